"""Which inputs a traced graph uses outside of the tensor, found out on the graph that Inductor lowers.

``as_strided`` looks at a storage through a window of its own. Inductor compiles it into a kernel, which then reads or
writes elements before or behind the input, or between its elements. Nothing in the host graph shows that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...host_graph.nodes import nodes_in
from .aliasing import bound_arguments

_Inputs = frozenset[Node]


def used_outside(gm: GraphModule, from_storage: bool) -> dict[int, str]:
    """The inputs of which more than the tensor may be used, by position, with the operator that does so.

    A window lies outside unless it is known to lie inside at all sizes.

    Args:
        from_storage: whether Inductor counts an offset from the start of an input's storage, as torch does; else it
            counts from the input's first element.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    viewed: dict[Node, _Inputs] = {node: _Inputs({node}) for node in inputs}
    outside: dict[Node, str] = {}

    def behind(value: Any) -> _Inputs:
        return _Inputs().union(*(viewed.get(node, ()) for node in nodes_in(value)))

    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            schema = node.target._schema
            arguments = list(bound_arguments(schema, node))
            viewed[node] = behind([value for argument, value in arguments if argument.alias_info is not None])
            if schema.name.startswith("aten::as_strided"):
                window = {argument.name: value for argument, value in arguments}
                reached = (seen for seen in behind(window["self"]) if not _lies_inside(window, seen, from_storage))
                outside.update(dict.fromkeys(reached, schema.name))
        elif node.target is operator.getitem:
            viewed[node] = behind(node.args[0])
        for subgraph in _subgraphs(node):
            # In which position it gets an input is not looked up.
            for name in used_outside(subgraph, from_storage).values():
                outside.update(dict.fromkeys(behind(node.args), name))
    return {position: outside[node] for position, node in enumerate(inputs) if node in outside}


def _subgraphs(node: Node) -> Iterator[GraphModule]:
    for operand in nodes_in(node.args) if isinstance(node.target, torch._ops.HigherOrderOperator) else ():
        if operand.op == "get_attr":
            value = operator.attrgetter(str(operand.target))(node.graph.owning_module)
            if isinstance(value, GraphModule):
                yield value


def _lies_inside(window: dict[str, Any], seen: Node, from_storage: bool) -> bool:
    """Whether a call of ``as_strided`` is known to look at no byte outside of an input that its operand views."""
    operand, whole = window["self"].meta.get("val"), seen.meta.get("val")
    if not isinstance(operand, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return False
    size, stride, offset = torch.fx.map_arg(
        (window["size"], window["stride"], window.get("storage_offset")), lambda node: node.meta["val"]
    )
    first = operand.storage_offset() if offset is None else offset
    start = whole.storage_offset() if from_storage or offset is None else 0
    before = first * operand.itemsize - start * whole.itemsize
    reached, there = _reach(operand, size, stride), _reach(whole, whole.size(), whole.stride())
    inside = before >= 0, before + reached <= there
    if statically_known_true(reached == 0):
        return True
    return all(map(statically_known_true, inside)) and (_is_dense(whole) or _is_itself(before, size, stride, whole))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known to have each element from its first to its last; it may repeat them."""
    dims = [dim for dim in zip(tensor.size(), tensor.stride(), strict=True) if not statically_known_true(dim[1] == 0)]
    extent: Any = 1  # of the dimensions that were found
    while dims:
        found = next(
            (d for d in dims if statically_known_true(d[1] == extent) or statically_known_true(d[0] == 1)), None
        )
        if found is None:
            return False
        dims = [dim for dim in dims if dim is not found]  # to compare sizes would make guards of them
        extent = extent * found[0]
    return True


def _is_itself(before: Any, size: Any, stride: Any, whole: torch.Tensor) -> bool:
    layout = (before, *size, *stride), (0, *whole.size(), *whole.stride())
    return len(layout[0]) == len(layout[1]) and all(
        statically_known_true(a == b) for a, b in zip(*layout, strict=True)
    )


def _reach(tensor: torch.Tensor, size: Any, stride: Any) -> Any:
    """The bytes from the start of its first element to the end of its last that a tensor of this layout has."""
    if any(statically_known_true(extent == 0) for extent in size):
        return 0
    return (1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))) * tensor.itemsize
