"""Prints host graphs as text, one short line for each node."""

from __future__ import annotations

import textwrap
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .nodes import Kind, kind_of
from .user_code import shown_name


def list_graph(gm: GraphModule, checks: bool = False) -> str:
    """The text of a host graph: allocations, launches, calls, views, arithmetic; also of branches and loop bodies.

    Args:
        checks: also list the asserts.
    """
    lines = []
    for node in gm.graph.nodes:
        kind = kind_of(node)
        if kind is Kind.CHECK and not checks:
            continue
        line = _line(node, kind, checks)
        if line:
            lines.append(line)
    return "\n".join(lines)


def line_of(node: Node) -> str:
    """The line that lists one node."""
    return _line(node, kind_of(node), True)


def _line(node: Node, kind: Kind, checks: bool) -> str:
    if kind is Kind.PLACEHOLDER:
        shown, other = shown_name(node), str(node.meta.get("user_name", ""))
        other = node.name if node.name != shown else other
        return f"{shown}: {_type_of(node.meta.get('val'))}" + (f" ({other})" if other else "")
    if kind is Kind.CONSTANT:
        # A kernel has no line: the launches name it.
        value = getattr(node.graph.owning_module, str(node.target).split(".")[0], None)
        if isinstance(value, GraphModule):
            return f"{node.name} = graph\n{textwrap.indent(list_graph(value, checks), '    ')}"
        return f"{node.name} = constant {_type_of(value)}" if isinstance(value, torch.Tensor) else ""
    if kind is Kind.OUTPUT:
        return f"return {_value(node.args[0])}"
    if kind is Kind.ALLOCATION:
        size, stride = node.args
        dtype, device = _value(node.kwargs["dtype"]), node.kwargs["device"]
        return f"{node.name} = allocate {_value(size)}, strides {_value(stride)}, {dtype}, {device}"
    if kind is Kind.LAUNCH:
        kernel, *args = node.args
        return f"launch {_value(kernel)}({', '.join(map(_value, args))})"
    args_text = [_value(arg) for arg in node.args]
    args_text += [f"{name}={_value(value)}" for name, value in node.kwargs.items()]
    text = f"{_target(node.target)}({', '.join(args_text)})"
    return f"{node.name} = {text}" if node.users else text


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return getattr(target, "__name__", str(target))


def _value(value: Any) -> str:
    if isinstance(value, Node):
        return shown_name(value)
    if isinstance(value, (tuple, list)):
        items = ", ".join(map(_value, value))
        if isinstance(value, list):
            return f"[{items}]"
        return f"({items}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        return f"{_value(value.dtype)}[{sizes}] on {value.device}"
    if isinstance(value, (int, torch.SymInt)):
        return "int"
    return "unknown" if value is None else type(value).__name__
