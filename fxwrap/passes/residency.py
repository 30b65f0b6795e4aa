"""PLAN: which storages have a place in an arena, and which are allocated anew at every call.

An arena is there all the time, and what operators allocate themselves comes on top. Where the two are large at
different steps, both together take more than is ever alive; storages that are alive when the arena is fullest, and
not when operators need most, are then better allocated when they are needed. That can be done only where a graph does
not freeze addresses.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..packing import Buffer

# Ways to share what is alive between the two that are tried, and steps of work spent on them.
_SHARES = 16
_EFFORT = 4_000_000


def choose_anew(buffers: Sequence[Buffer], beside: Sequence[Buffer], alignment: int) -> frozenset[str]:
    """Names of the buffers that are better allocated anew: the fewest found with which no more is taken than lives.

    ::

        arena    a a a a a a        b anew     a a a a a a
        arena    . b b . . .          ->
        beside   . . . . x x                   . b b . x x       max + max falls to what is alive at most

    Of what is alive at most some is the arena's, and the rest is for what is beside it. For each of a few such
    shares, whatever makes the arena too full is moved out, the largest first; with no arena it works out always.

    Args:
        beside: what lives outside of the arena, and when.
    """
    start = _Profile.of(buffers, beside, alignment)
    if start.total <= start.alive or not any(start.outside):
        return frozenset()  # what an arena alone has beyond what is alive is rounding
    most = max(start.outside)
    shares = max(2, min(_SHARES, _EFFORT // max(1, len(buffers) * len(start.inside))))
    best: list[int] | None = None
    for share in range(shares):
        room = most + (start.alive - most) * share // (shares - 1)  # beside the arena
        found = start.copy().empty_down_to(start.alive - room, room)
        if found is not None and (best is None or len(found) < len(best)):
            best = found
    return frozenset(buffers[i].name for i in best or ())


class Lives(Protocol):
    """Something that is alive in steps ``[begin, end)``."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...


@dataclass
class _Profile:
    """Bytes at each step: in the arena, and beside it.

    Attributes:
        alive: what is alive at most: nothing can need less.
    """

    buffers: Sequence[Buffer]
    sizes: list[int]
    inside: list[int]
    outside: list[int]
    alive: int

    @classmethod
    def of(cls, buffers: Sequence[Buffer], beside: Sequence[Buffer], alignment: int) -> _Profile:
        sizes = [-(-buffer.size // alignment) * alignment for buffer in buffers]
        steps = max((buffer.end for buffer in (*buffers, *beside)), default=0)
        inside = live_bytes(buffers, sizes, steps)
        outside = live_bytes(beside, [buffer.size for buffer in beside], steps)
        exact = live_bytes(buffers, [buffer.size for buffer in buffers], steps)
        return cls(buffers, sizes, inside, outside, max(map(sum, zip(exact, outside, strict=True)), default=0))

    def copy(self) -> _Profile:
        return _Profile(self.buffers, self.sizes, self.inside[:], self.outside[:], self.alive)

    @property
    def total(self) -> int:
        return max(self.inside, default=0) + max(self.outside, default=0)

    def empty_down_to(self, limit: int, room: int) -> list[int] | None:
        """Move buffers out until the arena needs no more than ``limit``; None if ``room`` is not enough for them."""
        moved: list[int] = []
        while (fullest := max(self.inside)) > limit:
            step = self.inside.index(fullest)
            best = None
            for i, buffer in enumerate(self.buffers):
                if (
                    buffer.begin <= step < buffer.end
                    and self.sizes[i]
                    and i not in moved
                    and (best is None or self.sizes[i] > self.sizes[best])
                    and max(self.outside[buffer.begin : buffer.end]) + buffer.size <= room
                ):
                    best = i
            if best is None:
                return None
            self._move(best)
            moved.append(best)
        return moved

    def _move(self, i: int) -> None:
        buffer = self.buffers[i]
        for step in range(buffer.begin, buffer.end):
            self.inside[step] -= self.sizes[i]
            self.outside[step] += buffer.size


def live_bytes(buffers: Sequence[Lives], sizes: Sequence[int], steps: int) -> list[int]:
    """How many bytes are alive at each step."""
    change = [0] * (steps + 1)
    for buffer, size in zip(buffers, sizes, strict=True):
        change[buffer.begin] += size
        change[buffer.end] -= size
    return list(itertools.accumulate(change[:-1]))
