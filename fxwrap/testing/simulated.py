"""A simulated accelerator on the CPU: device graphs with frozen addresses, and CUDA's rules, without hardware.

The CPU's graph uses new tensors at every replay. A hardware graph does not: a captured call reads and writes the
addresses that it was captured with. This device behaves like hardware. So everything that follows from frozen
addresses (static input buffers, copies between eager and captured work, outputs in an arena) and from hardware's
rules (pools that die, captures that fail and have after-effects) can be tested on any machine.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from ..errors import CaptureError
from ..graphs.devices.conditional_nodes import repeated_calls
from ..graphs.devices.cpu_graph import CPUGraph
from ..graphs.devices.runtime import DeviceRuntime
from ..graphs.memory.locks import lock_of_process
from ..graphs.memory.shared_state import SHARED
from ..graphs.record.placed_results import ResultCopy
from ..host_graph.tensors import tensor_over, tensors_in


@dataclass(frozen=True)
class Rules:
    """The rules of CUDA that other devices need not have. Each rule holds unless it is switched off.

    Attributes:
        captured_work_waits: captured work runs at replays only. Until the first replay, its outputs are unchanged,
            and memory that operators allocate in it is NaN.
            Source: torch/cuda/graphs.py, ``graph``: work captured "does not actually run" (all versions).
        capture_refuses_waits: reading a value on the host raises while its thread captures, and the capture is lost.
            Source: cudaStreamBeginCapture and cudaErrorStreamCaptureUnsupported; ATen/cuda/CUDAGraph.cpp,
            capture_end (torch 2.11 to 2.15).
        one_capture_at_a_time: a device captures one graph at a time, on all threads, because its generator can be
            part of one capture only. Source: ATen/cuda/CUDAGeneratorImpl.cpp, capture_prologue (torch 2.11; later, a
            generator has a state for each capture).
        no_replay_in_a_capture: a thread that captures cannot replay a graph, because graphs do not nest.
            Source: ATen/cuda/CUDAGeneratorImpl.cpp, replay_prologue (torch 2.11; 2.14.1 makes it a part).
        pool_dies_with_its_last_graph: a pool whose last graph was freed accepts no new one until the cache is
            emptied. Source: c10/cuda/CUDACachingAllocator.cpp, create_or_incref_pool (torch 2.11 to 2.15; the cache
            of pinned memory has to be emptied as well, and is not simulated).
        failed_capture_holds_its_pool: after a capture that ends with an error, the allocator goes on recording to its
            pool: no other capture may use the pool, and the cache cannot be emptied, until ``after_failed_capture``.
            Source: ATen/cuda/CUDAGraph.cpp, capture_end (torch 2.11 to 2.13; 2.15 ends it before it raises).
        failed_capture_spoils_its_pool: even after that no other capture may use the pool: the allocator of pinned
            memory records to it for ever.
            Source: ATen/core/CachingHostAllocator.h, begin_allocate_to_pool (torch 2.11 to 2.13).
        failed_capture_holds_generators: after a failed capture, generators cannot be used outside of captures until
            another capture succeeds. Source: ATen/cuda/CUDAGraph.cpp, capture_end (torch 2.11; later, reset does it).
    """

    captured_work_waits: bool = True
    capture_refuses_waits: bool = True
    one_capture_at_a_time: bool = True
    no_replay_in_a_capture: bool = True
    pool_dies_with_its_last_graph: bool = True
    failed_capture_holds_its_pool: bool = True
    failed_capture_spoils_its_pool: bool = True
    failed_capture_holds_generators: bool = True


# Reentrant: a graph may be collected, and call ``Simulator.leave``, at any point of its own thread.
_LOCK = lock_of_process()


@dataclass(eq=False)
class Simulator:
    """The state of a simulated device, with counters of its own.

    Attributes:
        captures: the number of successful captures.
        replays: the number of launches of graphs.
    """

    rules: Rules = Rules()
    captures: int = 0
    replays: int = 0
    _mapped: dict[int, int] = field(default_factory=dict)  # bytes of suspendable memory, by address
    _pools: Iterator[int] = field(default_factory=functools.partial(itertools.count, 1))
    _graphs_in: Counter[Any] = field(default_factory=Counter)  # by pool; a dead pool has 0
    _recorded_to: set[Any] = field(default_factory=set)
    _spoiled: set[Any] = field(default_factory=set)
    _capturing: weakref.ref[SimulatedGraph] | None = None  # an interrupted capture ends when its graph is freed
    _generators_held: bool = False
    _suspended: set[Any] = field(default_factory=set)  # pools

    def new_pool(self) -> tuple[int, int]:
        return (0, next(self._pools))

    @property
    def mapped(self) -> int:
        """Bytes of suspendable memory that are not suspended."""
        return sum(self._mapped.values())

    def capturing(self) -> SimulatedGraph | None:
        return self._capturing() if self._capturing is not None else None

    def begin(self, graph: SimulatedGraph, pool: Any) -> None:
        """Begin a capture, which records to a pool."""
        with _LOCK:
            if self.rules.one_capture_at_a_time and self.capturing() is not None:
                raise CaptureError("simulated graph: another capture is under way on this device")
            if pool in self._recorded_to:
                raise CaptureError("simulated graph: another capture records to this memory pool")
            if pool in self._spoiled:
                raise CaptureError("simulated graph: a capture has failed in this memory pool")
            if self.rules.pool_dies_with_its_last_graph and self._graphs_in.get(pool) == 0:
                raise CaptureError("simulated graph: the last graph of this memory pool is gone")
            self._capturing = weakref.ref(graph)
            self._recorded_to.add(pool)
            self._graphs_in[pool] += 1

    def end(self, pool: Any, lost: bool) -> None:
        """End a capture. If it failed (``lost``), the rules say what remains."""
        with _LOCK:
            self._capturing = None
            self._generators_held = lost and self.rules.failed_capture_holds_generators
            if not (lost and self.rules.failed_capture_holds_its_pool):
                self._recorded_to.discard(pool)
            if lost and self.rules.failed_capture_spoils_its_pool:
                self._spoiled.add(pool)
            self.captures += not lost

    def leave(self, pool: Any) -> None:
        """Note that a graph of a pool was freed."""
        with _LOCK:
            self._graphs_in[pool] -= 1

    def abandon(self, pool: Any) -> None:
        """Give a capture up: stop recording to its pool, and remove its graph."""
        with _LOCK:
            self._recorded_to.discard(pool)
            self.leave(pool)

    def recover(self, device: torch.device, pool: Any) -> None:
        """The device's ``after_failed_capture``. As in torch, it releases only a pool that is recorded to."""
        with _LOCK:
            if pool in self._recorded_to:
                self.abandon(pool)

    def count_replay(self, pool: Any) -> None:
        with _LOCK:
            if pool in self._suspended:
                raise CaptureError("simulated graph: replay() into memory that is suspended")
            self.replays += 1

    def empty_cache(self) -> None:
        """Forget dead pools; their identifiers may be used again."""
        if self._recorded_to:
            raise CaptureError("simulated device: emptying the cache: a capture records to a memory pool")
        self._graphs_in += Counter()  # removes pools without graphs

    def is_clean(self) -> bool:
        """Whether no capture is open and no failed one has after-effects."""
        return self.capturing() is None and not self._recorded_to and not self._generators_held

    def draw(self) -> None:
        """Called before a random number is drawn outside of captures."""
        if self._generators_held:
            raise CaptureError(
                "simulated device: a random number outside of captures",
                got="a capture has failed, and none has ended well since",
            )


# Bytes. Kernels of the CPU expect it of memory.
_ALIGNMENT = 64
# The methods that read a tensor's values on the host.
_WAITS = ("item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


class SimulatedGraph(CPUGraph):
    """A graph that replays calls on the tensors that they were captured with, as hardware does.

    The results of operators are copied to the memory that they had during the capture.
    """

    def __init__(self, simulator: Simulator, pool: Any = None) -> None:
        super().__init__()
        self._simulator, self._pool, self._lost, self._thread = simulator, pool, "", 0
        self._captured_with: list[list[Any]] = []
        self._leave: Any = _nothing

    def capture_begin(self) -> None:
        super().capture_begin()
        pool = self._pool or self._simulator.new_pool()
        try:
            self._simulator.begin(self, pool)
        except CaptureError:
            super().capture_end()
            super().reset()
            raise
        self._pool, self._lost, self._thread = pool, "", threading.get_ident()
        self._in_the_end(self._simulator.abandon)

    def _in_the_end(self, leave: Callable[[Any], None]) -> None:
        """Set what happens to the pool when the graph is reset or collected."""
        self._leave = weakref.finalize(self, leave, self._pool)
        self._leave.atexit = False

    def add(self, call: Callable[[], Any]) -> None:
        """Run the call to find out where operators allocate, then restore memory as if it had not run."""
        memory = _Memory(call) if self._simulator.rules.captured_work_waits else None
        try:
            with self._refusing_waits():
                super().add(call)
        finally:
            if memory is not None:
                memory.restore(call)

    @contextlib.contextmanager
    def _refusing_waits(self) -> Iterator[None]:
        # If an interrupt leaves a patch in place, the patch refuses nothing and keeps no graph alive.
        simulator, reference = self._simulator, weakref.ref(self)

        def refusing(name: str) -> Callable[..., Any]:
            read = getattr(torch.Tensor, name)

            @functools.wraps(read)
            def refuse(*args: Any, **kwargs: Any) -> Any:
                graph = simulator.capturing()
                if graph is None or graph is not reference() or threading.get_ident() != graph._thread:
                    return read(*args, **kwargs)
                graph.lose(f"Tensor.{name} reads a value on the host")
                raise CaptureError(f"simulated graph: {graph._lost}, which is not possible while a graph is captured")

            return refuse

        with contextlib.ExitStack() as stack:
            for name in _WAITS if self._simulator.rules.capture_refuses_waits else ():
                stack.enter_context(mock.patch.object(torch.Tensor, name, refusing(name)))
            yield

    def lose(self, why: str) -> None:
        """Mark the capture as failed: it will end with an error."""
        self._lost = self._lost or why

    def capture_end(self) -> None:
        super().capture_end()
        self._simulator.end(self._pool, bool(self._lost))
        self._leave.detach()
        if not self._lost or not self._simulator.rules.failed_capture_holds_its_pool:
            self._in_the_end(self._simulator.leave)
        if self._lost:
            self.reset()
            raise CaptureError("simulated graph: the capture has failed and the graph is empty", got=self._lost)
        # Inputs are static or copied to static input buffers: reading one from a register would fail on hardware.
        self._captured_with = [
            [None] * getattr(call, "inputs", 0) + list(_registers(call))[getattr(call, "inputs", 0) :]
            for call in self._calls
        ]

    def replay(self) -> None:
        capturing = self._simulator.capturing()
        if (
            self._simulator.rules.no_replay_in_a_capture
            and capturing is not None
            and capturing._thread == threading.get_ident()
        ):
            capturing.lose("a graph was replayed")
            raise CaptureError("simulated graph: replay() in a capture: a graph cannot be part of another one")
        if not self._captured:
            super().replay()  # raises
        self._simulator.count_replay(self._pool)
        for call, captured in zip(self._calls, self._captured_with, strict=True):
            registers = _registers(call)
            saved = list(registers)
            registers[:] = captured
            try:
                call()
                for index in _stores(call):
                    pairs = zip(tensors_in(registers[index]), tensors_in(captured[index]), strict=True)
                    for result, place in pairs:
                        place.copy_(result)
            finally:
                registers[:] = saved

    def reset(self) -> None:
        super().reset()
        self._captured_with = []
        self._leave()

    def pool(self) -> Any:
        return self._pool


class _Memory:
    """A snapshot of the memory that a call can write, and of the random number generator.

    Nothing else is restored: a collective that began before may fill its result at the same time.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        unique = {(storage.data_ptr(), storage.nbytes()): storage for storage in _writable(call)}
        self._before = [(storage, storage.clone()) for storage in unique.values()]
        self._random = torch.get_rng_state()

    def restore(self, call: Callable[[], Any]) -> None:
        """Restore the snapshot. Memory that operators have allocated, which replays will fill, becomes NaN."""
        for storage, before in self._before:
            storage.copy_(before)
        torch.set_rng_state(self._random)
        restored = {storage.data_ptr() for storage, _ in self._before}
        for index in _stores(call):
            for tensor in tensors_in(_registers(call)[index]):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in restored and not SHARED.arenas.owns(storage.data_ptr()):
                    tensor_over(storage, (storage.nbytes(),), (1,), torch.uint8).fill_(255)


def _writable(call: Callable[[], Any]) -> Iterator[torch.UntypedStorage]:
    """The storages that a call can write: those of its bound tensors, and the places that results are copied to.

    A call of a recording reads no tensor from its registers: captured work has fixed addresses.
    """
    function = getattr(call, "function", call)
    cells = getattr(function, "__closure__", None) or ()
    for value in (*getattr(function, "__globals__", {}).values(), *(cell.cell_contents for cell in cells)):
        if isinstance(value, ResultCopy):
            yield from value.places.values()
        else:
            yield from (tensor.untyped_storage() for tensor in tensors_in(value))


def _registers(call: Callable[[], Any]) -> list[Any]:
    """The registers of a call; empty for a plain one."""
    return getattr(call, "registers", [])


def _stores(call: Callable[[], Any]) -> list[int]:
    return getattr(call, "stores", [])


def _nothing() -> None:
    """The ``_leave`` of a graph without a pool."""


@dataclass(eq=False)
class SimulatedPool:
    """A memory pool of suspendable memory.

    Attributes:
        buffers: what was allocated in it outside of captures; it lives as long as the pool.
    """

    id: Any
    buffers: list[torch.UntypedStorage] = field(default_factory=list)


class SimulatedMemory:
    """Suspendable memory of the simulated device. Suspended memory is filled with 0xff, which is NaN.

    It stays accessible, but no graph of its pools can be replayed.
    """

    def __init__(self, simulator: Simulator, device: torch.device) -> None:
        self._simulator, self._device = simulator, device
        self._pools = weakref.WeakSet[SimulatedPool]()
        self._suspended: list[torch.UntypedStorage] = []

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        storage = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8).untyped_storage()
        begin = -storage.data_ptr() % _ALIGNMENT
        return self._counted(storage[begin : begin + nbytes])

    def _counted(self, storage: Any) -> torch.UntypedStorage:
        mapped, address = self._simulator._mapped, storage.data_ptr()
        mapped[address] = storage.nbytes()
        weakref.finalize(storage, mapped.pop, address, None).atexit = False
        return storage  # type: ignore[no-any-return]

    def new_pool(self) -> SimulatedPool:
        pool = SimulatedPool(self._simulator.new_pool())
        self._pools.add(pool)
        return pool

    def allocating(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def allocate_in(self, pool: SimulatedPool, nbytes: int) -> torch.UntypedStorage:
        pool.buffers.append(self._counted(torch.empty(nbytes, dtype=torch.uint8).untyped_storage()))
        return pool.buffers[-1]

    def note_stream(self, stream: Any) -> None:
        """Nothing to note: the CPU has no streams."""

    def suspend(self, block: torch.UntypedStorage | None) -> int:
        pools = list(self._pools)
        self._suspended = [*([block] if block is not None else []), *(b for pool in pools for b in pool.buffers)]
        self._simulator._suspended.update(pool.id for pool in pools)
        for storage in self._suspended:
            tensor_over(storage, (storage.nbytes(),), (1,), torch.uint8).fill_(255)
        return sum(self._simulator._mapped.pop(storage.data_ptr(), 0) for storage in self._suspended)

    def resume(self) -> int:
        self._simulator._suspended.difference_update(pool.id for pool in self._pools)
        suspended, self._suspended = self._suspended, []
        self._simulator._mapped.update((storage.data_ptr(), storage.nbytes()) for storage in suspended)
        return sum(storage.nbytes() for storage in suspended)

    def reclaim(self) -> int:
        return 0


@dataclass(frozen=True)
class SimulatedRuntime(DeviceRuntime):
    """The runtime of a simulated device."""

    simulator: Simulator = field(default_factory=Simulator)


def simulated(rules: Rules = Rules()) -> SimulatedRuntime:
    """A new simulated device, for ``using_runtime``."""
    simulator = Simulator(rules)
    return SimulatedRuntime(
        torch.device("cpu"),
        functools.partial(SimulatedGraph, simulator),
        frozen_addresses=True,
        runs_while_capturing=not rules.captured_work_waits,
        implementation="simulated graph",
        new_pool=simulator.new_pool,
        after_failed_capture=simulator.recover,
        suspendable_memory=functools.partial(SimulatedMemory, simulator),
        conditional_nodes=repeated_calls(capture_runs=not rules.captured_work_waits),
        simulator=simulator,
    )


SIMULATED = simulated()
