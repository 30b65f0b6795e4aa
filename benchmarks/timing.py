"""Timing two callables in turn, so that a noisy machine disturbs both alike."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_serial = itertools.count()


def own(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object of its own: Dynamo keeps what it compiles there."""
    assert isinstance(fn, types.FunctionType)
    code = fn.__code__.replace(co_name=f"{fn.__code__.co_name.strip('<>')}_{next(_serial)}")
    return types.FunctionType(code, fn.__globals__, closure=fn.__closure__, argdefs=fn.__defaults__)


def geometric_mean(ratios: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


@dataclass(frozen=True)
class Comparison:
    """Medians in microseconds a call, and the median of the ratios of neighbouring runs (first / second)."""

    first: float
    second: float
    ratio: float


def compare(
    first: Callable[[], Any],
    second: Callable[[], Any],
    pairs: int = 60,
    calls: int = 100,
    synchronize: Callable[[], None] = lambda: None,
) -> Comparison:
    """Time ``calls`` calls of each callable, ``pairs`` times, alternating."""

    def once(function: Callable[[], Any]) -> float:
        synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize()
        return (time.perf_counter() - begin) / calls * 1e6

    for function in (first, second):
        once(function)
    measured = []
    for turn in range(pairs):
        # Neither side always goes first.
        if turn % 2:
            b, a = once(second), once(first)
        else:
            a, b = once(first), once(second)
        measured.append((a, b))
    return Comparison(
        statistics.median(a for a, _ in measured),
        statistics.median(b for _, b in measured),
        statistics.median(a / b for a, b in measured),
    )


def in_turn(sides: Mapping[str, Callable[[], Any]], seconds: float, turn: float = 0.05) -> dict[str, list[float]]:
    """Microseconds a call of each side: one number for each turn, of which there are at least five.

    Args:
        seconds: for all turns.
        turn: seconds of one side in a turn.
    """

    def timed(side: Callable[[], Any], calls: int) -> float:
        side()
        begin = time.perf_counter()
        for _ in range(calls):
            side()
        return (time.perf_counter() - begin) / calls

    calls = {name: max(3, round(turn / timed(side, 3))) for name, side in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    end, order = time.monotonic() + seconds, list(sides)
    while time.monotonic() < end or len(times[order[0]]) < 5:
        random.shuffle(order)
        for name in order:
            times[name].append(timed(sides[name], calls[name]) * 1e6)
    return times
