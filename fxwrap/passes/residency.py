"""PLAN: which storages have a place in an arena, and which are allocated when they are needed.

An arena is there all the time, and what operators allocate themselves comes on top. Where the two are large at
different steps, both together take more than is ever alive at one time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..packing import Buffer
from .arena_layout import alive_at_steps, most_alive

# Sizes of the arena that are tried at most, and what may be spent on them: storages times storages and steps. On a
# CPU that is half a second.
_TRIED = 32
_EFFORT = 8_000_000


def choose_anew(
    buffers: Sequence[Buffer],
    beside: Sequence[Buffer],
    alignment: int,
    movable: Collection[str],
    asked: Collection[str] = (),
    lasting: Collection[str] = (),
) -> frozenset[str]:
    """Names of the buffers that are allocated when they are needed: the fewest found with which least is taken.

    ::

        arena    a a a a a a        b anew     a a a a a a
        arena    . b b . . .          ->
        beside   . . . . x x                   . b b . x x       max + max falls to what is alive at most

    A few sizes of the arena are tried. As long as it is fuller, a buffer moves out: one that raises least what is
    most beside the arena, and of these the one that empties it most. Every allocation costs time, so that of what
    takes least memory the choice is the one that moves fewest, of what lasts first.

    Args:
        beside: what lives outside of the arena anyway, and when.
        alignment: bytes; in an arena sizes are rounded up to it.
        movable: names of the buffers that may be allocated when they are needed.
        asked: names of movable buffers that shall be allocated anew in any case.
        lasting: names of buffers that somebody has afterwards: each is a new tensor at every call, if it moves, with
            new views. The others share memory that comes and goes (``slabs.py``), which costs much less.
    """
    if not beside or not movable:
        return frozenset(asked)  # an arena takes what is alive, but for rounding
    # Sizes that an arena rounds up are better outside, if it comes to the last byte.
    uneven = {b.name for b in buffers if b.size % alignment and b.name in movable}
    starts = [_Profile.of(buffers, beside, alignment, {*asked, *more}) for more in ((), uneven)]
    found = [*starts, _Profile.of(buffers, beside, alignment, {*asked, *movable})]
    alive = most_alive((b.size, b.begin, b.end) for b in (*buffers, *beside))
    costs = {i: b.name in lasting for i, b in enumerate(buffers) if b.name in movable}
    count = min(_TRIED, _EFFORT // max(1, len(buffers) * (len(buffers) + len(starts[0].inside))))
    for start in starts:
        found += start.with_smaller_arenas(costs, alive, alignment, count)
    best = min(found, key=lambda one: (one.total, sum(costs.get(i, False) for i in one.moved), len(one.moved)))
    return frozenset(buffers[i].name for i in best.moved)


@dataclass
class _Profile:
    """Bytes at each step, in the arena and beside it, and which buffers are beside it.

    Attributes:
        in_arena: sizes of the buffers, rounded up.
    """

    buffers: Sequence[Buffer]
    in_arena: Sequence[int]
    inside: list[int]
    outside: list[int]
    moved: set[int]

    @classmethod
    def of(
        cls, buffers: Sequence[Buffer], beside: Sequence[Buffer], alignment: int, anew: Collection[str]
    ) -> _Profile:
        moved = {i for i, buffer in enumerate(buffers) if buffer.name in anew}
        in_arena = [-(-buffer.size // alignment) * alignment for buffer in buffers]
        steps = max((buffer.end for buffer in (*buffers, *beside)), default=0)
        inside = alive_at_steps(
            ((in_arena[i], b.begin, b.end) for i, b in enumerate(buffers) if i not in moved), steps
        )
        anew_too = (*(buffers[i] for i in moved), *beside)
        outside = alive_at_steps(((b.size, b.begin, b.end) for b in anew_too), steps)
        return cls(buffers, in_arena, inside, outside, moved)

    @property
    def total(self) -> int:
        return max(self.inside, default=0) + max(self.outside, default=0)

    def with_smaller_arenas(
        self, movable: Mapping[int, bool], alive: int, alignment: int, count: int
    ) -> Iterator[_Profile]:
        """This profile with buffers moved out, for so many sizes of the arena.

        Args:
            movable: buffers that may move, and whether they last.
            alive: bytes that are alive at most: what cannot be improved upon.
        """
        largest = alive - max(self.outside, default=0)
        if self.total <= alive:
            return
        # So that what is beside has room for just one buffer, or two; and others, denser where the arena is large:
        # there fewest move.
        sizes = sorted({self.buffers[i].size for i in movable})
        exact = {alive - times * size for size in sizes for times in (1, 2)}
        tried = {int(largest * (1 - (k / count) ** 2)) // alignment * alignment for k in range(count)}
        tried |= {limit // alignment * alignment for limit in sorted(exact)[-count:] if 0 <= limit <= largest}
        for limit in sorted(tried, reverse=True):
            profile = replace(self, inside=self.inside[:], outside=self.outside[:], moved=set(self.moved))
            if profile._empty_down_to(limit, alive - limit, movable):
                yield profile

    def _empty_down_to(self, limit: int, room: int, movable: Mapping[int, bool]) -> bool:
        """Move buffers out until the arena needs no more than ``limit``; False if it always will."""
        while (over := max(self.inside) - limit) > 0:
            step = self.inside.index(over + limit)
            there = [i for i in movable if i not in self.moved and self._has(i, step)]
            if not there:
                return False

            def harm(i: int) -> tuple[int, bool, int, int]:
                return max(room, self._outside_with(i)), movable[i], -min(self.in_arena[i], over), i

            self._move(min(there, key=harm))
        return True

    def _has(self, i: int, step: int) -> bool:
        return self.in_arena[i] > 0 and self.buffers[i].begin <= step < self.buffers[i].end

    def _outside_with(self, i: int) -> int:
        buffer = self.buffers[i]
        return max(self.outside[buffer.begin : buffer.end]) + buffer.size

    def _move(self, i: int) -> None:
        buffer = self.buffers[i]
        for step in range(buffer.begin, buffer.end):
            self.inside[step] -= self.in_arena[i]
            self.outside[step] += buffer.size
        self.moved.add(i)
