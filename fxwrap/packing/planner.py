"""``plan_memory``: computes offsets of buffers in one arena."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from .orders import height, portfolio
from .problem import Buffer, Part, Placement, split, validate


@dataclass
class PartPlan:
    """The best plan of a part so far.

    Attributes:
        offsets: bytes above the part's base, by position in it.
        low: bytes that the part is proved to need.
    """

    part: Part
    offsets: list[int]
    low: int

    @property
    def top(self) -> int:
        """Bytes that the arena needs for this part."""
        return self.part.base + height(self.part, self.offsets)

    @property
    def bound(self) -> int:
        """Bytes that the arena is proved to need for this part."""
        return self.part.base + self.low


def plan_memory(
    buffers: Iterable[Buffer],
    alignment: int = 64,
    *,
    previous: Mapping[str, int] = MappingProxyType({}),
    improve: Callable[[Sequence[PartPlan]], object] = lambda plans: None,
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
        improve: lowers the plans of groups, and raises their bounds (``features/exact_packing``).

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
    plans = [PartPlan(part, portfolio(part, bound - part.base, previous_offsets), part.bound) for part in parts]
    if plans:
        improve(plans)
    for plan in plans:
        for i, offset in zip(plan.part.members, plan.offsets, strict=True):
            offsets[i] = plan.part.base + offset
    size = max([floor, *(plan.top for plan in plans)])
    bound = max([bound, *(plan.bound for plan in plans)])
    return Placement({item.name: offset for item, offset in zip(items, offsets, strict=True)}, size, bound)
