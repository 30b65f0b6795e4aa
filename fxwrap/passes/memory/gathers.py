"""PLAN: drops what was gathered from other processes between its uses, and gathers it again, within ``memory_limit``.

::

    w0 = gather(s0)                       w0 = gather(s0)
    y0 = mm(x, w0)                        y0 = mm(x, w0)                       w0 is free from here
    w1 = gather(s1)                       w1 = gather(s1)
    y1 = mm(y0, w1)          ->           y1 = mm(y0, w1)
    d1 = mm_backward(y1, w1)              d1 = mm_backward(y1, w1)
    d0 = mm_backward(d1, w0)              w0_again = gather(s0)
                                          d0 = mm_backward(d1, w0_again)

Parameters that lie in parts with several processes are so in memory one layer at a time, as with
``FullyShardedDataParallel``. It is done wherever something else that was gathered is used between two uses, whatever
the limit: all processes must communicate alike, and a choice by bytes could be another one in each. A gather that
Inductor begins early, beside work with what was gathered before, begins when that is done.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch.fx import GraphModule, Node

from ...host_graph.nodes import Kind, gathers, kind_of, waits
from ...host_graph.storages import StorageFacts
from ...limit import Repeated
from .fit import is_pure, repeated_in, work_of
from .rebuilt import Rebuilt
from .rematerialise import again
from .timeline import Costs, Run, Timeline

# All work is one partition: nothing is cut yet.
_WHOLE = 0


def gather_again(
    gm: GraphModule, facts: StorageFacts, sizes: Mapping[int, int], groups: Mapping[int, int]
) -> tuple[GraphModule, tuple[Repeated, ...]]:
    """Gather what lies with several processes anew before a use, where others were used since the last.

    Args:
        sizes: bytes of storages.
        groups: inputs that may overlap (``analysis.aliasing.overlap_groups``).

    Returns:
        The graph, which is the given one if nothing is gathered again or later, and the nodes that run again.
    """
    work = [node for node in gm.graph.nodes if kind_of(node) in (Kind.LAUNCH, Kind.EXTERN)]
    gathered = facts.behind(filter(gathers, work))
    if not gathered:
        return gm, ()
    made = facts.made()
    costs = Costs(
        sizes={index: nbytes for index, nbytes in sizes.items() if index in made},
        workspace={},
        work={node: work_of(node, facts, sizes) for node in work}.__getitem__,
        pure=lambda node: gathers(node) or waits(node) or is_pure(node),
        stays=facts.handed_out,
        captured=frozenset([_WHOLE]),
    )
    timeline = Timeline.of([_later(work, facts, gathered)], facts, costs, groups)
    todo = [version for run in timeline.runs if gathers(run.node) for version in run.makes]
    while todo:
        todo += _once_more(timeline, todo.pop(), gathered)
    if [run.node for run in timeline.runs] == work:
        return gm, ()
    rebuilt = Rebuilt(gm, facts, timeline.runs)
    return rebuilt.module, repeated_in(timeline, rebuilt)


def _later(work: Sequence[Node], facts: StorageFacts, gathered: frozenset[int]) -> list[Node]:
    """The work, with each gather behind the work with what was gathered before it."""
    later = list(work)
    for node in filter(gathers, work):
        begin, operands, results = later.index(node), facts.reads(node), facts.of(node)
        end = next((place for place in range(begin + 1, len(later)) if facts.touched(later[place]) & results), begin)
        between = later[begin + 1 : end]
        uses = any(facts.touched(one) & gathered and not (gathers(one) or waits(one)) for one in between)
        if uses and not any(facts.writes(one) & operands for one in between):
            later[begin:end] = [*between, node]
    return later


def _once_more(timeline: Timeline, version: int, gathered: frozenset[int]) -> list[int]:
    """Gather a version again in its first gap in which something else that was gathered is used.

    Args:
        gathered: the storages that hold what was gathered.

    Returns:
        The new version.
    """
    if version in timeline.costs.stays:
        return []
    for begin, end in itertools.pairwise(timeline.uses[version]):
        between = timeline.runs[begin.place + 1 : end.place]
        if waits(end.node) or not any(_works_with(timeline, run, gathered) for run in between):
            continue
        found = again(timeline, version, end.place, begin.place)
        if not found.runs:
            return []
        changed = timeline.repeated(found.runs, end)
        timeline.apply(changed)
        storage = timeline.storage_of.get(version, version)
        return [new for new, of in changed.storage_of.items() if of == storage]
    return []


def _works_with(timeline: Timeline, run: Run, gathered: frozenset[int]) -> bool:
    if gathers(run.node) or waits(run.node):
        return False
    return any(timeline.storage_of.get(version, version) in gathered for version in run.used)
