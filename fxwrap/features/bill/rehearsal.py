"""A rehearsal: calls run as programs of their own, in memory of their own, and without device graphs.

It finds out what recordings would keep, because it makes the same allocations: arenas, static buffers, and, in place
of the pool of a capture, a ``torch.cuda.MemPool`` (or another device's). The policies decide which sizes get a
recording and which are evicted. The functions' own programs, recordings and arenas are left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...api.record import COMPILES
from ...graphs.devices.device_graph import DeviceGraph
from ...graphs.devices.runtime import DeviceRuntime, GraphPool, runtime_for, using_runtime
from ...graphs.memory.arena_pool import ArenaPool
from ...graphs.memory.arenas import Arena
from ...graphs.memory.shared_state import SHARED
from ...graphs.policy.specialization import Specialization
from ...graphs.program import WARM_UPS, Program
from ...graphs.program_runs import calls_run_by, programs_run_by
from ...graphs.replay.recording import Recording
from ...packing.allocators import PAGE, rounded, taken
from ...plan import Verdict
from ...torch_private.functions import free_workspaces
from ..checked.through import through_capture
from .bill import Bill, DeviceBill, RecordingBill


@dataclass(frozen=True)
class RehearsalRuntime(DeviceRuntime):
    """A runtime whose captures run their work in a memory pool, as a device graph's capture allocates in one.

    Attributes:
        free_workspaces: ``torch_private.functions.free_workspaces``.
        workspaces: the bytes of the libraries' workspaces in each pool.
    """

    free_workspaces: Callable[[Any], None] = lambda stream: None
    workspaces: weakref.WeakKeyDictionary[GraphPool, int] = field(default_factory=weakref.WeakKeyDictionary)

    @classmethod
    def of(cls, runtime: DeviceRuntime, free_workspaces: Callable[[Any], None]) -> RehearsalRuntime:
        through = through_capture(runtime)
        fields = {f.name: getattr(through, f.name) for f in dataclasses.fields(DeviceRuntime)}
        return cls(**fields, free_workspaces=free_workspaces)

    def make_pool(self, *args: Any, **kwargs: Any) -> GraphPool:
        pool = super().make_pool(*args, **kwargs)
        make = getattr(torch.get_device_module(self.device), "MemPool", None)
        if pool.memory_pool is None and make is not None:
            with torch.get_device_module(self.device).device(self.device):
                pool.memory_pool = make()
        return pool

    def capture(self, graph: DeviceGraph, work: Callable[[], object], pool: GraphPool | None) -> None:
        if pool is None or pool.memory_pool is None:
            super().capture(graph, work, pool)
            return
        module = torch.get_device_module(self.device)
        with module.use_mem_pool(pool.memory_pool, self.device):
            super().capture(graph, work, pool)
        allocated = module.memory_allocated(self.device)
        self.free_workspaces(pool.stream)
        freed = allocated - module.memory_allocated(self.device)
        self.workspaces[pool] = max(self.workspaces.get(pool, 0), freed)


@dataclass(eq=False)
class Rehearsed:
    """The calls of one program at one set of sizes.

    Attributes:
        program: the program that was called, and ``understudy`` the one that ran.
        sizes: the values of sizes that vary, by symbol.
        key: of the understudy's specialization.
        eager: why the newest call ran eagerly; empty if it did not.
        took: what the newest recording takes; it may have ended since.
    """

    program: Program
    understudy: Program
    sizes: Mapping[str, Any]
    key: Any
    eager: str = ""
    took: RecordingBill | None = None

    @property
    def _specialization(self) -> Specialization:
        # One without recordings may have been forgotten.
        return self.understudy.specializations.get(self.key) or Specialization()

    @property
    def recordings(self) -> list[Recording]:
        """Those that can be replayed."""
        return [r for r in self._specialization.recordings if not r.ended and not r.superseded]

    @property
    def bill(self) -> RecordingBill:
        if self.recordings:
            return self._bill()
        made = self._specialization
        reasons = [*(recording.ended for recording in made.recordings), made.ended_because, self.eager]
        why = next(filter(None, reasons), "not called often enough")
        return dataclasses.replace(self.took or self._bill(), not_kept=why)

    def note(self, eager: Collection[str]) -> None:
        """Args: eager: why programs ran eagerly in a call."""
        self.eager = next(iter(eager), "")
        if self.recordings:
            self.took = self._bill()

    def _bill(self) -> RecordingBill:
        plan, recordings = self.understudy.plan, self.recordings
        eager = frozenset[int]().union(*(recording.eager_reasons for recording in recordings))
        captured = [p for p in plan.partitions if p.verdict is Verdict.CAPTURED and p.index not in eager]
        sized = [recording.request.sized for recording in recordings]
        return RecordingBill(
            program=self.program.name,
            sizes=self.sizes,
            arena=max((r.request.memory.size + r.request.memory.kept for r in recordings), default=0),
            copied_in=sum(nbytes for one in sized for _, nbytes in one.input_buffers.values()),
            own=sum(recording.own_bytes for recording in recordings),
            graphs=sum(len(recording.graphs) for recording in recordings),
            kernels=len(recordings) * sum(partition.launches for partition in captured),
            library_calls=len(recordings) * sum(partition.externs for partition in captured),
        )


class Rehearsal:
    """Runs the programs that this thread calls as other programs, and keeps what they record until it ends.

    Attributes:
        arenas: the arenas of these recordings.
        rehearsed: in the order of the first calls.
    """

    def __init__(self) -> None:
        self.arenas = ArenaPool()
        self.rehearsed = dict[tuple[Program, Any], Rehearsed]()
        self._runtimes = dict[torch.device, RehearsalRuntime]()
        self._understudies = dict[Program, Program]()
        self._unrecorded = ""  # why calls must not record now

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Rehearse the programs that this thread calls inside, with their backwards."""
        with calls_run_by(self._run):
            yield

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside of the context, programs run eagerly, and that is no warm-up."""
        self._unrecorded = COMPILES
        try:
            yield
        finally:
            self._unrecorded = ""

    @property
    def progress(self) -> tuple[int, int]:
        """The numbers of warm-up runs and of recordings."""
        counters = [understudy.counters for understudy in self._understudies.values()]
        warm_ups = sum(c.eager[reason] for c in counters for reason in WARM_UPS)
        return warm_ups, sum(sum(c.recordings.values()) for c in counters)

    def bill(self) -> Bill:
        """What the recordings keep at this moment."""
        devices = [*map(self._device_bill, dict.fromkeys(arena.device for arena in self.arenas.alive()))]
        recordings = (recording for calls in self.rehearsed.values() for recording in calls.recordings)
        if kept := max((recording.request.memory.kept for recording in recordings), default=0):
            devices.append(DeviceBill(torch.device("cpu"), kept, pools=0, workspaces=0, static_buffers=0))
        # Code with dynamic sizes can take the place of code that has only warmed up.
        uncalled = *WARM_UPS, COMPILES
        called = [calls for calls in self.rehearsed.values() if calls.took or calls.eager not in uncalled]
        return Bill(tuple(devices), tuple(calls.bill for calls in called))

    def end(self) -> None:
        """Free the memory of all recordings."""
        for arena in self.arenas.alive():
            arena.clear("the dry run is over")

    def _run(self, program: Program, inputs: list[Any]) -> Any:
        with programs_run_by(None), self._instead_of(program.plan.device, free_workspaces):
            understudy = self._understudy(program)
            key, sizes = understudy.sizes_of(inputs)
            eager = understudy.counters.eager
            why = self._unrecorded
            outputs = understudy.run_without_unit(inputs, why) if why else understudy.run(inputs)
        calls = self.rehearsed.setdefault((program, key), Rehearsed(program, understudy, sizes, key))
        calls.note(understudy.counters.eager - eager)
        return outputs

    @contextlib.contextmanager
    def _instead_of(self, device: torch.device, free_workspaces: Callable[[Any], None]) -> Iterator[None]:
        if device not in self._runtimes:
            self._runtimes[device] = RehearsalRuntime.of(runtime_for(device), free_workspaces)
        with using_runtime(self._runtimes[device]), SHARED.using_arenas(self.arenas):
            yield

    def _understudy(self, program: Program) -> Program:
        if program not in self._understudies:
            limit = program.recorder.memory_limit
            options = dataclasses.replace(program.options, strict=False, memory_limit=limit)
            made = Program(program.plan, program.planner, options)
            forward, saved = program.recorder.forward
            for other, understudy in self._understudies.items():
                if other.recorder is forward:
                    made.link_forward(understudy, saved)
            self._understudies[program] = made
        return self._understudies[program]

    def _device_bill(self, device: torch.device) -> DeviceBill:
        arenas = self.arenas.alive(device)
        pools = [pool for arena in arenas if (pool := arena.graph_pool) is not None]
        # All of them: torch must not be asked about one pool (features/suspend/cuda_memory.py says why).
        snapshot: list[dict[str, Any]] = getattr(torch.get_device_module(device), "memory_snapshot", list)()
        identifiers = {pool.memory_pool.id for pool in pools if pool.memory_pool is not None}
        segments = [s for s in snapshot if tuple(s.get("segment_pool_id", ())) in identifiers]
        in_pools = [range(s["address"], s["address"] + s["total_size"]) for s in segments]
        recordings = [recording for calls in self.rehearsed.values() for recording in calls.recordings]
        own = {s._cdata: s for recording in recordings for s in recording.own_storages if s.device == device}
        outside = [s for s in own.values() if not any(s.data_ptr() in segment for segment in in_pools)]
        workspaces = self._runtimes[device].workspaces if device in self._runtimes else {}
        return DeviceBill(
            device,
            sum(map(_bytes_of, arenas)),
            sum(segment["total_size"] for segment in segments),
            sum(workspaces.get(pool, 0) for pool in pools),
            sum(taken(storage.nbytes()) for storage in outside),
            temporaries_known=all(pool.memory_pool is not None for pool in pools),
        )


def _bytes_of(arena: Arena) -> int:
    if arena.memory is not None:
        return rounded(arena.nbytes, PAGE)
    return taken(arena.block.nbytes() if arena.block is not None else arena.nbytes)
