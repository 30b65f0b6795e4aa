"""Captures the work of one partition into a device graph."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ...devices import ConditionalNodes
from ...host_graph.control_flow import control_flow_of
from ...host_graph.sizes import symbols_at
from ...plan import Partition
from ...torch_private.functions import free_workspaces, other_threads_wait
from ..devices.cpu_graph import BoundCall, issue
from ..devices.device_graph import DeviceGraph
from ..devices.runtime import GraphPool, current_stream
from ..replay.recording import RecordingRequest
from .warm_up import run_bodies_once


def capture_graph(
    request: RecordingRequest,
    call: BoundCall,
    partition: Partition,
    pool: GraphPool | None,
    mode: contextlib.AbstractContextManager[object],
) -> DeviceGraph:
    """Capture a call into a new device graph.

    Args:
        partition: what is captured.
        pool: the memory pool in which the graph allocates.
        mode: the context in which the call is issued.
    """
    runtime, plan = request.runtime, request.sized.plan
    identifier = pool.id if pool is not None else None

    def work() -> None:
        with mode:
            issue(call)

    nodes = runtime.conditional_nodes
    if nodes is not None and nodes.need_a_run and any(map(control_flow_of, plan.work_in(partition))):
        with _own_workspaces(request, pool), runtime.capture_stream(pool.stream if pool is not None else None):
            run_bodies_once(plan.work_in(partition), symbols_at(request.sized.symbol_values), runtime.device)
    with _own_workspaces(request, pool):
        graph = runtime.new_graph(identifier)
        request.traces.capturing(graph)
        runtime.capture(graph, work, pool)
    graph.instantiate()
    request.traces.captured(graph, partition.index)
    return graph


def free_workspaces_of_warm_ups(stream: Any) -> None:
    """Free the workspaces of libraries that warm-ups have left on the default stream, one for each thread.

    It is done before an arena is allocated, which can use the memory. No graph has captured a workspace there, since
    that stream cannot be captured. Nothing is freed while another thread runs: it may already have the address of its
    workspace.
    """
    if getattr(stream, "stream_id", None) == 0 and other_threads_wait():
        free_workspaces(stream)


@contextlib.contextmanager
def _own_workspaces(request: RecordingRequest, pool: GraphPool | None) -> Iterator[None]:
    """Free the workspaces that libraries keep for the pool's stream, before and after a capture.

    A workspace belongs to a thread and a stream, and graphs capture its address. Freed before, a workspace is
    allocated from the pool and not outside of it. Freed afterwards, it is not held for each thread that captures:
    later captures may reuse its memory, as that of other temporaries, because graphs of a pool never run at the same
    time. Nothing else issues work on the pool's stream.
    """
    side = pool.stream if pool is not None else None
    free_workspaces(side)
    try:
        yield
    finally:
        free_workspaces(side)


def nodes_with_workspaces(request: RecordingRequest, captured: Counter[str]) -> ConditionalNodes:
    """The conditional nodes of a device, whose bodies have workspaces of their own: each has its own stream.

    Args:
        captured: counts them, as "nodes".
    """
    nodes, device = request.runtime.conditional_nodes, request.runtime.device
    assert nodes is not None
    Body = Callable[[torch.Tensor], Iterator[Any]]

    def with_workspaces(body: Body) -> Body:
        def run(predicate: torch.Tensor) -> Iterator[Any]:
            for value in body(predicate):
                stream = current_stream(device)
                free_workspaces(stream)
                try:
                    yield value
                finally:
                    free_workspaces(stream)
            captured["nodes"] += 1

        return run

    return replace(nodes, branch=with_workspaces(nodes.branch), loop=with_workspaces(nodes.loop))
