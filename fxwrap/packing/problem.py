"""The packing problem: buffers, which are checked and split into parts that can be packed separately."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

# A step after all others.
FOREVER = 1 << 62
# Rounds in which the longest-lived buffers are split off. Without a limit, nested live ranges take quadratic time.
_PEELS = 8


@dataclass(frozen=True)
class Buffer:
    """A buffer to place: ``size`` bytes, live in steps ``[begin, end)`` (begin inclusive, end exclusive).

    Attributes:
        first: the lowest offset that it may have, in bytes; a multiple of the alignment.
    """

    name: str
    size: int
    begin: int
    end: int
    first: int = 0


@dataclass(frozen=True)
class Reserved:
    """Bytes ``[low, high)`` of an arena that something else occupies in steps ``[begin, end)``.

    Attributes:
        end: by default the bytes are never free.
        nodes: names of the program's inputs that are these bytes and that nothing else refers to: the bytes are free
            after the last use of these inputs.
    """

    low: int
    high: int
    begin: int = 0
    end: int = FOREVER
    nodes: tuple[str, ...] = ()


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of spans ``[low, high)``, as spans that do not touch, in ascending order."""
    union: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if union and low <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], high)
        elif low < high:
            union.append((low, high))
    return union


@dataclass(frozen=True)
class Placement:
    """Offsets in bytes into one arena of ``size`` bytes.

    Attributes:
        offsets: by name of the buffer.
        lower_bound: bytes; no arena can be smaller. It is the largest number of (aligned) bytes that are live in one
            step.
    """

    offsets: Mapping[str, int]
    size: int
    lower_bound: int

    def allowed(self, buffers: Sequence[Buffer], alignment: int) -> Placement:
        """The same, or turned upside down, or moved up, so that no buffer lies below its first offset."""
        sized = [buffer for buffer in buffers if buffer.size]
        if all(self.offsets[buffer.name] >= buffer.first for buffer in sized):
            return self
        turned = {b.name: self.size - self.offsets[b.name] - -(-b.size // alignment) * alignment for b in buffers}
        if all(turned[buffer.name] >= buffer.first for buffer in sized):
            return replace(self, offsets=turned)
        up = max(buffer.first for buffer in sized)
        higher = {name: offset + up for name, offset in self.offsets.items()}
        return Placement(higher, self.size + up, self.lower_bound)

    @property
    def proven(self) -> bool:
        """Whether the arena is known to be the smallest possible."""
        return self.size == self.lower_bound


@dataclass(frozen=True)
class PackingPart:
    """Buffers whose offsets depend on no others, with time reduced to sections.

    A section is a step whose set of live buffers is not contained in that of another step. Two buffers are live at
    the same time exactly if they share a section.

    Attributes:
        members: positions of the buffers in the whole problem; the sequences below are in this order.
        begins, ends: the first section in which each is live, and the one after its last.
        sizes: bytes, multiples of the alignment and above 0.
        base: bytes below the part, which buffers occupy that are live during all of it.
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
        """Bytes of the largest live set, without the base: the part needs at least as many."""
        return max(self.loads)

    @cached_property
    def spans(self) -> int:
        """Live sections, summed over buffers: the cost of one pass over the part."""
        return sum(self.ends) - sum(self.begins)


def validate(buffers: Sequence[Buffer], alignment: int) -> None:
    """Check that buffers can be placed.

    Raises:
        ValueError: naming the buffer and what is wrong with it.
    """
    if alignment < 1:
        raise ValueError(f"alignment must be at least 1 byte, got {alignment}")
    seen: set[str] = set()
    for buffer in buffers:
        if buffer.size < 0 or buffer.end <= buffer.begin:
            raise ValueError(f"buffer {buffer.name!r} needs size >= 0 and begin < end, got {buffer}")
        if buffer.name in seen:
            raise ValueError(f"buffer name {buffer.name!r} is given twice")
        seen.add(buffer.name)


def split(buffers: Sequence[Buffer], alignment: int) -> tuple[list[int], list[PackingPart]]:
    """Place the buffers that need no search, and split the others into parts.

    A buffer of no bytes can lie anywhere. A buffer that is live during all of a part can lie below it: in any
    placement it separates the buffers under it from those over it, and can change places with the former.

    Returns:
        Offsets by position, 0 for the buffers of parts; and the parts.
    """
    sizes = [-(-buffer.size // alignment) * alignment for buffer in buffers]
    offsets = [0] * len(buffers)
    parts: list[PackingPart] = []
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
    """Split items, sorted by begin, into groups: no two buffers of different groups are live at the same time."""
    runs: list[list[int]] = []
    end = None
    for i in items:
        if end is None or buffers[i].begin >= end:
            runs.append([])
            end = buffers[i].end
        runs[-1].append(i)
        end = max(end, buffers[i].end)
    return runs


def _part(buffers: Sequence[Buffer], sizes: list[int], items: list[int], base: int) -> PackingPart:
    begins = {buffers[i].begin for i in items}
    ends = {buffers[i].end for i in items}
    # A step is a section if a buffer begins there, and one ends before the next begins.
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
    return PackingPart(tuple(items), starts, stops, tuple(sizes[i] for i in items), base, loads)
