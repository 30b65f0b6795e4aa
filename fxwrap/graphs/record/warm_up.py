"""Runs what is inside of branches and loops once, before it is captured.

In its first run a Triton kernel is tuned, and a library makes its handle: both wait for the device, which no capture
can. A program has run once when it is captured; a branch of it may not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from ...host_graph.control_flow import control_flow_of, counts_on_the_host
from ...host_graph.nodes import is_work, kernel_of, schema_of
from ...host_graph.sizes import layout_at, number_at


def run_bodies_once(nodes: Iterable[Node], symbols: Mapping[Any, int], device: torch.device) -> None:
    """Run kernels that have not run yet, and operators of torch's own, inside of branches and loops, on zeros.

    What they compute goes nowhere. A custom operator is not called: it may have effects.

    Args:
        symbols: the values of symbolic sizes.
        device: that captures.
    """
    for node in _inside(nodes, device):
        kernel, overload = kernel_of(node), schema_of(node)
        if kernel is not None and not getattr(kernel.call, "is_tuned", True):
            kernel.call(*_stand_ins(node.args[1:], symbols))
        elif overload is not None and overload.namespace == "aten":
            overload(*_stand_ins(node.args, symbols), **_stand_ins(node.kwargs, symbols))


def _inside(nodes: Iterable[Node], device: torch.device) -> Iterator[Node]:
    """The work inside of branches and loops, but for loops that count on the host: it has run with the program."""
    for node in nodes:
        flow = control_flow_of(node)
        for body in flow.subgraphs if flow is not None else ():
            if flow is not None and not counts_on_the_host(flow, device):
                yield from filter(is_work, body.graph.nodes)
            yield from _inside(body.graph.nodes, device)


def _stand_ins(args: Any, symbols: Mapping[Any, int]) -> Any:
    """Arguments with zeros in place of tensors, and the values of numbers."""

    def stand_in(node: Node) -> Any:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return number_at(value, symbols)
        layout = layout_at(value, symbols)
        if layout is None:
            raise TypeError(f"{node.name} has a size that is not known before the call")
        return torch.empty_strided(*layout, dtype=value.dtype, device=value.device).zero_()

    return torch.fx.map_arg(args, stand_in)
