"""What a trace has done to Python's objects: new tensors go into the old ones, the rest is taken back and refused.

::

    state["m"] = b * state["m"] + g      a tensor in the place of a watched one: written to the old one, at every call
    losses.append(loss)                  a value of the trace in a list: would be there once, and fake: refused
    self.count += 1                      a Python value: would change once, when the step is traced: refused
    state["exp_avg"] = zeros_like(p)     new state of an optimizer: the call runs as written, the next one is traced
"""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

import torch

from ..codegen.tracing_state import is_fake
from ..codegen.wrapped_tensors import is_wrapped, parts_of, wrapping_of
from ..refusals import PARAMETER_HOOKS
from .found import PLAIN, STEPPED, Found, content_of


class SideEffects:
    """A copy of all tables and variables that a step's code reaches, and what has changed since."""

    def __init__(self, found: Found) -> None:
        self._states = {id(optimizer.state): name for name, optimizer in found.optimizers.items()}
        self._inner = {id(state): None for o in found.optimizers.values() for state in o.state.values()}
        # Of globals, others may add some meanwhile.
        self._tables = [
            (
                name,
                table,
                list(table) if isinstance(table, list) else _part(table, keys),
                _keys(table) if name else None,
            )
            for name, table, keys in found.tables
        ]
        self._cells = [(name, cell, content_of(cell, _MISSING)) for name, cell in found.cells]
        self._classes = [(name, cls, {key: vars(cls)[key] for key in keys}) for name, cls, keys in found.classes]
        # A view of each tensor, which keeps the memory that ``.data = ...`` would take from it.
        self._memory = [
            (part, name, part.detach()) for tensor, name in found.tensors.items() for part in parts_of(tensor)
        ]
        self._required = [(tensor, tensor.requires_grad) for tensor in found.leaves()]
        self._hooks = [
            (tensor, table, dict(hooks))
            for tensor in found.tensors
            for table in PARAMETER_HOOKS
            if (hooks := getattr(tensor, table, None)) is not None
        ]

    def write_back(self) -> None:
        """Have tensors that took the place of watched ones written to those. It is traced."""
        pairs: list[tuple[Any, Any, torch.Tensor, torch.Tensor]] = []
        for _, table, before, _ in self._tables:
            entries = enumerate(before) if isinstance(before, list) else before.items()
            for key, old in entries:
                if isinstance(old, torch.Tensor) and _has(table, key) and _replaces(table[key], old):
                    pairs.append((table, key, old, table[key]))
        for name, cell, old in self._cells:
            if isinstance(old, torch.Tensor) and _replaces(content_of(cell, _MISSING), old):
                pairs.append((cell, name, old, content_of(cell, _MISSING)))
        # Two names of one tensor stay that; copies would not.
        new = [id(value) for _, _, _, value in pairs]
        gone = {id(old) for _, _, old, _ in pairs}
        if len(set(new)) < len(new) or any(not is_fake(value) and id(value) not in gone for *_, value in pairs):
            raise AliasedError
        # All are read before one is written: a, b = b, a
        values = [value.detach().clone() for *_, value in pairs]
        for (owner, key, old, _), value in zip(pairs, values, strict=True):
            old.copy_(value)
            if isinstance(owner, (dict, list)):
                owner[key] = old
            else:
                owner.cell_contents = old

    def undo(self) -> tuple[bool, list[str]]:
        """Put everything back. Returns whether optimizers have made state, and what else was changed, by name.

        Modes of modules (``model.train()``) are in ``modes``: a replay sets them.
        """
        made_state, faults = False, self._undo_tensors()
        self.modes: list[tuple[dict[str, Any], bool]] = []
        for name, table, before, keys in self._tables:
            entries = dict(enumerate(before)) if isinstance(before, list) else before
            now = dict(enumerate(table)) if isinstance(table, list) else table
            changed = [key for key, old in entries.items() if key not in now or _is_other(now[key], old)]
            added = [key for key in now if key not in keys and key != STEPPED] if keys is not None else []
            if not (changed or added):
                continue
            if changed == ["training"] and not added and isinstance(now["training"], bool):
                self.modes.append((table, now["training"]))
            elif id(table) in self._states or id(table) in self._inner:
                # A number that an optimizer counts with would be another one at each call.
                numbers = [key for key in changed if isinstance(entries[key], (int, float))]
                faults += [
                    f"{name} keeps a Python number, {key!r}, that each step changes: make it a tensor"
                    for key in numbers
                ]
                made_state |= bool(added) or len(numbers) < len(changed)
            else:
                faults += [f"it changes {_shown(name, key)}, which a replay does not: {_REMEDY}" for key in changed]
                faults += [f"it adds to {name.rstrip('.')}, which a replay does not: {_REMEDY}" for _ in added[:1]]
            if isinstance(table, list):
                table[:] = before
            else:
                for key in added:
                    del table[key]
                table.update({key: entries[key] for key in changed})
        for name, cell, old in self._cells:
            if _is_other(content_of(cell, _MISSING), old):
                cell.cell_contents = old
                faults.append(f"it changes the variable {name}, which a replay does not: {_REMEDY}")
        for name, cls, before in self._classes:
            for key, old in before.items():
                if _is_other(vars(cls).get(key, _MISSING), old):
                    setattr(cls, key, old)
                    faults.append(f"it changes {name}.{key}, which a replay does not: {_REMEDY}")
        return made_state, faults

    def _undo_tensors(self) -> list[str]:
        faults = []
        for tensor, name, memory in self._memory:
            if tensor.device != memory.device or _address(tensor) != _address(memory):
                tensor.data = memory
                faults.append(f"it sets .data of {name}: write to the tensor in place, such as by copy_")
        for tensor, required in self._required:
            if tensor.requires_grad is not required:
                tensor.requires_grad_(required)
                faults.append("it calls requires_grad_, which a replay does not: do so between steps")
        hooks = {(id(tensor), table): before for tensor, table, before in self._hooks}
        for tensor, name, _ in self._memory:
            for table in PARAMETER_HOOKS:
                now, before = getattr(tensor, table, None), hooks.get((id(tensor), table), {})
                if now is not None and dict(now) != before:
                    now.clear()
                    now.update(before)
                    faults.append(f"it registers or removes a hook of {name}: do so once, before")
        return faults


class AliasedError(Exception):
    """The step gives one tensor two of the names that it had for two."""


_REMEDY = "return the value, take it as an argument, or make it a tensor that is written in place"
_MISSING = object()


def _address(tensor: torch.Tensor) -> object:
    return tensor.data_ptr() if tensor.layout is torch.strided and tensor.device.type != "meta" else None


def _keys(table: Any) -> frozenset[Any]:
    return frozenset(range(len(table)) if isinstance(table, list) else table)


def _part(table: dict[Any, Any], keys: tuple[Any, ...] | None) -> dict[Any, Any]:
    return dict(table) if keys is None else {key: table[key] for key in keys}


def _has(table: Any, key: Any) -> bool:
    return key < len(table) if isinstance(table, list) else key in table


def _replaces(new: Any, old: torch.Tensor) -> bool:
    """Whether a tensor can be written to the one in whose place it is."""
    if not isinstance(new, torch.Tensor) or new is old or not (type(old) is torch.Tensor or is_wrapped(old)):
        return False
    return _kind_of(new) == _kind_of(old)


def _kind_of(tensor: torch.Tensor) -> object:
    return tensor.shape, tensor.dtype, tensor.device, wrapping_of(tensor) if is_wrapped(tensor) else None


def _is_other(new: Any, old: Any) -> bool:
    if new is old:
        return False
    if isinstance(old, PLAIN) and type(new) is type(old):
        return bool(new != old)
    return True


def _shown(name: str, key: Any) -> str:
    return f"{name}{key}" if name.endswith(".") or not name else f"{name}[{key!r}]"


class Drawn:
    """The states of generators of random numbers that are not torch's."""

    def __init__(self) -> None:
        self._of = [("Python's random", random.getstate, random.setstate, random.getstate())]
        if (numpy := sys.modules.get("numpy")) is not None:
            get = numpy.random.get_state
            self._of.append(("NumPy's random", get, numpy.random.set_state, get()))

    def put_back(self) -> list[str]:
        """Put back the states. Returns the names of the generators that were drawn from since."""
        drawn = [one for one in self._of if pickle.dumps(one[1]()) != pickle.dumps(one[3])]
        for _, _, put, state in drawn:
            put(state)
        return [name for name, *_ in drawn]
