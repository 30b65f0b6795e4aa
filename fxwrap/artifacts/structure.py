"""How arguments and results are nested: tuples, lists and dictionaries, as data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import InputError, StorageError

LEAF = "*"


def structure_of(value: Any, constants: Mapping[int, Any] | None = None) -> Any:
    """The structure of a nested value, in which ``LEAF`` stands for whatever is no container.

    Args:
        constants: leaves that are always the same, by their number: the structure holds them itself.
    """
    known = constants or {}
    return _structure(value, ({"constant": known[n]} if n in known else LEAF for n in itertools.count()))


def _structure(value: Any, leaves: Iterator[Any]) -> Any:
    if value == LEAF:
        return next(leaves)
    if type(value) is tuple:
        return {"tuple": [_structure(item, leaves) for item in value]}
    if type(value) is list:
        return {"list": [_structure(item, leaves) for item in value]}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise StorageError("keys of a dictionary", expected="strings", got=", ".join(map(repr, value)))
        return {"dict": [[key, _structure(item, leaves)] for key, item in value.items()]}
    raise StorageError(
        f"a value of type {type(value).__name__} among arguments or results",
        expected="tensors, numbers, tuples, lists and dictionaries",
        remedy="wrap the module in one that takes and returns these",
    )


def flatten(structure: Any, value: Any, where: str = "") -> Iterator[Any]:
    """The leaves of a value that has a structure.

    Raises:
        InputError: it has another one.
    """
    if structure == LEAF:
        yield value
        return
    ((kind, inner),) = structure.items()
    if kind == "dict":
        keys = [key for key, _ in inner]
        if not isinstance(value, dict) or set(value) != set(keys):
            got = f"keys {', '.join(map(repr, value))}" if isinstance(value, dict) else type(value).__name__
            raise InputError(
                f"argument{where}", expected=f"a dictionary with {', '.join(keys) or 'nothing'}", got=got
            )
        for key, part in inner:
            yield from flatten(part, value[key], f"{where}[{key!r}]")
        return
    if type(value) is not (tuple if kind == "tuple" else list) or len(value) != len(inner):
        got = f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
        raise InputError(f"argument{where}", expected=f"a {kind} of {len(inner)}", got=got)
    for position, (part, item) in enumerate(zip(inner, value, strict=True)):
        yield from flatten(part, item, f"{where}[{position}]")


def unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    """The value with a structure, from its leaves in order."""
    if structure == LEAF:
        return next(leaves)
    ((kind, inner),) = structure.items()
    if kind == "constant":
        return inner
    if kind == "dict":
        return {key: unflatten(part, leaves) for key, part in inner}
    items = [unflatten(part, leaves) for part in inner]
    return tuple(items) if kind == "tuple" else items
