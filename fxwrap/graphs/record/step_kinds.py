"""What of a node decides which kind of step runs it."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from ...host_graph.arithmetic import is_arithmetic
from ...host_graph.nodes import check, checks_alignment, checks_layout, require, schema_of
from ..replay import steps
from ..replay.operands import LITERALS

# The options of an allocation, besides size and stride.
OPTIONS = {"dtype", "device", "pin_memory"}


def only_elements_used(node: Node) -> bool:
    """Whether a node returns a tuple of which only elements are used."""
    elements = all(user.target is operator.getitem and type(user.args[1]) is int for user in node.users)
    return elements and isinstance(node.meta.get("val"), (tuple, list))


def is_default(node: Node, name: str, value: Any) -> bool:
    """Whether a keyword argument has its default value. It is left out, because parsing it costs time."""
    overload = schema_of(node)
    if overload is None or type(value) not in (*LITERALS, float):
        return False
    for argument in overload._schema.arguments:
        if argument.name == name and argument.kwarg_only and argument.has_default_value():
            return type(argument.default_value) is type(value) and argument.default_value == value
    return False


def kind_of_call(node: Node) -> type[steps.CallPython]:
    """The kind of call of a node that calls no operator."""
    if node.kwargs:
        return steps.CallPython
    if is_arithmetic(node.target):
        return steps.Arithmetic
    if checks_layout(node):
        return steps.CheckLayout
    if checks_alignment(node):
        return steps.CheckAlignment
    return steps.CheckCondition if node.target in (check, require) else steps.CallPython
