"""Which outputs are copied when they are handed out: those that were found live when their memory was needed."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch.multiprocessing.reductions import StorageWeakRef

# Bytes: up to this size, copying an output takes less time than finding out whether it is live.
SMALL = 1 << 20


@dataclass(eq=False)
class OutputCopies:
    """Outputs by their storage's index.

    Attributes:
        live: how often an output was found live.
        copied: outputs that are copied from now on.
        copies_all: whether all are.
        warm_outputs: outputs of the last warm-up run.
    """

    live: collections.Counter[int] = field(default_factory=collections.Counter)
    copied: frozenset[int] = frozenset()
    copies_all: bool = False
    warm_outputs: list[tuple[int, StorageWeakRef]] = field(default_factory=list)

    def found_live(self, outputs: Collection[int], small: Iterable[int]) -> bool:
        """Note that outputs were live although their memory was needed.

        Returns whether more are copied from now on. An output found live twice is copied, and all small ones with it;
        the next time, all outputs. So few recordings are replaced.

        Args:
            small: outputs of at most ``SMALL`` bytes.
        """
        self.live.update(outputs)
        twice = frozenset(index for index in outputs if self.live[index] > 1) - self.copied
        if not twice:
            return False
        self.copies_all = bool(self.copied)
        self.copied |= twice.union(small)
        return True

    def of(self, outputs: Iterable[int]) -> frozenset[int]:
        """Those of ``outputs`` that are copied."""
        return frozenset(outputs) if self.copies_all else self.copied.intersection(outputs)

    def add_live_warm_outputs(self) -> None:
        """Copy outputs that are still live after the warm-up: the caller will probably keep later ones, too."""
        self.copied |= {index for index, storage in self.warm_outputs if not storage.expired()}
        self.warm_outputs = []
