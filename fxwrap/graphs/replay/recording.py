"""A recording: a program captured for one set of concrete sizes. It replays until it ends, or is superseded."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node
from torch.profiler import record_function

from ...host_graph.tensors import tensors_in
from ...torch_private import native_library
from ...torch_private.functions import below_autograd, pointer_check, profiling, without_modes
from ...torch_private.native_units import CannotReplay, Unit
from ..devices.device_graph import DeviceGraph
from ..devices.runtime import DeviceRuntime, GraphPool
from ..memory.arenas import Arena
from ..memory.live_outputs import OutputStorage, WatchedOutputs
from ..memory.locks import LockOwner, TryLock
from ..memory.memory_provider import RecordingMemory
from ..memory.regions import Regions
from ..traces import ProgramTraces
from .flat_python import Part
from .guards import Description, Guards
from .liveness_guard import LivenessGuard
from .overlaps import MutatedInputs
from .units import make_unit

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RecordingRequest(RecordingMemory):
    """What a recording is made from: its memory (inherited), and what follows.

    Attributes:
        name, traces: the program's name and traces.
        static_inputs: positions of the inputs whose addresses are assumed not to change; each call checks them.
        copied: storages of outputs that are copied when handed out.
        mutated_inputs: checks that no mutated input overlaps another input; None where no check is needed.
        guards: what a native call must look like, apart from addresses, locks, device and streams, which
            ``make_unit`` adds; None if a unit cannot check it: then the recording replays in Python.
        count: counts native replays.
        policy: the policy that gets reports of outputs that are live when their memory is needed.
    """

    name: str
    traces: ProgramTraces
    runtime: DeviceRuntime
    static_inputs: list[int]
    copied: frozenset[int]
    mutated_inputs: MutatedInputs | None
    guards: Guards | None
    count: ctypes.c_int64
    policy: weakref.ref[Policy]


class Policy(Protocol):
    """Decides which outputs are copied (``graphs/policy/specialization.py``)."""

    def note_live(self, outputs: Collection[int]) -> bool: ...


@dataclass(frozen=True)
class Replay:
    """The work of a call.

    Attributes:
        registers: values that change from call to call; the first ``inputs_end`` are the inputs.
        frees_inputs: whether a replay drops its references to inputs at their last use.
        parts: in order: asserts on inputs, copies to static input buffers, for each partition the replay of its
            graph, or its eager work and the copies of its results to static buffers, copies back to mutated inputs;
            the last makes the outputs.
    """

    registers: list[Any]
    inputs_end: int
    frees_inputs: bool
    parts: Sequence[Part]

    def run(self) -> Any:
        outputs = None
        for part in self.parts:
            outputs = part.run(self.registers)
        return outputs

    def run_profiled(self) -> Any:
        """Run with a range for each part that has a name, and one for each launch and library call."""
        outputs = None
        for part in self.parts:
            with contextlib.ExitStack() as around:
                if part.name:
                    around.enter_context(record_function(part.name))
                if part.below_autograd:
                    around.enter_context(below_autograd())
                outputs = part.run_profiled(self.registers)
        return outputs


@dataclass(frozen=True)
class RecordingResources:
    """Resources that a recording keeps until it ends.

    Attributes:
        graphs: the device graphs.
        pools: the memory pools of the graphs. A live pool marks its stream as used, so that a new pool takes another
            if one is free.
        kept: tensors over planned and per-recording storages, static input buffers, and values at fixed addresses
            (results of captured partitions, and static buffers of eager results), by the node that makes the value.
        in_arenas: (device, offset) of each storage in an arena, by its handle.
        eager_reasons: why a partition that was to be captured runs eagerly, by partition.
    """

    graphs: Sequence[DeviceGraph]
    pools: Sequence[GraphPool | None]
    kept: Mapping[Node, Any]
    in_arenas: Mapping[int, tuple[torch.device, int]]
    regions: Regions
    eager_reasons: Mapping[int, str]


class Recording:
    """Replayed with ``run`` by a call that holds its locks (``acquire``). ``record/recording_builder`` makes it.

    Attributes:
        static_addresses: the addresses of static inputs, by position.
        same_addresses: tells whether every static input of a call is at its recorded address.
        ended: why it can never run again; empty while it can.
        superseded: why another recording is to replace it; empty otherwise.
        without_graphs: the reason, if every capture failed; empty otherwise.
        unit: replays it natively; None if it replays in Python.
        listing: the steps of the unit, a line for each.
    """

    def __init__(
        self, request: RecordingRequest, replay: Replay, resources: RecordingResources, static_addresses: list[Any]
    ) -> None:
        self.request, self.plan = request, request.sized.plan
        self._replay: Replay | None = replay
        self._resources: RecordingResources | None = resources
        self._blank = (None,) * len(replay.registers)
        # An arena's lock also guards all recordings in it. A recording without arenas has a lock of its own.
        self._arenas = tuple(request.arenas.values())
        self._locks = tuple(arena.lock for arena in self._arenas) or (TryLock(),)
        self.static_addresses = static_addresses
        self.same_addresses: Callable[[list[Any]], bool] = lambda inputs: True
        if request.static_inputs:
            self.same_addresses = pointer_check(static_addresses, request.static_inputs)
        self.eager_reasons = resources.eager_reasons
        captured_none = resources.eager_reasons and not resources.graphs
        self.without_graphs = next(iter(resources.eager_reasons.values())) if captured_none else ""
        self.ended = self.superseded = ""
        self._used = next_use()
        self.unit: Unit | None = None
        self.listing: Sequence[str] = ()
        self._watched_outputs = WatchedOutputs()
        self._liveness: LivenessGuard | None = None
        self._retire: Callable[[], object] = lambda: None  # until ``watch`` has run

    def watch(self, outputs: Sequence[OutputStorage], inputs: Sequence[Any], returned: Any) -> None:
        """Take the use-count baselines of the first call's outputs, and enter the arenas.

        Called when the recorded call has cleared its registers: references to them would raise the counts.

        Args:
            outputs: the outputs that are handed out uncopied.
            returned: the outputs of the first call.
        """
        assert self._resources is not None
        handed_out = Counter(tensor.untyped_storage()._cdata for tensor in tensors_in(returned))
        memory, arenas = self.request.memory, self.request.arenas
        self._watched_outputs = WatchedOutputs(outputs, handed_out=handed_out)
        regions = {arena: memory.arenas.get(device) for device, arena in arenas.items()}
        footprints = {arena: memory.footprint(region) if region else [] for arena, region in regions.items()}
        donated_counts = Counter(inputs[position].untyped_storage()._cdata for position in self.request.reused_inputs)
        self._liveness = LivenessGuard(footprints, self._watched_outputs, donated_counts)
        kept = tensors_in(list(self._resources.kept.values()))
        self._retire = weakref.finalize(self, _retire, self._watched_outputs, self._arenas, kept)
        self._retire.atexit = False
        # Last: an interrupt before it leaves nothing in the arenas; after it the finalizer retires the outputs.
        for arena, region in regions.items():
            arena.enter(self, self._watched_outputs, region.size if region is not None else 0)
        others = [user for arena in regions for user, _ in arena.users() if user is not self]
        for other in sorted(others, key=lambda user: -user.used)[:_TOLD_AT_ONCE]:
            other.tell_unit_of_others()

    def tell_unit_of_others(self) -> None:
        """Have the unit know the outputs that others have in its arenas by now, whose locks the call holds.

        Otherwise the next replay would go through Python, which tells it.
        """
        if self._liveness is not None and self._liveness.changed() and not self.superseded:
            self._tell_unit()

    def acquire(self, owner: LockOwner) -> bool:
        """Lock the recording and its arenas for one call: all of them, or none.

        Returns:
            False if another call uses one, or if the recording has ended or has a suspended arena.
        """
        if all(lock.acquire(owner) for lock in self._locks):
            if self.unit is not None and self.unit.abandoned and not self.superseded:
                self.supersede("the process was forked in the middle of a call")
            if not self.ended and not any(arena.is_suspended() for arena in self._arenas):
                return True
        self.release(owner)
        return False

    def end_if_suspended(self, why: str) -> bool:
        """End it if one of its arenas is suspended, and so cannot be locked; returns whether one was."""
        return any(arena.end_if_suspended([self], why) for arena in self._arenas)

    def release(self, owner: LockOwner) -> None:
        """Release the locks that ``owner`` holds."""
        for lock in self._locks:
            lock.release(owner)

    @property
    def graphs(self) -> Sequence[DeviceGraph]:
        """The device graphs that it replays; empty if it has ended."""
        return self._resources.graphs if self._resources is not None else ()

    @property
    def replay(self) -> Replay | None:
        """The work of a call; None if it has ended."""
        return self._replay

    @property
    def used(self) -> int:
        """When it was used last, as a number that grows."""
        return max(self._used, self.unit.used if self.unit is not None else 0)

    def make_unit(self) -> str:
        """Make the native unit, unless there are no guards, the recording has ended, or every capture failed.

        Returns:
            Why it could not be made; empty if it was, or is not wanted.
        """
        guards, replay, resources = self.request.guards, self._replay, self._resources
        if guards is None or replay is None or resources is None or self.without_graphs:
            return ""
        native = native_library.native_replay()
        if isinstance(native, str):
            return native
        static = [(position, self.static_addresses[position]) for position in self.request.static_inputs]
        device = self.request.runtime.device if self._arenas and self.request.runtime.device.type != "cpu" else None
        streams = [arena.stream_id for arena in self._arenas] if device is not None else []
        locks = [(lock.owners, lock.native) for lock in self._locks]
        guards = dataclasses.replace(guards, addresses=static, locks=locks, device=device, streams=streams)
        described = Description(
            replay.inputs_end, replay.frees_inputs, guards, _CLOCK, self.request.count, self.request.name
        )
        try:
            self.unit = make_unit(native, replay.parts, len(replay.registers), described)
        except CannotReplay as error:
            return str(error)
        self.listing = described.listing
        self._tell_unit()
        return ""

    @property
    def own_storages(self) -> list[torch.UntypedStorage]:
        """What it keeps outside arenas.

        These are static buffers of eager results, results of captured partitions in the graph pool, and per-recording
        storages. On the CPU they are also the regions, which have no memory between calls.
        """
        if self._resources is None:
            return []
        kept = tensors_in(list(self._resources.kept.values()))
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in kept}
        return [storage for handle, storage in storages.items() if handle not in self._resources.in_arenas]

    @property
    def own_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.own_storages)

    def is_at(self, position: int, value: Any) -> bool:
        """Whether a static input is at its recorded address."""
        return bool(value.data_ptr() == self.static_addresses[position])

    def may_run(self, inputs: list[Any], owner: LockOwner) -> bool:
        """Whether it can replay this call; the caller holds its locks.

        It cannot if it is superseded, a static input has moved, a mutated input overlaps another input, another
        stream works in its arenas, or a replay would overwrite a live output.
        """
        if self.superseded or not self.same_addresses(inputs):
            return False
        if (mutated := self.request.mutated_inputs) is not None and not mutated.are_apart(inputs):
            return False
        return not self._arenas or (self.is_idle_for(owner) and self.spares_live_outputs())

    def spares_live_outputs(self) -> bool:
        """Whether a replay would overwrite no live output (donated ones may be). False if superseded."""
        free = not self.superseded and (self._liveness is None or self._liveness.all_dead())
        if free:
            self._tell_unit()
        return free

    def _tell_unit(self) -> None:
        """Give the unit the use counts at which no output is live.

        It then checks liveness itself, until an arena's version changes.
        """
        if self.unit is not None and self._liveness is not None:
            self.unit.expect(*self._liveness.expected())

    def supersede(self, why: str) -> None:
        """Mark it as to be replaced by another recording; it does not run again."""
        log.info("%s: a recording is to be replaced: %s", self.request.name, why)
        self.superseded = why
        if self.unit is not None:
            self.unit.clear()

    def is_idle_for(self, owner: LockOwner) -> bool:
        """Whether no other stream still works in its arenas."""
        return all(arena.is_idle_for(owner.stream) for arena in self._arenas)

    @property
    def watched_outputs(self) -> Sequence[OutputStorage]:
        """The outputs that it hands out uncopied."""
        return self._watched_outputs.outputs

    def live(self) -> Mapping[OutputStorage, int]:
        """The live outputs, with the number of the caller's tensors over each."""
        return self._watched_outputs.live()

    def report_live_outputs(self) -> None:
        """Report live outputs of other recordings in this one's memory to their specializations.

        An output that is reported twice is copied from then on.
        """
        for output in self._liveness.live_of_others() if self._liveness is not None else ():
            owner = output.owner() if output.owner is not None else None
            policy = owner.request.policy() if owner is not None else None
            if policy is not None:
                policy.note_live(output.indices)

    def end(self, why: str) -> None:
        """End it and drop all memory. The caller holds the lock of one of its arenas, or its own lock."""
        log.info("%s: a recording ends: %s", self.request.name, why)
        self.ended = why
        self._retire()
        if self.unit is not None:
            self.unit.clear()
        self._replay = self._resources = self._liveness = None
        self._watched_outputs = WatchedOutputs()

    def run(self, inputs: list[Any], owner: LockOwner) -> Any:
        """Replay on ``inputs`` and hand out the outputs.

        ``owner`` holds its locks, and no other stream works in its arenas. Where addresses are not frozen the list is
        emptied, so that each input is freed after its last use.
        """
        replay = self._replay
        assert replay is not None, f"a recording was run that has ended: {self.ended}"
        r = replay.registers
        self._used = next_use()
        for arena in self._arenas:
            arena.stream = owner.stream
        try:
            r[: replay.inputs_end] = inputs
            if replay.frees_inputs:
                inputs.clear()
            return replay.run_profiled() if profiling() else replay.run()
        except BaseException:
            if self._resources is not None:
                self._resources.regions.empty()
            raise
        finally:
            r[:] = self._blank

    def forget_inputs(self) -> None:
        """Drop inputs that an interrupted call left in the registers."""
        owner = LockOwner()
        if self.acquire(owner):
            if self._replay is not None:
                self._replay.registers[:] = self._blank
            self.release(owner)

    def failed_natively(self, error: BaseException) -> None:
        """Add the failed step to an error that the unit raised."""
        if self.unit is not None and self.unit.failed >= 0 and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"fxwrap: raised by {self.listing[self.unit.failed]}")


# A counter that stamps each use: the lowest stamp is the least recent use.
_CLOCK = ctypes.c_int64()


# How many recordings hear of a new one's outputs when it is made, the newest used first; others at their next use.
_TOLD_AT_ONCE = 32


def next_use() -> int:
    _CLOCK.value += 1
    return _CLOCK.value


def _retire(
    outputs: WatchedOutputs,
    arenas: Sequence[Arena],
    kept: list[torch.Tensor],
) -> None:
    """Retire the outputs, and keep memory until the device has finished using it.

    Also runs as a finalizer, perhaps while another program is traced.
    """
    outputs.retire()
    for arena in arenas:
        arena.changed()
        with without_modes():
            arena.keep_until_done(kept)
    kept.clear()
