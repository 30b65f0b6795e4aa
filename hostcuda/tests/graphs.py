"""Graphs by torch's interface, without what ``torch.cuda.graph`` does before a capture (it empties caches)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

# torch's own rules of graphs are those of 2.14 and later: with 2.11 captures do not register the generators that they
# meet, keep them when they fail, and refuse replays.
LATER_RULES = hasattr(torch.cuda.CUDAGraph, "begin_capture_to_if_node")
needs_later_rules = pytest.mark.skipif(not LATER_RULES, reason="torch's own rules of graphs were others before 2.14")


def capture(
    work: Callable[[], Any], pool: Any = None, mode: str = "global", on: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """A graph of work, which may raise: then the capture is ended, and what comes first is raised."""
    graph = torch.cuda.CUDAGraph()
    on = on or _usual_stream()
    on.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(on):
        graph.capture_begin(**({} if pool is None else {"pool": pool}), capture_error_mode=mode)
        try:
            work()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:
                graph.reset()
            raise
        graph.capture_end()
    return graph


@functools.cache
def _usual_stream() -> torch.cuda.Stream:
    """One for all captures, as torch.cuda.graph has: a pool reuses a block on the stream that it was made on."""
    return torch.cuda.Stream()


@functools.cache
def workspaces_stay() -> bool:
    """Whether torch keeps cuBLAS's workspaces for the next product, which it does up to 2.14."""
    matrix = torch.ones(4, 4, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    torch.mm(matrix, matrix)
    stay = torch.cuda.memory_allocated() - before > 1 << 20
    torch._C._cuda_clearCublasWorkspaces()
    return stay


def first_line(work: Callable[[], Any]) -> str:
    """Of the error that work raises; "" if it raises none."""
    try:
        work()
    except Exception as error:
        return str(error).splitlines()[0]
    return ""


def replay_error(graph: torch.cuda.CUDAGraph) -> str:
    """The first line of what a replay of the graph raises, at the latest when it is waited for; "" if nothing."""
    return first_line(lambda: (graph.replay(), torch.cuda.synchronize()))


def in_thread(work: Callable[[], Any]) -> Any:
    """What work returns, or raises, in a thread of its own."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((work(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = result[0]
    if error is not None:
        raise error
    return value
