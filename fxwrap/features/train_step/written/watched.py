"""What a program was made for: facts of the values that the step's code reaches, and whether they still hold.

::

    world.training: True     world.cell.weight: float32[32, 20]     scale: 0.5     optimizer.param_groups[0]['lr']...

A call compares values by identity, in loops that Python runs in C. Where one is another object, the facts are
gathered anew: equal facts, as after ``load_state_dict``, need no other program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, getitem, is_
from typing import Any

import torch

from ..codegen.wrapped_tensors import flat, is_wrapped, parts_of, storage_of, wrapping_of
from ..refusals import PARAMETER_HOOKS
from .arguments import Same
from .found import PLAIN, Found, content_of

_of_parameter = attrgetter("requires_grad", *PARAMETER_HOOKS)
_content, _dtype = attrgetter("cell_contents"), attrgetter("dtype")


class Watched:
    """The objects that a step's code reached when it was looked at."""

    def __init__(self, found: Found) -> None:
        self._empty = [table for _, table, keys in found.tables if keys is None and not table]
        whole = [(name, table) for name, table, keys in found.tables if keys is None and table]
        self._lists = [table for _, table in whole if isinstance(table, list)]
        self._dictionaries = [table for _, table in whole if isinstance(table, dict)]
        parts: list[tuple[Any, Any]] = [
            (table, key) for _, table, keys in found.tables if keys is not None for key in keys
        ]
        parts += [(vars(owner), key) for _, owner, keys in found.classes for key in keys]
        self._owners, self._keys = [owner for owner, _ in parts], [key for _, key in parts]
        self._cells = [cell for _, cell in found.cells]
        self._tensors, self._parameters = list(found.tensors), found.leaves()
        self._wrapped = [tensor for tensor in self._tensors if is_wrapped(tensor)]
        self._ordered, self._attributes = found.dictionaries, found.attributes
        tables = (getattr(parameter, name, None) for parameter in self._parameters for name in PARAMETER_HOOKS)
        self._hooks = [table for table in tables if isinstance(table, dict)]
        self._tables = [*self._dictionaries, *self._lists, *self._hooks]
        self._lengths = list(map(len, self._tables))
        self._others = self._kinds()
        self._seen = tuple(map(list, self._now()))

    def holds(self) -> bool:
        """Whether all of them are the same objects."""
        if any(self._empty) or list(map(len, self._tables)) != self._lengths:
            return False
        if self._kinds() != self._others:
            return False
        try:
            return all(all(map(is_, now, seen)) for now, seen in zip(self._now(), self._seen, strict=True))
        except (KeyError, ValueError):  # an entry, or the value of a variable, is gone
            return False

    def _kinds(self) -> tuple[Any, ...]:
        """What may change of an object that stays."""
        orders, attributes = list(map(list, self._ordered)), list(map(len, self._attributes))
        return list(map(_dtype, self._tensors)), orders, attributes

    def _now(self) -> tuple[Iterable[Any], ...]:
        return (
            itertools.chain.from_iterable(map(dict.values, self._dictionaries)),
            itertools.chain.from_iterable(self._lists),
            map(getitem, self._owners, self._keys),
            flat(self._wrapped),
            map(_content, self._cells),
            itertools.chain.from_iterable(map(_of_parameter, self._parameters)),
            itertools.chain.from_iterable(map(dict.values, self._hooks)),
        )


# What a program depends on, each with its name, in the order of the search: inputs have that order, too.
Facts = Sequence[tuple[str, object]]


def facts_of(found: Found) -> Facts:
    """Layouts of tensors, plain values, identities of other objects."""
    known = {id(tensor): place for place, tensor in enumerate(found.tensors)}
    facts: list[tuple[str, object]] = [(f"{name}{key}", _fact(value, known)) for name, key, value in _entries(found)]
    for tensor, name in found.tensors.items():
        facts.append((f"layout of {name}", _layout(tensor)))
        for table in PARAMETER_HOOKS:
            if hooks := getattr(tensor, table, None):
                facts.append((f"hooks of {name}", tuple(map(Same, hooks.values()))))
    return [*facts, *((f"memory of {names[0]}", names) for names in shared_memory(found))]


def shared_memory(found: Found) -> list[tuple[str, ...]]:
    """The names of tensors that lie in one storage, for each storage that several lie in."""
    storages: dict[int, list[str]] = {}
    for tensor, name in found.tensors.items():
        for part in parts_of(tensor):
            if storage := storage_of(part):
                storages.setdefault(storage, []).append(name)
    return [tuple(names) for names in storages.values() if len(names) > 1]


def difference(before: Facts, now: Facts) -> str:
    """The first fact that is another one, as ``world.training is False, was True``."""
    for old, new in itertools.zip_longest(before, now, fillvalue=("", _NONE)):
        if old != new:
            was = old[1] if old[0] == new[0] else _NONE
            return f"{new[0]} is {_shown(new[1])}, was {_shown(was)}" if new[0] else f"{old[0]} is not there any more"
    return ""


def _entries(found: Found) -> Iterator[tuple[str, object, Any]]:
    for name, table, keys in found.tables:
        if isinstance(table, list):
            yield from ((name, f"[{place}]", value) for place, value in enumerate(table))
            continue
        for place, (key, value) in enumerate([(key, table[key]) for key in (table if keys is None else keys)]):
            if isinstance(key, str) and name.endswith("."):
                yield name, key, value
            else:  # of a tensor, such as a state's key, even the text would take long
                yield name, f"[{key!r}]" if isinstance(key, (str, int)) else f"[{place}]", value
    for name, owner, names in found.classes:
        yield from ((f"{name}.", key, vars(owner)[key]) for key in names)
    for name, cell in found.cells:
        yield name, "", content_of(cell, _NONE)


class _None:
    def __repr__(self) -> str:
        return "not there"


_NONE = _None()


def _fact(value: Any, known: Mapping[int, int]) -> object:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return f"tensor {known.get(id(value), '')}"
    if isinstance(value, (tuple, set, frozenset)) and all(isinstance(one, PLAIN) for one in value):
        return type(value), value if isinstance(value, tuple) else frozenset(value)
    if isinstance(value, (dict, list)):
        return type(value), len(value)
    return Same(value)


def _layout(tensor: torch.Tensor) -> object:
    kind = tensor.dtype, tensor.device, tuple(tensor.shape), tensor.layout, tensor.requires_grad, wrapping_of(tensor)
    return (*kind, tensor.stride()) if tensor.layout is torch.strided else kind


def _shown(fact: object) -> str:
    if isinstance(fact, tuple) and len(fact) == 2 and isinstance(fact[0], type):
        return repr(fact[1])
    return repr(fact) if not isinstance(fact, tuple) else ", ".join(map(str, fact))
