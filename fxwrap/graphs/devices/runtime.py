"""The runtime of a device: which device graph it has, and how work is captured: pools, streams, failed captures."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from ...devices import (
    ConditionalNodes,
    DeviceSupport,
    Placements,
    RecoverFromFailedCapture,
    SuspendableMemory,
    device_function,
    device_support,
)
from ...errors import CaptureError
from ...torch_private.placed_allocations import cuda_can_place, cuda_placements
from .conditional_nodes import cuda_conditional_nodes
from .cpu_graph import CPUGraph, capturing_graph
from .device_graph import CUDAGraphAdapter, DeviceGraph, XPUGraphAdapter


@dataclass(eq=False)
class GraphPool:
    """A memory pool that device graphs share.

    Attributes:
        runtime: makes the pool's graphs.
        id: the identifier of torch's memory pool; None on devices without pools, whose graphs share nothing.
        stream: the stream on which all graphs of the pool are captured. The pool reuses freed memory on one stream
            only, and libraries have a workspace for each stream, whose address is captured.
        recover: stops the allocator from recording to the pool after a failed capture; None if not needed.
        keeper: a graph that keeps the pool usable: a pool whose last graph was freed accepts no new one. Source:
            c10/cuda/CUDACachingAllocator.cpp, create_or_incref_pool (torch 2.11 to 2.15).
        spoiled: whether a capture failed in the pool, which accepts no other then: the allocator of pinned memory
            goes on recording to it. Source: ATen/core/CachingHostAllocator.h, begin_allocate_to_pool (torch 2.11 to
            2.13).
        memory, memory_pool: the suspendable memory that the pool is a part of, and its pool there; None if its
            memory cannot be suspended.
    """

    runtime: DeviceRuntime
    id: Any
    stream: Any
    recover: RecoverFromFailedCapture | None = None
    keeper: Any = None
    spoiled: bool = False
    memory: SuspendableMemory | None = None
    memory_pool: Any = None

    def allocate(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Memory outside of captures, which is suspended with the pool's."""
        if self.memory is not None and device == self.runtime.device:
            return self.memory.allocate_in(self.memory_pool, nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


@dataclass(frozen=True)
class DeviceRuntime:
    """How work is captured on one device.

    Attributes:
        new_graph: makes a device graph that allocates in a memory pool of ``new_pool``.
        new_pool: makes the identifier of a memory pool; it is None on devices without pools.
        frozen_addresses: whether a captured call always reads and writes the addresses that it was captured with, and
            an operator's allocation during a capture keeps its address. Hardware graphs are like this; the CPU's
            graph repeats its calls, and uses new tensors.
        runs_while_capturing: whether a capture also computes, so that no replay is needed for the first result.
        implementation: the name of the graph's class, for reports.
        repeats_calls: whether a replay makes the captured calls again; the graph keeps what these refer to.
        after_failed_capture: restores the allocator after a failed capture; None if torch's own functions do.
        suspendable_memory: makes the suspendable memory of an arena; None if the device has none.
        conditional_nodes: of its graphs; None if they have none.
        placements: decides during a capture where operators allocate (``devices.Placements``); None if the device
            cannot.
    """

    device: torch.device
    new_graph: Callable[[Any], DeviceGraph]
    frozen_addresses: bool
    runs_while_capturing: bool
    implementation: str
    new_pool: Callable[[], Any] = lambda: None
    after_failed_capture: RecoverFromFailedCapture | None = None
    suspendable_memory: Callable[[torch.device], SuspendableMemory] | None = None
    repeats_calls: bool = False
    conditional_nodes: ConditionalNodes | None = None
    placements: Callable[[torch.device], contextlib.AbstractContextManager[Placements]] | None = None

    def make_pool(
        self, recover: RecoverFromFailedCapture | None = None, memory: SuspendableMemory | None = None
    ) -> GraphPool:
        """A memory pool that lives as long as the object.

        Args:
            recover: torch's own ``after_failed_capture``, for devices that have none.
            memory: the suspendable memory that the pool is to be a part of.
        """
        memory_pool = memory.new_pool() if memory is not None else None
        identifier = memory_pool.id if memory_pool is not None else self.new_pool()
        pool = GraphPool(self, identifier, _side_stream(self.device), self.after_failed_capture or recover)
        pool.memory, pool.memory_pool = memory, memory_pool
        if pool.id is not None:
            pool.keeper = self._capture_little(pool)
        _pools.add(pool)
        return pool

    def _capture_little(self, pool: GraphPool) -> Any:
        """Capture a small graph that is never replayed and keeps no memory. (Torch warns about an empty one.)"""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        graph = self.new_graph(pool.id)
        self.capture(graph, byte.zero_, pool)
        return graph

    def rehearse(self, work: Callable[[], object]) -> DeviceGraph:
        """Capture work in a graph that never runs. Errors are raised, and leave nothing behind."""
        pool = GraphPool(self, self.new_pool(), _side_stream(self.device), self.after_failed_capture)
        graph = self.new_graph(pool.id)
        self.capture(graph, work, pool)
        return graph

    def capture(self, graph: DeviceGraph, work: Callable[[], object], pool: GraphPool | None) -> None:
        """Capture what ``work`` issues.

        The capture ends even at an interrupt: while one is open, nothing can wait for the device.

        This is no context manager, because an interrupt between ``__enter__`` and the block would skip ``__exit__``.
        """
        ending = False
        stream, memory = (pool.stream, pool.memory) if pool is not None else (None, None)
        with self.capture_stream(stream), memory.allocating() if memory is not None else contextlib.nullcontext():
            try:
                graph.capture_begin()
                work()
                ending = True
                graph.capture_end()
            except BaseException as error:
                try:
                    # An interrupt can come before or after any step, and a graph does not tell whether it captures.
                    # If it does not, it raises here.
                    graph.capture_end()
                except Exception as refusal:
                    if not ending and hasattr(error, "add_note"):  # from Python 3.11 on
                        error.add_note(f"fxwrap: ending the capture has failed, too: {refusal}")
                    if pool is not None:
                        self._recover(pool)
                raise

    def _recover(self, pool: GraphPool) -> None:
        """Undo the after-effects of a failed capture.

        When ``cudaStreamBeginCapture`` fails, recording to the pool has already begun. When ``cudaStreamEndCapture``
        fails, ``CUDAGraph::capture_end`` throws before it ends the recording, and (torch 2.11) before generators
        leave the capture: they cannot be used until another capture succeeds. Source: ATen/cuda/CUDAGraph.cpp.
        """
        spoiled_before, pool.spoiled = pool.spoiled, True
        if pool.recover is not None:
            with contextlib.suppress(Exception):
                pool.recover(self.device, pool.id)
        if spoiled_before:
            return
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(Exception):
                # The pool is marked from the start: its failure does not come here again.
                self._capture_little(GraphPool(self, self.new_pool(), pool.stream, pool.recover, spoiled=True))
                return

    @contextlib.contextmanager
    def keeping_stream(self) -> Iterator[None]:
        """A context after which the current stream is the same.

        A CUDA graph whose capture has failed inside of a branch or a loop makes the stream of the capture the current
        one when it is freed (torch 2.14).
        """
        stream = current_stream(self.device)
        try:
            yield
        finally:
            if stream is not None:
                device_function(self.device.type, "set_stream")(stream)

    @contextlib.contextmanager
    def capture_stream(self, side: Any) -> Iterator[None]:
        """A context for a capture on a side stream (None on devices without streams): the default stream cannot be
        captured."""
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
# How often a small graph is captured after a failed capture. What has ended that capture (another thread that waits
# for the device) may end this one, too.
_ATTEMPTS = 5
# The number of streams of a device that torch returns in turn.
_STREAMS = 32


def _side_stream(device: torch.device) -> Any:
    """A stream that no other pool uses for its captures, if there is one."""
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
    """The runtime of a device, with ``torch.accelerator.Graph`` if it can be constructed, else with an adapter.

    Raises:
        CaptureError: no device graph exists for the device.
    """
    chosen = _override.get()
    if chosen is not None and chosen.device.type == device.type:
        return chosen
    return own_runtime(device)


def own_runtime(device: torch.device) -> DeviceRuntime:
    """The runtime of a device with its own graphs, whatever ``using_runtime`` says."""
    return _CPU if device.type == "cpu" else _accelerator_runtime(device, device_support(device.type))


def freezes_addresses(device: torch.device) -> bool:
    """Whether device graphs of a device freeze addresses; False if it has no device graph."""
    try:
        return runtime_for(device).frozen_addresses
    except CaptureError:
        return False


def conditional_nodes_of(device: torch.device) -> ConditionalNodes | None:
    """The nodes of a device's graphs that decide what runs; None if there are none."""
    try:
        return runtime_for(device).conditional_nodes
    except CaptureError:
        return None


def capture_check(device: torch.device) -> Callable[[], bool]:
    """A function that tells whether the caller captures: the device's current stream, or a CPU graph on this thread.

    It returns False on devices that cannot tell.
    """
    if device.type == "cpu":
        return lambda: capturing_graph() is not None
    return getattr(torch.get_device_module(device), "is_current_stream_capturing", lambda: False)


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
        recover, memory = support.after_failed_capture, support.suspendable_memory
        nodes, placements = support.conditional_nodes, support.placements
        if device.type == "cuda" and support.new_graph is None:
            nodes = nodes or cuda_conditional_nodes()
            placements = placements or (cuda_placements if cuda_can_place() else None)
        return DeviceRuntime(
            device,
            make,
            True,
            False,
            name,
            new_pool,
            recover,
            memory,
            conditional_nodes=nodes,
            placements=placements,
        )
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
        yield "torch.accelerator.Graph", lambda pool: unified(pool=pool, capture_error_mode="thread_local")
    if device.type == "cuda":
        yield "torch.cuda.CUDAGraph", CUDAGraphAdapter
    if device.type == "xpu" and hasattr(torch.xpu, "XPUGraph"):
        yield "torch.xpu.XPUGraph", XPUGraphAdapter


def _new_pool(device: torch.device) -> Any:
    make = getattr(torch.get_device_module(device), "graph_pool_handle", None)
    return make() if make is not None else None
