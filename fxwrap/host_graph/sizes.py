"""Concrete sizes: evaluate a host graph's arithmetic for one set of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from .nodes import Kind, kind_of


def evaluate_sizes(gm: GraphModule, inputs: Mapping[Node, Any]) -> dict[Node, Any]:
    """Evaluate every symbolic node that depends on inputs only.

    Args:
        inputs: a placeholder's tensor or number, for every placeholder.

    Returns:
        Their values, and those of placeholders that are numbers. Data-dependent nodes are missing.
    """
    known_inputs = {node: number_of(value) for node, value in inputs.items()}
    symbol_values: dict[Node, Any] = {
        node: value
        for node, value in known_inputs.items()
        if value is not None and not isinstance(value, torch.Tensor)
    }
    for node in gm.graph.nodes:
        if kind_of(node) is not Kind.SYMBOLIC:
            continue
        known = {arg: symbol_values.get(arg, known_inputs.get(arg)) for arg in node.all_input_nodes}
        if all(value is not None for value in known.values()):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
            symbol_values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return symbol_values


def number_of(value: Any) -> Any:
    """An input itself; None for the ragged size of a jagged tensor, which only says whose structure it has."""
    return None if isinstance(value, torch.SymInt) else value


def concrete(value: Any, symbol_values: Mapping[Node, Any]) -> Any:
    """``value`` with its nodes replaced by their values; None when one is not known."""
    missing = False

    def look_up(node: Node) -> Any:
        nonlocal missing
        missing |= node not in symbol_values
        return symbol_values.get(node)

    result = torch.fx.map_arg(value, look_up)
    return None if missing else result


def symbols_at(symbol_values: Mapping[Node, Any]) -> dict[Any, int]:
    """The symbolic expressions that nodes stand for, with their values at concrete sizes.

    The ragged size of a jagged tensor is no number, only the same for tensors of one structure: it is missing.
    """
    known = ((node.meta.get("val"), number) for node, number in symbol_values.items() if type(number) is int)
    return {val.node.expr: sympy.Integer(number) for val, number in known if isinstance(val, torch.SymInt)}


def number_at(value: Any, symbols: Mapping[Any, int]) -> int | None:
    """A size at concrete sizes; None if they do not tell."""
    if isinstance(value, int):
        return value
    found = value.node.expr.xreplace(symbols)
    return int(found) if found.is_Integer else None


def hint(number: Any) -> int | None:
    """The size that a symbolic one had when the program was compiled; None for a data-dependent one."""
    if isinstance(number, int):
        return number
    try:
        found = number.node.hint
    except Exception:
        return None
    return int(found) if found is not None else None


def hinted_layout(value: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Size and stride that a fake tensor had when the program was compiled; None if one is data-dependent,
    and for what is no strided tensor."""
    return _layout(value, hint)


def layout_at(value: Any, symbols: Mapping[Any, int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Size and stride of a fake tensor at concrete sizes; None if these do not tell, and for no strided tensor."""
    return _layout(value, lambda number: number_at(number, symbols))


def _layout(value: Any, number: Callable[[Any], int | None]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    size, stride = (tuple(number(n) for n in each) for each in (value.size(), value.stride()))
    return None if None in size or None in stride else (size, stride)  # type: ignore[return-value]


def storage_bytes(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes a strided tensor reaches from its first element on."""
    if 0 in size:
        return 0
    elements = 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    return elements * dtype.itemsize
