"""PLAN: lays out the arena of a recording, in which live outputs of other recordings occupy bytes.

Outputs of the program lie in the arena, too: they come down from its top, and temporaries lie at the bottom.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from .planner import plan_memory
from .problem import FOREVER, Buffer, Placement, Reserved

# The limit of orders times buffers: larger programs get fewer orders.
_EFFORT = 1_000
# A hint is good enough if the arena is at most so many times its size. A search, with much more work, hardly gains.
_NEAR = 1.0005


def lay_out_arena(
    buffers: Sequence[Buffer],
    outputs: Collection[str],
    reserved: Sequence[Reserved],
    alignment: int,
    hint: Placement | None = None,
    previous: Mapping[str, int] = MappingProxyType({}),
) -> Placement:
    """Place buffers in an arena around reserved bytes, outputs at one end; live ones do not overlap.

    ::

        |    g g g      outputs (gradients), which stay, come down from the top
        |  t   g g
        |s s   t g      others' outputs: saved activations
        |s s s   t
        +---------

    Args:
        outputs: names of buffers that live on after the program.
        reserved: bytes that live outputs of other recordings occupy.
        alignment: bytes; every offset is a multiple.
        hint: offsets that are followed where no reserved bytes are in the way, if that hardly enlarges the arena.
        previous: offsets in a plan for other sizes, by name, in bytes.

    Returns:
        Offsets in bytes. The size and the lower bound count reserved bytes, too. Where the hint is followed, the
        lower bound is the hint's, and the size is at least the hint's.
    """
    problem = _Problem.of(buffers, reserved, alignment)
    placements = list[Placement]()
    if hint is not None:
        offsets = problem.offsets_from(hint.offsets)
        placements.append(problem.placement(offsets))
        if (top := problem.top(offsets)) <= hint.size * _NEAR:
            return replace(placements[0], size=max(top, hint.size), lower_bound=hint.lower_bound)
    if reserved:
        placements.append(problem.placement(problem.between_ends(outputs)))
    else:
        placements.append(plan_memory(buffers, alignment, previous=previous))
    return min(placements, key=lambda placement: placement.size)


# Bytes ``[low, high)`` that are taken in steps ``[begin, end)``.
_Interval = tuple[int, int, int, int]


@dataclass(frozen=True)
class _Problem:
    """Buffers, by position, and the reserved bytes around which they are placed.

    Attributes:
        taken: the reserved bytes, and the gaps up to the next aligned offset, which no buffer can use.
        bound: bytes that the arena needs at least.
    """

    items: Sequence[Buffer]
    sizes: list[int]
    reserved: Sequence[Reserved]
    taken: list[_Interval]
    alignment: int
    bound: int

    @classmethod
    def of(cls, items: Sequence[Buffer], reserved: Sequence[Reserved], alignment: int) -> _Problem:
        sizes = [-(-item.size // alignment) * alignment for item in items]
        last = max((item.end for item in items), default=1)
        ends = (r.end if r.end < FOREVER else last for r in reserved)
        intervals = [Buffer("", r.high - r.low, r.begin, end) for r, end in zip(reserved, ends, strict=True)]
        intervals += [replace(item, size=size) for item, size in zip(items, sizes, strict=True)]
        taken = [(r.low, -(-r.high // alignment) * alignment, r.begin, r.end) for r in reserved]
        return cls(items, sizes, reserved, taken, alignment, most_alive(intervals))

    def offsets_from(self, hint: Mapping[str, int]) -> list[int]:
        """The hint's offsets. A buffer that overlaps another there gets the lowest free offset."""
        live, followed = list[tuple[int, int, int]](), dict[int, int]()
        # No offset is followed if reserved intervals overlap one another, which is not known to happen.
        disjoint = all([_take(live, low, high - low, 0, end) for low, high, _, end in self.taken])
        for i in sorted(range(len(self.items)), key=lambda i: self.items[i].begin) if disjoint else ():
            item, size = self.items[i], self.sizes[i]
            if item.name not in hint or (size and hint[item.name] < item.first):
                continue
            if not size or _take(live, hint[item.name], size, item.begin, item.end):
                followed[i] = hint[item.name]
        rest = (i for i in range(len(self.items)) if i not in followed)
        return self._fit(sorted(rest, key=lambda i: (-self.sizes[i], self.items[i].begin)), fixed=followed)

    def placement(self, offsets: Sequence[int]) -> Placement:
        """Offsets by name, with the size of the arena that they need."""
        size = max([self.top(offsets), *(r.high for r in self.reserved)])
        names = (item.name for item in self.items)
        return Placement(dict(zip(names, offsets, strict=True)), size, self.bound)

    def between_ends(self, outputs: Collection[str]) -> list[int]:
        """Offsets with outputs at the top of the smallest possible arena and the other buffers at its bottom.

        All buffers are placed from the bottom where that does not fit.
        """
        high = {i for i, item in enumerate(self.items) if item.name in outputs}
        orders = self._orders()
        lowest = min(map(self._fit, orders), key=self.top)
        top = -(-self.bound // self.alignment) * self.alignment
        for order in orders if top < self.top(lowest) else ():
            for variant in (order, sorted(order, key=lambda i: i not in high)):
                offsets = self._fit(variant, high, top)
                if self.top(offsets) <= top and min(offsets, default=0) >= 0:
                    return offsets
        return lowest

    def _orders(self) -> list[list[int]]:
        positions = range(len(self.items))
        keys = _KEYS[: max(1, _EFFORT // max(len(positions), 1))]
        return [sorted(positions, key=lambda i, key=key: key(self.items[i], self.sizes[i])) for key in keys]  # type: ignore[misc]

    def top(self, offsets: Sequence[int]) -> int:
        return max((offset + size for offset, size in zip(offsets, self.sizes, strict=True)), default=0)

    def _fit(
        self,
        order: Iterable[int],
        high: Collection[int] = (),
        top: int = 0,
        fixed: Mapping[int, int] = MappingProxyType({}),
    ) -> list[int]:
        """First fit: each buffer in ``order`` gets the lowest free offset.

        Args:
            high: buffers that get the highest free offset below ``top`` instead, which is negative if none is free.
            fixed: offsets of the buffers that are not in ``order``.
        """
        offsets = [0] * len(self.items)
        taken = [*self.taken]

        def put(i: int, low: int) -> None:
            offsets[i] = low
            if self.sizes[i]:
                taken.append((low, low + self.sizes[i], self.items[i].begin, self.items[i].end))

        for i, low in fixed.items():
            put(i, low)
        for i in order:
            first, last, size = self.items[i].begin, self.items[i].end, self.sizes[i]
            spans = [(low, high) for low, high, begin, end in taken if begin < last and first < end]
            if self.items[i].first and size:
                spans.append((0, self.items[i].first))
            put(i, _highest_gap(spans, size, top) if i in high else lowest_gap(spans, size))
        return offsets


def _take(live: list[tuple[int, int, int]], low: int, size: int, begin: int, end: int) -> bool:
    """Add a span to disjoint spans in ascending order. Returns False, and adds nothing, if it overlaps a live one.

    It is called in the order of ``begin``: spans that have ended by then are replaced.

    Args:
        live: bytes ``[low, high)`` and the step at which they are free.
    """
    high = low + size
    first = bisect.bisect_left(live, (low,))
    first -= first > 0 and live[first - 1][1] > low
    last = first
    while last < len(live) and live[last][0] < high:
        if live[last][2] > begin:
            return False
        last += 1
    live[first:last] = [(low, high, end)]
    return True


class Live(Protocol):
    """Bytes that are live in steps ``[begin, end)``."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def size(self) -> int: ...


def alive_at_steps(intervals: Iterable[Live]) -> list[int]:
    """Bytes live in each step, up to the last step with any."""
    change: dict[int, int] = defaultdict(int)
    for interval in intervals:
        change[interval.begin] += interval.size
        change[interval.end] -= interval.size
    return list(itertools.accumulate(change[step] for step in range(max(change, default=0))))


def most_alive(intervals: Iterable[Live]) -> int:
    """The largest number of bytes live in one step."""
    return max(alive_at_steps(intervals), default=0)


def lowest_gap(taken: list[tuple[int, int]], size: int) -> int:
    """The lowest offset at which ``size`` bytes lie between spans ``[low, high)``."""
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
