"""JUDGE: decides for every node of a host graph whether it can be captured.

A rule is one entry in a table below: a reason against capture, when it holds, and what the user can change.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...eager_rules import EagerRule, as_rules
from ...host_graph.control_flow import ControlFlow, control_flow_of, switch, unchanged
from ...host_graph.nodes import (
    Kind,
    communicates,
    device_of,
    draws_numbers,
    is_symbolic_value,
    is_work,
    kind_of,
    operator_name,
    output_values,
    schema_of,
)
from ...host_graph.sizes import expression
from ...plan import NodeVerdict, Verdict
from ..analysis.aliasing import analyse_storages
from .host_counters import host_counters

_CAPTURED = NodeVerdict(Verdict.CAPTURED, "")
_FOLDED = NodeVerdict(Verdict.CAPTURED, "evaluated when recorded")


def judge(
    gm: GraphModule,
    eager_ops: Sequence[str | EagerRule] = (),
    capture_errors: Mapping[str, str] | None = None,
    conditional_nodes: bool = False,
) -> dict[str, NodeVerdict]:
    """Give every node a verdict.

    Args:
        eager_ops: operators and rules of the user and of the device; they apply before the general rules.
        capture_errors: how captures have failed, by name of the operator or kernel.
        conditional_nodes: whether branches and loops become nodes of the device graph, with what is inside of them.
    """
    device = main_device(gm)
    rules = (*as_rules(eager_ops), *_EVERYWHERE, *(_ON_ACCELERATORS if device.type != "cpu" else ()))
    applicable = [rule for rule in rules if not rule.devices or device.type in rule.devices]
    return _judge(gm, applicable, capture_errors or {}, conditional_nodes)


def _judge(
    gm: GraphModule,
    rules: Sequence[EagerRule],
    capture_errors: Mapping[str, str],
    conditional_nodes: bool,
    known: Container[Node] = (),
) -> dict[str, NodeVerdict]:
    """``known``: nodes that the host computes without data (``host_counters``)."""
    verdicts: dict[str, NodeVerdict] = {}
    for node in gm.graph.nodes:
        if node in known or kind_of(node) in (Kind.PLACEHOLDER, Kind.CONSTANT, Kind.OUTPUT):
            verdicts[node.name] = _FOLDED
            continue
        flow = control_flow_of(node) if conditional_nodes else None
        counters = host_counters(node) if flow is not None else None
        direct = _cause(node, rules, capture_errors) if is_work(node) and counters is None else None
        if direct is None and flow is not None:
            inside = counters or [set()] * len(flow.subgraphs)
            direct = _decided_on_the_host(node, flow) if counters is None else None
            bodies = [
                _judge(body, rules, capture_errors, conditional_nodes, one)
                for body, one in zip(flow.subgraphs, inside, strict=True)
            ]
            direct = direct or _cause_inside(flow, bodies)
        cause = direct or _inherited(node, verdicts)
        if cause is None:
            verdicts[node.name] = _CAPTURED if is_work(node) else _FOLDED
        else:
            dependent = _is_data_dependent(node, verdicts)
            verdicts[node.name] = NodeVerdict(Verdict.EAGER, cause[0], dependent, cause[1], inherited=direct is None)
    return verdicts


def main_device(gm: GraphModule) -> torch.device:
    """The device whose graphs capture the program: the accelerator if any node works there, else the CPU."""
    for node in gm.graph.nodes:
        device = device_of(node)
        if device is not None and device.type not in ("cpu", "meta"):
            return device
    return torch.device("cpu")


def _cause(node: Node, rules: Sequence[EagerRule], capture_errors: Mapping[str, str]) -> tuple[str, str] | None:
    """The reason for which work cannot be captured by itself, and its remedy; None if there is none."""
    for rule in rules:
        if (reason := rule.why(node)) is not None:
            return reason, rule.remedy
    if capture_errors and (failure := capture_errors.get(operator_name(node))) is not None:
        return f"a capture failed at it: {failure}", "what the failure says; naming it in eager_ops saves the attempt"
    return None


def _inherited(node: Node, verdicts: Mapping[str, NodeVerdict]) -> tuple[str, str] | None:
    """The reason for which a node cannot be captured because of its operands, and its remedy."""
    source = next((arg for arg in node.all_input_nodes if verdicts[arg.name].data_dependent), None)
    if source is None:
        return None
    if is_work(node):
        return f"works on {source.name}, whose value or size is data-dependent", f"see {source.name}"
    return f"depends on {source.name}, which is data-dependent", f"see {source.name}"


# -- branches and loops as nodes of a device graph ------------------------------------------------------------


def _decided_on_the_host(node: Node, flow: ControlFlow) -> tuple[str, str] | None:
    """Why no node of a device graph can decide what a branch or a loop runs; None if one can."""
    decides = [node.args[0]] if node.target is switch else output_values(flow.subgraphs[0])
    if not all(_is_tensor(value) for value in decides):
        return "a number decides, which the host knows", "a tensor on the device"
    carried = flow.operands[: len(node.meta["val"])] if flow.repeats else ()
    if not all(map(_is_tensor, carried)) or not all(isinstance(value, torch.Tensor) for value in node.meta["val"]):
        return "it carries or returns a number, which the host computes", "a tensor on the device"
    if flow.repeats and _writes_what_it_carries(flow):
        return "it writes in place what it carries to the next iteration", "a new tensor in each iteration"
    return None


def _writes_what_it_carries(flow: ControlFlow) -> bool:
    """Whether a loop writes to what it was given, and carries on something else: the first iteration alone writes."""
    changing = set(range(len(output_values(flow.subgraphs[1])))) - unchanged(flow)
    for gm in flow.subgraphs:
        facts, inputs = analyse_storages(gm), gm.graph.find_nodes(op="placeholder")
        if facts.behind(inputs[position] for position in changing) & facts.all_written():
            return True
    return False


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _cause_inside(flow: ControlFlow, bodies: Iterable[Mapping[str, NodeVerdict]]) -> tuple[str, str] | None:
    """Why something in a branch or a loop cannot be captured, and its remedy; None if all can be."""
    for gm, verdicts in zip(flow.subgraphs, bodies, strict=True):
        for node in gm.graph.nodes:
            verdict = verdicts[node.name]
            if is_work(node) and verdict.verdict is Verdict.EAGER:
                return f"{operator_name(node)}, inside of it: {verdict.reason}", verdict.remedy
            if draws_numbers(node):
                # A graph draws the same at each run of a body, and as much for a branch that does not run.
                return f"{operator_name(node)}, inside of it, draws random numbers", "numbers drawn before it"
    return None


# -- general rules ------------------------------------------------------------------------------------------


def _calls_unknown_subgraphs(node: Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _decides(node: Node) -> bool:
    return control_flow_of(node) is not None


def _communicates(node: Node) -> bool:
    """Whether a call, or one in its branches or its loop, works with other processes."""
    flow = control_flow_of(node)
    inner = [one for gm in flow.subgraphs for one in gm.graph.nodes] if flow is not None else ()
    return communicates(node) or any(is_work(one) and _communicates(one) for one in inner)


def _is_host_only(node: Node) -> bool:
    """Whether no tensor goes into a call, and none comes out (``print``)."""
    if kind_of(node) is not Kind.EXTERN or schema_of(node) is not None:
        return False
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return False
    values = [arg.meta.get("val") for arg in (node, *node.all_input_nodes)]
    return not any(isinstance(value, (torch.Tensor, tuple, list)) for value in values)


def _reads_a_number(node: Node) -> bool:
    return is_symbolic_value(node.meta.get("val"))


def _has_a_size_of_data(node: Node) -> bool:
    return "of_data" in node.meta or _depends_on_data(node)


def _moves_data(node: Node) -> bool:
    return len({d.type for arg in (node, *node.all_input_nodes) if (d := _tensor_device(arg)) is not None}) > 1


def _works_on_the_host(node: Node) -> bool:
    device = device_of(node)
    return device is not None and device.type == "cpu"


def _selects_by_mask(node: Node) -> bool:
    """Indexing with booleans counts them first, and waits for the number."""
    if not operator_name(node).startswith(("aten::index", "aten::_index", "aten::_unsafe_index")):
        return False
    values = [arg.meta.get("val") for arg in node.all_input_nodes]
    return any(isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8) for value in values[1:])


def _has_no_address(node: Node) -> bool:
    values = [arg.meta.get("val") for arg in (node, *node.all_input_nodes)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return any(tensor.layout is not torch.strided or tensor.device.type == "meta" for tensor in tensors)


# Rules for all devices: what no device graph can hold.
_EVERYWHERE = (
    EagerRule(
        "control flow that fxwrap does not know is decided on the host",
        predicate=_calls_unknown_subgraphs,
        remedy="torch.where over both results, where both may be computed",
    ),
    EagerRule("what it does, it does on the host", predicate=_is_host_only, remedy="leave it out"),
    EagerRule(
        "reads a number out of a tensor on the host",
        tags=(torch.Tag.data_dependent_output,),
        predicate=_reads_a_number,
        remedy="keep the number in a tensor: no .item(), int() or float(); compare with tensors, torch.where",
    ),
    EagerRule(
        "its result's size is data-dependent",
        tags=(torch.Tag.dynamic_output_shape,),
        predicate=_has_a_size_of_data,
        remedy="a result of fixed size: a mask with torch.where or masked_fill, or torch.nonzero_static",
    ),
    EagerRule(
        "tagged as unsafe to capture (cudagraph_unsafe)",
        tags=(torch.Tag.cudagraph_unsafe,),
        remedy="an operator that never waits for the host, registered without the tag",
    ),
    EagerRule(
        "a collective runs on the process group's own stream",
        predicate=_communicates,
        remedy="nothing: replays go on on either side of it",
    ),
)
# A rule for device graphs without conditional nodes.
DECIDED_ON_HOST = EagerRule(
    "control flow is decided on the host",
    predicate=_decides,
    remedy="torch.where over both results, where both may be computed",
)
# Rules for device graphs that keep the addresses that they were captured with.
FROZEN_ADDRESS_RULES = (
    EagerRule(
        "works on a tensor without memory of its own: sparse, or on the meta device",
        predicate=_has_no_address,
        remedy="dense tensors on the device",
    ),
)
_ON_ACCELERATORS = (
    EagerRule(
        "moves data between host and device",
        predicate=_moves_data,
        remedy="make the tensor on the device, or move it before the compiled region",
    ),
    EagerRule(
        "works on the host",
        predicate=_works_on_the_host,
        remedy="move its tensors to the device, before the compiled region",
    ),
    EagerRule(
        "counts a mask on the host",
        predicate=_selects_by_mask,
        remedy="torch.where or masked_fill instead of indexing with a mask",
    ),
)


def _tensor_device(node: Node) -> torch.device | None:
    # A CPU scalar counts, too: a device graph would keep the value that the operator read.
    val = node.meta.get("val")
    return val.device if isinstance(val, torch.Tensor) else None


def _sizes(val: Any) -> list[Any]:
    values = val if isinstance(val, (tuple, list)) else (val,)
    sizes: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            sizes.extend(size for size in value.shape if not isinstance(size, int))
        elif is_symbolic_value(value):
            sizes.append(value)
    return sizes


def _depends_on_data(node: Node) -> bool:
    """Whether a number, or the size of a tensor, is known only when data are: no input of the program carries it."""
    unknown = {str(symbol) for symbol in free_unbacked_symbols(_sizes(node.meta.get("val")))}
    return bool(unknown) and not unknown <= _carried_by_inputs(node.graph)


def _carried_by_inputs(graph: Graph) -> set[str]:
    """The numbers and sizes that inputs are or have, by symbol."""
    inputs = graph.find_nodes(op="placeholder")
    sizes = (user for node in inputs for user in node.users if user.target is torch.ops.aten.sym_size.int)
    return {str(expression(node.meta.get("val"))) for node in (*inputs, *sizes)}


def _is_data_dependent(node: Node, verdicts: Mapping[str, NodeVerdict]) -> bool:
    """Whether the value of a number, or the size of a tensor, depends on data."""
    val = node.meta.get("val")
    if is_symbolic_value(val):
        return True  # numbers of eager nodes come out of data, by the rules above
    if val is not None:
        return _depends_on_data(node)
    overload = schema_of(node)
    if overload is not None and {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(
        overload.tags
    ):
        return True
    if overload is not None and not overload._schema.returns:
        return False
    return any(verdicts[arg.name].data_dependent for arg in node.all_input_nodes)
