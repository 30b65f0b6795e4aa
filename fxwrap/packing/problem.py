"""What is to be packed: buffers, checked and cut into parts that do not disturb one another."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

# A step after every other.
FOREVER = 1 << 62
# Peeling buffers off again and again is worth a few rounds, and would take quadratic time on nested ones.
_PEELS = 8


@dataclass(frozen=True)
class Buffer:
    """Something to place: ``size`` bytes, live in steps ``[begin, end)``: begin inclusive, end exclusive."""

    name: str
    size: int
    begin: int
    end: int


@dataclass(frozen=True)
class Reserved:
    """Bytes ``[low, high)`` of an arena that something else has in steps ``[begin, end)``.

    Attributes:
        end: by default it is there for good.
        nodes: names of the inputs as which the program gets it, if nobody else has it: free after their last use.
    """

    low: int
    high: int
    begin: int = 0
    end: int = FOREVER
    nodes: tuple[str, ...] = ()


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The bytes of some spans ``[low, high)``, as spans that do not touch, in order."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], high)
        elif low < high:
            found.append((low, high))
    return found


@dataclass(frozen=True)
class Placement:
    """Offsets in bytes into one arena of ``size`` bytes.

    ``lower_bound``: no arena can be smaller. It is the largest number of (aligned) bytes live in any one step; or
    more, where a search has proved that these are not enough.
    """

    offsets: Mapping[str, int]
    size: int
    lower_bound: int

    @property
    def proven(self) -> bool:
        """Whether no smaller arena is possible, and that is known."""
        return self.size == self.lower_bound


@dataclass(frozen=True)
class Part:
    """Buffers whose places depend on no others, with time reduced to what they need.

    A section is a step in which no set of live buffers is contained in that of another step: two buffers are live
    at the same time exactly if they share a section.

    Attributes:
        members: positions of the buffers in the whole problem; the sequences below are in this order.
        begins, ends: the first section in which each is live, and the one after its last.
        sizes: bytes, multiples of the alignment and above 0.
        base: bytes below the part, in which buffers lie that are live during all of it.
        loads: bytes live in each section.
    """

    members: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    sizes: tuple[int, ...]
    base: int
    loads: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def bound(self) -> int:
        """The largest live set: the part needs as many bytes, without its base."""
        return max(self.loads)

    @cached_property
    def unit(self) -> int:
        """All sizes are multiples of it, and therefore the optimum is."""
        return math.gcd(*self.sizes)

    @cached_property
    def spans(self) -> int:
        """Sections, summed over buffers: what looking at everything once costs."""
        return sum(self.ends) - sum(self.begins)


def validate(buffers: Sequence[Buffer], alignment: int) -> None:
    """Raise ValueError, naming the buffer, for what cannot be placed."""
    if alignment < 1:
        raise ValueError(f"alignment must be at least 1 byte, got {alignment}")
    seen: set[str] = set()
    for buffer in buffers:
        if buffer.size < 0 or buffer.end <= buffer.begin:
            raise ValueError(f"buffer {buffer.name!r} needs size >= 0 and begin < end, got {buffer}")
        if buffer.name in seen:
            raise ValueError(f"buffer name {buffer.name!r} is given twice")
        seen.add(buffer.name)


def split(buffers: Sequence[Buffer], alignment: int) -> tuple[list[int], list[Part]]:
    """Offsets of the buffers that can be placed at once, and parts for the others.

    A buffer of no bytes can lie anywhere. One that is live during all of a part can lie below it: in any placement it
    parts what is under it from what is over it, and can change places with the former.

    Returns:
        Offsets by position, 0 for the buffers of parts; the parts.
    """
    sizes = [-(-buffer.size // alignment) * alignment for buffer in buffers]
    offsets = [0] * len(buffers)
    parts: list[Part] = []
    order = sorted((i for i in range(len(buffers)) if sizes[i]), key=lambda i: buffers[i].begin)
    todo = [(order, 0, 0)]
    while todo:
        items, base, peels = todo.pop()
        for run in _runs(buffers, items):
            first, last = buffers[run[0]].begin, max(buffers[i].end for i in run)
            rest, above = [], base
            for i in run:
                if buffers[i].begin == first and buffers[i].end == last:
                    offsets[i] = above
                    above += sizes[i]
                else:
                    rest.append(i)
            if rest and len(rest) < len(run) and peels < _PEELS:
                todo.append((rest, above, peels + 1))
            elif rest:
                parts.append(_part(buffers, sizes, rest, above))
    return offsets, parts


def _runs(buffers: Sequence[Buffer], items: list[int]) -> list[list[int]]:
    """Items, which are sorted by begin, in groups that no two of which are live at the same time."""
    runs: list[list[int]] = []
    end = None
    for i in items:
        if end is None or buffers[i].begin >= end:
            runs.append([])
            end = buffers[i].end
        runs[-1].append(i)
        end = max(end, buffers[i].end)
    return runs


def _part(buffers: Sequence[Buffer], sizes: list[int], items: list[int], base: int) -> Part:
    begins = {buffers[i].begin for i in items}
    ends = {buffers[i].end for i in items}
    # The live set of a step is contained in no other one if a buffer begins there, and one ends before another does.
    sections: list[int] = []
    latest = None
    for step in sorted(begins | ends):
        if step in ends and latest is not None:
            sections.append(latest)
            latest = None
        if step in begins:
            latest = step
    starts = tuple(bisect.bisect_left(sections, buffers[i].begin) for i in items)
    stops = tuple(bisect.bisect_left(sections, buffers[i].end) for i in items)
    change = [0] * (len(sections) + 1)
    for i, start, stop in zip(items, starts, stops, strict=True):
        change[start] += sizes[i]
        change[stop] -= sizes[i]
    loads = tuple(accumulate(change))[:-1]
    return Part(tuple(items), starts, stops, tuple(sizes[i] for i in items), base, loads)
