"""``fxwrap.plan_memory``: the stand-alone planner, with exact plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ... import packing
from .search import improve


def plan_memory(
    buffers: Iterable[packing.Buffer],
    alignment: int = 64,
    budget_s: float = 0.0,
    *,
    exact: bool = False,
    previous: Mapping[str, int] = MappingProxyType({}),
) -> packing.Placement:
    """Place buffers in one arena so that those live at the same time do not overlap.

    A few quick heuristics are tried (``packing.plan_memory``). The same buffers always get the same offsets, on any
    machine. An exact plan is then improved until it is proven to be the smallest or its budget is spent.

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
    if exact and not budget_s > 0:
        raise ValueError(f"an exact plan needs a budget: pass budget_s, in seconds, got {budget_s}")
    if budget_s != 0 and not exact:
        raise ValueError(f"only an exact plan takes a budget: pass exact=True, got budget_s={budget_s} without it")
    if not exact:
        return packing.plan_memory(buffers, alignment, previous=previous)
    return packing.plan_memory(buffers, alignment, previous=previous, improve=lambda plans: improve(plans, budget_s))
