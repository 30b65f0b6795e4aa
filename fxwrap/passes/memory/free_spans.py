"""Bytes of an arena that are free while an operator runs.

Where the device's allocator can be told, captured operators are offered them for what they take for a while, which
would lie in the pool of the graphs otherwise: beside the arena, and for as long as a graph lives.
"""

from __future__ import annotations

import bisect
from collections.abc import Container, Iterator, Sequence

from torch.fx import Node

from ...host_graph.nodes import Kind, kind_of, only_computes
from ...packing.reserved import Fixed
from ...plan import ArenaPlan, Origin, ProgramPlan, Verdict

# A span ``[low, high)`` of bytes in an arena.
Span = tuple[int, int]


def free_spans_of(
    program: ProgramPlan, arena: ArenaPlan, placed: Container[int], taken: Sequence[Fixed]
) -> dict[Node, tuple[Span, ...]]:
    """What each captured operator may have, if it is torch's own: others may keep what they allocate.

    What lives on after the call has to have a place of its own.

    Args:
        placed: storages that lie in the plan.
        taken: what others have in the arena.
    """
    facts = program.facts
    captured = {n for p in program.partitions if p.verdict is Verdict.CAPTURED for n in p.nodes}
    captured -= {n for p in program.partitions if p.index in program.compiled for n in p.nodes}
    step_of = {
        node: step
        for step, node in enumerate(program.schedule)
        if node in captured and kind_of(node) is Kind.EXTERN and only_computes(node)
        if all(i in placed or facts.storages[i].origin is not Origin.EXTERN for i in facts.of.get(node, ()))
    }
    free = free_at_steps(arena, taken, list(step_of.values()))
    return {node: free[step] for node, step in step_of.items() if free[step]}


def free_at_steps(arena: ArenaPlan, taken: Sequence[Fixed], steps: Sequence[int]) -> dict[int, tuple[Span, ...]]:
    """The spans that are free in each of some steps, of what the program works on: others may have the rest.

    One pass over the steps, O(steps x what is live).
    """
    offsets = arena.placement.offsets
    spans = [(b.begin, b.end, offsets[name], offsets[name] + b.size) for name, b in arena.buffers.items() if b.size]
    spans += [(one.begin, one.end, one.low, one.high) for one in taken]
    begins = sorted(spans, reverse=True)
    ends = sorted(spans, key=lambda span: span[1], reverse=True)
    footprint = arena.footprint
    live: list[Span] = []  # in order, and apart
    found = {}
    for step in sorted(steps):
        while ends and ends[-1][1] <= step:
            _, _, low, high = ends.pop()
            if (low, high) in live:  # it may have come and gone between two of the steps
                live.remove((low, high))
        while begins and begins[-1][0] <= step:
            _, end, low, high = begins.pop()
            if end > step:
                bisect.insort(live, (low, high))
        found[step] = tuple(_between(footprint, live, arena.alignment))
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
