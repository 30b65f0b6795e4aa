"""Emission for devices without a kernel compiler: every operation is a call of the device's own operators."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch._inductor import config
from torch._inductor.scheduler import BaseScheduling
from torch.fx import GraphModule

from ...errors import DeviceError

# Settings with which Inductor emits the operators that eager mode calls, in the same order. Operators are not
# decomposed, since no kernel would fuse the parts; no pattern is replaced; random numbers are drawn by the operators
# that eager mode draws them with. Inductor's passes that make updates in place stay on.
LIBRARY_CALLS = {
    "fallback_by_default": True,
    "selective_decompose": True,
    "use_pre_grad_passes": False,
    "use_joint_graph_passes": False,
    "pattern_matcher": False,
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "layout_optimization": False,
    "always_keep_tensor_constants": True,
}
# Operators that Inductor evaluates on the host. Its Python has no calls of them; older torch fails to make some.
_ON_THE_HOST = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_storage_offset.default,
)


def prepare(gm: GraphModule) -> bool:
    """Rewrite a graph, in place, so that it is lowered to calls only, where a device is registered so.

    Returns:
        Whether it may have changed.
    """
    if not config.fallback_by_default:
        return False
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.aten.lift_fresh_copy.default:  # Inductor would make a kernel
            node.target = torch.ops.aten.lift_fresh.default
            with gm.graph.inserting_after(node):
                copy = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy)
            copy.args = (node,)
        elif node.target is torch.ops.aten._unsafe_view.default:  # returns a view that its schema does not declare
            node.target = torch.ops.aten.reshape.default
        elif node.target in _ON_THE_HOST:
            node.meta["custom"] = {**(node.meta.get("custom") or {}), "compile_with_inductor": True}
    return True


class LibraryCalls(BaseScheduling):
    """Inductor's scheduling on a device without kernels. An operation that needs one is an error."""

    def can_fuse_vertical(self, node1: Any, node2: Any) -> bool:
        return False

    can_fuse_horizontal = can_fuse_vertical

    def group_fn(self, sizes: Any) -> Any:
        return tuple(map(tuple, sizes))

    def codegen_node(self, node: Any) -> NoReturn:
        origins = [origin for part in node.get_nodes() for origin in part.node.get_origins()]
        names = dict.fromkeys(str(origin.target) for origin in origins if origin.op == "call_function")
        raise DeviceError(
            f"{node.get_device()} has no kernels, and {', '.join(names) or 'an operation'} needs one",
            expected="operations that are calls of operators: the device is registered with scheduling='none'",
            remedy="keep this code out of the compiled region (torch.compiler.disable), or register a scheduling",
        )

    def ready_to_flush(self) -> bool:
        return False

    def codegen_sync(self) -> None:
        """Do nothing: no other work runs beside the calls."""

    def flush(self) -> None:
        """Do nothing: no code is buffered."""
