"""Liveness of outputs: whether the caller still has an output that was returned without a copy."""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .arenas import Arena

UseCounter = Callable[[Sequence[torch.UntypedStorage]], Callable[[], list[int]]]


@dataclass(frozen=True, eq=False)
class OutputStorage:
    """The storage of an output, and its place in an arena.

    Attributes:
        indices: the storage indices of the program that it may belong to.
        device: the device of the arena; None for a storage outside of arenas.
        low: the offset of its first byte in the arena.
        owner: the recording that returns it.
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
        """Whether it shares a byte with any of these spans ``[low, high)``."""
        return any(low < self.high and self.low < high for low, high in footprint)


class WatchedOutputs:
    """The outputs of one recording, and their use counts.

    An output is live if its storage's use count is above the baseline, its count when it was not live.
    """

    def __init__(
        self,
        outputs: Sequence[OutputStorage] = (),
        counter: UseCounter = lambda storages: list,
        handed_out: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            handed_out: the number of tensors that the caller already has of each storage, by the storage's handle.
        """
        self.outputs = list(outputs)
        self._counts = counter([output.storage for output in self.outputs])
        counted = zip(self._counts(), self.outputs, strict=True)
        self.baseline = [count - handed_out.get(output.storage._cdata, 0) for count, output in counted]
        self._retired = False

    def live(self) -> dict[OutputStorage, int]:
        """The live outputs, each with the number of tensors that the caller has of it."""
        counts = self._counts()
        if counts == self.baseline:
            return {}
        # Garbage that referred to an output when watching began made the baseline too high.
        self.baseline = list(map(min, counts, self.baseline))
        counted = zip(self.outputs, counts, self.baseline, strict=True)
        return {output: count - baseline for output, count, baseline in counted if count > baseline}

    def retire(self) -> None:
        """Note that the recording ended: only the caller and this object still refer to its outputs."""
        # One statement: an interrupt between the two would leave live outputs that look dead.
        self.baseline, self._retired = [1] * len(self.outputs), True

    def is_dead(self) -> bool:
        """Whether the recording has ended, and none of its outputs is live."""
        return self._retired and not self.live()


class LivenessGuard:
    """Checks that no output is live that a replay overwrites: its own ones, and others in the bytes that it uses."""

    def __init__(
        self,
        footprints: Mapping[Arena, Sequence[tuple[int, int]]],
        own: WatchedOutputs,
        donated: Mapping[int, int],
        counter: UseCounter,
    ) -> None:
        """
        Args:
            footprints: the spans of bytes that the replay uses, by arena.
            own: the outputs of the recording itself.
            donated: the number of donated inputs that share a storage, by the storage's handle.
        """
        self._footprints, self._own, self._donated, self._counter = footprints, own, donated, counter
        self._counts: Callable[[], list[int]]
        self._free: list[int]
        self._versions: list[int]
        self._collect(list(map(_version, footprints)))

    def all_dead(self) -> bool:
        """Whether no output is live, except what this call donates. Every call asks: it compares a list of counts."""
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

    def live_of_others(self) -> list[OutputStorage]:
        """The live outputs of other recordings. Call ``all_dead`` first."""
        counts = self._counts()[len(self._own.outputs) :]
        return [output for output, count, free in zip(self._near, counts, self._free, strict=True) if count > free]

    def expected(self) -> tuple[list[torch.UntypedStorage], list[int], list[tuple[ctypes.c_int64, int, int]]]:
        """The storages, their use counts if no output is live, and the arena versions for which these are right.

        A version is a cell with its address and value.
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
        # The storages stay referenced: the counter knows them by their handles.
        counted = [output.storage for output in (*self._own.outputs, *near)]
        counts = self._counter(counted)
        # One statement after the last call: an interrupt must not leave counts of other outputs.
        self._near, self._free, self._versions, self._counted, self._counts = near, free, versions, counted, counts


_version = operator.attrgetter("version.value")
