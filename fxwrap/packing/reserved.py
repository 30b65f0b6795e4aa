"""PLAN: offsets in an arena in which outputs live, too, around those of other recordings."""

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

# Orders tried, times buffers: larger programs are tried in fewer ways.
_EFFORT = 1_000
# A followed hint may need so many times its size: a search, with many times the work, hardly finds less.
_NEAR = 1.0005


def lay_out_arena(
    buffers: Sequence[Buffer],
    outputs: Collection[str],
    reserved: Sequence[Reserved],
    alignment: int,
    hint: Placement | None = None,
    like: Mapping[str, int] = MappingProxyType({}),
) -> Placement:
    """Place buffers so that those live at the same time do not overlap; outputs at one end, around what is reserved.

    ::

        |    g g g      outputs (gradients), which stay, come down from the top
        |  t   g g
        |s s   t g      others' outputs: saved activations
        |s s s   t
        +---------

    Args:
        outputs: names of buffers that live on after the program.
        reserved: intervals of live outputs of other recordings.
        hint: offsets that are kept where nothing reserved is in the way, if the arena need hardly be larger for that.
        like: offsets in a plan for other sizes, by name.

    Returns:
        The arena's size counts what is reserved, too, and so does the lower bound. Where the hint is followed, the
        lower bound is the hint's, and the size at least the hint's.
    """
    problem = _Problem.of(buffers, reserved, alignment)
    found = list[Placement]()
    if hint is not None:
        offsets = problem.follow(hint.offsets)
        found.append(problem.placement(offsets))
        if (top := problem.top(offsets)) <= hint.size * _NEAR:
            return replace(found[0], size=max(top, hint.size), lower_bound=hint.lower_bound)
    if reserved:
        found.append(problem.placement(problem.between_ends(outputs)))
    else:
        found.append(plan_memory(buffers, alignment, like=like))
    return min(found, key=lambda placement: placement.size)


# Bytes ``[low, high)`` that are taken in steps ``[begin, end)``.
_Interval = tuple[int, int, int, int]


@dataclass(frozen=True)
class _Problem:
    """Buffers are positions; ``taken`` is what is reserved, with gaps that no buffer can lie in."""

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

    def follow(self, hint: Mapping[str, int]) -> list[int]:
        """Offsets of a hint, but for those that are in the way of others: they lie at the lowest that is free."""
        live, kept = list[tuple[int, int, int]](), dict[int, int]()
        # Nothing is kept if reserved intervals overlap one another: that is not known to happen.
        apart = all([_take(live, low, high - low, 0, end) for low, high, _, end in self.taken])
        for i in sorted(range(len(self.items)), key=lambda i: self.items[i].begin) if apart else ():
            item, size = self.items[i], self.sizes[i]
            if item.name in hint and (not size or _take(live, hint[item.name], size, item.begin, item.end)):
                kept[i] = hint[item.name]
        rest = (i for i in range(len(self.items)) if i not in kept)
        return self._fit(sorted(rest, key=lambda i: (-self.sizes[i], self.items[i].begin)), kept=kept)

    def placement(self, offsets: Sequence[int]) -> Placement:
        """Offsets by name; the size is that of the arena they need."""
        size = max([self.top(offsets), *(f.high for f in self.reserved)])
        names = (item.name for item in self.items)
        return Placement(dict(zip(names, offsets, strict=True)), size, self.bound)

    def between_ends(self, outputs: Collection[str]) -> list[int]:
        """Outputs from the top of the smallest arena that is possible, the rest from the bottom, around what is
        reserved; all of them from the bottom where that does not go."""
        high = {i for i, item in enumerate(self.items) if item.name in outputs}
        orders = self._orders()
        lowest = min(map(self._fit, orders), key=self.top)
        top = -(-self.bound // self.alignment) * self.alignment
        for order in orders if top < self.top(lowest) else ():
            for variant in (order, sorted(order, key=lambda i: i not in high)):
                found = self._fit(variant, high, top)
                if self.top(found) <= top and min(found, default=0) >= 0:
                    return found
        return lowest

    def _orders(self) -> list[list[int]]:
        every = range(len(self.items))
        keys = _KEYS[: max(1, _EFFORT // max(len(every), 1))]
        return [sorted(every, key=lambda i, key=key: key(self.items[i], self.sizes[i])) for key in keys]  # type: ignore[misc]

    def top(self, offsets: Sequence[int]) -> int:
        return max((offset + size for offset, size in zip(offsets, self.sizes, strict=True)), default=0)

    def _fit(
        self,
        order: Iterable[int],
        high: Collection[int] = (),
        top: int = 0,
        kept: Mapping[int, int] = MappingProxyType({}),
    ) -> list[int]:
        """First fit: ``high`` ones at the highest free offset below ``top`` (negative: there is none).

        Args:
            kept: offsets of the buffers that are not in ``order``.
        """
        offsets = [0] * len(self.items)
        taken = [*self.taken]

        def put(i: int, low: int) -> None:
            offsets[i] = low
            if self.sizes[i]:
                taken.append((low, low + self.sizes[i], self.items[i].begin, self.items[i].end))

        for i, low in kept.items():
            put(i, low)
        for i in order:
            first, last, size = self.items[i].begin, self.items[i].end, self.sizes[i]
            spans = [(low, high) for low, high, begin, end in taken if begin < last and first < end]
            put(i, _highest_gap(spans, size, top) if i in high else lowest_gap(spans, size))
        return offsets


def _take(live: list[tuple[int, int, int]], low: int, size: int, begin: int, end: int) -> bool:
    """Enter a span among others, which are apart and in order; False if one that is there at ``begin`` is in the way.

    Called in the order of ``begin``: those that are over by then make room.

    Args:
        live: bytes ``[low, high)`` up to a step.
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
    """Bytes live in each step, up to the last in which anything is."""
    change: dict[int, int] = defaultdict(int)
    for one in intervals:
        change[one.begin] += one.size
        change[one.end] -= one.size
    return list(itertools.accumulate(change[step] for step in range(max(change, default=0))))


def most_alive(intervals: Iterable[Live]) -> int:
    """The largest number of bytes live in one step."""
    return max(alive_at_steps(intervals), default=0)


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
