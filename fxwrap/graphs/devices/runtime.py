"""Which device graph a device has, and how work is captured with it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from ...devices import DeviceSupport, PutRight, device_function, device_support
from ...errors import CaptureError
from .cpu_graph import CPUGraph, capturing_graph
from .device_graph import CUDAGraphAdapter, DeviceGraph, XPUGraphAdapter


@dataclass(eq=False)
class GraphPool:
    """Memory that graphs share.

    Attributes:
        runtime: makes its graphs.
        id: None where there is no such thing: then graphs share nothing.
        stream: on which all of them are captured. The pool gives memory that one has freed to another on one stream
            only, and libraries have a workspace for each stream, whose address is captured, too.
        put_right: has the allocator record to the pool no more; None where nobody has to.
        keeper: a graph in it: once its last one is gone, a pool takes no other. Source:
            c10/cuda/CUDACachingAllocator.cpp, create_or_incref_pool (torch 2.11 to 2.15).
        spoiled: a capture has failed in it, and it takes no other: the allocator of pinned memory goes on recording
            to it. Source: ATen/core/CachingHostAllocator.h, begin_allocate_to_pool (torch 2.11 to 2.13).
    """

    runtime: DeviceRuntime
    id: Any
    stream: Any
    put_right: PutRight | None = None
    keeper: Any = None
    spoiled: bool = False


@dataclass(frozen=True)
class DeviceRuntime:
    """How work is captured on one device.

    Attributes:
        new_graph: makes a device graph, which allocates in a memory pool of ``new_pool``.
        new_pool: makes what graphs share memory by; None where there is no such thing.
        frozen_addresses: a captured call always reads and writes the addresses it was captured with, and
            what an operator allocates during capture keeps its address. Hardware graphs are like this; the
            CPU graph calls again and so takes new tensors.
        runs_while_capturing: capturing also computes, so that no replay is needed to get the first result.
        after_failed_capture: puts the allocator right; None where torch's own functions do.
    """

    device: torch.device
    new_graph: Callable[[Any], DeviceGraph]
    frozen_addresses: bool
    runs_while_capturing: bool
    implementation: str
    new_pool: Callable[[], Any] = lambda: None
    after_failed_capture: PutRight | None = None

    def make_pool(self, put_right: PutRight | None = None) -> GraphPool:
        """A memory pool that lives as long as the object.

        Args:
            put_right: torch's own ``after_failed_capture``, for devices that have none.
        """
        pool = GraphPool(self, self.new_pool(), _side_stream(self.device), self.after_failed_capture or put_right)
        if pool.id is not None:
            pool.keeper = self._capture_little(pool)
        _pools.add(pool)
        return pool

    def _capture_little(self, pool: GraphPool) -> Any:
        """A graph that is never replayed, and keeps no memory. (Torch warns of one without any work.)"""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        graph = self.new_graph(pool.id)
        self.capture(graph, byte.zero_, pool)
        return graph

    def capture(self, graph: DeviceGraph, work: Callable[[], object], pool: GraphPool | None) -> None:
        """Capture what ``work`` issues. However it fails, interrupts included, no capture stays open: nothing could
        wait for the device any more.

        This is no context manager: an interrupt can come between ``__enter__`` and the block, and then ``__exit__``
        is not called.
        """
        ending = False
        with self.capture_stream(pool.stream if pool is not None else None):
            try:
                graph.capture_begin()
                work()
                ending = True
                graph.capture_end()
            except BaseException as error:
                try:
                    # An interrupt comes before or after any of the steps, and no graph tells whether it captures. One
                    # that does not refuses to end.
                    graph.capture_end()
                except Exception as refusal:
                    if not ending and hasattr(error, "add_note"):  # from Python 3.11 on
                        error.add_note(f"fxwrap: ending the capture has failed, too: {refusal}")
                    if pool is not None:
                        self._put_right(pool)
                raise

    def _put_right(self, pool: GraphPool) -> None:
        """Undo what a capture leaves that has not ended well.

        Where ``cudaStreamBeginCapture`` fails, recording to the pool has begun. Where ``cudaStreamEndCapture`` fails,
        ``CUDAGraph::capture_end`` throws before it ends that, and (torch 2.11) before generators leave the capture:
        they draw nothing until another one has ended well. Source: ATen/cuda/CUDAGraph.cpp.
        """
        spoiled_before, pool.spoiled = pool.spoiled, True
        if pool.put_right is not None:
            with contextlib.suppress(Exception):
                pool.put_right(self.device, pool.id)
        if not spoiled_before:  # a pool that is marked before it is used: what fails in it is not tried again
            with contextlib.suppress(Exception):
                self._capture_little(GraphPool(self, self.new_pool(), pool.stream, pool.put_right, spoiled=True))

    @contextlib.contextmanager
    def capture_stream(self, side: Any) -> Iterator[None]:
        """Capture on a side stream: the default stream cannot be captured. None where there are no streams."""
        if side is None:
            yield
            return
        current = current_stream(self.device)
        side.wait_stream(current)
        with device_function(self.device.type, "stream")(side):
            yield
        current.wait_stream(side)


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread issues work; None on the CPU."""
    return None if device.type == "cpu" else device_function(device.type, "current_stream")(device)


_pools = weakref.WeakSet[GraphPool]()
# Torch hands out so many streams of a device, in turn.
_STREAMS = 32


def _side_stream(device: torch.device) -> Any:
    """A stream on which no other pool's graphs are captured, as long as there is one."""
    if device.type == "cpu":
        return None
    taken = [current_stream(device), *(pool.stream for pool in _pools)]
    for _ in range(_STREAMS):
        stream = device_function(device.type, "Stream")(device)
        if stream not in taken:
            break
    return stream


_CPU = DeviceRuntime(torch.device("cpu"), lambda pool: CPUGraph(), False, True, "CPU graph")
_override: ContextVar[DeviceRuntime | None] = ContextVar("fxwrap_runtime", default=None)


def runtime_for(device: torch.device) -> DeviceRuntime:
    """The runtime of a device: the unified graph where it can be constructed, else an adapter.

    Raises:
        CaptureError: no device graph exists for the device.
    """
    chosen = _override.get()
    if chosen is not None and chosen.device.type == device.type:
        return chosen
    if device.type == "cpu":
        return _CPU
    return _accelerator_runtime(device, device_support(device.type))


def freezes_addresses(device: torch.device) -> bool:
    """Whether captured work on a device stays at the addresses it was captured with; False where nothing captures."""
    runtime = _runtime_if_any(device)
    return runtime is not None and runtime.frozen_addresses


def capture_check(device: torch.device) -> Callable[[], bool]:
    """Makes a function that tells whether somebody captures what is issued now: on the device's current stream, or to
    a CPU graph on this thread. False where nobody can tell."""
    if device.type == "cpu":
        return lambda: capturing_graph() is not None
    return getattr(torch.get_device_module(device), "is_current_stream_capturing", lambda: False)


def _runtime_if_any(device: torch.device) -> DeviceRuntime | None:
    try:
        return runtime_for(device)
    except CaptureError:
        return None


@contextlib.contextmanager
def using_runtime(runtime: DeviceRuntime) -> Iterator[None]:
    """Use ``runtime`` for its device type on this thread: for simulated devices and tests."""
    token = _override.set(runtime)
    try:
        yield
    finally:
        _override.reset(token)


@functools.cache
def _accelerator_runtime(device: torch.device, support: DeviceSupport) -> DeviceRuntime:
    failures = []
    for name, make in _candidates(device, support):
        try:
            make(None)
        except Exception as error:
            failures.append(f"{name}: {error}")
            continue
        new_pool = functools.partial(_new_pool, device)
        return DeviceRuntime(device, make, True, False, name, new_pool, support.after_failed_capture)
    raise CaptureError(
        f"no device graph for {device}",
        expected="a GraphImplInterface registered for it in C++, so that torch.accelerator.Graph can be made, or an "
        "object with its methods (device_graph= of fxwrap.register_device)",
        got="; ".join(failures) or "none of them exists",
        remedy="until there is one, programs on this device run eagerly; docs/devices.md says how to make one",
    )


def _candidates(device: torch.device, support: DeviceSupport) -> Iterator[tuple[str, Callable[[Any], DeviceGraph]]]:
    if support.new_graph is not None:
        yield f"the graph registered for {device.type}", support.new_graph
        return
    unified = getattr(torch.accelerator, "Graph", None)
    if unified is not None:
        yield (
            "torch.accelerator.Graph",
            lambda pool: unified(pool=pool, capture_error_mode="thread_local"),
        )
    if device.type == "cuda":
        yield "torch.cuda.CUDAGraph", CUDAGraphAdapter
    if device.type == "xpu" and hasattr(torch.xpu, "XPUGraph"):
        yield "torch.xpu.XPUGraph", XPUGraphAdapter


def _new_pool(device: torch.device) -> Any:
    make = getattr(torch.get_device_module(device), "graph_pool_handle", None)
    return make() if make is not None else None
