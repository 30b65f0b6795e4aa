"""Outputs that were handed out uncopied, and whether anybody has them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .memory import Arena

UseCounter = Callable[[Sequence[torch.UntypedStorage]], Callable[[], list[int]]]


@dataclass(frozen=True, eq=False)
class LentOutput:
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


class Lent:
    """What one recording hands out.

    A storage's use count tells who has it: it is compared with what it was when nobody did.
    """

    def __init__(
        self,
        outputs: Sequence[LentOutput] = (),
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
        self.unheld = [n - handed_out.get(output.storage._cdata, 0) for n, output in counts]
        self._orphan = False

    def held(self) -> dict[LentOutput, int]:
        """The outputs that somebody has, and how many tensors they have of each."""
        counts = self._counts()
        if counts == self.unheld:
            return {}
        # Garbage that was not collected when watching began must not pass for nobody later.
        self.unheld = list(map(min, counts, self.unheld))
        found = zip(self.outputs, counts, self.unheld, strict=True)
        return {output: count - unheld for output, count, unheld in found if count > unheld}

    def leave(self) -> None:
        """The recording ends: whoever has its outputs now is all who share them, but for the entry here."""
        self._orphan = True
        self.unheld = [1] * len(self.outputs)

    def over(self) -> bool:
        """Whether the recording has ended, and nobody has an output any more."""
        return self._orphan and not self.held()


class Overwritten:
    """What a replay overwrites: its own outputs, and what other recordings have lent out of the bytes it works on."""

    def __init__(
        self,
        footprints: Mapping[Arena, Sequence[tuple[int, int]]],
        own: Lent,
        handed_in: Mapping[int, int],
        counter: UseCounter,
    ) -> None:
        """
        Args:
            handed_in: how many of the tensors that a call hands in, and gives away, share a storage (by its handle).
        """
        self._footprints, self._own, self._handed_in, self._counter = footprints, own, handed_in, counter
        self._counts: Callable[[], list[int]]
        self._free: list[int]
        self._versions: list[int]
        self._look_again([])

    def away(self) -> bool:
        """Whether nobody has any of it, but the call that is to run. It is asked at every call: one look at all."""
        while True:
            counts = self._counts()
            # A recording that ends says so before it lets go of its outputs.
            versions = list(map(_version, self._footprints))
            if versions == self._versions:
                break
            self._look_again(versions)
        if counts == self._own.unheld + self._free:
            return True
        if self._own.held():
            return False
        others = counts[len(self._own.outputs) :]
        self._free = list(map(min, others, self._free))
        return others == self._free

    def in_the_way(self) -> list[LentOutput]:
        """Outputs of other recordings that somebody has. To be asked after ``away``."""
        counts = self._counts()[len(self._own.outputs) :]
        return [output for output, count, free in zip(self._near, counts, self._free, strict=True) if count > free]

    def _look_again(self, versions: list[int]) -> None:
        near, free = list[LentOutput](), list[int]()
        for arena, footprint in self._footprints.items():
            for lent in arena.lent:
                if lent is self._own:
                    continue
                for position, output in enumerate(lent.outputs):
                    if output.device == arena.device and output.within(footprint):
                        near.append(output)
                        free.append(lent.unheld[position] + self._handed_in.get(output.storage._cdata, 0))
        self._near, self._free, self._versions = near, free, versions
        # Kept: the counter knows them by their handles.
        self._asked = [output.storage for output in (*self._own.outputs, *near)]
        self._counts = self._counter(self._asked)


_version = operator.attrgetter("version")
