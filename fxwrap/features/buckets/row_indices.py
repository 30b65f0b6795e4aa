"""Whether an index of a row is valid for rows of padding, too."""

from __future__ import annotations

import operator
from typing import Any

import sympy
from torch.fx import Node

from ...host_graph.sizes import expression
from .row_calls import OperatorCall, RowsMixed, arguments_of, operator_of


def check_indices(call: OperatorCall, node: Any, size: Any) -> None:
    """Check that rows of padding hold valid indices, below ``size``.

    A row of padding computes what the caller's row does that it is a copy of, as far as its number has no part in it.

    Raises:
        RowsMixed: the number of a row has a part in the indices, and may take them out of range.
    """
    if node in call.numbered and not _is_below(node, size):
        raise RowsMixed("uses indices that a row's number decides, which may be out of range for rows of padding")


def _is_below(node: Any, size: Any) -> bool:
    """Whether indices are below a size whatever the numbers are that they are computed from."""
    if not isinstance(node, Node):
        return isinstance(node, int) and _at_most(node + 1, size) and node >= 0
    name, operands = operator_of(node), node.args
    if node.target is _GETITEM:
        node, item = operands  # type: ignore[assignment]
        name, operands = operator_of(node), node.args
        if item == 1 and name in _RETURNS_INDICES:
            return _at_most(_places(node), size)
    if name in ("aten::argmax", "aten::argmin"):
        return _at_most(_places(node), size)
    if name == "aten::full":
        return _is_below(operands[1], size)
    if name == "aten::where":
        return all(_is_below(branch, size) for branch in operands[1:])
    return name in _KEEPS_VALUES and all(_is_below(operand, size) for operand in node.all_input_nodes)


def _places(node: Node) -> Any:
    """The size of the dimension in which an operator looks for an element, whose place it returns."""
    arguments = arguments_of(node)
    return arguments["self"].meta["val"].size(arguments["dim"])


def _at_most(size: Any, limit: Any) -> bool:
    return bool(sympy.sympify(expression(limit) - expression(size)).is_nonnegative)


_GETITEM: Any = operator.getitem
# Operators whose second result is indices.
_RETURNS_INDICES = {
    "aten::topk",
    "aten::sort",
    "aten::max",
    "aten::min",
    "aten::median",
    "aten::mode",
    "aten::kthvalue",
}
_KEEPS_VALUES = {
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "slice",
        "select", "clone", "alias", "_to_copy", "cat", "split", "split_with_sizes", "unbind",
    )
} | {"prims::convert_element_type", "prims::device_put"}  # fmt: skip
