"""Outputs that were handed out uncopied, and whether anybody has them."""

from __future__ import annotations

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
        indices: storages in its program's facts, of which it is one.
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


class LiveOutputs:
    """What one recording hands out.

    A storage's use count tells who has it: it is compared with what it was when nobody did.
    """

    def __init__(
        self,
        outputs: Sequence[OutputStorage] = (),
        counter: UseCounter = lambda storages: list,
        handed_out: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            handed_out: how many tensors somebody has already of each storage, by its handle.
        """
        self.outputs = list(outputs)
        self._counts = counter([output.storage for output in self.outputs])
        counts = zip(self._counts(), self.outputs, strict=True)
        self.baseline = [n - handed_out.get(output.storage._cdata, 0) for n, output in counts]
        self._retired = False

    def held(self) -> dict[OutputStorage, int]:
        """The outputs that somebody has, and how many tensors they have of each."""
        counts = self._counts()
        if counts == self.baseline:
            return {}
        # Garbage that was not collected when watching began must not pass for nobody later.
        self.baseline = list(map(min, counts, self.baseline))
        found = zip(self.outputs, counts, self.baseline, strict=True)
        return {output: count - baseline for output, count, baseline in found if count > baseline}

    def retire(self) -> None:
        """The recording ends: whoever has its outputs now is all who share them, but for the entry here."""
        self._retired = True
        self.baseline = [1] * len(self.outputs)

    def is_dead(self) -> bool:
        """Whether the recording has ended, and nobody has an output any more."""
        return self._retired and not self.held()


class SharedMemory(Protocol):
    """An arena.

    Attributes:
        live_outputs: what recordings have handed out in it.
        version: changes whenever ``live_outputs`` does.
    """

    device: torch.device
    live_outputs: list[LiveOutputs]
    version: int


class LivenessGuard:
    """What a replay overwrites: its own outputs, and what other recordings hand out in the bytes it works on."""

    def __init__(
        self,
        footprints: Mapping[SharedMemory, Sequence[tuple[int, int]]],
        own: LiveOutputs,
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
        self._look_again([])

    def all_dead(self) -> bool:
        """Whether nobody has any of it, but the call that is to run. It is asked at every call: one look at all."""
        while True:
            counts = self._counts()
            # A recording that ends says so before it lets go of its outputs.
            versions = list(map(_version, self._footprints))
            if versions == self._versions:
                break
            self._look_again(versions)
        if counts == self._own.baseline + self._free:
            return True
        if self._own.held():
            return False
        others = counts[len(self._own.outputs) :]
        self._free = list(map(min, others, self._free))
        return others == self._free

    def in_the_way(self) -> list[OutputStorage]:
        """Outputs of other recordings that somebody has. To be asked after ``all_dead``."""
        counts = self._counts()[len(self._own.outputs) :]
        return [output for output, count, free in zip(self._near, counts, self._free, strict=True) if count > free]

    def _look_again(self, versions: list[int]) -> None:
        near, free = list[OutputStorage](), list[int]()
        for arena, footprint in self._footprints.items():
            for live in arena.live_outputs:
                if live is self._own:
                    continue
                for position, output in enumerate(live.outputs):
                    if output.device == arena.device and output.within(footprint):
                        near.append(output)
                        free.append(live.baseline[position] + self._donated.get(output.storage._cdata, 0))
        self._near, self._free, self._versions = near, free, versions
        # Kept: the counter knows them by their handles.
        self._asked = [output.storage for output in (*self._own.outputs, *near)]
        self._counts = self._counter(self._asked)


_version = operator.attrgetter("version")
