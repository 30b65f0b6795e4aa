"""Workspace of library calls. No interface reports it, so it is measured, on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.fx import Node

from ...host_graph.nodes import Kind, kind_of, only_computes, operator_name
from ...host_graph.sizes import hint, hinted_layout
from ...plan import Allocations

# They work in memory that their library keeps.
_WITHOUT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# By kind of call and number of threads, in this process.
_MEASURED: dict[Hashable, int] = {}


def measure_workspace(nodes: Iterable[Node], allocations: Allocations) -> dict[str, int]:
    """Bytes that calls allocate beyond what they return, at most at one time, by node.

    Each kind of call runs once in a process, on zeros of the sizes that the program was compiled for. What cannot be
    run so (custom operators, operands that are no tensors or numbers) is missing, as is all work on accelerators.
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
    return {
        node.name: nbytes for kind, alike in kinds.items() if (nbytes := _MEASURED.get(kind, 0)) for node in alike
    }


class _Unknown(Exception):
    """A value that nothing stands for."""


def _kind_of_call(node: Node) -> Hashable | None:
    """What tells calls apart that may take different workspace; None for one that is not run."""
    if kind_of(node) is not Kind.EXTERN or not only_computes(node) or "effect" in node.meta:
        return None
    if operator_name(node) in _WITHOUT and _type_of(node) in (torch.float32, torch.float64):
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
        return 0  # zeros do not suit it
    if changes is None:
        return None
    held = list(itertools.accumulate(changes))
    return max(held, default=0) - held[-1] if held else 0
