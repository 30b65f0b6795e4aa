"""CHECK: proves that a schedule computes what its graph computes, and that the graph reads what was written only."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch.fx import GraphModule, Node

from ...errors import PlanError
from ...host_graph.listing import line_of
from ...host_graph.nodes import is_work
from .accesses import CALL_SUBGRAPHS, Accesses, AccessesByRoot, called, fault, name_of


def verify_schedule(gm: GraphModule, schedule: Sequence[Node], apart_on: str = "") -> None:
    """Prove that running ``schedule`` computes what the graph in program order computes, and that this is defined.

    Args:
        apart_on: the type of the device whose inputs do not overlap at any call; empty for none.

    Raises:
        PlanError: naming the two nodes that stand in the wrong order, the node that is missing or doubled, or the
            buffer that is read although nothing has written it.
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
    by_root = memory.accesses(required)
    for root, accesses in by_root.items():
        _verify_accesses(name_of(root), accesses, position)
    verify_written(memory, by_root)
    for device, accesses in memory.accesses_to_inputs(required).items():
        if torch.device(device).type == apart_on:
            continue
        _verify_accesses(f"an input on {device}, where another may lie", accesses, position)


def verify_written(memory: Accesses, accesses: AccessesByRoot) -> None:
    """Check that no buffer is read, or returned, that nothing has written before; in subgraphs, too."""
    graph = memory.graph
    (output,) = graph.find_nodes(op="output")
    returned = memory.roots_in(output.args)
    for buffer in graph.find_nodes(op="call_function", target=torch.empty_strided):
        root = buffer, None
        first, writes = accesses[root][0] if root in accesses else (output, root not in returned)
        if not writes and not buffer.meta.get("uninitialised") and 0 not in buffer.args[0]:
            reads = "reads" if root in accesses else "returns"
            raise PlanError(
                f"graph: nothing writes {buffer.name} before {first.name} {reads} it",
                expected="a launch or a call before it that writes the buffer",
                got=line_of(first),
                remedy="look at passes that change the graph: one may have erased the writer",
            )
    for node in graph.nodes:
        for subgraph in called(node) if node.target in CALL_SUBGRAPHS else ():
            inner = Accesses(subgraph.graph)
            verify_written(inner, inner.accesses(list(filter(is_work, subgraph.graph.nodes))))


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
