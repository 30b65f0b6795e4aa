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
    """A device graph of a call.

    Args:
        partition: its index, for traces.
        pool: where the graph allocates.
        mode: the call is issued in it.
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
    """Have libraries take a workspace for one capture only: from the pool, which gets it back.

    A workspace belongs to a thread and a stream, and graphs capture its address. One that stayed would be held for
    each thread that captures; one that was taken before the pool was there would lie outside of it. Later captures
    may reuse a graph's workspace, as they do its other temporaries: graphs of a pool never run at one time. Nothing
    else issues work on the pool's stream.
    """
    free, side = request.functions.free_workspaces, pool.stream if pool is not None else None
    free(side)
    try:
        yield
    finally:
        free(side)
