"""Which program gets what another hands out: seen in eager runs, for memory to be planned for both."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Links:
    """Outputs of eager runs that may still be alive, by storage.

    Storages are known by their handles, which are used again: an entry holds as long as its storage lives.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, weakref.ref[Any], int]] = {}
        self._sweeps = itertools.count(1)

    def hand_out(self, owner: Any, outputs: Iterable[tuple[int, StorageWeakRef]]) -> None:
        """Note outputs of ``owner``: the index of each storage, and where it is now."""
        for index, storage in outputs:
            self._known[storage.cdata] = storage, weakref.ref(owner), index
        if next(self._sweeps) % 64 == 0:
            for handle, (storage, _, _) in list(self._known.items()):
                if storage.expired():
                    self._known.pop(handle, None)

    def made_by(self, inputs: Sequence[Any], positions: Iterable[int]) -> dict[int, tuple[Any, int]]:
        """By position, for inputs that are outputs of others: whose, and the index of the storage."""
        found = {}
        for position in positions:
            value = inputs[position]
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            try:
                entry = self._known.get(value.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError):
                continue  # it has no storage
            if entry is not None and not entry[0].expired() and (owner := entry[1]()) is not None:
                found[position] = owner, entry[2]
        return found


LINKS = Links()
