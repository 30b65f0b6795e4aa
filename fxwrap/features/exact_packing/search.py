"""Exact plans within a budget of time: improves a plan, and proves that it cannot be improved."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

from ...packing.orders import height, lowest_offset_first, orders, weights_of
from ...packing.planner import PartPlan
from ...packing.problem import Part
from . import exact

# A search visits every buffer in every section many times. Above so many live sections only orders are tried.
_SPANS = 1_000_000
# Nodes of the first restarts, and their growth. Most searches that succeed at all succeed early.
_NODES, _GROWTH = 500, 1.03
# Relative noise of the buffers' weights in a restart.
_NOISE = 0.25
# Capacities between the bound, which may be impossible, and the best plan: fractions of the way to the latter.
_MIDDLES = (0.5, 0.75, 0.875, 0.9375)
# Seconds after which a search returns, for Ctrl-C and the deadline.
_SLICE = 0.1


def improve(plans: Sequence[PartPlan], budget_s: float) -> None:
    """Lower the highest part until a bound is reached or ``budget_s`` seconds have passed."""
    deadline = time.monotonic() + budget_s
    climbs: dict[int, Iterator[None]] = {}
    while time.monotonic() < deadline:
        highest = max(range(len(plans)), key=lambda i: plans[i].top)
        enough = max(plan.bound for plan in plans)
        if plans[highest].top <= enough:
            return
        if highest not in climbs:
            climbs[highest] = _climb(plans[highest], deadline)
        next(climbs[highest])


def _climb(plan: PartPlan, deadline: float) -> Iterator[None]:
    """Improve the plan of one part, a little at each ``next``; most of the work is the proof that it is optimal.

    It never ends by itself: the caller stops when nothing is left to gain.
    """
    part = plan.part
    tie_breaks = orders(part)
    search, proof = (exact.Search(part), exact.Search(part)) if part.spans <= _SPANS else (None, None)
    proving = -1
    for turn, (nodes, ranks, rule) in enumerate(_restarts(part)):
        offsets = lowest_offset_first(part, next(tie_breaks), stop=lambda: time.monotonic() >= deadline)
        if offsets:
            _take_if_lower(plan, offsets)
        yield
        if search is None or proof is None:
            continue
        _attempt(plan, search, plan.low, ranks, rule, nodes, deadline)
        yield
        if turn % 2:
            # The proof is never given up; restarts are.
            if proving != plan.low:
                proving = plan.low
                proof.start(ranks, proving, rule)
            _go_on(plan, proof, proving, nodes, deadline)
            yield
        if turn % 4 == 2:
            middle = _MIDDLES[turn // 4 % len(_MIDDLES)]
            steps = int((height(part, plan.offsets) - plan.low) // part.unit * middle)
            if steps > 0:
                _attempt(plan, search, plan.low + steps * part.unit, ranks, rule, nodes, deadline)
                yield


def _restarts(part: Part) -> Iterator[tuple[int, list[int], int]]:
    """Nodes, ranks and rule of each restart, without end."""
    weights = weights_of(part)
    by_life = (weights.lives, weights.areas)
    by_crowd = (weights.crowds, weights.lives, weights.areas)
    by_area = (weights.areas,)
    ways = [(rule, key) for key in (by_life, by_crowd) for rule in exact.RULES] + [(exact.RULES[-1], by_area)]
    draw = random.Random(0)
    nodes, noise = float(_NODES), 0.0
    while True:
        for rule, key in ways:
            noisy = [tuple(-w[i] * draw.uniform(1 - noise, 1 + noise) for w in key) for i in range(len(part))]
            ranks = [0] * len(part)
            for rank, i in enumerate(sorted(range(len(part)), key=noisy.__getitem__)):
                ranks[i] = rank
            yield int(nodes), ranks, rule
        nodes *= _GROWTH
        noise = _NOISE


def _attempt(
    plan: PartPlan,
    search: exact.Search,
    capacity: int,
    ranks: list[int],
    rule: int,
    nodes: int,
    deadline: float,
) -> None:
    if height(plan.part, plan.offsets) > plan.low:
        search.start(ranks, capacity, rule)
        _go_on(plan, search, capacity, nodes, deadline)


def _go_on(plan: PartPlan, search: exact.Search, capacity: int, nodes: int, deadline: float) -> None:
    stop = search.nodes + nodes
    result = None
    while result is None and search.nodes < stop and (left := deadline - time.monotonic()) > 0:
        result = search.run(stop - search.nodes, min(_SLICE, left))
    if result:
        _take_if_lower(plan, search.offsets())
    elif result is False:
        plan.low = max(plan.low, capacity + plan.part.unit)


def _take_if_lower(plan: PartPlan, offsets: list[int]) -> None:
    if height(plan.part, offsets) < height(plan.part, plan.offsets):
        plan.offsets = offsets
