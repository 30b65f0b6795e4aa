"""Captures the work of one partition into a device graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..devices.cpu_graph import BoundCall, issue
from ..devices.device_graph import DeviceGraph
from ..devices.runtime import GraphPool
from ..replay.recording import RecordingRequest


def capture_graph(
    request: RecordingRequest,
    call: BoundCall,
    partition: int,
    pool: GraphPool | None,
    mode: contextlib.AbstractContextManager[object],
) -> DeviceGraph:
    """Capture a call into a new device graph.

    Args:
        partition: the index of the captured partition, for traces.
        pool: the memory pool in which the graph allocates.
        mode: the context in which the call is issued.
    """
    runtime = request.runtime
    graph = runtime.new_graph(pool.id if pool is not None else None)
    request.traces.capturing(graph)

    def work() -> None:
        with mode:
            issue(call)

    with _own_workspaces(request, pool):
        runtime.capture(graph, work, pool)
    graph.instantiate()
    request.traces.captured(graph, partition)
    return graph


@contextlib.contextmanager
def _own_workspaces(request: RecordingRequest, pool: GraphPool | None) -> Iterator[None]:
    """Free the workspaces that libraries keep for the pool's stream, before and after a capture.

    A workspace belongs to a thread and a stream, and graphs capture its address. Freed before, a workspace is
    allocated from the pool and not outside of it. Freed afterwards, it is not held for each thread that captures:
    later captures may reuse its memory, as that of other temporaries, because graphs of a pool never run at the same
    time. Nothing else issues work on the pool's stream.
    """
    free, side = request.functions.free_workspaces, pool.stream if pool is not None else None
    free(side)
    try:
        yield
    finally:
        free(side)
