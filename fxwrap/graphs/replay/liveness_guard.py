"""The check before a replay that it overwrites no live output."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Mapping, Sequence

import torch

from ...torch_private.functions import use_counter
from ..memory.arenas import Arena
from ..memory.live_outputs import OutputStorage, UseCounter, WatchedOutputs


class LivenessGuard:
    """Checks that no live output, of this recording or another one, lies in bytes that a replay overwrites."""

    def __init__(
        self,
        footprints: Mapping[Arena, Sequence[tuple[int, int]]],
        own: WatchedOutputs,
        donated: Mapping[int, int],
        counter: UseCounter = use_counter,
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
            if not self.changed():
                break
        if counts == self._own.baseline + self._free:
            return True
        if self._own.live():
            return False
        others = counts[len(self._own.outputs) :]
        self._free = list(map(min, others, self._free))
        return others == self._free

    def changed(self) -> bool:
        """Whether outputs came or went since they were collected. It collects them again."""
        versions = list(map(_version, self._footprints))
        if versions == self._versions:
            return False
        self._collect(versions)
        return True

    def live_of_others(self) -> list[OutputStorage]:
        """The live outputs of other recordings. Call ``all_dead`` first."""
        counts = self._counts()[len(self._own.outputs) :]
        return [output for output, count, free in zip(self._near, counts, self._free, strict=True) if count > free]

    def expected(self) -> tuple[list[torch.UntypedStorage], list[int], list[tuple[ctypes.c_int64, int]]]:
        """The storages, their use counts if no output is live, and the arena versions for which these are right.

        A version is a cell with its value.
        """
        versions = list(zip((arena.version for arena in self._footprints), self._versions, strict=True))
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
