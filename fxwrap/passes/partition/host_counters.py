"""JUDGE: finds loops that count on the host, and so go through the same iterations at each call.

::

    i = zeros((), device="cpu")
    while i < 6:                      the host alone computes i, from constants: a capture can go through the
        k = i.item()                  loop, and captures what the device does in each iteration
        launch on xs[k], on the device
        i = i + 1
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...host_graph.control_flow import control_flow_of
from ...host_graph.nodes import Kind, device_of, is_symbolic_value, is_work, kind_of, output_values


def host_counters(node: Node) -> list[set[Node]] | None:
    """What the host computes in a loop that it decides without data, while a device works in it.

    ``torch.scan`` and ``torch.map`` become such loops: their counter is a tensor on the CPU that begins at zero.

    Returns:
        For the condition, and for the body, the nodes that the host computes: from what it carries itself, from
        constants and from sizes. None for any other loop.
    """
    flow = control_flow_of(node)
    if flow is None or not flow.repeats:
        return None
    carried = flow.operands[: len(node.meta["val"])]
    counters = {position for position, value in enumerate(carried) if _on_cpu(value)}
    if not counters or len(counters) == len(carried) or not all(_is_known(carried[p]) for p in counters):
        return None
    found = list[set[Node]]()
    for gm, returned in zip(flow.subgraphs, ({0}, counters), strict=True):
        values, known = output_values(gm), _known_on_the_host(gm, counters)
        if known is None or not all(values[position] in known for position in returned):
            return None
        found.append(known)
    return found


def _known_on_the_host(gm: GraphModule, counters: Container[int]) -> set[Node] | None:
    """The nodes of a loop's subgraph that the host can compute without data.

    Args:
        counters: positions of the inputs that are known.

    Returns:
        None if the host computes anything else, or a device reads memory of the host's.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    known = {node for position, node in enumerate(inputs) if position in counters or _is_number(node)}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            known.add(node)
        if node.op != "call_function":
            continue
        of_host = [arg for arg in node.all_input_nodes if _on_cpu(arg) or _is_number(arg)]
        if not known.issuperset(of_host):
            return None
        if kind_of(node) is Kind.CHECK:
            continue
        if _runs_on_host(node):
            if not known.issuperset(node.all_input_nodes):
                return None
            known.add(node)
        elif any(map(_on_cpu, of_host)):
            return None
    return known


def _runs_on_host(node: Node) -> bool:
    device = device_of(node)
    on_cpu = _on_cpu(node) or (is_work(node) and device is not None and device.type == "cpu")
    return on_cpu or _is_number(node) or kind_of(node) is Kind.SYMBOLIC


def _is_number(node: Node) -> bool:
    return is_symbolic_value(node.meta.get("val"))


def _on_cpu(value: Any) -> bool:
    val = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(val, torch.Tensor) and val.device.type == "cpu"


def _is_known(node: Any) -> bool:
    """Whether a tensor on the CPU is made without data: what writes it reads no tensor but such."""
    if node.op == "get_attr":
        return True
    writers = [user for user in node.users if is_work(user) and control_flow_of(user) is None]
    sources = {arg for work in (node, *writers) for arg in work.all_input_nodes if arg.op != "get_attr"} - {node}
    return node.op == "call_function" and all(_on_cpu(source) and _is_known(source) for source in sources)
