"""Scalars that live on the host: copied to the device once, instead of being read by every kernel that uses them."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node


def copy_host_scalars(gm: GraphModule) -> None:
    """Give elementwise work on an accelerator copies of the host scalars that it takes, in place.

    A kernel that takes a CPU scalar gets its value with the launch, which a device graph would keep; so each of them
    would have to run eagerly. Copies stand before all of them, and everything after them can be captured.

    ::

        step = aten.mul(schedule, 0.9)                   step = aten.mul(schedule, 0.9)
        y = aten.mul(x, step)                   ->       on_device = prims.device_put(step, "cuda:0")
        z = aten.mul(y, step)                            y = aten.mul(x, on_device); z = aten.mul(y, on_device)

    ``gm`` is a graph of AOTAutograd, in which nothing is written but inputs, at the very end.
    """
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
                    copy = gm.graph.call_function(torch.ops.prims.device_put.default, (operand, device))
                copy.meta["val"] = operand.meta["val"].to(device)
                if "stack_trace" in node.meta:
                    copy.meta["stack_trace"] = node.meta["stack_trace"]
                copies[operand, device] = copy
            node.replace_input_with(operand, copies[operand, device])
    if copies:
        gm.recompile()


def _accelerator_of(node: Node) -> torch.device | None:
    """The device of elementwise work on an accelerator."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return None
    val = node.meta.get("val")
    return val.device if isinstance(val, torch.Tensor) and val.device.type not in ("cpu", "meta") else None


def _is_host_scalar(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.device.type == "cpu" and val.dim() == 0
