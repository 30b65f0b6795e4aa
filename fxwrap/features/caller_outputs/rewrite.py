"""Rewrite: results are written to tensors of the caller (``out=``), which become inputs of the host graph."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node

from ...host_graph.nodes import Kind, kind_of, output_values, reinterpret
from ...host_graph.sizes import expression
from ...host_graph.storages import Origin, StorageFacts
from ...passes.analysis.aliasing import analyse_storages


@dataclass(frozen=True)
class CallerOutput:
    """How one result gets to the caller's tensor.

    Attributes:
        position: of the result among the graph's results.
        allocation: the allocation that the caller's tensor replaces. None: the result is copied, because it is no new
            buffer (an operator's own result, an input), another result shares its memory, or its layout has gaps.
        relayout: whether the result views the allocation in another layout.
    """

    position: int
    allocation: str | None = None
    relayout: bool = False


def caller_outputs(gm: GraphModule, positions: Collection[int]) -> tuple[CallerOutput, ...]:
    """Decide for each of these results whether kernels can write to the caller's tensor directly."""
    values, facts = output_values(gm), analyse_storages(gm)
    return tuple(_decision(position, values, facts) for position in positions)


def _decision(position: int, values: list[Any], facts: StorageFacts) -> CallerOutput:
    copied = CallerOutput(position)
    value = values[position]
    others = facts.behind(node for place, node in enumerate(values) if place != position and isinstance(node, Node))
    storages = facts.of(value)
    if len(storages) != 1 or storages & others:
        return copied
    (index,) = storages
    if facts.storages[index].origin is not Origin.ALLOCATION:
        return copied
    if kind_of(value) is Kind.ALLOCATION:
        has_views = any(kind_of(user) is Kind.VIEW for user in value.users)
        return copied if has_views and not _is_dense(value) else CallerOutput(position, value.name)
    base = value.args[0] if value.target is reinterpret else None
    if not isinstance(base, Node) or kind_of(base) is not Kind.ALLOCATION or value.args[3:] not in ((), (0,)):
        return copied
    if not (_is_dense(base) and _is_dense(value) and _same_elements(base, value)):
        return copied
    return CallerOutput(position, base.name, relayout=True)


def _is_dense(node: Node) -> bool:
    """Whether a value has no gaps. In a gap the caller may keep other data."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    last = sum((expression(n) - 1) * expression(step) for n, step in zip(value.size(), value.stride(), strict=True))
    return bool(sympy.expand(last + 1 - _elements(value)) == 0)


def _same_elements(first: Node, second: Node) -> bool:
    one, other = first.meta["val"], second.meta["val"]
    return one.dtype == other.dtype and bool(sympy.expand(_elements(one) - _elements(other)) == 0)


def _elements(value: torch.Tensor) -> Any:
    return sympy.prod(map(expression, value.size()))


def with_caller_outputs(gm: GraphModule, decisions: Collection[CallerOutput]) -> GraphModule:
    """A copy of a graph that takes the caller's tensors as its last inputs, and returns its other results.

    ::

        def forward(x):                        def forward(x, out0):
            buf0 = empty_strided(...)
            launch k(x, buf0)           ->         launch k(x, out0)
            return buf0                            return ()
    """
    graph, nodes = Graph(), dict[Node, Node]()
    returned = graph.graph_copy(gm.graph, nodes)
    values: list[Any] = list(returned) if isinstance(returned, (list, tuple)) else [returned]  # type: ignore[arg-type]
    by_name = {node.name: copy for node, copy in nodes.items()}
    for number, decision in enumerate(decisions):
        result = values[decision.position]
        given = _placeholder(graph, f"out{number}")
        value = result.meta.get("val")
        if decision.allocation is None:
            copy = graph.call_function(torch.ops.aten.copy_.default, (given, result))
            if value is not None:
                # A fake value of its own: that of the result would say that the result lies in the caller's tensor.
                given.meta["val"] = copy.meta["val"] = value.new_empty_strided(value.size(), value.stride())
        else:
            if value is not None:
                given.meta["val"] = value
            _replace(by_name[decision.allocation], given, result if decision.relayout else None)
    taken = {decision.position for decision in decisions}
    graph.output(tuple(value for position, value in enumerate(values) if position not in taken))
    return GraphModule(gm, graph)


def _placeholder(graph: Graph, name: str) -> Node:
    last = graph.find_nodes(op="placeholder")[-1:]
    with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes), None)):
        return graph.placeholder(name)


def _replace(allocation: Node, given: Node, view: Node | None) -> None:
    """Put the caller's tensor in the place of an allocation.

    Args:
        view: the result, if it views the allocation in another layout: kernels get the caller's tensor in the
            allocation's layout then.
    """
    value = given
    if view is not None:
        with allocation.graph.inserting_before(allocation):
            size, stride = allocation.args[:2]
            value = allocation.graph.call_function(reinterpret, (given, size, stride, 0))
        value.meta = {key: view.meta[key] for key in ("call", "kind") if key in view.meta}
        if "val" in allocation.meta:
            value.meta["val"] = allocation.meta["val"]
    allocation.replace_all_uses_with(value)
    allocation.graph.erase_node(allocation)
