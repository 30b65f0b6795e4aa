"""``plan_memory``: computes offsets of buffers in one arena."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from .orders import height, portfolio
from .problem import Buffer, Placement, split, validate


def plan_memory(
    buffers: Iterable[Buffer],
    alignment: int = 64,
    *,
    previous: Mapping[str, int] = MappingProxyType({}),
) -> Placement:
    """Place buffers in one arena so that those live at the same time do not overlap.

    A few quick heuristics are tried. The same buffers always get the same offsets, on any machine. Groups of buffers
    that overlap no other group in time are placed separately; buffers that live during all of a group lie below it.

    A heuristic places one buffer after the other, the one that can lie lowest first: "best fit" of Sekiyama et al.,
    "Profile-guided memory optimization for deep neural networks" (2018). Heuristics differ in how they break ties.

    Args:
        buffers: sizes in bytes, live ranges in steps; names are unique.
        alignment: bytes; every offset is a multiple.
        previous: offsets in a plan for other sizes of these buffers, by name, in bytes; their order is tried first.

    Returns:
        Offsets, the arena's size and a lower bound, all in bytes; ``proven`` tells whether the size is the optimum.

    Raises:
        ValueError: a size is negative, a live range is empty or a name is given twice; the alignment is below 1.
    """
    items = list(buffers)
    validate(items, alignment)
    offsets, parts = split(items, alignment)
    ends = (offset + item.size for offset, item in zip(offsets, items, strict=True))
    floor = max((-(-end // alignment) * alignment for end in ends), default=0)
    bound = max([floor, *(part.base + part.bound for part in parts)])
    previous_offsets = [previous.get(item.name, 0) for item in items] if previous else []
    size = floor
    for part in parts:
        inside = portfolio(part, bound - part.base, previous_offsets)
        size = max(size, part.base + height(part, inside))
        for i, offset in zip(part.members, inside, strict=True):
            offsets[i] = part.base + offset
    placement = Placement({item.name: offset for item, offset in zip(items, offsets, strict=True)}, size, bound)
    return placement.allowed(items, alignment)
