"""CHECK: proves that work in lanes computes what its schedule computes, from the graph and bytes of storages alone.

Of each two nodes that must not run at the same time, the later one happens after the earlier: because they are in one
lane, or because it waits for it, or for a node that happens after it (Lamport 1978).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from ...host_graph.storages import StorageFacts
from ...plan import Home, Lanes, MemoryPlan
from .accesses import Accesses, fault, has_parallel_region, may_keep_operands, name_of


def verify_lanes(
    gm: GraphModule, schedule: Sequence[Node], facts: StorageFacts, plan: MemoryPlan, apart_on: str = ""
) -> None:
    """Prove that no two nodes that depend on each other, or use the same bytes, run at the same time.

    Args:
        facts: only identifies the storages of the plan.
        apart_on: the type of the device whose inputs do not overlap at any call; empty for none.

    Raises:
        PlanError: naming two such nodes and why they depend on each other, a wait that has no end, or a node that
            must not run beside others.
    """
    accesses = Accesses(gm.graph) if plan.lanes else None
    for lanes in plan.lanes:
        assert accesses is not None
        nodes = _nodes(lanes, schedule)
        after = _happens_before(lanes, nodes)
        for node in nodes:
            if has_parallel_region(node) or may_keep_operands(node):
                raise fault(
                    f"lanes: {node.name} runs beside other work",
                    expected="one node after the other, where a node has threads of its own or runs foreign code",
                    got=f"lane {lanes.lane_of[node.name]}",
                )
        for before, node, why in itertools.chain(
            _dependences(accesses, nodes, apart_on), _in_one_place(accesses, nodes, facts, plan)
        ):
            if not after[node] >> nodes[before] & 1:
                raise fault(
                    f"lanes: {node.name} may run while {before.name} does",
                    expected=f"{before.name} first, because {why}",
                    got=f"lanes {lanes.lane_of[before.name]} and {lanes.lane_of[node.name]}, and no wait in between",
                )


def _nodes(lanes: Lanes, schedule: Sequence[Node]) -> dict[Node, int]:
    """The nodes in lanes, with their places; they follow each other in the schedule."""
    names = list(lanes.lane_of)
    first = next((step for step, node in enumerate(schedule) if node.name == names[0]), len(schedule))
    nodes = schedule[first : first + len(names)]
    if [node.name for node in nodes] != names:
        raise fault("lanes: what is in lanes is no part of the schedule", expected=", ".join(names), got=str(nodes))
    return {node: place for place, node in enumerate(nodes)}


def _happens_before(lanes: Lanes, nodes: Mapping[Node, int]) -> dict[Node, int]:
    """For each node the nodes that happen before it, a bit for each place."""
    by_name = {node.name: node for node in nodes}
    before, last = dict[Node, int](), dict[int, Node]()
    for node, place in nodes.items():
        sources = [by_name[name] for name in lanes.waits_for.get(node.name, ())]
        if any(nodes[source] >= place for source in sources):
            raise fault(
                f"lanes: {node.name} waits for what comes later",
                expected="waits for earlier nodes of the schedule, which cannot wait for each other",
                got=", ".join(source.name for source in sources),
            )
        lane = lanes.lane_of[node.name]
        sources += [last[lane]] if lane in last else []
        before[node] = 0
        for source in sources:
            before[node] |= before[source] | 1 << nodes[source]
        last[lane] = node
    return before


def _dependences(accesses: Accesses, nodes: Mapping[Node, int], apart_on: str) -> Iterator[tuple[Node, Node, str]]:
    """Pairs of nodes of which the second has to follow the first, and why."""
    for node in nodes:
        for source in accesses.sources(node, set(nodes)):
            yield source, node, f"{node.name} uses its value"
    for chain in accesses.ordered(list(nodes)):
        for before, node in itertools.pairwise(chain):
            yield before, node, "random numbers and effects keep program order"
    for root, used in accesses.accesses(list(nodes)).items():
        yield from _conflicts(used, name_of(root))
    for device, used in accesses.accesses_to_inputs(list(nodes)).items():
        if torch.device(device).type != apart_on:
            yield from _conflicts(used, f"an input on {device}, where another may lie")


def _conflicts(used: Sequence[tuple[Node, bool]], storage: str) -> Iterator[tuple[Node, Node, str]]:
    """Accesses to one storage of which one writes: each to the last write before it, and a write to reads since."""
    writer: Node | None = None
    readers: list[Node] = []
    for node, writes in used:
        if writer is not None:
            yield writer, node, f"it writes {storage}"
        if writes:
            yield from ((reader, node, f"it reads {storage}") for reader in readers)
            writer, readers = node, []
        else:
            readers.append(node)


def _in_one_place(
    accesses: Accesses, nodes: Mapping[Node, int], facts: StorageFacts, plan: MemoryPlan
) -> Iterator[tuple[Node, Node, str]]:
    """Pairs of nodes that use storages which share bytes."""
    used = accesses.accesses(list(nodes))
    in_region = defaultdict[int, list[tuple[int, int, str, list[Node]]]](list)
    by_name = {(maker.name, element): own for (maker, element), own in used.items()}
    for storage, place in zip(facts.storages, plan.places, strict=True):
        users = [node for node, _ in by_name.get((storage.node, storage.element), ())]
        if place.home is Home.REGION and users:
            low, high = place.offset, place.offset + plan.sizes[storage.index]
            in_region[place.region].append((low, high, storage.name, users))
    for spans in in_region.values():
        spans.sort(key=lambda span: span[0])
        for n, (low, high, name, own) in enumerate(spans):
            for other_low, other_high, other, others in itertools.islice(spans, n + 1, None):
                if other_low >= high:
                    break
                if low < high and other_low < other_high:
                    first, second = (own, others) if nodes[own[0]] < nodes[others[0]] else (others, own)
                    why = f"{name} and {other} share bytes"
                    yield from ((before, node, why) for before in first for node in second if before is not node)
