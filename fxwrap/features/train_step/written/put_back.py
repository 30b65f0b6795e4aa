"""Everything that a call of a step may change, to be put back: for rehearsals and checked calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from ....graphs.copies import Generators
from ..codegen.wrapped_tensors import flat, storage_of
from .found import Found
from .gradients import Before
from .side_effects import SideEffects


class Kept:
    """What tensors hold, and random numbers, as they are now.

    Whole storages are kept, on the host: a device that is filled by parameters and states has no room for them twice.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages = list({storage_of(one): one.untyped_storage() for one in tensors}.values())
        self._copies = [one.cpu() if one.device.type != "cpu" else one.clone() for one in self._storages]
        devices = {storage.device for storage in self._storages} or {torch.device("cpu")}
        self._generators = [Generators(device) for device in devices]

    def put_back(self) -> None:
        for storage, copy in zip(self._storages, self._copies, strict=True):
            storage.copy_(copy)
        for generators in self._generators:
            generators.set()


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
