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

    A few quick heuristics are tried, and the same buffers always get the same places, on any machine. An exact plan
    is then made smaller until it is known to be smallest or its budget is spent. Buffers that no others connect in
    time are placed apart, and those live during all of such a part lie below it.

    The heuristics put, again and again, the buffer that can lie lowest, and break ties in several ways: "best fit" of
    Sekiyama et al., "Profile-guided memory optimization for deep neural networks" (2018). The exact search is a
    branch and bound in sections of time, after Moffitt, "MiniMalloc: A Lightweight Memory Allocator for
    Hardware-Accelerated Machine Learning" (ASPLOS 2023), with restarts. It is in C++, compiled when it is first
    needed: seconds, on top of the budget, once on a machine.

    Args:
        buffers: sizes in bytes, live ranges in steps; names are unique.
        alignment: bytes; every offset is a multiple.
        budget_s: seconds that an exact plan may take.
        exact: look for the smallest arena, and for the proof that no smaller one exists.
        like: offsets that were good for other sizes of these buffers, by name: their order is tried first.

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
    before = [like.get(item.name, 0) for item in items] if like else []
    found = [Found(part, portfolio(part, bound - part.base, before), part.bound) for part in parts]
    if exact and found:
        improve(found, budget_s)
    for one in found:
        for i, offset in zip(one.part.members, one.offsets, strict=True):
            offsets[i] = one.part.base + offset
    size = max([floor, *(one.top for one in found)])
    bound = max([bound, *(one.bound for one in found)])
    return Placement({item.name: offset for item, offset in zip(items, offsets, strict=True)}, size, bound)
