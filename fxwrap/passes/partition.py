"""CUT: a verdict with its reason for every node, and as few captured partitions as the dependencies allow."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import networkx as nx
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..host_graph import (
    Kind,
    communicates,
    control_flow_of,
    device_of,
    is_symbolic_value,
    kind_of,
    operator_name,
    schema_of,
    user_line,
)
from ..plan import NodeVerdict, Partition, Verdict

_WORK = (Kind.LAUNCH, Kind.EXTERN)
_CAPTURED = NodeVerdict(Verdict.CAPTURED, "")
_FOLDED = NodeVerdict(Verdict.CAPTURED, "settled when recorded")


def is_work(node: Node) -> bool:
    """Whether a node does something at run time (a launch or an extern call)."""
    return kind_of(node) in _WORK


def judge(
    gm: GraphModule,
    eager_ops: Sequence[str] = (),
    device_reason: Callable[[Node], str | None] | None = None,
    refused: Mapping[str, str] | None = None,
) -> dict[Node, NodeVerdict]:
    """Give every node a verdict.

    Args:
        eager_ops: operators the user wants outside of captured partitions, as ``namespace::name``,
            ``namespace.name`` or ``namespace::name.overload``.
        device_reason: for work that the device cannot capture, why; else None.
        refused: names of operators and kernels that a capture has failed at, and how.
    """
    device = main_device(gm)
    listed = {name.replace("::", ".") for name in eager_ops}
    verdicts: dict[Node, NodeVerdict] = {}
    for node in gm.graph.nodes:
        reason = _eager_reason(node, device, listed, verdicts)
        if reason is None and is_work(node):
            reason = device_reason(node) if device_reason is not None else None
            if reason is None and refused and (failure := refused.get(operator_name(node))) is not None:
                reason = f"a capture failed at it: {failure}"
        if reason is None:
            verdicts[node] = _CAPTURED if is_work(node) else _FOLDED
        else:
            dependent = _is_data_dependent(node, verdicts)
            verdicts[node] = NodeVerdict(Verdict.EAGER, reason, dependent)
    return verdicts


def main_device(gm: GraphModule) -> torch.device:
    """The device whose graphs capture the program: the accelerator if any node works there, else the CPU."""
    devices = [device for node in gm.graph.nodes if (device := device_of(node)) is not None]
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    return accelerators[0] if accelerators else torch.device("cpu")


def _eager_reason(
    node: Node, device: torch.device, listed: set[str], verdicts: Mapping[Node, NodeVerdict]
) -> str | None:
    kind = kind_of(node)
    operands = [arg for arg in node.all_input_nodes if arg in verdicts and verdicts[arg].data_dependent]
    if kind in (Kind.PLACEHOLDER, Kind.CONSTANT, Kind.OUTPUT):
        return None
    if kind not in _WORK:
        return f"depends on {operands[0].name}, which only data decides" if operands else None
    reason = _operator_reason(node, device, listed)
    if reason is None and operands:
        reason = f"works on {operands[0].name}, whose value or size only data decides"
    return reason


def _operator_reason(node: Node, device: torch.device, listed: set[str]) -> str | None:
    name = operator_name(node)
    overload = schema_of(node)
    spellings = {name.replace("::", "."), str(node.target), f"{name.replace('::', '.')}.default"}
    if overload is not None:
        spellings.add(f"{overload._schema.name.replace('::', '.')}.{overload._overloadname}")
    if listed & spellings:
        return "listed in eager_ops"
    if isinstance(node.target, torch._ops.HigherOrderOperator) or control_flow_of(node) is not None:
        return "control flow is decided on the host"
    if overload is None and not isinstance(node.target, torch._ops.OpOverloadPacket) and _is_host_only(node):
        return "what it does, it does on the host"
    tags = overload.tags if overload is not None else []
    if torch.Tag.data_dependent_output in tags or is_symbolic_value(node.meta.get("val")):
        return "reads a number out of a tensor on the host"
    if torch.Tag.dynamic_output_shape in tags or free_unbacked_symbols(_sizes(node.meta.get("val"))):
        return "the size of its result depends on data"
    if torch.Tag.cudagraph_unsafe in tags:
        return "tagged as unsafe to capture (cudagraph_unsafe)"
    if communicates(node):
        return "a collective runs on the process group's own stream"
    if device.type != "cpu":
        devices = {d.type for arg in (node, *node.all_input_nodes) if (d := _tensor_device(arg)) is not None}
        if len(devices) > 1:
            return "moves data between host and device"
        if (own := device_of(node)) is not None and own.type == "cpu":
            return "works on the host"
    return None


def _is_host_only(node: Node) -> bool:
    """Whether no tensor goes into a call, and none comes out (``print``)."""
    values = [arg.meta.get("val") for arg in (node, *node.all_input_nodes)]
    return kind_of(node) is Kind.EXTERN and not any(
        isinstance(value, (torch.Tensor, tuple, list)) for value in values
    )


def _tensor_device(node: Node) -> torch.device | None:
    # A CPU scalar counts, too: an operator takes its value, which a device graph would keep.
    val = node.meta.get("val")
    return val.device if isinstance(val, torch.Tensor) else None


def _sizes(val: object) -> list[object]:
    values = val if isinstance(val, (tuple, list)) else (val,)
    found: list[object] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.extend(value.shape)
        elif is_symbolic_value(value):
            found.append(value)
    return found


def _is_data_dependent(node: Node, verdicts: Mapping[Node, NodeVerdict]) -> bool:
    """Whether a node's value (a number) or size (a tensor) is known only once data is."""
    val = node.meta.get("val")
    if is_symbolic_value(val):
        return True  # numbers of eager nodes come out of data, by the rules above
    if val is not None:
        return bool(free_unbacked_symbols(_sizes(val)))
    overload = schema_of(node)
    if overload is not None and {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(
        overload.tags
    ):
        return True
    if overload is not None and not overload._schema.returns:
        return False
    return any(verdicts[arg].data_dependent for arg in node.all_input_nodes if arg in verdicts)


def cut(
    dependencies: nx.DiGraph, verdicts: Mapping[Node, NodeVerdict], device: torch.device
) -> tuple[Partition, ...]:
    """Order the work and group it into partitions, with the fewest captured ones.

    One colour is drained before the other is touched, which for two colours gives as many groups as the longest
    chain of colour changes in the DAG has, the least possible; of the two colours to begin with, the better is
    taken. Inside a partition program order is kept.

    ::

        a(captured)  b(eager)  c(captured)      a, c, b  or  a, b, c      independent work is pulled
            |           |          |       ->   ------------------   ->   together: [a c] [b]
    """
    orders = [_drain(dependencies, verdicts, first) for first in (Verdict.CAPTURED, Verdict.EAGER)]
    best = min(orders, key=lambda groups: (sum(v is Verdict.CAPTURED for v, _ in groups), len(groups)))
    return tuple(
        _partition(index, verdict, tuple(nodes), verdicts, device) for index, (verdict, nodes) in enumerate(best)
    )


def _drain(
    dependencies: nx.DiGraph, verdicts: Mapping[Node, NodeVerdict], first: Verdict
) -> list[tuple[Verdict, list[Node]]]:
    order = {node: position for position, node in enumerate(dependencies.nodes)}
    nodes = list(order)
    waiting = {node: dependencies.in_degree(node) for node in nodes}
    ready: dict[Verdict | None, list[int]] = {None: [], Verdict.CAPTURED: [], Verdict.EAGER: []}

    def colour(node: Node) -> Verdict | None:
        # What is settled when recorded belongs to no partition.
        if is_work(node) or verdicts[node].verdict is Verdict.EAGER:
            return verdicts[node].verdict
        return None

    for node in nodes:
        if waiting[node] == 0:
            heapq.heappush(ready[colour(node)], order[node])
    groups: list[tuple[Verdict, list[Node]]] = []
    current = first
    while any(ready.values()):
        queue = ready[None] or ready[current]
        if not queue:
            current = Verdict.EAGER if current is Verdict.CAPTURED else Verdict.CAPTURED
            continue
        node = nodes[heapq.heappop(queue)]
        if colour(node) is not None:
            if not groups or groups[-1][0] is not current:
                groups.append((current, []))
            groups[-1][1].append(node)
        for successor in dependencies.successors(node):
            waiting[successor] -= 1
            if waiting[successor] == 0:
                heapq.heappush(ready[colour(successor)], order[successor])
    return groups


def _partition(
    index: int,
    verdict: Verdict,
    nodes: tuple[Node, ...],
    verdicts: Mapping[Node, NodeVerdict],
    device: torch.device,
) -> Partition:
    kinds = Counter(kind_of(node) for node in nodes)
    reasons: dict[str, None] = {}
    if verdict is Verdict.EAGER:
        for node in nodes:
            if is_work(node):
                where = user_line(node)
                text = f"{operator_name(node)}: {verdicts[node].reason}"
                reasons[f"{text} ({where})" if where else text] = None
    return Partition(
        index,
        verdict,
        nodes,
        "; ".join(reasons),
        device if verdict is Verdict.CAPTURED else torch.device("cpu"),
        kinds[Kind.LAUNCH],
        kinds[Kind.EXTERN],
    )
