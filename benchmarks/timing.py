"""Timing two callables in turn, so that a noisy machine disturbs both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
