"""Outputs that were handed out uncopied, and whether they are live: the caller still has them."""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch

UseCounter = Callable[[Sequence[torch.UntypedStorage]], Callable[[], list[int]]]


@dataclass(frozen=True, eq=False)
class OutputStorage:
    """A storage that is handed out, and where it lies.

    Attributes:
        indices: the storages of its program's facts that it may be.
        device: of the arena; None for memory of its own.
        low: first byte in the arena.
        owner: the recording that hands it out.
    """

    storage: torch.UntypedStorage
    indices: frozenset[int]
    device: torch.device | None = None
    low: int = 0
    owner: weakref.ref[Any] | None = None

    @property
    def high(self) -> int:
        return self.low + self.storage.nbytes()

    def within(self, footprint: Sequence[tuple[int, int]]) -> bool:
        """Whether it shares a byte with any of some spans."""
        return any(low < self.high and self.low < high for low, high in footprint)


class WatchedOutputs:
    """The outputs of one recording.

    An output is live if its storage's use count is above the baseline: the count when it was not live.
    """

    def __init__(
        self,
        outputs: Sequence[OutputStorage] = (),
        counter: UseCounter = lambda storages: list,
        handed_out: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            handed_out: how many tensors the caller has already of each storage, by its handle.
        """
        self.outputs = list(outputs)
        self._counts = counter([output.storage for output in self.outputs])
        counted = zip(self._counts(), self.outputs, strict=True)
        self.baseline = [count - handed_out.get(output.storage._cdata, 0) for count, output in counted]
        self._retired = False

    def live(self) -> dict[OutputStorage, int]:
        """The live outputs, and how many tensors the caller has of each."""
        counts = self._counts()
        if counts == self.baseline:
            return {}
        # Garbage that held an output when watching began made its baseline too high.
        self.baseline = list(map(min, counts, self.baseline))
        counted = zip(self.outputs, counts, self.baseline, strict=True)
        return {output: count - baseline for output, count, baseline in counted if count > baseline}

    def retire(self) -> None:
        """The recording ends, and with it every reference to its outputs but the caller's and the one kept here."""
        # Both at once: with the old baseline an interrupt would leave live outputs that look dead.
        self.baseline, self._retired = [1] * len(self.outputs), True

    def is_dead(self) -> bool:
        """Whether the recording has ended, and none of its outputs is live."""
        return self._retired and not self.live()


class SharedMemory(Protocol):
    """An arena.

    Attributes:
        watched_outputs: the outputs in it that were handed out, by recording.
        version: changes whenever ``watched_outputs`` does.
    """

    device: torch.device
    watched_outputs: list[WatchedOutputs]
    version: ctypes.c_int64


class LivenessGuard:
    """The outputs that a replay overwrites: its own, and those of other recordings in the bytes it works on."""

    def __init__(
        self,
        footprints: Mapping[SharedMemory, Sequence[tuple[int, int]]],
        own: WatchedOutputs,
        donated: Mapping[int, int],
        counter: UseCounter,
    ) -> None:
        """
        Args:
            donated: how many of the tensors that a call donates share a storage (by its handle).
        """
        self._footprints, self._own, self._donated, self._counter = footprints, own, donated, counter
        self._counts: Callable[[], list[int]]
        self._free: list[int]
        self._versions: list[int]
        self._collect(list(map(_version, footprints)))

    def all_dead(self) -> bool:
        """Whether none of them is live, but for what this call donates. Asked at every call: one list of counts."""
        while True:
            counts = self._counts()
            # A recording that ends changes the version before it frees its outputs.
            versions = list(map(_version, self._footprints))
            if versions == self._versions:
                break
            self._collect(versions)
        if counts == self._own.baseline + self._free:
            return True
        if self._own.live():
            return False
        others = counts[len(self._own.outputs) :]
        self._free = list(map(min, others, self._free))
        return others == self._free

    def in_the_way(self) -> list[OutputStorage]:
        """Live outputs of other recordings. To be called after ``all_dead``."""
        counts = self._counts()[len(self._own.outputs) :]
        return [output for output, count, free in zip(self._near, counts, self._free, strict=True) if count > free]

    def expected(self) -> tuple[list[torch.UntypedStorage], list[int], list[tuple[ctypes.c_int64, int, int]]]:
        """Storages, the use counts that they have when all are dead, and the versions for which this is true.

        Versions are cells, with their addresses and values.
        """
        cells = [arena.version for arena in self._footprints]
        versions = list(zip(cells, map(ctypes.addressof, cells), self._versions, strict=True))
        return self._counted, self._own.baseline + self._free, versions

    def _collect(self, versions: list[int]) -> None:
        near, free = list[OutputStorage](), list[int]()
        for arena, footprint in self._footprints.items():
            for outputs in arena.watched_outputs:
                if outputs is self._own:
                    continue
                for position, output in enumerate(outputs.outputs):
                    if output.device == arena.device and output.within(footprint):
                        near.append(output)
                        free.append(outputs.baseline[position] + self._donated.get(output.storage._cdata, 0))
        # Kept alive: the counter knows them by their handles.
        counted = [output.storage for output in (*self._own.outputs, *near)]
        counts = self._counter(counted)
        # All at once, after the last call: an interrupt must not leave counts of other outputs.
        self._near, self._free, self._versions, self._counted, self._counts = near, free, versions, counted, counts


_version = operator.attrgetter("version.value")
