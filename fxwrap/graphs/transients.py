"""Storages that have memory for a part of each call only."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.fx import Node

from ..plan import MemoryPlan, ProgramPlan


class Transients:
    """The storages of a plan that are filled before the first step that names them, and emptied after the last.

    ::

        step           0  1  2  3  4  5
        has memory     .  .  x  x  .  .         the same storage at every call, with the same tensors over it

    To give a storage memory and to take it back costs a fifth of a microsecond on a CPU; a new tensor costs half a
    microsecond, and as much again for every view of it.

    Attributes:
        storages: by storage index.
        before, after: what to call before and after a node runs.
    """

    def __init__(self, program: ProgramPlan, memory: MemoryPlan) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._sizes: dict[int, int] = {}
        before: dict[Node, list[Callable[[], object]]] = defaultdict(list)
        after: dict[Node, list[Callable[[], object]]] = defaultdict(list)
        for index, (begin, end) in memory.transient.items():
            self.storages[index] = storage = torch.UntypedStorage(0)
            self._sizes[index] = memory.sizes[index]
            before[program.schedule[begin]].append(functools.partial(storage.resize_, memory.sizes[index]))
            after[program.schedule[end - 1]].append(functools.partial(storage.resize_, 0))
        self.before: Mapping[Node, Sequence[Callable[[], object]]] = dict(before)
        self.after: Mapping[Node, Sequence[Callable[[], object]]] = dict(after)

    @contextlib.contextmanager
    def filled(self) -> Iterator[None]:
        """All have memory, for tensors over them to be made; nobody touches it, so that no page of it is there."""
        without = [index for index, storage in self.storages.items() if not storage.nbytes()]
        try:
            for index in without:
                self.storages[index].resize_(self._sizes[index])
            yield
        finally:
            for index in without:
                self.storages[index].resize_(0)

    def empty(self) -> None:
        """Take the memory of all of them back."""
        for storage in self.storages.values():
            storage.resize_(0)
