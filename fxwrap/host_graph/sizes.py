"""Evaluates a host graph's symbolic sizes for one set of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from .nodes import Kind, kind_of


def evaluate_sizes(gm: GraphModule, inputs: Mapping[Node, Any]) -> dict[Node, Any]:
    """Evaluate every symbolic node that depends on inputs only.

    Args:
        inputs: the tensor or number of every placeholder.

    Returns:
        The values of these nodes, and of placeholders that are numbers. Data-dependent nodes are missing.
    """
    input_values = {node: number_of(value) for node, value in inputs.items()}
    symbol_values: dict[Node, Any] = {
        node: value
        for node, value in input_values.items()
        if value is not None and not isinstance(value, torch.Tensor)
    }
    for node in gm.graph.nodes:
        if kind_of(node) is not Kind.SYMBOLIC:
            continue
        operands = {arg: symbol_values.get(arg, input_values.get(arg)) for arg in node.all_input_nodes}
        if all(value is not None for value in operands.values()):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operands.__getitem__)
            symbol_values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return symbol_values


def number_of(value: Any) -> Any:
    """An input itself; None for the ragged size of a jagged tensor, which identifies a structure and is no number."""
    return None if isinstance(value, torch.SymInt) else value


def concrete(value: Any, symbol_values: Mapping[Node, Any]) -> Any:
    """``value`` with its nodes replaced by their values; None if one of these is missing."""
    missing = False

    def look_up(node: Node) -> Any:
        nonlocal missing
        missing |= node not in symbol_values
        return symbol_values.get(node)

    result = torch.fx.map_arg(value, look_up)
    return None if missing else result


def symbols_at(symbol_values: Mapping[Node, Any]) -> dict[Any, int]:
    """The values of the nodes' symbolic expressions at concrete sizes.

    The ragged size of a jagged tensor is missing: it is no number, but the same object for tensors of one structure.
    """
    integers = ((node.meta.get("val"), number) for node, number in symbol_values.items() if type(number) is int)
    return {val.node.expr: sympy.Integer(number) for val, number in integers if isinstance(val, torch.SymInt)}


def number_at(value: Any, symbols: Mapping[Any, int]) -> int | None:
    """A size at concrete values of symbols; None if it depends on other symbols."""
    if isinstance(value, int):
        return value
    number = value.node.expr.xreplace(symbols)
    return int(number) if number.is_Integer else None


def expression(number: Any) -> Any:
    """The sympy expression of a symbolic number; any other number itself."""
    return number.node.expr if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) else number


def hint(number: Any) -> int | None:
    """The value that a symbolic size had when the program was compiled; None for a data-dependent size."""
    if isinstance(number, int):
        return number
    try:
        value = number.node.hint
    except Exception:
        return None
    return int(value) if value is not None else None


def hinted_layout(value: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Size and stride that a fake tensor had when the program was compiled.

    Returns:
        None if one of them is data-dependent, and for a value that is no strided tensor.
    """
    return _layout(value, hint)


def layout_at(value: Any, symbols: Mapping[Any, int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Size and stride of a fake tensor at concrete values of symbols.

    Returns:
        None if one of them depends on other symbols, and for a value that is no strided tensor.
    """
    return _layout(value, lambda number: number_at(number, symbols))


def _layout(value: Any, number: Callable[[Any], int | None]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    size, stride = (tuple(number(n) for n in numbers) for numbers in (value.size(), value.stride()))
    return None if None in size or None in stride else (size, stride)  # type: ignore[return-value]


def storage_bytes(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the start of a strided tensor's first element to the end of its last."""
    if 0 in size:
        return 0
    elements = 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    return elements * dtype.itemsize
