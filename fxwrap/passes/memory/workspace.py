"""Workspace of library calls. No interface reports it, so it is measured, on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...host_graph.nodes import Kind, kind_of, only_computes, operator_name
from ...host_graph.sizes import hint, hinted_layout, layout_at, number_at

# They work in memory that their library keeps.
_WITHOUT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# By kind of call and number of threads, in this process.
_MEASURED: dict[Hashable, int] = {}

# Runs a function and tells how many bytes it allocated (above 0) and freed (below) on the CPU, in order, before its
# result was freed; None if that cannot be told at the moment.
Allocations = Callable[[Callable[[], object]], Sequence[int] | None]


def measure_workspace(nodes: Iterable[Node], allocations: Allocations) -> dict[str, int]:
    """Bytes that calls allocate beyond what they return, at most at one time, by node.

    Each kind of call runs once in a process, on zeros of the sizes that the program was compiled for. What cannot be
    run so (custom operators, operands that are no tensors or numbers) is missing, as is all work on accelerators, and
    what needs none at any size.
    """
    kinds: dict[Hashable, list[Node]] = {}
    for node in nodes:
        if (kind := _kind_of_call(node)) is not None:
            kinds.setdefault((kind, torch.get_num_threads()), []).append(node)
    unknown = [kind for kind in kinds if kind not in _MEASURED]
    with torch.no_grad(), torch.random.fork_rng(devices=(), enabled=bool(unknown)):
        for kind in unknown:
            if (nbytes := _measure(kinds[kind][0], allocations)) is not None:
                _MEASURED[kind] = nbytes
    return {node.name: _MEASURED[kind] for kind, alike in kinds.items() if kind in _MEASURED for node in alike}


def needs_no_workspace(node: Node) -> bool:
    """Whether a call takes none at any size: products of matrices that the library reads as they lie."""
    if operator_name(node) not in _WITHOUT or _type_of(node) not in (torch.float32, torch.float64):
        return False
    factors = [arg for arg in node.args if isinstance(arg, Node)][-2:]
    return all(_reads_as_it_lies(factor.meta.get("val")) for factor in factors)


def _reads_as_it_lies(value: Any) -> bool:
    """Whether a matrix lies row by row, or column by column; of any other the library makes a copy."""
    if (layout := hinted_layout(value)) is None or len(layout[0]) < 2:
        return False
    (rows, columns), (row, column) = layout[0][-2:], layout[1][-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


def same_layouts(node: Node, symbols: Mapping[Any, int]) -> bool:
    """Whether all that a call takes and returns has the sizes that the program was compiled for."""
    values = [found.meta.get("val") for found in (node, *node.all_input_nodes)]
    return all(_same(value, symbols) for value in values)


def _same(value: Any, symbols: Mapping[Any, int]) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_same(one, symbols) for one in value)
    if isinstance(value, torch.SymInt):
        return number_at(value, symbols) == hint(value)
    return not isinstance(value, torch.Tensor) or layout_at(value, symbols) == hinted_layout(value)


class _Unknown(Exception):
    """A value that nothing stands for."""


def _kind_of_call(node: Node) -> Hashable | None:
    """What tells calls apart that may take different workspace; None for one that is not run."""
    if kind_of(node) is not Kind.EXTERN or not only_computes(node) or "effect" in node.meta:
        return None
    if needs_no_workspace(node):
        return None
    try:
        return str(node.target), repr(torch.fx.map_arg((node.args, node.kwargs), _description))
    except _Unknown:
        return None


def _type_of(node: Node) -> torch.dtype | None:
    values = (node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes))
    return next((value.dtype for value in values if isinstance(value, torch.Tensor)), None)


def _description(node: Node) -> Any:
    """Sizes, strides and type of a tensor, the value of a number."""
    value: Any = node.meta.get("val")
    if (layout := hinted_layout(value)) is not None and value.device.type == "cpu":
        return *layout, value.dtype
    if isinstance(value, (int, torch.SymInt)) and (number := hint(value)) is not None:
        return number
    raise _Unknown


def _measure(node: Node, allocations: Allocations) -> int | None:
    def zeros(operand: Node) -> Any:
        found = _description(operand)
        return torch.empty_strided(*found[:2], dtype=found[2]).zero_() if isinstance(found, tuple) else found

    try:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), zeros)
        function = node.meta.get("call", node.target)
        changes = allocations(lambda: function(*args, **kwargs))
    except Exception:
        return None  # zeros do not suit it
    if changes is None:
        return None
    held = list(itertools.accumulate(changes))
    return max(held, default=0) - held[-1] if held else 0
