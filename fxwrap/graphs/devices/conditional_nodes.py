"""Conditional nodes: those of CUDA graphs, which torch captures from 2.14 on, and of graphs that repeat calls.

Source: CUDA Programming Guide, "Conditional Graph Nodes".
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...devices import ConditionalNodes
from .cpu_graph import capturing_graph


def _branch(predicate: torch.Tensor) -> Iterator[None]:
    graph = _capturing()
    with _body(graph, graph.begin_capture_to_if_node, predicate):
        yield


def _loop(predicate: torch.Tensor) -> Iterator[Callable[[torch.Tensor], object]]:
    graph = _capturing()
    with _body(graph, graph.begin_capture_to_while_node, predicate):
        yield graph.set_conditional_handle_for_current_node


@contextlib.contextmanager
def _body(graph: Any, begin: Callable[[torch.Tensor], object], predicate: torch.Tensor) -> Iterator[None]:
    """The context in which a body is captured, on a stream of its own."""
    stream = torch.cuda.current_stream()
    begin(predicate)
    try:
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # the capture fails, and says why
                graph.end_capture_to_conditional_node()
            raise
        graph.end_capture_to_conditional_node()
    finally:
        # A body that fails to end leaves its stream the current one (torch 2.14), and the capture could not end.
        torch.cuda.set_stream(stream)


def _capturing() -> Any:
    return torch.cuda.CUDAGraph.get_currently_capturing_graph()


CUDA = ConditionalNodes(_branch, _loop)


def cuda_conditional_nodes() -> ConditionalNodes | None:
    """The conditional nodes of CUDA graphs; None if this torch cannot capture them."""
    return CUDA if hasattr(torch.cuda.CUDAGraph, "begin_capture_to_while_node") else None


def repeated_calls(capture_runs: bool) -> ConditionalNodes:
    """The conditional nodes of a graph that repeats calls: the call reads the predicate.

    Args:
        capture_runs: whether a capture decides as a replay does. Otherwise it goes through each body once.
    """

    def undecided() -> bool:
        return not capture_runs and capturing_graph() is not None

    def branch(predicate: torch.Tensor) -> Iterator[None]:
        if undecided() or bool(predicate):
            yield

    def loop(predicate: torch.Tensor) -> Iterator[Callable[[torch.Tensor], object]]:
        going = [predicate]
        decide = functools.partial(going.__setitem__, 0)
        if undecided():
            yield decide
            return
        while bool(going[0]):
            yield decide

    return ConditionalNodes(branch, loop, need_a_run=False)
