"""PLAN: offsets in an arena in which outputs live, too, beside those of other recordings."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from .planner import plan_memory
from .problem import FOREVER, Buffer, Placement, Reserved

# How much larger than the lower bound an arena may get before the ends of it are no longer kept for outputs.
_ROOM = (1.0, 1.003, 1.01, 1.02, 1.04, 1.08, 1.16, 1.3)
# Placements tried, times buffers: larger programs are tried in fewer ways.
_EFFORT = 4_000
# Seconds for a better layout, where the first one is above the lower bound: rare, and milliseconds are mostly enough.
SEARCH_S = 0.05


def lay_out_arena(
    buffers: Sequence[Buffer],
    outputs: Collection[str],
    reserved: Sequence[Reserved],
    alignment: int,
    like: Mapping[str, int] = MappingProxyType({}),
) -> Placement:
    """Place buffers so that those live at the same time do not overlap; outputs at one end, beside what others have.

    ::

        |    g g g      outputs (gradients), which stay, come down from the top
        |  t   g g
        |s s   t g      others' outputs: saved activations
        |s s s   t
        +---------

    Args:
        outputs: names of buffers that live on after the program.
        reserved: what others have in the arena.
        like: offsets in a plan for other sizes, by name.

    Returns:
        The arena's size counts what is reserved, too, and so does the lower bound.
    """
    problem = _Problem.of(buffers, reserved, alignment)
    if reserved:
        return problem.placement(problem.between_ends(outputs))
    return plan_memory(buffers, alignment, SEARCH_S, like=like)


def fits(offsets: Mapping[str, int], buffers: Sequence[Buffer], reserved: Sequence[Reserved], alignment: int) -> bool:
    """Whether every buffer has an offset, apart from all that it meets."""
    return _Problem.of(buffers, reserved, alignment).allows(offsets)


@dataclass(frozen=True)
class _Problem:
    """Buffers are positions; ``near[i]`` are those live at some time with ``i``, ``around[i]`` what is reserved."""

    items: Sequence[Buffer]
    sizes: list[int]
    near: list[list[int]]
    around: list[list[tuple[int, int]]]
    reserved: Sequence[Reserved]
    alignment: int
    bound: int

    @classmethod
    def of(cls, items: Sequence[Buffer], reserved: Sequence[Reserved], alignment: int) -> _Problem:
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
            [
                (f.low, -(-f.high // alignment) * alignment)
                for f in reserved
                if f.begin < item.end and item.begin < f.end
            ]
            for item in items
        ]
        last = max((item.end for item in items), default=1)
        ends = (r.end if r.end < FOREVER else last for r in reserved)
        taken = [Buffer("", r.high - r.low, r.begin, end) for r, end in zip(reserved, ends, strict=True)]
        taken += [replace(item, size=size) for item, size in zip(items, sizes, strict=True)]
        return cls(items, sizes, near, around, reserved, alignment, most_alive(taken))

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
        size = max([*ends, *(f.high for f in self.reserved)], default=0)
        names = (item.name for item in self.items)
        return Placement(dict(zip(names, offsets, strict=True)), size, self.bound)

    def between_ends(self, outputs: Collection[str]) -> list[int]:
        """Outputs from the top of as small an arena as will do, the rest from the bottom, around what is reserved."""
        high = {i for i, item in enumerate(self.items) if item.name in outputs}
        orders = self._orders()
        tries = max(2 * len(orders), _EFFORT // max(len(self.items), 1))
        lowest = min(map(self._fit, orders), key=self._top)
        tops = (-(-int(self.bound * room) // self.alignment) * self.alignment for room in _ROOM)
        variants = [one for order in orders for one in (order, sorted(order, key=lambda i: i not in high))]
        for top, order in itertools.islice(itertools.product(tops, variants), tries):
            if top >= self._top(lowest):
                break
            found = self._fit(order, high, top)
            if self._top(found) <= top and min(found, default=0) >= 0:
                return found
        return lowest

    def _orders(self) -> list[list[int]]:
        every = range(len(self.items))
        keys = _KEYS[: max(1, _EFFORT // max(len(every), 1))]
        return [sorted(every, key=lambda i, key=key: key(self.items[i], self.sizes[i])) for key in keys]  # type: ignore[misc]

    def _top(self, offsets: Sequence[int]) -> int:
        return max((offset + size for offset, size in zip(offsets, self.sizes, strict=True)), default=0)

    def _fit(self, order: Sequence[int], high: Collection[int] = (), top: int = 0) -> list[int]:
        """First fit: ``high`` ones at the highest free offset below ``top`` (negative: there is none)."""
        offsets = [0] * len(self.items)
        spans: list[tuple[int, int] | None] = [None] * len(self.items)
        for i in order:
            taken = [span for j in self.near[i] if (span := spans[j]) is not None]
            taken += self.around[i]
            size = self.sizes[i]
            offsets[i] = _highest_gap(taken, size, top) if i in high else lowest_gap(taken, size)
            if size:
                spans[i] = offsets[i], offsets[i] + size
        return offsets


class Live(Protocol):
    """Bytes that are live in steps ``[begin, end)``."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def size(self) -> int: ...


def _meet(one: Reserved, other: Buffer) -> bool:
    return one.begin < other.end and other.begin < one.end


def alive_at_steps(held: Iterable[Live]) -> list[int]:
    """Bytes live in each step, up to the last in which anything is."""
    change: dict[int, int] = defaultdict(int)
    for one in held:
        change[one.begin] += one.size
        change[one.end] -= one.size
    return list(itertools.accumulate(change[step] for step in range(max(change, default=0))))


def most_alive(held: Iterable[Live]) -> int:
    """The largest number of bytes live in one step."""
    return max(alive_at_steps(held), default=0)


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
