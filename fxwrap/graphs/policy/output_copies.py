"""Which outputs a program copies because they were live when a replay needed their memory.

Others are copied whatever the caller does: all with the option ``copy_outputs`` (``prepared.py``), and those without
an address or in a graph's pool (``record/outputs.py``).
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch.multiprocessing.reductions import StorageWeakRef

# In bytes. Copying an output of this size takes less time than to find out whether it is live.
SMALL = 1 << 20


@dataclass(eq=False)
class OutputCopies:
    """The outputs that a program copies, by storage index.

    Attributes:
        live: how often each output was found live.
        copied: outputs that are copied from now on.
        copies_all: whether all outputs are copied.
        warm_outputs: the storages of outputs of the last warm-up run.
    """

    live: collections.Counter[int] = field(default_factory=collections.Counter)
    copied: frozenset[int] = frozenset()
    copies_all: bool = False
    warm_outputs: list[tuple[int, StorageWeakRef]] = field(default_factory=list)

    def note_live(self, outputs: Collection[int], small: Iterable[int], numbers: frozenset[int]) -> bool:
        """Note that outputs were live when their memory was needed.

        An output that is found live twice is copied from then on, together with all small ones; the next time this
        happens, all outputs are. So few recordings have to be replaced. Numbers are copied once one was found live.

        Args:
            small: outputs of at most ``SMALL`` bytes.
            numbers: outputs of one element.

        Returns:
            Whether more outputs are copied from now on.
        """
        self.live.update(outputs)
        if numbers.intersection(outputs) - self.copied:
            self.copied |= numbers
            return True
        twice = frozenset(index for index in outputs if self.live[index] > 1) - self.copied
        if not twice:
            return False
        self.copies_all = bool(self.copied - numbers)
        self.copied |= twice.union(small)
        return True

    def of(self, outputs: Iterable[int]) -> frozenset[int]:
        """Those of ``outputs`` that are copied."""
        return frozenset(outputs) if self.copies_all else self.copied.intersection(outputs)

    def add_live_warm_outputs(self) -> None:
        """Copy outputs that are still live after the warm-up: the caller probably keeps later ones as well."""
        self.copied |= {index for index, storage in self.warm_outputs if not storage.expired()}
        self.warm_outputs = []
