"""Memory that is there for a part of each call only."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from ...plan import MemoryPlan, ProgramPlan
from ...torch_private import native_library


class Regions:
    """The regions of a plan: filled before the first step that names what is in one, and emptied after the last.

    ::

        step           0  1  2  3  4  5
        has memory     .  .  x  x  .  .         the same storage at every call, with the same tensors over it

    To give a storage memory and to take it back costs a fifth of a microsecond on a CPU; a new tensor costs half a
    microsecond, and as much again for every view of it. The memory of a kept region comes from the helper library
    (``native/kept_memory.h``), which keeps it for the next call of any program; without the library it is allocated
    and freed like that of others.

    Attributes:
        places: the region and the offset in bytes of each storage, by storage index.
        before, after: (storage, bytes): the size that a storage gets before and after a node runs.
    """

    def __init__(self, program: ProgramPlan, memory: MemoryPlan) -> None:
        self.places: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        self._kept: list[Any] = []  # their memory is theirs as long as they exist
        self.before: dict[Node, list[tuple[torch.UntypedStorage, int]]] = defaultdict(list)
        self.after: dict[Node, list[tuple[torch.UntypedStorage, int]]] = defaultdict(list)
        for region in (region for region in memory.regions if not region.arena):
            storage = torch.UntypedStorage(0)
            if region.kept and (kept := native_library.kept_region(region.size)) is not None:
                self._kept.append(kept)
                storage = kept.storage
            self._sizes.append((storage, region.size))
            self.places.update({index: (storage, offset) for index, offset in memory.inside(region).items()})
            self.before[program.schedule[region.begin]].append((storage, region.size))
            self.after[program.schedule[region.end - 1]].append((storage, 0))

    @contextlib.contextmanager
    def filled(self, index: int) -> Iterator[tuple[torch.UntypedStorage, int]]:
        """Allocates the region of a storage while a tensor is made over it. One at a time: a call has a limit."""
        region, offset = self.places[index]
        size = next(size for storage, size in self._sizes if storage is region)
        was_empty = not region.nbytes()
        try:
            if was_empty:
                region.resize_(size)
            yield region, offset
        finally:
            if was_empty:
                region.resize_(0)

    def empty(self) -> None:
        """Free the memory of every region."""
        for storage, _ in self._sizes:
            storage.resize_(0)
