"""PLAN: where a graph calls again (CPU), temporaries share regions: memory that comes and goes with each call."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from .planner import plan_memory
from .problem import Buffer
from .reserved import alive_at_steps, lowest_gap

# Steps and storages that are looked at in all, a storage like ten steps: up to half a second on a CPU.
_EFFORT = 10_000_000


@dataclass(frozen=True)
class SharedRegion:
    """``size`` bytes in steps ``[begin, end)``; offsets in bytes by storage."""

    begin: int
    end: int
    size: int
    offsets: Mapping[int, int]


def share_regions(
    buffers: Mapping[int, Buffer], others: Sequence[Buffer], room: int, alignment: int, apart: Collection[int] = ()
) -> tuple[SharedRegion, ...]:
    """Few regions for storages, with which no more than ``room`` is ever taken.

    ::

        step         0  1  2  3  4  5               0  1  2  3  4  5
        storages     a  a  .  b  b  .               s  s  s  s  s  .      a and b in one region
                     .  c  c  c  .  .      ->       .  s  s  s  s  .      c in it, too
        others       x  .  .  .  x  x               x  .  .  .  x  x

    Memory costs time whenever it comes or goes. So storages share a region, which is larger, or there for longer,
    where there is room for that. One region for all is tried first. If there is no room for it, regions join one
    another, those of the largest storages first: each the one that becomes least larger.

    Args:
        buffers: by storage index, in steps of the program.
        others: what takes memory beside these.
        room: bytes; what each storage takes in the steps in which it is there fits in any case.
        alignment: bytes, of offsets in a region.
        apart: storages that need a region of their own.
    """
    own = {i: SharedRegion(b.begin, b.end, b.size, {i: 0}) for i, b in buffers.items()}
    alone = [own.pop(i) for i in buffers if i in apart]
    taken = _Budget(alive_at_steps([*others, *own.values(), *alone]), room)
    whole = _one_region([buffers[i] for i in own], list(own), alignment) if own else None
    if whole is not None and taken.fits([*own.values()], whole):
        joined = [whole]
    else:
        joined = _joined(sorted(own.values(), key=_extent, reverse=True), buffers, taken, alignment)
    return tuple(sorted([*alone, *joined], key=lambda region: region.begin))


def _one_region(buffers: Sequence[Buffer], indices: Sequence[int], alignment: int) -> SharedRegion:
    """All storages in one region, as small as it can be found."""
    named = [replace(b, name=str(i)) for i, b in zip(indices, buffers, strict=True)]
    packed = plan_memory(named, alignment)
    offsets = {int(name): offset for name, offset in packed.offsets.items()}
    return SharedRegion(min(b.begin for b in buffers), max(b.end for b in buffers), packed.size, offsets)


def _joined(
    regions: Sequence[SharedRegion], buffers: Mapping[int, Buffer], taken: _Budget, alignment: int
) -> list[SharedRegion]:
    """Regions in the place of many: first each is put to those before it, then they join one another."""
    found: list[SharedRegion] = []
    effort = _EFFORT

    def join(region: SharedRegion) -> bool:
        nonlocal effort
        best: tuple[int, SharedRegion, SharedRegion] | None = None
        for other in found if effort > 0 else ():
            if other is region:
                continue
            both = _both(other, region, buffers, alignment)
            effort -= both.end - both.begin + 10 * len(both.offsets)
            growth = _extent(both) - _extent(other)
            if (best is None or growth < best[0]) and taken.fits([other, region], both):
                best = growth, other, both
        if best is None:
            return False
        _, other, both = best
        taken.instead([other, region], both)
        found[:] = [both if one is other else one for one in found if one is not region]
        return True

    for region in regions:
        if not join(region):
            found.append(region)
    while any(join(region) for region in sorted(found, key=_extent)):
        pass
    return found


def _both(region: SharedRegion, other: SharedRegion, buffers: Mapping[int, Buffer], alignment: int) -> SharedRegion:
    """One region for both, in which the other's storages lie at the lowest offsets that are free."""
    offsets = dict(region.offsets)
    for index in other.offsets:
        mine = buffers[index]
        there = [(buffers[i], low) for i, low in offsets.items()]
        spans = [
            (low, -(-(low + b.size) // alignment) * alignment)
            for b, low in there
            if b.begin < mine.end and mine.begin < b.end
        ]
        offsets[index] = lowest_gap(spans, mine.size)
    size = max(low + buffers[i].size for i, low in offsets.items())
    return SharedRegion(min(region.begin, other.begin), max(region.end, other.end), size, offsets)


def _extent(region: SharedRegion) -> int:
    """Bytes times steps."""
    return region.size * (region.end - region.begin)


class _Budget:
    """Bytes taken at each step, and how many may be."""

    def __init__(self, at_steps: list[int], room: int) -> None:
        self._at_steps, self._room = at_steps, room

    def fits(self, before: Sequence[SharedRegion], after: SharedRegion) -> bool:
        """Whether there is room for one region in the place of others."""
        return all(
            more <= 0 or max(self._at_steps[begin:end]) + more <= self._room
            for begin, end, more in self._changes(before, after)
        )

    def instead(self, before: Sequence[SharedRegion], after: SharedRegion) -> None:
        """Have one region in the place of others."""
        for begin, end, more in self._changes(before, after):
            self._at_steps[begin:end] = [nbytes + more for nbytes in self._at_steps[begin:end]]

    def _changes(self, before: Sequence[SharedRegion], after: SharedRegion) -> list[tuple[int, int, int]]:
        """By how many bytes more is taken in steps ``[begin, end)``."""
        bounds = sorted({step for one in (after, *before) for step in (one.begin, one.end)})
        return [
            (begin, end, after.size * (after.begin <= begin < after.end) - _at(before, begin))
            for begin, end in itertools.pairwise(bounds)
        ]


def _at(regions: Sequence[SharedRegion], step: int) -> int:
    return sum(one.size for one in regions if one.begin <= step < one.end)
