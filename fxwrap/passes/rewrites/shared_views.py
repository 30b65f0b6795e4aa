"""Rewrite: makes each view once, and none where its base serves as well."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from ...host_graph.nodes import Kind, kernel_of, kind_of, only_computes, reinterpret


def share_views(gm: GraphModule) -> GraphModule:
    """Remove views that are made twice, and those that only kernels of the CPU read, in place.

    ::

        v = reinterpret(buf0, (16,), (1,), 0)
        w = reinterpret(v, (4, 4), (4, 1), 0)           # buf0 is (4, 4)
        launch(kernel, v, buf1)                         launch(kernel, buf0, buf1)
        mm(w, w, out=buf2)                        ->    mm(buf0, buf0, out=buf2)
        u = reinterpret(buf2, (16,), (1,), 0)           u = reinterpret(buf2, (16,), (1,), 0)
        aten.add(u, u, out=buf3)                        aten.add(u, u, out=buf3)
        return reinterpret(buf2, (16,), (1,), 0)        return u

    A view stays where its tensor object may be kept or changed: the caller gets an object that nothing else has, and
    so do operators that are not torch's.
    """
    first_of: dict[Any, Node] = {}
    for node in list(gm.graph.nodes):
        if node.target is reinterpret:
            _count_from_the_buffer(node)
            base, size, stride, offset = node.args
            first = first_of.setdefault((base, tuple(size), tuple(stride), offset), node)
            if first is not node and _may_share(first, node):
                node.replace_all_uses_with(first)
            elif _has_layout(base, size, stride, offset) and not _is_returned(node) and _others_compute(node):
                node.replace_all_uses_with(base)
        elif (kernel := kernel_of(node)) is not None and kernel.language == "cpp" and kernel.device.type == "cpu":
            # Such a kernel takes only the address of a tensor.
            node.args = (node.args[0], *(_base_at_same_address(arg) for arg in node.args[1:]))
    for node in reversed(gm.graph.nodes):
        if node.target is reinterpret and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


def _count_from_the_buffer(node: Node) -> None:
    """Make a view of a view a view of the latter's base."""
    base, size, stride, offset = node.args
    if isinstance(base, Node) and base.target is reinterpret and isinstance(offset, int):
        further, _, _, before = base.args
        if isinstance(before, int):
            node.args = (further, size, stride, before + offset)


def _is_allocated(base: Any) -> bool:
    return isinstance(base, Node) and kind_of(base) is Kind.ALLOCATION


def _has_layout(base: Any, size: Any, stride: Any, offset: Any) -> bool:
    return _is_allocated(base) and offset == 0 and (tuple(size), tuple(stride)) == tuple(map(tuple, base.args[:2]))


def _may_share(first: Node, second: Node) -> bool:
    returned = _is_returned(first) + _is_returned(second)
    # The caller may get a view of what the call allocates; one of an input may exist before the call.
    unshared = not returned or (returned == 1 and _is_allocated(first.args[0]))
    return unshared and _others_compute(first) and _others_compute(second)


def _is_returned(view: Node) -> bool:
    return any(user.op == "output" for user in view.users)


def _others_compute(view: Node) -> bool:
    return all(user.op == "output" or only_computes(user) for user in view.users)


def _base_at_same_address(value: Any) -> Any:
    while isinstance(value, Node) and value.target is reinterpret and value.args[3] == 0:
        value = value.args[0]
    return value
