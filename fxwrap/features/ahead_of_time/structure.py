"""The nesting of arguments and results: tuples, named tuples, lists, dictionaries, and what pytree knows besides.

A structure is data, except that a named tuple in it has its class or, in a file, the names of its module and of its
class; and that no file holds what only pytree knows (``structure_to_data`` refuses it).
"""

from __future__ import annotations

import importlib
import itertools
from collections import namedtuple
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils import _pytree as pytree

from ...errors import InputError, StorageError

LEAF = "*"
# Names and fields come from a file.
_named_tuple: Any = namedtuple


def structure_of(value: Any, constants: Mapping[int, Any] | None = None) -> Any:
    """The structure of a nested value; ``LEAF`` stands for everything that is no container.

    Args:
        constants: leaves that are always the same, by their number; the structure holds them itself.
    """
    fixed = constants or {}
    return _structure(value, ({"constant": fixed[n]} if n in fixed else LEAF for n in itertools.count()))


def _structure(value: Any, leaves: Iterator[Any]) -> Any:
    if value == LEAF:
        return next(leaves)
    if type(value) is tuple:
        return {"tuple": [_structure(item, leaves) for item in value]}
    if (fields := _fields(type(value))) is not None:
        items = [[name, _structure(item, leaves)] for name, item in zip(fields, value, strict=True)]
        return {"named tuple": [type(value), type(value).__qualname__, items]}
    if type(value) is list:
        return {"list": [_structure(item, leaves) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[key, _structure(item, leaves)] for key, item in value.items()]}
    items, spec = _unpacked(value)
    return {"other": [spec, [_structure(item, leaves) for item in items]]}


def _unpacked(value: Any) -> tuple[list[Any], Any]:
    """What a container holds, and pytree's description of the container alone."""
    return pytree.tree_flatten(value, is_leaf=lambda item: item is not value)


def structure_to_data(structure: Any) -> Any:
    """A structure as data that JSON can hold.

    Raises:
        StorageError: it has a container other than tuples, named tuples, lists, and dictionaries of strings.
    """
    if structure == LEAF:
        return structure
    ((kind, inner),) = structure.items()
    if kind == "constant":
        return structure
    if kind == "named tuple":
        named, name, items = inner
        return {kind: [named.__module__, name, [[field, structure_to_data(part)] for field, part in items]]}
    if kind == "dict":
        if not all(isinstance(key, str) for key, _ in inner):
            keys = ", ".join(repr(key) for key, _ in inner)
            raise StorageError("keys of a dictionary", expected="strings", got=keys)
        return {kind: [[key, structure_to_data(part)] for key, part in inner]}
    if kind == "other":
        raise StorageError(
            f"a value of type {inner[0].type.__name__} among arguments or results",
            expected="tensors, numbers, tuples, named tuples, lists and dictionaries",
            remedy="wrap the module in one that takes and returns these",
        )
    return {kind: list(map(structure_to_data, inner))}


def flatten(structure: Any, value: Any, where: str = "") -> Iterator[Any]:
    """The leaves of a value, in the order of a structure.

    Raises:
        InputError: the value has another structure.
    """
    if structure == LEAF:
        yield value
        return
    ((kind, inner),) = structure.items()
    if kind == "constant":
        if value is not None:
            raise InputError(f"argument{where}", expected=f"None: it is always {inner!r}", got=type(value).__name__)
        return
    if kind == "named tuple":
        # Compared by its fields: if the class cannot be imported here, callers have another one.
        _, name, items = inner
        fields = [field for field, _ in items]
        if _fields(type(value)) != fields:
            expected = f"a named tuple {name} with the fields {', '.join(fields)}"
            raise InputError(f"argument{where}", expected=expected, got=type(value).__name__)
        for (field, part), item in zip(items, value, strict=True):
            yield from flatten(part, item, f"{where}.{field}")
        return
    if kind == "dict":
        keys = [key for key, _ in inner]
        if not isinstance(value, dict) or set(value) != set(keys):
            got = f"keys {', '.join(map(repr, value))}" if isinstance(value, dict) else type(value).__name__
            raise InputError(
                f"argument{where}", expected=f"a dictionary with {', '.join(map(str, keys)) or 'nothing'}", got=got
            )
        for key, part in inner:
            yield from flatten(part, value[key], f"{where}[{key!r}]")
        return
    if kind == "other":
        spec, inner = inner
        items, found = _unpacked(value)
        if found != spec:
            expected = f"a value of type {spec.type.__name__} like the one in the example"
            raise InputError(f"argument{where}", expected=expected, got=type(value).__name__)
        for position, (part, item) in enumerate(zip(inner, items, strict=True)):
            yield from flatten(part, item, f"{where}[{position}]")
        return
    if type(value) is not (tuple if kind == "tuple" else list) or len(value) != len(inner):
        got = f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
        raise InputError(f"argument{where}", expected=f"a {kind} of {len(inner)}", got=got)
    for position, (part, item) in enumerate(zip(inner, value, strict=True)):
        yield from flatten(part, item, f"{where}[{position}]")


def with_classes(structure: Any) -> Any:
    """A structure for ``unflatten``, with the classes of its named tuples.

    If a class of a file cannot be imported, or has other fields now, a new class with the same name and fields is
    made.
    """
    if structure == LEAF:
        return structure
    ((kind, inner),) = structure.items()
    if kind == "named tuple":
        module, name, items = inner
        fields = [field for field, _ in items]
        named = module if isinstance(module, type) else _imported(module, name)
        if _fields(named) != fields:
            named = _named_tuple(name.rpartition(".")[2], fields)
        return {"named tuple": [named, [with_classes(part) for _, part in items]]}
    if kind == "dict":
        return {kind: [[key, with_classes(part)] for key, part in inner]}
    if kind == "other":
        return {kind: [inner[0], list(map(with_classes, inner[1]))]}
    return {kind: [with_classes(part) for part in inner]} if kind in ("tuple", "list") else structure


def _imported(module: str, name: str) -> Any:
    """The object of a module with a (dotted) name; None if it cannot be imported."""
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit):  # whatever the module does when it is imported
        return None
    return value


def _fields(kind: Any) -> list[str] | None:
    """The field names of a named tuple's class; None for any other class."""
    fields = getattr(kind, "_fields", None)
    if isinstance(kind, type) and issubclass(kind, tuple) and isinstance(fields, tuple):
        return list(fields)
    return None


def unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    """Build a value from its leaves, in order.

    Args:
        structure: what ``with_classes`` returned.
    """
    if structure == LEAF:
        return next(leaves)
    ((kind, inner),) = structure.items()
    if kind == "constant":
        return inner
    if kind == "named tuple":
        named, items = inner
        return named(*(unflatten(part, leaves) for part in items))
    if kind == "dict":
        return {key: unflatten(part, leaves) for key, part in inner}
    if kind == "other":
        spec, parts = inner
        return pytree.tree_unflatten([unflatten(part, leaves) for part in parts], spec)
    items = [unflatten(part, leaves) for part in inner]
    return tuple(items) if kind == "tuple" else items
