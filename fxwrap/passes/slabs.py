"""PLAN: storages beside an arena share slabs, memory that comes and goes as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..packing import Buffer
from ..plan import Slab
from .arena_layout import alive_at_steps, lowest_gap

# Steps and storages that are looked at in all, a storage like ten steps: up to half a second on a CPU.
_EFFORT = 10_000_000


def share_slabs(
    buffers: Mapping[int, Buffer], others: Sequence[int], room: int, alignment: int, apart: Collection[int] = ()
) -> tuple[Slab, ...]:
    """Few slabs for storages, with which no more than ``room`` is ever taken.

    ::

        step         0  1  2  3  4  5               0  1  2  3  4  5
        storages     a  a  .  b  b  .               s  s  s  s  s  .      a and b in one slab
                     .  c  c  c  .  .      ->       .  s  s  s  s  .      c in it, too
        others       x  .  .  .  x  x               x  .  .  .  x  x

    Memory costs time whenever it comes or goes. So storages share a slab, which is larger, or there for longer, where
    there is room for that. They join slabs one after the other, the largest first; then slabs join one another.

    Args:
        buffers: by storage index, in steps of the program.
        others: bytes that other things than these take, at each step.
        room: bytes; what each storage takes in the steps in which it is there fits in any case.
        alignment: bytes, of offsets in a slab.
        apart: storages that need a slab of their own.
    """
    order = sorted(buffers, key=lambda i: -buffers[i].size * (buffers[i].end - buffers[i].begin))
    own = ((b.size, b.begin, b.end) for b in buffers.values())
    taken = [sum(both) for both in zip(others, alive_at_steps(own, len(others)), strict=True)]
    joining = _Joining(taken, room, alignment, [])
    alone = []
    for index in order:
        slab = _Shared((buffers[index],), {index: 0})
        if index in apart:
            alone.append(slab)
        elif not joining.join(slab):
            joining.slabs.append(slab)
    while any(joining.join(slab) for slab in sorted(joining.slabs, key=lambda slab: slab.extent)):
        pass
    found = sorted([*alone, *joining.slabs], key=lambda slab: slab.begin)
    return tuple(Slab(slab.begin, slab.end, slab.size, slab.offsets) for slab in found)


class _Shared:
    """Storages in one slab.

    Attributes:
        extent: bytes times steps.
    """

    def __init__(self, buffers: tuple[Buffer, ...], offsets: Mapping[int, int]) -> None:
        self.buffers, self.offsets = buffers, offsets
        self.begin, self.end = min(b.begin for b in buffers), max(b.end for b in buffers)
        self.size = max(offset + b.size for b, offset in self.placed)
        self.extent = self.size * (self.end - self.begin)

    @property
    def placed(self) -> list[tuple[Buffer, int]]:
        return list(zip(self.buffers, self.offsets.values(), strict=True))

    def with_those_of(self, other: _Shared, alignment: int) -> _Shared:
        """One slab for both, in which the other's storages lie at the lowest offsets that are free."""
        buffers, offsets = self.buffers, dict(self.offsets)
        for index, buffer in zip(other.offsets, other.buffers, strict=True):
            placed = zip(buffers, offsets.values(), strict=True)
            there = [(b, low) for b, low in placed if b.begin < buffer.end and buffer.begin < b.end]
            spans = [(low, -(-(low + b.size) // alignment) * alignment) for b, low in there]
            offsets[index] = lowest_gap(spans, buffer.size)
            buffers = (*buffers, buffer)
        return _Shared(buffers, offsets)


@dataclass
class _Joining:
    """Slabs, and what is taken with them at each step."""

    taken: list[int]
    room: int
    alignment: int
    slabs: list[_Shared]
    effort: int = _EFFORT

    def join(self, slab: _Shared) -> bool:
        """Put storages into another slab if there is room for that: into the one that becomes least larger."""
        best: tuple[int, int, _Shared] | None = None
        for position, other in enumerate(self.slabs):
            if other is slab:
                continue
            if self.effort < 0:
                break
            both = other.with_those_of(slab, self.alignment)
            self.effort -= both.end - both.begin + 10 * len(both.buffers)
            growth = both.extent - other.extent
            if (best is None or growth < best[0]) and self._has_room(both, other, slab):
                best = growth, position, both
        if best is None:
            return False
        _, position, both = best
        for begin, end, more in _changes(both, self.slabs[position], slab):
            self.taken[begin:end] = [nbytes + more for nbytes in self.taken[begin:end]]
        self.slabs[position] = both
        if slab in self.slabs:
            self.slabs.remove(slab)
        return True

    def _has_room(self, both: _Shared, *instead_of: _Shared) -> bool:
        return all(
            more <= 0 or max(self.taken[begin:end]) + more <= self.room
            for begin, end, more in _changes(both, *instead_of)
        )


def _changes(slab: _Shared, *instead_of: _Shared) -> list[tuple[int, int, int]]:
    """By how many bytes more is taken in steps ``[begin, end)``, with one slab instead of others."""
    bounds = sorted({step for one in (slab, *instead_of) for step in (one.begin, one.end)})
    return [
        (begin, end, slab.size - sum(one.size for one in instead_of if one.begin <= begin < one.end))
        for begin, end in itertools.pairwise(bounds)
    ]
