"""PLAN: orders the work of each partition so that less memory is in use at one time.

Program order is the order in which the program was written: all updates of an optimizer after all gradients, a value
long before its only use. Each partition is ordered anew, within its dependencies, and the new order stays if the peak
of the program falls.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.fx import Node

from ...host_graph.storages import StorageFacts
from ...packing.lifetimes import Lifetimes
from ...plan import Partition, ProgramPlan, Verdict

if TYPE_CHECKING:
    import networkx as nx


def order_for_memory(plan: ProgramPlan, dependencies: nx.DiGraph, sizes: Mapping[int, int]) -> ProgramPlan:
    """Order the nodes of captured partitions.

    ::

        g1 = grad 1    (8 bytes)        g1 = grad 1
        g2 = grad 2    (8 bytes)   ->   update 1 with g1        g1 is free before g2 is made
        update 1 with g1                g2 = grad 2
        update 2 with g2                update 2 with g2

    Args:
        sizes: bytes of storages that the program or its operators allocate, at the sizes compiled for.
    """
    other = reordered(plan, dependencies, sizes)
    return other if _peak(other, sizes) < _peak(plan, sizes) else plan


def reordered(plan: ProgramPlan, dependencies: nx.DiGraph, sizes: Mapping[int, int]) -> ProgramPlan:
    """The plan with the nodes of captured partitions in the order of ``least_memory``, whatever its peak is."""
    made = _made(plan, sizes)
    before = work_before(plan, dependencies)
    partitions = tuple(_ordered(plan, partition, before, made) for partition in plan.partitions)
    return replace(plan, cut=replace(plan.cut, partitions=partitions))


def _made(plan: ProgramPlan, sizes: Mapping[int, int]) -> Mapping[int, int]:
    return {index: nbytes for index, nbytes in sizes.items() if index in plan.facts.made()}


def _peak(plan: ProgramPlan, sizes: Mapping[int, int]) -> int:
    made = _made(plan, sizes)
    used = [[index for index in plan.facts.touched(node) if index in made] for node in plan.schedule]
    stays = [index for index in plan.facts.handed_out if index in made]
    return Lifetimes.of([*used, stays]).peak(made)


def work_before(plan: ProgramPlan, dependencies: nx.DiGraph) -> dict[Node, set[Node]]:
    """The scheduled nodes that each one has to follow, directly or through views, sizes and checks."""
    scheduled, before = set(plan.schedule), dict[Node, set[Node]]()
    for node in dependencies:  # in program order
        found = before[node] = set()
        for source in dependencies.pred[node]:
            found.update((source,) if source in scheduled else before[source])
    return before


def _ordered(
    plan: ProgramPlan, partition: Partition, before: Mapping[Node, set[Node]], sizes: Mapping[int, int]
) -> Partition:
    nodes = plan.work_in(partition)
    if partition.verdict is not Verdict.CAPTURED or len(nodes) < 3 or partition.index in plan.compiled:
        return partition
    begin = plan.schedule.index(nodes[0])
    earlier, later = plan.schedule[:begin], plan.schedule[begin + len(nodes) :]
    stay = plan.facts.handed_out | plan.facts.named_in(later)
    order = least_memory(nodes, before, plan.facts, sizes, plan.facts.named_in(earlier), stay)
    return replace(partition, nodes=tuple(node.name for node in order))


def least_memory(
    nodes: Sequence[Node],
    before: Mapping[Node, Collection[Node]],
    facts: StorageFacts,
    sizes: Mapping[int, int],
    exist: Collection[int],
    stay: Collection[int],
) -> list[Node]:
    """An order of nodes that makes memory grow late and frees it early.

    List scheduling: of the nodes whose predecessors have run, the one that frees most runs next; where all make
    memory grow, the next of program order. Takes O(n log n) for n nodes and their uses of storages.

    Args:
        before: nodes that have to run before each node.
        exist: storages that are in use before the first of ``nodes`` runs.
        stay: storages that are still needed when all of ``nodes`` have run.
    """
    place = {node: n for n, node in enumerate(nodes)}
    uses = [[index for index in facts.touched(node) if index in sizes] for node in nodes]
    users = defaultdict[int, set[int]](set)
    for n, used in enumerate(uses):
        for index in used:
            users[index].add(n)
    sources = [[place[source] for source in before[node] if source in place and source is not node] for node in nodes]
    waits, followers = [len(ns) for ns in sources], defaultdict[int, list[int]](list)
    for n, ns in enumerate(sources):
        for source in ns:
            followers[source].append(n)
    alive = set(exist)
    waiting, growth = {n for n, count in enumerate(waits) if not count}, dict[int, int]()

    def grows(n: int) -> int:
        new = sum(sizes[index] for index in uses[n] if index not in alive)
        freed = sum(sizes[index] for index in uses[n] if len(users[index]) == 1 and index not in stay)
        return new - freed

    def key(n: int) -> tuple[int, int]:
        growth[n] = grows(n)
        return (min(growth[n], 1), n)

    queue, order = [key(n) for n in waiting], list[Node]()
    heapq.heapify(queue)
    while queue:
        growing, n = heapq.heappop(queue)
        if n not in waiting or growing != min(growth[n], 1):
            continue  # it has run, or its growth has changed since
        waiting.remove(n)
        order.append(nodes[n])
        changed = set(followers[n])
        for index in uses[n]:
            if index not in alive:
                alive.add(index)
                changed |= users[index]
            users[index].discard(n)
            if len(users[index]) == 1:
                changed |= users[index]
        for follower in followers[n]:
            waits[follower] -= 1
            if not waits[follower]:
                waiting.add(follower)
        for other in changed & waiting:
            heapq.heappush(queue, key(other))
    return order
