"""PLAN: on the CPU temporaries share regions: memory that each call allocates and frees.

An allocation takes time, so that few large ones are better than many small ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .planner import plan_memory
from .problem import Buffer
from .reserved import alive_at_steps, lowest_gap

# Bytes, from glibc's malloc. Smaller blocks it keeps when they are freed, whatever was before (M_TRIM_THRESHOLD).
_SMALL = 128 << 10
# Larger ones always return to the system (the most that M_MMAP_THRESHOLD grows to, less a page for what it adds).
_LARGE = (32 << 20) - 4096
# The limit of steps and storages that are visited; a storage counts as ten steps. Half a second on a CPU.
_EFFORT = 10_000_000


@dataclass(frozen=True)
class SharedRegion:
    """``size`` bytes in steps ``[begin, end)``; offsets in bytes by storage. A ``kept`` one is there in all steps."""

    begin: int
    end: int
    size: int
    offsets: Mapping[int, int]
    kept: bool = False


def share_regions(
    buffers: Mapping[int, Buffer],
    others: Sequence[Buffer],
    room: int,
    alignment: int,
    steps: int,
    unshared: Collection[int] = (),
) -> tuple[SharedRegion, ...]:
    """Put storages into few regions, with at most ``room`` bytes in use in any step.

    ::

        step         0  1  2  3  4  5               0  1  2  3  4  5
        storages     a  a  .  b  b  .               s  s  s  s  s  .      a and b in one region
                     .  c  c  c  .  .      ->       .  s  s  s  s  .      c in it, too
        others       x  .  .  .  x  x               x  .  .  .  x  x

    Allocating and freeing memory takes time. So storages share a region, which is larger or lives longer than each of
    them, where there is room for that. One region for all storages is tried first. If there is no room for it,
    regions are joined, those of the largest storages first: each with the region that grows least.

    Touching new memory takes time, too: the system zeroes it page by page. So one region is kept between calls, as
    large as there is room for in all steps; the others are no larger than what the C library may keep.

    Args:
        buffers: by storage index, in steps of the program.
        others: other memory in use.
        room: bytes; it is enough for the storages if each has a region of its own.
        alignment: bytes, of offsets in a region.
        steps: the number of steps.
        unshared: storages that need a region of their own.
    """
    regions = {index: _alone(index, buffer) for index, buffer in buffers.items()}
    alone = [regions.pop(i) for i in buffers if i in unshared]
    budget = _Budget(alive_at_steps([*others, *regions.values(), *alone, Buffer("", 0, steps, steps)]), room)
    whole = _one_region([buffers[i] for i in regions], list(regions), alignment) if regions else None
    if whole is not None and budget.fits([*regions.values()], whole):
        budget.replace([*regions.values()], whole)
        joined = [whole]
    else:
        joined = _joined(regions.values(), buffers, budget, alignment)
    joined = _with_one_kept(joined, buffers, budget, alignment, steps)
    return tuple(sorted([*alone, *joined], key=lambda region: region.begin))


def _one_region(buffers: Sequence[Buffer], indices: Sequence[int], alignment: int) -> SharedRegion:
    """One region for all storages, as small as ``plan_memory`` makes it."""
    named = [replace(b, name=str(i)) for i, b in zip(indices, buffers, strict=True)]
    packed = plan_memory(named, alignment)
    offsets = {int(name): offset for name, offset in packed.offsets.items()}
    return SharedRegion(min(b.begin for b in buffers), max(b.end for b in buffers), packed.size, offsets)


def _with_one_kept(
    regions: Iterable[SharedRegion], buffers: Mapping[int, Buffer], budget: _Budget, alignment: int, steps: int
) -> list[SharedRegion]:
    """Stack regions, largest first, in one that is kept, where there is room in all steps. Large others are split."""
    kept, others = SharedRegion(0, steps, 0, {}, kept=True), list(regions)

    def stack() -> None:
        nonlocal kept
        for region in sorted(others, key=lambda region: region.size, reverse=True):
            base = -(-kept.size // alignment) * alignment
            offsets = {index: base + offset for index, offset in region.offsets.items()}
            more = replace(kept, size=base + region.size, offsets={**kept.offsets, **offsets})
            if region.size >= _SMALL and budget.fits([kept, region], more):
                budget.replace([kept, region], more)
                kept = more
                others.remove(region)

    stack()
    large = [region for region in others if region.size > _LARGE]
    parts = [_alone(index, buffers[index]) for region in large for index in region.offsets]
    budget.replace(large, *parts)
    others = [region for region in others if region not in large]
    others += _joined(parts, buffers, budget, alignment, most=_LARGE)
    stack()
    return [kept, *others] if kept.offsets else others


def _alone(index: int, buffer: Buffer) -> SharedRegion:
    return SharedRegion(buffer.begin, buffer.end, buffer.size, {index: 0})


def _joined(
    regions: Iterable[SharedRegion],
    buffers: Mapping[int, Buffer],
    budget: _Budget,
    alignment: int,
    most: float = math.inf,
) -> list[SharedRegion]:
    """Fewer regions for the same storages: each is joined to one before it, then the remaining ones are joined.

    Args:
        most: bytes that a region may have if it is larger than both that are joined.
    """
    regions = sorted(regions, key=_extent, reverse=True)
    remaining: list[SharedRegion] = []
    effort = _EFFORT

    def join(region: SharedRegion) -> bool:
        nonlocal effort
        best: tuple[int, SharedRegion, SharedRegion] | None = None
        for other in remaining if effort > 0 else ():
            if other is region:
                continue
            both = _both(other, region, buffers, alignment)
            effort -= both.end - both.begin + 10 * len(both.offsets)
            growth = _extent(both) - _extent(other)
            suits = both.size <= max(most, region.size, other.size)
            if suits and (best is None or growth < best[0]) and budget.fits([other, region], both):
                best = growth, other, both
        if best is None:
            return False
        _, other, both = best
        budget.replace([other, region], both)
        remaining[:] = [both if r is other else r for r in remaining if r is not region]
        return True

    for region in regions:
        if not join(region):
            remaining.append(region)
    while any(join(region) for region in sorted(remaining, key=_extent)):
        pass
    return remaining


def _both(region: SharedRegion, other: SharedRegion, buffers: Mapping[int, Buffer], alignment: int) -> SharedRegion:
    """One region for both, in which the other's storages get the lowest free offsets."""
    offsets = dict(region.offsets)
    for index in other.offsets:
        buffer = buffers[index]
        placed = [(buffers[i], low) for i, low in offsets.items()]
        spans = [
            (low, -(-(low + b.size) // alignment) * alignment)
            for b, low in placed
            if b.begin < buffer.end and buffer.begin < b.end
        ]
        offsets[index] = lowest_gap(spans, buffer.size)
    size = max(low + buffers[i].size for i, low in offsets.items())
    return SharedRegion(min(region.begin, other.begin), max(region.end, other.end), size, offsets)


def _extent(region: SharedRegion) -> int:
    """Bytes times steps."""
    return region.size * (region.end - region.begin)


class _Budget:
    """Bytes in use at each step, and the limit for them."""

    def __init__(self, at_steps: list[int], room: int) -> None:
        self._at_steps, self._room = at_steps, room

    def fits(self, before: Sequence[SharedRegion], after: SharedRegion) -> bool:
        """Whether one region may replace others."""
        return all(
            more <= 0 or max(self._at_steps[begin:end]) + more <= self._room
            for begin, end, more in self._changes(before, after)
        )

    def replace(self, before: Sequence[SharedRegion], *after: SharedRegion) -> None:
        """Replace regions by others."""
        for begin, end, more in self._changes(before, *after):
            self._at_steps[begin:end] = [nbytes + more for nbytes in self._at_steps[begin:end]]

    def _changes(self, before: Sequence[SharedRegion], *after: SharedRegion) -> list[tuple[int, int, int]]:
        """Steps ``[begin, end)``, and how many more bytes are in use there."""
        bounds = sorted({step for region in (*after, *before) for step in (region.begin, region.end)})
        return [(begin, end, _at(after, begin) - _at(before, begin)) for begin, end in itertools.pairwise(bounds)]


def _at(regions: Sequence[SharedRegion], step: int) -> int:
    return sum(region.size for region in regions if region.begin <= step < region.end)
