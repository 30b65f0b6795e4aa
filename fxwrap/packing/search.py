"""Exact plans, within a budget of time: the improvement of a plan, and the proof that it cannot be improved."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import exact
from .orders import height, lowest_offset_first, orders, weights_of
from .problem import Part

# A search looks at every buffer in every section again and again: above so many, orders are all there is time for.
_SPANS = 1_000_000
# Nodes of the first restarts, and how that grows: most searches that succeed do so at once, or hardly ever.
_NODES, _GROWTH = 500, 1.03
# Restarts differ by so much in how they weigh buffers.
_NOISE = 0.25
# Besides what may be impossible, less is tried: so much of the way from there to what is known.
_MIDDLES = (0.5, 0.75, 0.875, 0.9375)
# Seconds after which a search looks up, for Ctrl-C and the deadline.
_SLICE = 0.1


@dataclass
class Found:
    """What is known of a part: ``offsets``, and that it cannot be done with less than ``low`` bytes."""

    part: Part
    offsets: list[int]
    low: int

    @property
    def top(self) -> int:
        return self.part.base + height(self.part, self.offsets)

    @property
    def bound(self) -> int:
        return self.part.base + self.low


def improve(found: Sequence[Found], budget_s: float) -> None:
    """Make the highest part lower, until it is as low as any bound or time is over."""
    deadline = time.monotonic() + budget_s
    climbs: dict[int, Iterator[None]] = {}
    while time.monotonic() < deadline:
        highest = max(range(len(found)), key=lambda i: found[i].top)
        enough = max(one.bound for one in found)
        if found[highest].top <= enough:
            return
        if highest not in climbs:
            climbs[highest] = _climb(found[highest], deadline)
        next(climbs[highest])


def _climb(found: Found, deadline: float) -> Iterator[None]:
    """Endless work on one part, a little at a time, most of it on the proof that no less is possible.

    It may only go on while there is something to gain.
    """
    part = found.part
    tie_breaks = orders(part)
    search, proof = (exact.Search(part), exact.Search(part)) if part.spans <= _SPANS else (None, None)
    proving = -1
    for turn, (nodes, ranks, rule) in enumerate(_restarts(part)):
        offsets = lowest_offset_first(part, next(tie_breaks), stop=lambda: time.monotonic() >= deadline)
        if offsets:
            _keep(found, offsets)
        yield
        if search is None or proof is None:
            continue
        _attempt(found, search, found.low, ranks, rule, nodes, deadline)
        yield
        if turn % 2:
            # This one is never given up, as the restarts are.
            if proving != found.low:
                proving = found.low
                proof.start(ranks, proving, rule)
            _go_on(found, proof, proving, nodes, deadline)
            yield
        if turn % 4 == 2:
            middle = _MIDDLES[turn // 4 % len(_MIDDLES)]
            steps = int((height(part, found.offsets) - found.low) // part.unit * middle)
            if steps > 0:
                _attempt(found, search, found.low + steps * part.unit, ranks, rule, nodes, deadline)
                yield


def _restarts(part: Part) -> Iterator[tuple[int, list[int], int]]:
    """Nodes, ranks and rule of one restart after the other."""
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
    found: Found,
    search: exact.Search,
    capacity: int,
    ranks: list[int],
    rule: int,
    nodes: int,
    deadline: float,
) -> None:
    if height(found.part, found.offsets) > found.low:
        search.start(ranks, capacity, rule)
        _go_on(found, search, capacity, nodes, deadline)


def _go_on(found: Found, search: exact.Search, capacity: int, nodes: int, deadline: float) -> None:
    stop = search.nodes + nodes
    result = None
    while result is None and search.nodes < stop and (left := deadline - time.monotonic()) > 0:
        result = search.run(stop - search.nodes, min(_SLICE, left))
    if result:
        _keep(found, search.offsets())
    elif result is False:
        found.low = max(found.low, capacity + found.part.unit)


def _keep(found: Found, offsets: list[int]) -> None:
    if height(found.part, offsets) < height(found.part, found.offsets):
        found.offsets = offsets
