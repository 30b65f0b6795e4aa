"""Storages that have memory for a part of each call only."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

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
        self._fill: list[Callable[[], object]] = []
        self._empty: list[Callable[[], object]] = []
        before: dict[Node, list[Callable[[], object]]] = defaultdict(list)
        after: dict[Node, list[Callable[[], object]]] = defaultdict(list)
        for index, (begin, end) in memory.transient.items():
            storage = torch.UntypedStorage(memory.sizes[index])
            self.storages[index] = storage
            fill, empty = functools.partial(storage.resize_, storage.nbytes()), functools.partial(storage.resize_, 0)
            before[program.schedule[begin]].append(fill)
            after[program.schedule[end - 1]].append(empty)
            self._fill.append(fill)
            self._empty.append(empty)
        self.before: Mapping[Node, Sequence[Callable[[], object]]] = dict(before)
        self.after: Mapping[Node, Sequence[Callable[[], object]]] = dict(after)

    def fill(self) -> None:
        """Give all of them memory."""
        for fill in self._fill:
            fill()

    def empty(self) -> None:
        """Take the memory of all of them back."""
        for empty in self._empty:
            empty()
