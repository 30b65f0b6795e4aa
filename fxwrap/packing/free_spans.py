"""Bytes of an arena that are free in some steps."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from .problem import Reserved, joined

# A span ``[low, high)`` of bytes in an arena.
Span = tuple[int, int]


def free_at_steps(
    own: Sequence[Reserved], others: Sequence[Reserved], alignment: int, steps: Sequence[int]
) -> dict[int, tuple[Span, ...]]:
    """The spans that are free in each of some steps, of what the program works on: others may have the rest.

    One pass over the steps, O(steps x what is live).
    """
    begins = sorted([*own, *others], key=lambda span: span.begin, reverse=True)
    ends = sorted([*own, *others], key=lambda span: span.end, reverse=True)
    footprint = joined((span.low, span.high) for span in own)
    live: list[Span] = []  # in order, and apart
    found = {}
    for step in sorted(steps):
        while ends and ends[-1].end <= step:
            over = ends.pop()
            if (over.low, over.high) in live:  # it may have come and gone between two of the steps
                live.remove((over.low, over.high))
        while begins and begins[-1].begin <= step:
            begun = begins.pop()
            if begun.end > step:
                bisect.insort(live, (begun.low, begun.high))
        found[step] = tuple(_between(footprint, live, alignment))
    return found


def _between(footprint: Sequence[Span], live: Sequence[Span], alignment: int) -> Iterator[Span]:
    for first, end in footprint:
        begin = first
        for low, high in [*live, (end, end)]:
            if begin >= end:
                break
            free = -(-begin // alignment) * alignment, min(low, end) // alignment * alignment
            if free[0] < free[1]:
                yield free
            begin = max(begin, high)
