"""What a trace has done to Python's objects: new tensors go into the old ones, the rest is taken back and refused.

::

    state["m"] = b * state["m"] + g      a tensor in the place of a watched one: written to the old one, at every call
    losses.append(loss)                  a value of the trace in a list: would be there once, and fake: refused
    self.count += 1                      a Python value: would change once, when the step is traced: refused
    state["exp_avg"] = zeros_like(p)     new state of an optimizer: the call runs as written, the next one is traced
"""

from __future__ import annotations

from typing import Any

import torch

from .found import PLAIN, Found


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
        self._cells = [(name, cell, _content(cell)) for name, cell in found.cells]

    def write_back(self) -> None:
        """Have tensors that took the place of watched ones written to those. It is traced."""
        pairs: list[tuple[Any, Any, torch.Tensor, torch.Tensor]] = []
        for _, table, before, _ in self._tables:
            entries = enumerate(before) if isinstance(before, list) else before.items()
            for key, old in entries:
                if isinstance(old, torch.Tensor) and _has(table, key) and _replaces(table[key], old):
                    pairs.append((table, key, old, table[key]))
        for name, cell, old in self._cells:
            if isinstance(old, torch.Tensor) and _replaces(_content(cell), old):
                pairs.append((cell, name, old, _content(cell)))
        # All are read before one is written: a, b = b, a
        values = [new.detach().clone() for _, _, _, new in pairs]
        for (owner, key, old, _), value in zip(pairs, values, strict=True):
            old.copy_(value)
            if isinstance(owner, (dict, list)):
                owner[key] = old
            else:
                owner.cell_contents = old

    def undo(self) -> tuple[bool, list[str]]:
        """Put everything back. Returns whether optimizers have made state, and what else was changed, by name."""
        made_state, faults = False, []
        for name, table, before, keys in self._tables:
            entries = dict(enumerate(before)) if isinstance(before, list) else before
            now = dict(enumerate(table)) if isinstance(table, list) else table
            changed = [key for key, old in entries.items() if key not in now or _is_other(now[key], old)]
            added = [key for key in now if key not in keys] if keys is not None else []
            if not (changed or added):
                continue
            if id(table) in self._states or id(table) in self._inner:
                made_state = True
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
            if _is_other(_content(cell), old):
                cell.cell_contents = old
                faults.append(f"it changes the variable {name}, which a replay does not: {_REMEDY}")
        return made_state, faults


_REMEDY = "return the value, take it as an argument, or make it a tensor that is written in place"
_MISSING = object()


def _keys(table: Any) -> frozenset[Any]:
    return frozenset(range(len(table)) if isinstance(table, list) else table)


def _part(table: dict[Any, Any], keys: tuple[Any, ...] | None) -> dict[Any, Any]:
    return dict(table) if keys is None else {key: table[key] for key in keys}


def _has(table: Any, key: Any) -> bool:
    return key < len(table) if isinstance(table, list) else key in table


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _replaces(new: Any, old: torch.Tensor) -> bool:
    """Whether a tensor can be written to the one in whose place it is."""
    same = isinstance(new, torch.Tensor) and new is not old and type(old) is torch.Tensor
    return same and (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)


def _is_other(new: Any, old: Any) -> bool:
    if new is old:
        return False
    if isinstance(old, PLAIN) and type(new) is type(old):
        return bool(new != old)
    return True


def _shown(name: str, key: Any) -> str:
    return f"{name}{key}" if name.endswith(".") or not name else f"{name}[{key!r}]"
