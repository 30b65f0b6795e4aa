"""Everything that a call of a step may change, to be put back: for rehearsals and checked calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ..codegen.wrapped_tensors import flat
from ..unchanged import Kept
from .found import Found
from .gradients import Before
from .side_effects import SideEffects


class Everything:
    """What a step reaches, as it is now: tensors, gradients, Python's objects, settings, random numbers.

    Args:
        given: arguments that are tensors.
    """

    def __init__(self, found: Found, given: Sequence[torch.Tensor] = ()) -> None:
        leaves = dict.fromkeys([*found.leaves(), *(tensor for tensor in given if tensor.is_leaf)])
        self._gradients, self._effects = Before.of(list(leaves)), SideEffects(found)
        self._groups = [
            (group, dict(group)) for optimizer in found.optimizers.values() for group in optimizer.param_groups
        ]
        self._tensors = Kept(flat([*found.tensors, *given, *self._gradients.tensors()]))

    def put_back(self) -> list[str]:
        """Returns what was changed that no replay changes, as ``SideEffects`` names it."""
        _, faults = self._effects.undo()
        for group, seen in self._groups:
            group.update(seen)
        self._gradients.restore()
        self._tensors.put_back()
        return faults


@contextlib.contextmanager
def put_back(found: Found, given: Sequence[torch.Tensor] = ()) -> Iterator[list[str]]:
    """Put everything back when the context ends, also after an error.

    Gives a list that then has what was changed that no replay changes.
    """
    before, faults = Everything(found, given), list[str]()
    try:
        yield faults
    finally:
        faults += before.put_back()
