"""``plan_memory``: from buffers to offsets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from .orders import portfolio
from .problem import Buffer, Placement, split, validate
from .search import Found, improve


def plan_memory(
    buffers: Iterable[Buffer],
    alignment: int = 64,
    budget_s: float = 0.0,
    *,
    exact: bool = False,
    like: Mapping[str, int] = MappingProxyType({}),
) -> Placement:
    """Place buffers in one arena so that those live at the same time do not overlap.

    Without a budget, a few quick heuristics are tried, and the same buffers always get the same places. With one, the
    arena is made smaller until it is known to be smallest or time is over. Buffers that no others connect in
    time are placed apart, and those live during all of such a part lie below it.

    The heuristics put, again and again, the buffer that can lie lowest, and break ties in several ways: "best fit" of
    Sekiyama et al., "Profile-guided memory optimization for deep neural networks" (2018). The search is a branch and
    bound in sections of time, after Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated
    Machine Learning" (ASPLOS 2023), with restarts. It is in C++, which is compiled when it is first needed (seconds,
    on top of the budget, once on a machine), and in Python where there is no compiler.

    Args:
        buffers: sizes in bytes, live ranges in steps; names are unique.
        alignment: bytes; every offset is a multiple.
        budget_s: seconds to spend on a smaller arena; none by default.
        exact: give most of the budget to proving that no smaller arena exists.
        like: offsets that were good for other sizes of these buffers, by name: their order is tried first.

    Returns:
        Offsets, the arena's size and a lower bound, all in bytes; ``proven`` tells whether the size is the optimum.

    Raises:
        ValueError: a size is negative, a live range is empty or a name is given twice; the alignment is below 1,
            the budget below 0, or 0 where an exact plan is asked for.
    """
    items = list(buffers)
    validate(items, alignment)
    if not budget_s >= 0:
        raise ValueError(f"budget_s must be at least 0 seconds, got {budget_s}")
    if exact and budget_s == 0:
        raise ValueError("an exact plan needs a budget: pass budget_s, in seconds")
    offsets, parts = split(items, alignment)
    ends = (offset + item.size for offset, item in zip(offsets, items, strict=True))
    floor = max((-(-end // alignment) * alignment for end in ends), default=0)
    bound = max([floor, *(part.base + part.bound for part in parts)])
    before = [like.get(item.name, 0) for item in items] if like else []
    found = [Found(part, portfolio(part, bound - part.base, before), part.bound) for part in parts]
    if budget_s > 0 and found:
        improve(found, budget_s, exact)
    for one in found:
        for i, offset in zip(one.part.members, one.offsets, strict=True):
            offsets[i] = one.part.base + offset
    size = max([floor, *(one.top for one in found)])
    bound = max([bound, *(one.bound for one in found)])
    return Placement({item.name: offset for item, offset in zip(items, offsets, strict=True)}, size, bound)
