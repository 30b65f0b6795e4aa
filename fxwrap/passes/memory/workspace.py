"""Measures the workspace of library calls on the CPU, which no interface reports."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.fx import Node

from ...host_graph.nodes import Kind, kind_of, only_computes, operator_name, schema_of
from ...host_graph.sizes import hint, hinted_layout, layout_at, number_at
from ...torch_private.functions import allocations, most_beyond_result

# Operators whose library owns the memory that they work in.
_WITHOUT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# Operands that hold what a library has noted for the backward: with zeros in their place it reads wild addresses.
_NOTES = ("workspace", "reserve")
# Bytes by kind of call and number of threads, for this process.
_MEASURED: dict[Hashable, int] = {}


def measure_workspace(nodes: Iterable[Node], symbols: Mapping[Any, int] | None = None) -> dict[Node, int]:
    """The most bytes that each call has allocated at one time beyond what it returns, by node.

    Each kind of call runs once in a process, on zeros. Calls that cannot run so (custom operators, operands that are
    neither tensors nor numbers, backwards of recurrent layers) are missing. So are calls on accelerators, and calls
    that need no workspace at any size.

    Args:
        symbols: the sizes, by symbol; by default those that the program was compiled for.
    """
    kinds: dict[Hashable, list[Node]] = {}
    for node in nodes:
        if (kind := _kind_of_call(node, symbols)) is not None:
            kinds.setdefault((kind, torch.get_num_threads()), []).append(node)
    if unknown := {kind: calls[0] for kind, calls in kinds.items() if kind not in _MEASURED}:
        # A thread of its own has no modes, and no profiler: where one runs, allocations are not told.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_measure_all, unknown, symbols).result()
    return {node: _MEASURED[kind] for kind, calls in kinds.items() if kind in _MEASURED for node in calls}


def _measure_all(kinds: Mapping[Hashable, Node], symbols: Mapping[Any, int] | None) -> None:
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for kind, node in kinds.items():
            if (nbytes := _measure(node, symbols)) is not None:
                _MEASURED[kind] = nbytes


def needs_no_workspace(node: Node) -> bool:
    """Whether a call needs no workspace at any size: a product of matrices that the library reads in place."""
    if operator_name(node) not in _WITHOUT or _type_of(node) not in (torch.float32, torch.float64):
        return False
    factors = [arg for arg in node.args if isinstance(arg, Node)][-2:]
    return all(_is_read_in_place(factor.meta.get("val")) for factor in factors)


def _is_read_in_place(value: Any) -> bool:
    """Whether a matrix is stored row by row or column by column. The library copies any other matrix."""
    if (layout := hinted_layout(value)) is None or len(layout[0]) < 2:
        return False
    (rows, columns), (row, column) = layout[0][-2:], layout[1][-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


def same_layouts(node: Node, symbols: Mapping[Any, int]) -> bool:
    """Whether all operands and results of a call have the sizes that the program was compiled for."""
    values = [value_node.meta.get("val") for value_node in (node, *node.all_input_nodes)]
    return all(_same(value, symbols) for value in values)


def _same(value: Any, symbols: Mapping[Any, int]) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_same(item, symbols) for item in value)
    if isinstance(value, torch.SymInt):
        return number_at(value, symbols) == hint(value)
    return not isinstance(value, torch.Tensor) or layout_at(value, symbols) == hinted_layout(value)


class _Unknown(Exception):
    """An operand has no value to measure with."""


def _kind_of_call(node: Node, symbols: Mapping[Any, int] | None) -> Hashable | None:
    """A key that is equal for calls with the same workspace; None for a call that is not measured."""
    if kind_of(node) is not Kind.EXTERN or not only_computes(node) or "effect" in node.meta:
        return None
    schema = schema_of(node)
    if needs_no_workspace(node) or (schema and any(arg.name in _NOTES for arg in schema._schema.arguments)):
        return None
    try:
        described = torch.fx.map_arg((node.args, node.kwargs), lambda operand: _description(operand, symbols))
        return str(node.target), repr(described)
    except _Unknown:
        return None


def _type_of(node: Node) -> torch.dtype | None:
    values = (node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes))
    return next((value.dtype for value in values if isinstance(value, torch.Tensor)), None)


def _description(node: Node, symbols: Mapping[Any, int] | None) -> Any:
    """Sizes, strides and type of a tensor, the value of a number."""
    value: Any = node.meta.get("val")
    layout = hinted_layout(value) if symbols is None else layout_at(value, symbols)
    if layout is not None and value.device.type == "cpu":
        return *layout, value.dtype
    if isinstance(value, (int, torch.SymInt)):
        number = hint(value) if symbols is None else number_at(value, symbols)
        if number is not None:
            return number
    raise _Unknown


def _measure(node: Node, symbols: Mapping[Any, int] | None) -> int | None:
    def zeros(operand: Node) -> Any:
        described = _description(operand, symbols)
        if not isinstance(described, tuple):
            return described
        return torch.empty_strided(*described[:2], dtype=described[2]).zero_()

    try:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), zeros)
        function = node.meta.get("call", node.target)
        changes = allocations(lambda: function(*args, **kwargs))
    except Exception:
        return None  # it does not run on zeros
    return None if changes is None else most_beyond_result(changes)
