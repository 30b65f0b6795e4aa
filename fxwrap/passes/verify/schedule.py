"""CHECK: proves that a schedule computes what its graph computes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch.fx import GraphModule, Node

from ...host_graph.nodes import is_work
from .accesses import Accesses, fault, name_of


def verify_schedule(gm: GraphModule, schedule: Sequence[Node]) -> None:
    """Prove that running ``schedule`` computes what the graph in program order computes.

    Raises:
        PlanError: naming the two nodes that stand in the wrong order, or the node that is missing or doubled.
    """
    memory = Accesses(gm.graph)
    position = {node: step for step, node in enumerate(schedule)}
    required = [node for node in gm.graph.nodes if is_work(node)]
    for node in required:
        if node not in position:
            raise fault(f"schedule: {node.name} never runs", expected="every launch and extern call once")
    if len(position) != len(schedule):
        doubled = next(node for node in position if list(schedule).count(node) > 1)
        raise fault(f"schedule: {doubled.name} runs twice", expected="every launch and extern call once")
    for node in schedule:
        for source in memory.sources(node, set(position)):
            if position[source] >= position[node]:
                _wrong_order(source, node, position, f"{node.name} uses the value of {source.name}")
    for chain in memory.ordered(required):
        for before, after in itertools.pairwise(chain):
            if position[before] >= position[after]:
                _wrong_order(before, after, position, "random numbers and effects keep program order")
    for root, accesses in memory.accesses(required).items():
        _verify_accesses(name_of(root), accesses, position)
    for device, accesses in memory.accesses_to_inputs(required).items():
        _verify_accesses(f"an input on {device}, where another may lie", accesses, position)


def _verify_accesses(storage: str, accesses: Sequence[tuple[Node, bool]], position: Mapping[Node, int]) -> None:
    """Check the order of accesses to one storage. Reads may change places; no access may cross a write."""
    last_writer: Node | None = None
    group: list[Node] = []
    for node, writes in accesses:
        step = position[node]
        if last_writer is not None and step <= position[last_writer]:
            _wrong_order(last_writer, node, position, f"{last_writer.name} writes {storage} first")
        if writes:
            for reader in group:
                if position[reader] >= step:
                    _wrong_order(reader, node, position, f"{reader.name} reads {storage} first")
            last_writer, group = node, []
        else:
            group.append(node)


def _wrong_order(before: Node, after: Node, position: Mapping[Node, int], why: str) -> None:
    raise fault(
        f"schedule: {after.name} runs before {before.name}",
        expected=f"{before.name} first, because {why}",
        got=f"steps {position[before]} ({before.name}) and {position[after]} ({after.name})",
    )
