"""PLAN: offsets in an arena in which outputs live, too, beside those of other recordings."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..packing import Buffer, Placement, plan_memory

# How much larger than the lower bound an arena may get before the ends of it are no longer kept for outputs.
_ROOM = (1.0, 1.003, 1.01, 1.02, 1.04, 1.08, 1.16, 1.3)
# Placements tried, times buffers, at most: larger programs are tried in fewer ways.
_EFFORT = 40_000
# Seconds for a better layout, where the first one is above the lower bound: rare, and milliseconds are mostly enough.
SEARCH_S = 0.05


@dataclass(frozen=True)
class Fixed:
    """Bytes ``[low, high)`` that are taken in steps ``[begin, end)``, whatever the plan."""

    low: int
    high: int
    begin: int
    end: int


def lay_out_arena(
    buffers: Sequence[Buffer],
    outputs: Collection[str],
    fixed: Sequence[Fixed],
    alignment: int,
    like: Mapping[str, int] = MappingProxyType({}),
) -> Placement:
    """Place buffers so that those live at the same time do not overlap, with outputs at one end.

    ::

        forward                       backward
                                      |    g g g      gradients come down from the top
            t t   t                   |  t   g g
        |   s s s s                   |s s   t g      saved activations die from the top,
        | s s s s s                   |s s s   t      the first that was saved is the last that is needed
        +----------                   +---------

    Activations are stacked in the order in which they are made, so that a backward program finds what is free in
    one piece, and puts gradients, which stay, at the other end.

    Args:
        outputs: names of buffers that live on after the program.
        fixed: what others have in the arena.
        like: offsets in a plan for other sizes, by name.

    Returns:
        The arena's size counts what is fixed, too, and so does the lower bound.
    """
    problem = _Problem.of(buffers, fixed, alignment)
    if fixed:
        return problem.placement(problem.between_ends(outputs))
    stacked = problem.placement(problem.on_a_stack(outputs))
    if stacked.size == stacked.lower_bound:
        return stacked
    free = plan_memory(buffers, alignment, SEARCH_S, like=like)
    return free if free.size < stacked.size else stacked


def fits(offsets: Mapping[str, int], buffers: Sequence[Buffer], fixed: Sequence[Fixed], alignment: int) -> bool:
    """Whether every buffer has an offset, apart from all that it meets."""
    return _Problem.of(buffers, fixed, alignment).allows(offsets)


@dataclass(frozen=True)
class _Problem:
    """Buffers are positions; ``near[i]`` are those live at some time with ``i``, ``around[i]`` what is fixed then."""

    items: Sequence[Buffer]
    sizes: list[int]
    near: list[list[int]]
    around: list[list[tuple[int, int]]]
    fixed: Sequence[Fixed]
    alignment: int
    bound: int

    @classmethod
    def of(cls, items: Sequence[Buffer], fixed: Sequence[Fixed], alignment: int) -> _Problem:
        sizes = [-(-item.size // alignment) * alignment for item in items]
        near: list[list[int]] = [[] for _ in items]
        live: list[int] = []
        for i in sorted(range(len(items)), key=lambda i: items[i].begin):
            live = [j for j in live if items[j].end > items[i].begin]
            for j in live:
                near[i].append(j)
                near[j].append(i)
            live.append(i)
        around = [
            [(f.low, -(-f.high // alignment) * alignment) for f in fixed if f.begin < item.end and item.begin < f.end]
            for item in items
        ]
        taken = [(f.high - f.low, f.begin, f.end) for f in fixed]
        taken += [(size, item.begin, item.end) for item, size in zip(items, sizes, strict=True)]
        return cls(items, sizes, near, around, fixed, alignment, most_alive(taken))

    def allows(self, offsets: Mapping[str, int]) -> bool:
        """Whether every buffer has an offset, apart from all that it meets."""
        if any(item.name not in offsets for item in self.items):
            return False
        spans = [
            (offsets[item.name], offsets[item.name] + size) for item, size in zip(self.items, self.sizes, strict=True)
        ]
        for i, (low, high) in enumerate(spans):
            others = itertools.chain((spans[j] for j in self.near[i]), self.around[i])
            if any(low < end and begin < high for begin, end in others):
                return False
        return True

    def placement(self, offsets: Sequence[int]) -> Placement:
        """Offsets by name; the size is that of the arena they need."""
        ends = [offset + size for offset, size in zip(offsets, self.sizes, strict=True)]
        size = max([*ends, *(f.high for f in self.fixed)], default=0)
        names = (item.name for item in self.items)
        return Placement(dict(zip(names, offsets, strict=True)), size, self.bound)

    def on_a_stack(self, outputs: Collection[str]) -> list[int]:
        """Outputs from the bottom, in the order in which they are made; the rest at the lowest free offset."""
        stack, height = dict[int, int](), 0
        for i in sorted(range(len(self.items)), key=lambda i: self.items[i].begin):
            if self.items[i].name in outputs:
                stack[i] = height
                height += self.sizes[i]
        return self._best(self._fit(order, stack) for order in self._orders(stack))

    def between_ends(self, outputs: Collection[str]) -> list[int]:
        """Outputs from the top of as small an arena as will do, the rest from the bottom, around what is fixed."""
        high = {i for i, item in enumerate(self.items) if item.name in outputs}
        lowest = self._best(self._fit(order, {}) for order in self._orders(()))
        limit = self._top(lowest)
        for room in _ROOM:
            top = -(-int(self.bound * room) // self.alignment) * self.alignment
            if top >= limit:
                break
            for order in self._orders(()):
                for one in (order, sorted(order, key=lambda i: i not in high)):
                    found = self._fit(one, {}, high, top)
                    if self._top(found) <= top and min(found, default=0) >= 0:
                        return found
        return lowest

    def _orders(self, placed: Collection[int]) -> Iterator[list[int]]:
        rest = [i for i in range(len(self.items)) if i not in placed]
        tries = max(1, _EFFORT // max(len(rest), 1))
        for key in itertools.islice(_KEYS, tries):
            yield sorted(rest, key=lambda i: key(self.items[i], self.sizes[i]))

    def _best(self, found: Iterator[list[int]]) -> list[int]:
        best: list[int] | None = None
        for offsets in found:
            if best is None or self._top(offsets) < self._top(best):
                best = offsets
            if self._top(best) <= self.bound:
                break
        assert best is not None
        return best

    def _top(self, offsets: Sequence[int]) -> int:
        return max((offset + size for offset, size in zip(offsets, self.sizes, strict=True)), default=0)

    def _fit(
        self, order: Sequence[int], placed: dict[int, int], high: Collection[int] = (), top: int = 0
    ) -> list[int]:
        """First fit: ``high`` ones at the highest free offset below ``top`` (negative: there is none)."""
        offsets: list[int | None] = [placed.get(i) for i in range(len(self.items))]
        for i in order:
            others = ((offsets[j], self.sizes[j]) for j in self.near[i])
            taken = [(offset, offset + size) for offset, size in others if offset is not None and size]
            taken += self.around[i]
            offsets[i] = _highest_gap(taken, self.sizes[i], top) if i in high else lowest_gap(taken, self.sizes[i])
        return [offset if offset is not None else 0 for offset in offsets]


def most_alive(taken: Iterable[tuple[int, int, int]]) -> int:
    """The largest number of bytes live in one step; of each: bytes, begin, end."""
    change: dict[int, int] = defaultdict(int)
    for size, begin, end in taken:
        change[begin] += size
        change[end] -= size
    return max(itertools.accumulate(change[step] for step in sorted(change)), default=0)


def alive_at_steps(taken: Iterable[tuple[int, int, int]], end: int) -> list[int]:
    """Bytes live in each of the steps ``[0, end)``; of each: bytes, begin, end."""
    change = [0] * (end + 1)
    for size, first, stop in taken:
        change[min(first, end)] += size
        change[min(stop, end)] -= size
    return list(itertools.accumulate(change[:-1]))


def lowest_gap(taken: list[tuple[int, int]], size: int) -> int:
    """The lowest offset of so many bytes between spans ``[low, high)``."""
    offset = 0
    for low, high in sorted(taken):
        if low >= offset + size:
            break
        offset = max(offset, high)
    return offset


def _highest_gap(taken: list[tuple[int, int]], size: int, top: int) -> int:
    end = top
    for low, high in sorted(taken, key=lambda span: -span[1]):
        if high <= end - size:
            break
        end = min(end, low)
    return end - size


_KEYS: tuple[Callable[[Buffer, int], Any], ...] = (
    lambda item, size: (-size, item.begin),
    lambda item, size: (-(item.end - item.begin), -size),
    lambda item, size: (-size * (item.end - item.begin), item.begin),
    lambda item, size: (item.begin, -size),
    lambda item, size: (-item.end, -size),
)
