"""Rewrite: copies scalars on the host to the device once, so that kernels which use them can be captured."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node


def copy_host_scalars(gm: GraphModule) -> None:
    """Replace host scalars that elementwise work on an accelerator takes by copies on the device, in place.

    A kernel that takes a CPU scalar gets its value with the launch, and a device graph would keep that value. So each
    such kernel would run eagerly. With the copies in front of them, all of them can be captured.

    ::

        step = aten.mul(schedule, 0.9)                   step = aten.mul(schedule, 0.9)
        y = aten.mul(x, step)                   ->       on_device = prims.device_put(step, "cuda:0")
        z = aten.mul(y, step)                            y = aten.mul(x, on_device); z = aten.mul(y, on_device)

    ``gm`` is a graph of AOTAutograd: it writes to nothing except inputs, at its end.
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
