"""Outputs that were handed out uncopied, and whether anybody has them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

UseCounter = Callable[[Sequence[torch.UntypedStorage]], Callable[[], list[int]]]


@dataclass(frozen=True, eq=False)
class LentOutput:
    """A storage that is handed out, and where it lies.

    Attributes:
        index: of the storage in its program's facts.
        device: of the arena; None for memory of its own.
        low: first byte in the arena.
    """

    storage: torch.UntypedStorage
    index: int
    device: torch.device | None = None
    low: int = 0

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

    def __init__(self, outputs: Sequence[LentOutput], counter: UseCounter | None) -> None:
        self.outputs = list(outputs)
        storages = [output.storage for output in self.outputs]
        self._counts = counter(storages) if counter is not None else None
        self.unheld = self._counts() if self._counts is not None else []
        self.addresses = [storage.data_ptr() for storage in storages]
        self._storages = storages
        self._orphan = False

    def held(self) -> dict[LentOutput, int]:
        """The outputs that somebody has, and how many tensors they have of each: all outputs, and no tensors, where
        torch cannot tell."""
        if self._counts is None:
            return dict.fromkeys(self.outputs, 0)
        counts = self._counts()
        if counts == self.unheld:
            return {}
        # Garbage that was not collected when watching began must not pass for nobody later.
        self.unheld = list(map(min, counts, self.unheld))
        found = zip(self.outputs, counts, self.unheld, strict=True)
        return {output: count - unheld for output, count, unheld in found if count > unheld}

    def spoiled(self) -> bool:
        """Whether the memory of an output is not where it was: its holder freed it, or shared it with another
        process. To be asked after ``held``: that happens while somebody holds it."""
        return list(map(torch.UntypedStorage.data_ptr, self._storages)) != self.addresses

    def moved(self) -> set[int]:
        """Indices of storages whose memory is not where it was."""
        now = map(torch.UntypedStorage.data_ptr, self._storages)
        return {
            o.index for o, address, before in zip(self.outputs, now, self.addresses, strict=True) if address != before
        }

    def leave(self) -> None:
        """The recording ends: whoever has its outputs now is all who share them, but for the entry here."""
        self._orphan = True
        self.unheld = [1] * len(self.outputs)

    def over(self) -> bool:
        """Whether the recording has ended, and nobody has an output any more."""
        return self._orphan and not self.held()


class Lender(Protocol):
    """An arena, as far as the outputs in it go.

    Attributes:
        lent: outputs that were handed out, by recording.
        version: changes whenever ``lent`` does, and before there is another slice of the block.
        block: all of its memory. Its use count tells how many slices are where they were made.
    """

    device: torch.device
    block: torch.UntypedStorage | None
    lent: list[Lent]
    version: int


class Overwritten:
    """What a replay overwrites: its own outputs, and what other recordings have lent out of the bytes it works on."""

    def __init__(
        self,
        footprints: Mapping[Lender, Sequence[tuple[int, int]]],
        own: Lent,
        handed_in: Mapping[int, int],
        counter: UseCounter | None,
    ) -> None:
        """
        Args:
            handed_in: how many of the tensors that a call hands in, and gives away, share a storage (by its handle).
        """
        self._footprints, self._own, self._handed_in, self._counter = footprints, own, handed_in, counter
        self._versions, self._free, self._slices = list[int](), list[int](), list[int]()
        self._counts: Callable[[], list[int]]
        self._all_slices = all(output.device is not None and output.storage.nbytes() for output in own.outputs)
        self._look_again(self._versions)

    def away(self) -> bool:
        """Whether nobody has any of it, but the call that is to run, and its own outputs are where they were.

        It is asked at every call: one look at all. Whoever moves the memory of a slice lets go of the arena's block.
        """
        while True:
            counts = self._counts()
            # A recording that ends says so before it lets go of its outputs.
            versions = list(map(_version, self._footprints))
            if versions == self._versions:
                break
            self._look_again(versions)
        if counts == self._own.unheld + self._free + self._slices:
            return True
        if self._own.held():
            return False
        counts = counts[len(self._own.outputs) :]
        self._free = list(map(min, counts, self._free))
        others, slices = counts[: len(self._free)], counts[len(self._free) :]
        if others != self._free or self._own.spoiled():
            return False
        if self._all_slices:
            self._slices = slices
        return True

    def _look_again(self, versions: list[int]) -> None:
        near, free = [], []
        for arena, footprint in self._footprints.items():
            for lent in arena.lent:
                if lent is self._own:
                    continue
                for position, output in enumerate(lent.outputs):
                    if output.device == arena.device and output.within(footprint):
                        unheld = lent.unheld[position] if lent.unheld else 0
                        near.append(output)
                        free.append(unheld + self._handed_in.get(output.storage._cdata, 0))
        self._free, self._versions = free, versions
        self._slices = [0]  # not known: there is no such count
        blocks = [arena.block for arena in self._footprints if arena.block is not None]
        # Kept: the counter knows them by their handles.
        self._asked = storages = [*(output.storage for output in (*self._own.outputs, *near)), *blocks]
        # Where torch cannot tell, somebody has everything.
        self._counts = self._counter(storages) if self._counter is not None else lambda: [1] * len(storages)


_version = operator.attrgetter("version")
