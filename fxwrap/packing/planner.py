"""``plan_memory``: computes offsets of buffers in one arena."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from .orders import portfolio
from .problem import Buffer, Placement, split, validate
from .search import PartPlan, improve


def plan_memory(
    buffers: Iterable[Buffer],
    alignment: int = 64,
    budget_s: float = 0.0,
    *,
    exact: bool = False,
    previous: Mapping[str, int] = MappingProxyType({}),
) -> Placement:
    """Place buffers in one arena so that those live at the same time do not overlap.

    A few quick heuristics are tried. The same buffers always get the same offsets, on any machine. An exact plan is
    then improved until it is proven to be the smallest or its budget is spent. Groups of buffers that overlap no
    other group in time are placed separately; buffers that live during all of a group lie below it.

    A heuristic places one buffer after the other, the one that can lie lowest first: "best fit" of Sekiyama et al.,
    "Profile-guided memory optimization for deep neural networks" (2018). Heuristics differ in how they break ties.
    The exact search is a branch and bound in sections of time, after Moffitt, "MiniMalloc: A Lightweight Memory
    Allocator for Hardware-Accelerated Machine Learning" (ASPLOS 2023), with restarts. It is written in C++ and
    compiled at its first use, once on a machine; this takes seconds on top of the budget.

    Args:
        buffers: sizes in bytes, live ranges in steps; names are unique.
        alignment: bytes; every offset is a multiple.
        budget_s: seconds that an exact plan may take.
        exact: look for the smallest arena, and for the proof that no smaller one exists.
        previous: offsets in a plan for other sizes of these buffers, by name, in bytes; their order is tried first.

    Returns:
        Offsets, the arena's size and a lower bound, all in bytes; ``proven`` tells whether the size is the optimum.

    Raises:
        ValueError: a size is negative, a live range is empty or a name is given twice; the alignment is below 1,
            the budget is not above 0 for an exact plan, or not 0 for another one.
        RuntimeError: an exact plan needs a search, and there is no C++ compiler.
    """
    items = list(buffers)
    validate(items, alignment)
    if exact and not budget_s > 0:
        raise ValueError(f"an exact plan needs a budget: pass budget_s, in seconds, got {budget_s}")
    if budget_s != 0 and not exact:
        raise ValueError(f"only an exact plan takes a budget: pass exact=True, got budget_s={budget_s} without it")
    offsets, parts = split(items, alignment)
    ends = (offset + item.size for offset, item in zip(offsets, items, strict=True))
    floor = max((-(-end // alignment) * alignment for end in ends), default=0)
    bound = max([floor, *(part.base + part.bound for part in parts)])
    previous_offsets = [previous.get(item.name, 0) for item in items] if previous else []
    plans = [PartPlan(part, portfolio(part, bound - part.base, previous_offsets), part.bound) for part in parts]
    if exact and plans:
        improve(plans, budget_s)
    for plan in plans:
        for i, offset in zip(plan.part.members, plan.offsets, strict=True):
            offsets[i] = plan.part.base + offset
    size = max([floor, *(plan.top for plan in plans)])
    bound = max([bound, *(plan.bound for plan in plans)])
    return Placement({item.name: offset for item, offset in zip(items, offsets, strict=True)}, size, bound)
