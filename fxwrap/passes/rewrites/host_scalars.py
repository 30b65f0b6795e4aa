"""Rewrite: copies scalars on the host to the device once, so that kernels which use them can be captured."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node


def copy_host_scalars(gm: GraphModule) -> bool:
    """Replace host scalars that elementwise work on an accelerator takes by copies on the device, in place.

    A kernel that takes a CPU scalar gets its value with the launch, and a device graph would keep that value. So each
    such kernel would run eagerly. With the copies in front of them, all of them can be captured.

    ::

        step = aten.mul(schedule, 0.9)                   step = aten.mul(schedule, 0.9)
        y = aten.mul(x, step)                   ->       on_device = prims.device_put(step, "cuda:0")
        z = aten.mul(y, step)                            y = aten.mul(x, on_device); z = aten.mul(y, on_device)

    ``gm`` is a graph of AOTAutograd: it writes to nothing except inputs, at its end.

    Returns:
        Whether anything is copied.
    """
    constant = _constant_nodes(gm)
    copies: dict[tuple[Node, torch.device], Node] = {}
    for node in list(gm.graph.nodes):
        device = _accelerator_of(node)
        if device is None:
            continue
        for operand in node.all_input_nodes:
            if not _is_host_scalar(operand):
                continue
            if (operand, device) not in copies:
                # Placeholders stay together, in front.
                with gm.graph.inserting_before(node):
                    copies[operand, device] = _copy(
                        operand, device, operand in constant, node.meta.get("stack_trace")
                    )
            node.replace_input_with(operand, copies[operand, device])
    if copies:
        gm.recompile()
    return bool(copies)


def _copy(operand: Node, device: torch.device, is_constant: bool, stack_trace: str | None) -> Node:
    """A node that copies a scalar to a device.

    Where a value is made of constants alone, Inductor has its loops run on the device in place of a copy, which it
    can do with elementwise work, and not with a reduction. Of a view it copies what the reduction has written.
    """
    graph, source = operand.graph, operand
    steps: list[tuple[Any, Any]] = [(torch.ops.prims.device_put.default, device)]
    if is_constant:
        steps = [(torch.ops.aten.reshape.default, [1]), *steps, (torch.ops.aten.reshape.default, [])]
    for function, argument in steps:
        previous, source = source, graph.call_function(function, (source, argument))
        val = previous.meta["val"]
        source.meta["val"] = val.to(device) if argument is device else val.reshape(argument)
        if stack_trace is not None:
            source.meta["stack_trace"] = stack_trace
    return source


def _constant_nodes(gm: GraphModule) -> set[Node]:
    """The nodes whose values come from no input."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op != "placeholder" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _accelerator_of(node: Node) -> torch.device | None:
    """The device of elementwise work on an accelerator."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return None
    val = node.meta.get("val")
    return val.device if isinstance(val, torch.Tensor) and val.device.type not in ("cpu", "meta") else None


def _is_host_scalar(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.device.type == "cpu" and val.dim() == 0
