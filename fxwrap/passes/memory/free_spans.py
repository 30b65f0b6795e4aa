"""Bytes of an arena that are free while an operator runs.

Where the device's allocator can be told, captured operators are offered them as workspace. It would lie in the pool
of the graphs otherwise: outside the arena, and for as long as a graph lives.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence

from ...host_graph.nodes import Kind, kind_of, only_computes
from ...packing import Buffer, Reserved, joined
from ...plan import Origin, ProgramPlan, Region

# A span ``[low, high)`` of bytes in an arena.
Span = tuple[int, int]


def free_spans_of(
    program: ProgramPlan, arena: Region, placed: Mapping[int, tuple[int, Buffer]]
) -> dict[str, tuple[Span, ...]]:
    """What each captured operator is offered, if it is torch's own: others may keep what they allocate.

    What lives on after the call has to have a place of its own.

    Args:
        placed: offset and life of what lies in the arena, by storage.
    """
    facts = program.facts
    captured = program.captured_work - program.replaced_work
    step_of = {
        node.name: step
        for step, node in enumerate(program.schedule)
        if node in captured and kind_of(node) is Kind.EXTERN and only_computes(node)
        if all(i in placed or facts.storages[i].origin is not Origin.EXTERN for i in facts.of(node))
    }
    own = [Reserved(low, low + b.size, b.begin, b.end) for low, b in placed.values() if b.size]
    free = free_at_steps(own, arena.reserved, arena.alignment, list(step_of.values()))
    return {name: free[step] for name, step in step_of.items() if free[step]}


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
