"""A program: the callable made from one host graph. Warms up, records, replays."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from ..errors import CaptureError, InputError, MemoryLimitError, PlanError
from ..host_graph.nodes import (
    Kind,
    aligned_inputs,
    checks_on,
    constants,
    counts_from_storage,
    is_symbolic_value,
    kind_of,
    operator_name,
    output_node,
    output_values,
)
from ..host_graph.sizes import number_of
from ..host_graph.tensors import stands_for_memory
from ..options import Options
from ..plan import MemoryPlan, Origin, Planned, ProgramPlan
from .devices.runtime import capture_check, current_stream, freezes_addresses, runtime_for
from .memory.arenas import OUT_OF_MEMORY, TOO_LARGE, Arena
from .memory.locks import LockOwner
from .memory.memory_provider import Estimate, MemoryProvider, Planner, RecordingMemory, Saved
from .memory.shared_state import SHARED
from .policy.counters import Counters, RecordingMade
from .policy.eager_memory import GiveBack, can_run_again
from .policy.specialization import Decision, Specialization, Specializations
from .record.flat import FlatBuilder, FlatFunction
from .record.recording_builder import Recorded, RecordingBuilder
from .replay.flat_python import Part
from .replay.guards import Description, Guards
from .replay.native import CannotReplay, Unit
from .replay.overlaps import MutatedInputs
from .replay.ranges import partition_range
from .replay.ranges import recording as recording_range
from .replay.recording import Recording, RecordingRequest, next_use
from .replay.units import make_unit
from .torch_functions import TorchFunctions

log = logging.getLogger(__name__)

_NOT_REPLAYED = object()
_WARM_UP, _CAPTURED = "warm-up", "called while the caller captures"
_OVERLAP = "a mutated input overlaps another one"
# Seconds that a call waits for another thread's capture before it runs eagerly: a capture takes milliseconds.
_WAIT_S = 1.0
# The eager run at which a native unit is made for eager runs. Most programs run eagerly only once.
_RUNS_BEFORE_UNIT = 3
# Recordings that a report can tell of.
_HISTORY = 200
_serial_numbers = itertools.count()


@dataclass(frozen=True)
class _Prepared:
    """A program plan, and what is derived from it. Made again when the program is cut again."""

    plan: ProgramPlan
    eager: EagerRuns
    give_back: GiveBack | None  # None where recordings keep no memory
    outputs: Sequence[tuple[int, int]]  # (position, storage) of outputs that the program or an operator allocates
    copied: frozenset[int]  # storages of outputs copied because of copy_outputs; saved ones are not
    overwritten: Sequence[int]  # positions of donated inputs whose memory may be written
    aligned: frozenset[int]  # positions of inputs that kernels expect to be aligned
    provider: MemoryProvider


class Program:
    """Runs a host graph: eagerly at first, then from recordings.

    Thread-safe: a recording serves one call at a time. Other calls use other recordings, or run eagerly.

    Attributes:
        name: names the program in logs, profiles and reports: its number in this process, and its phase.
    """

    def __init__(
        self,
        plan: ProgramPlan,
        planner: Planner,
        options: Options,
        functions: TorchFunctions,
    ) -> None:
        self.options, self.functions, self._planner = options, functions, planner
        self._profiling = functions.profiling
        self._refused = dict[str, str]()  # operators whose capture failed, with the error
        self.counters = Counters()
        self.history = deque[RecordingMade](maxlen=_HISTORY)
        self.specializations = Specializations(options.max_recordings)
        self.newest_plan: MemoryPlan | None = None
        self.newest_planned: Planned | None = None
        self._never_recorded = ""
        self.name = f"fxwrap {next(_serial_numbers)} {plan.phase}"
        self._traces = functions.traces(self.name)
        self._traces.compiled(plan)
        self._prepared = self._adopt(plan)
        self._inputs = len(self.plan.placeholders)
        self._dynamic = _dynamic_positions(self.plan.placeholders)
        self._freezes_addresses = freezes_addresses(self.plan.device)
        self._mutated_inputs = MutatedInputs.of(self.plan, functions.overlap) if self._freezes_addresses else None
        self._is_forward = self.plan.phase == "forward"
        self._on_accelerator = self.plan.device.type != "cpu"
        self._warm_ups = max(options.warmup, int(self._on_accelerator))
        self._no_room = f"{options.max_recordings} other recordings are used more often (max_recordings)"
        self._caller_captures = capture_check(self.plan.device)
        self._forward: tuple[weakref.ref[Program], Mapping[int, Sequence[str]]] | None = None
        self._saved_tensors = frozenset[int]()  # positions of inputs that the forward program allocates
        self._missed: Any = None
        self._thread = threading.local()  # warm: this thread has made a warm-up run (accelerators only)

    @property
    def plan(self) -> ProgramPlan:
        return self._prepared.plan

    def _adopt(self, plan: ProgramPlan) -> _Prepared:
        log.info("%s: %d partition(s) on %s", self.name, len(plan.partitions), plan.device)
        for one in plan.partitions:
            what = partition_range(self.name, one.index), one.verdict.value, one.launches, one.externs
            log.info("%s: %s, %d launches, %d extern calls; %s", *what, one.reason or one.benefit)
        written, frozen = plan.facts.all_written(), freezes_addresses(plan.device)
        provider = MemoryProvider(
            self._planner,
            plan,
            _inputs_counted_from_their_storage(plan),
            self.options.max_memory,
        )
        outputs = _tensor_outputs(plan)
        give_back = GiveBack(plan.device, self.counters, capture_check(plan.device)) if frozen else None
        return _Prepared(
            plan,
            EagerRuns(self.name, _eager_function(plan, self.name, give_back), len(plan.placeholders), self.functions),
            give_back,
            outputs,
            frozenset(index for p, index in outputs if self.options.copy_outputs and p not in plan.saved),
            [p for p in sorted(plan.donated) if frozen or written & plan.facts.of(plan.placeholders[p])],
            aligned_inputs(plan.graph),
            provider,
        )

    # -- calling ----------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any) -> Any:
        return self.run(list(inputs))

    def run(self, inputs: list[Any]) -> Any:
        """Run the program on a list of inputs, which is emptied."""
        for unit in self.specializations.units or self._units_for(inputs):
            try:
                outputs = unit(inputs)
            except BaseException as error:
                self._failed(error, unit)
                raise
            if outputs is not self._missed:
                return outputs
        inputs, caller_s = list(inputs), inputs
        caller_s.clear()
        if len(inputs) != self._inputs:
            raise InputError(
                "program called with the wrong number of inputs",
                expected=str(self._inputs),
                got=str(len(inputs)),
            )
        try:
            if self._prepared.overwritten:
                SHARED.packed.copy_from(inputs, self._prepared.overwritten)
            key = self._key(inputs) if self._dynamic else None
            run = self._run_in_range if self._profiling() else self._run
            if self._on_accelerator:
                with self._guard():
                    outputs = run(key, inputs)
            else:
                outputs = run(key, inputs)
            if self._is_forward and self.functions.saved_tensors_hooks():
                SHARED.packed.note(outputs)
            return outputs
        except BaseException as error:
            self._failed(error)
            raise

    def _units_for(self, inputs: Sequence[Any]) -> tuple[Unit, ...]:
        by_key = self.specializations.units_by_key
        return by_key.get(self._key(inputs), ()) if by_key and len(inputs) == self._inputs else ()

    def _failed(self, error: BaseException, unit: Unit | None = None) -> None:
        self._count("events", f"a call raised {type(error).__name__}")
        for recording in self.specializations.recordings():
            if unit is None:
                recording.forget_inputs()
            elif recording.unit is unit:
                recording.failed_natively(error, self._owner())

    def _count(self, kind: str, reason: str) -> None:
        """Count an eager run's reason, or an event. Each thread logs the first of each."""
        if self.counters.count(kind, reason) == 1:
            log.info("%s: %s%s", self.name, "runs eagerly: " if kind == "eager" else "", reason)

    def _run_in_range(self, key: Any, inputs: list[Any]) -> Any:
        with record_function(self.name):
            return self._run(key, inputs)

    def _run(self, key: Any, inputs: list[Any]) -> Any:
        found = self.specializations.get(key) or self._add_specialization(key, inputs)
        if found.recordings:
            outputs = self._replay(found, inputs)
            if outputs is not _NOT_REPLAYED:
                return outputs
        return self._not_replayed(found, inputs)

    def _add_specialization(self, key: Any, inputs: Sequence[Any]) -> Specialization:
        for value in inputs:
            if stands_for_memory(value):
                raise InputError(
                    f"{self.name} called with a {type(value).__name__}",
                    expected="tensors that have memory",
                    got="one that stands for others",
                    remedy="call the function that was compiled, not what torch.compile returned",
                )
        return self.specializations.add(key)

    def _replay(self, specialization: Specialization, inputs: list[Any]) -> Any:
        owner = self._owner()
        # If the caller is capturing, its graph would keep arena addresses, but hold no reference to the memory.
        # Stream 0 cannot be captured, so the driver, which answers slowly, is not asked about it.
        if getattr(owner.stream, "stream_id", 0) and self._caller_captures():
            return _NOT_REPLAYED
        for recording in specialization.recordings:
            if recording.acquire(owner) and recording.may_run(inputs, owner):
                return self._run_recording(recording, inputs, owner)
            recording.release(owner)
        return _NOT_REPLAYED

    def _key(self, inputs: Sequence[Any]) -> Any:
        """The key of a specialization: all dynamic sizes and strides, and number inputs."""
        return tuple(
            number_of(inputs[position])
            if how is None
            else (inputs[position].size(dim) if how == "size" else inputs[position].stride(dim))
            for position, how, dim in self._dynamic
        )

    def _owner(self) -> LockOwner:
        return LockOwner(current_stream(self.plan.device) if self._on_accelerator else None)

    def _not_replayed(self, specialization: Specialization, inputs: list[Any]) -> Any:
        specialization.missed_at.append(next_use())
        prepared, reason = self._prepared, self._eager_reason(specialization, inputs)
        if reason:
            return self._run_eagerly(prepared, inputs, reason, specialization)
        owner, capturing = self._owner(), SHARED.capturing[self.plan.device]
        # Take the capture lock before deciding: another thread may be making the recording that this call needs.
        if self._freezes_addresses and not capturing.acquire(owner, _WAIT_S):
            return self._run_eagerly(prepared, inputs, "another capture is under way", specialization)
        try:
            decision = specialization.decide(inputs, owner, self.specializations.is_full())
            if decision.event:
                self._count("events", decision.event)
            reason = decision.eager
            if decision.record and (short_of := specialization.memory_shortage(self.plan.device)):
                reason = short_of
            elif decision.record and not self.specializations.make_room(specialization, owner):
                reason = self._no_room
            elif decision.record:
                return self._record(prepared, specialization, inputs, decision, owner)
        finally:
            capturing.release(owner)
        if decision.replay is not None:
            return self._run_recording(decision.replay, inputs, owner)
        return self._run_eagerly(prepared, inputs, reason, specialization)

    def _run_recording(self, recording: Recording, inputs: list[Any], owner: LockOwner) -> Any:
        try:
            outputs = recording.run(inputs, owner)
            if recording.without_graphs:
                self.counters.count("eager", recording.without_graphs)
            else:
                self.counters.count("replays")
            return outputs
        finally:
            recording.release(owner)

    def _eager_reason(self, specialization: Specialization, inputs: Sequence[Any]) -> str:
        if self._caller_captures():
            return _CAPTURED
        if self._never_recorded:
            return self._never_recorded
        if self._mutated_inputs is not None and not self._mutated_inputs.are_apart(inputs):
            return _OVERLAP
        # One-time work cannot be captured: kernels load and are tuned, libraries make a handle for each thread. So
        # each thread warms up first.
        if self._on_accelerator and not getattr(self._thread, "warm", False):
            return _WARM_UP
        if specialization.recordings:
            return ""
        if specialization.eager_runs < self._warm_ups:
            return _WARM_UP
        return self._no_room if specialization.waits_for_room() else ""

    @property
    def estimate(self) -> Estimate | None:
        """The estimate of the newest shape that has one; None if none has."""
        found = [one.estimate for one in self.specializations.values() if one.estimate is not None]
        return found[-1] if found else None

    @property
    def stages(self) -> Mapping[str, tuple[int, float]]:
        """How often each stage of the pipeline ran for this program, and the seconds that it took."""
        return self._planner.took

    def release(self) -> None:
        """End every recording, but those that another call uses at this moment; the next call records again."""
        for recording in self.specializations.recordings():
            owner = LockOwner()
            try:
                if recording.acquire(owner):
                    recording.end("released")
            finally:
                recording.release(owner)

    def _guard(self) -> contextlib.AbstractContextManager[Any]:
        return torch.get_device_module(self.plan.device).device(self.plan.device)

    # -- eager ------------------------------------------------------------------------------------------

    def _run_eagerly(
        self, prepared: _Prepared, inputs: list[Any], reason: str, specialization: Specialization
    ) -> Any:
        self._count("eager", reason)
        if reason != _WARM_UP:
            return self._run_schedule(prepared, inputs)
        if specialization.estimate is None:
            self._make_estimate(prepared, inputs, specialization)
        # Remember input addresses: the next call may be recorded, and checks which inputs stayed.
        last = specialization.eager_runs + 1 >= self._warm_ups
        if last:
            specialization.note(inputs)
        outputs = self._run_schedule(prepared, inputs)
        if self._on_accelerator:
            self._thread.warm = True
        specialization.eager_runs += 1
        if last and self._freezes_addresses:
            specialization.warm_outputs = _weak_outputs(prepared, outputs)
        return outputs

    @staticmethod
    def _run_schedule(prepared: _Prepared, inputs: list[Any]) -> Any:
        try:
            return prepared.eager(inputs)
        except torch.OutOfMemoryError:
            if prepared.give_back is not None:
                prepared.give_back()  # of a step that may not run again: the next call is not to fail for it, too
            raise

    def _make_estimate(self, prepared: _Prepared, inputs: Sequence[Any], specialization: Specialization) -> None:
        """Plan memory before anything is recorded: for a report, and for arenas to be large enough."""
        if self.newest_plan is not None and (not self.newest_plan.arenas or self.specializations.are_enough()):
            return
        try:
            estimate = prepared.provider.estimate(inputs, self.newest_plan, self._saved())
            specialization.estimate = estimate
            self._note_plan(estimate.planned, estimate.memory)
        except PlanError as error:
            if self.options.strict:
                raise
            self._never_recorded = str(error.subject)

    def _note_plan(self, planned: Planned, memory: MemoryPlan) -> None:
        if self.newest_plan is None:
            self._traces.planned(self.plan, memory)
        if self.newest_plan is not memory:
            told = memory.size, memory.peak, memory.lower_bound
            log.debug("%s: planned: arenas %d bytes, peak %d bytes, lower bound %d bytes", self.name, *told)
        self.newest_planned, self.newest_plan = planned, memory

    def plan_ahead(self, inputs: Sequence[Any]) -> None:
        """Plan memory for a call with inputs like these, without making the call."""
        key = self._key(inputs) if self._dynamic else None
        found = self.specializations.get(key) or self.specializations.add(key)
        if found.estimate is None:
            self._make_estimate(self._prepared, inputs, found)

    def follow(self, forward: Program, inputs: Mapping[int, Sequence[str]]) -> None:
        """Link this backward program to its forward.

        Args:
            inputs: names of this program's inputs, by the forward program's storage that they live in.
        """
        self._forward = weakref.ref(forward), inputs
        names = {name for several in inputs.values() for name in several}
        self._saved_tensors = frozenset(p for p, node in enumerate(self.plan.placeholders) if node.name in names)

    def _saved(self) -> Saved | None:
        if self._forward is None:
            return None
        program, inputs = self._forward
        forward = program()
        return Saved(forward.estimate if forward is not None else None, inputs)

    # -- recording --------------------------------------------------------------------------------------

    def _record(
        self,
        prepared: _Prepared,
        specialization: Specialization,
        inputs: list[Any],
        decision: Decision,
        owner: LockOwner,
    ) -> Any:
        why, locked, device = decision.record, list[Arena](), prepared.plan.device
        short_of, outputs, begin = "", _NOT_REPLAYED, time.perf_counter()
        if why == "first":
            specialization.copy_live_warm_outputs()
            why = "first" if len(self.specializations) == 1 else "new shape"
        if self._freezes_addresses:
            self._free_workspaces_of_warm_ups(owner.stream)
        before = {what: SHARED.arenas.pressure(what, device) for what in (TOO_LARGE, OUT_OF_MEMORY)}
        try:
            static = specialization.static_positions(
                inputs,
                prepared.plan.static_inputs,
                others_copied=runtime_for(device).frozen_addresses,
                backward=prepared.plan.phase == "backward",
                saved=self._saved_tensors,
                aligned=prepared.aligned,
            )
            estimate = specialization.estimate
            decision.without_live_outputs |= specialization.without_live_outputs
            provide, which = prepared.provider.provide, decision.excludes
            own = provide(inputs, static, estimate, self.newest_plan, owner, locked, which)
            self._note_plan(own.planned, own.memory)
            specialization.estimate = estimate or Estimate(own.planned, own.memory)
            request = self._request_for(prepared, specialization, inputs, static, own)
            with record_function(recording_range(self.name)):
                recorded = RecordingBuilder(request).record(inputs)
            recording, outputs = recorded.recording, recorded.outputs
            short_of = OUT_OF_MEMORY if recording.ended == OUT_OF_MEMORY else ""
        except MemoryLimitError as error:
            short_of = OUT_OF_MEMORY if isinstance(error.__cause__, torch.OutOfMemoryError) else TOO_LARGE
            for arena in locked if short_of == OUT_OF_MEMORY else ():
                arena.clear(OUT_OF_MEMORY)  # drops the pool, too: failed captures left allocations in it
            if self.options.strict:
                raise
        except (PlanError, CaptureError) as error:
            if self.options.strict:
                raise
            if isinstance(error, PlanError) and any(arena.live() for arena in locked):
                specialization.without_live_outputs = True  # they may be why: next time use an arena without any
            else:
                self._never_recorded = str(error.subject)
            return self._run_eagerly(prepared, inputs, str(error.subject), specialization)
        finally:
            for arena in locked:
                arena.lock.release(owner)
        if not short_of or self.options.strict:
            self._keep(specialization, recorded, inputs, why)
            self._note_recording(recorded, inputs, why, time.perf_counter() - begin)
            return outputs
        # A retry waits until the pressure is below both values. Recordings that ended for this attempt have lowered
        # it, but they will be made again. This call's outputs raise it, but they will be dropped.
        specialization.note_shortage(short_of, min(before[short_of], SHARED.arenas.pressure(short_of, device)))
        if short_of == OUT_OF_MEMORY:
            SHARED.arenas.withdraw(specialization.estimate)  # arenas need not grow for this recording
        if outputs is _NOT_REPLAYED:  # by now what was made for the recording is free
            return self._run_eagerly(prepared, inputs, short_of, specialization)
        self._count("eager", short_of)
        return outputs

    def _free_workspaces_of_warm_ups(self, stream: Any) -> None:
        """Free what libraries have left on the default stream in warm-ups, for each thread that made one.

        Before an arena is laid out, which may lie there then. No graph has captured it, since that stream cannot be
        captured. A thread that is about to launch work has its workspace's address already, so nothing is freed while
        another one runs.
        """
        if getattr(stream, "stream_id", None) == 0 and self.functions.nobody_else_runs():
            self.functions.free_workspaces(stream)

    def _request_for(
        self,
        prepared: _Prepared,
        specialization: Specialization,
        inputs: Sequence[Any],
        static: list[int],
        own: RecordingMemory,
    ) -> RecordingRequest:
        return RecordingRequest(
            planned=own.planned,
            memory=own.memory,
            arenas=own.arenas,
            reused_inputs=own.reused_inputs,
            name=self.name,
            traces=self._traces,
            runtime=runtime_for(prepared.plan.device),
            functions=self.functions,
            static_inputs=static,
            copied=specialization.copied_of(index for _, index in prepared.outputs) | prepared.copied,
            mutated_inputs=self._mutated_inputs.with_static(inputs, static) if self._mutated_inputs else None,
            guards=self._guards(prepared, inputs),
            count=self.counters.cell(),
            policy=weakref.ref(specialization),
        )

    def _guards(self, prepared: _Prepared, inputs: Sequence[Any]) -> Guards | None:
        """What native calls must satisfy, whatever recording they replay; None if a unit cannot check it.

        ``Recording.make_unit`` adds what is the recording's own: addresses, locks, streams.
        """
        known = list(zip(self._dynamic, self._key(inputs), strict=True))
        numbers = [(p, value) for (p, how, _), value in known if how is None and value is not None]
        if not all(type(number) is int for _, number in numbers):
            return None
        return Guards(
            numbers=numbers,
            dimensions=[(p, how == "stride", dim, value) for (p, how, dim), value in known if how is not None],
            packed=SHARED.packed.known,
            overwritten=prepared.overwritten,
            no_hooks=self._is_forward,
            caller_captures=self._caller_captures,
        )

    def _keep(self, specialization: Specialization, recorded: Recorded, inputs: list[Any], why: str) -> None:
        recording = recorded.recording
        if recording.eager_reasons and self.options.strict:
            raise CaptureError(
                f"{len(recording.eager_reasons)} partition(s) could not be captured",
                got="; ".join(f"partition {i}: {reason}" for i, reason in recording.eager_reasons.items()),
                remedy="list the operators in eager_ops, or leave strict out",
            )
        self.counters.count("recordings", why)
        for reason in recording.eager_reasons.values():
            self._count("events", reason)
        if not recorded.refused:
            specialization.add(recording, inputs)
            if recorded.not_native:
                self._count("events", f"replays in Python: {recorded.not_native}")
            if recording.unit is not None and not isinstance(native := self.functions.native(), str):
                self._missed = native.missed
            self.specializations.find_units()
            return
        # Cut again with these operators eager: otherwise each would make its whole partition eager.
        self._refused.update(recorded.refused)
        for operator, failure in recorded.refused.items():
            log.info("%s: is cut again around %s: %s", self.name, operator, failure)
        self._prepared = self._adopt(self._planner.partition(self._refused))
        for known in self.specializations.values():
            known.drop_recordings()
        self.specializations.find_units()

    def _note_recording(self, recorded: Recorded, inputs: Sequence[Any], why: str, seconds: float) -> None:
        recording, request = recorded.recording, recorded.recording.request
        copied = request.copied if request.memory.arenas else ()  # without arenas outputs are new tensors, not copies
        copied_out = sum(request.memory.sizes.get(index, 0) for index in copied)
        copied_in = sum(nbytes for _, nbytes in request.planned.input_buffers.values())
        fakes = [node.meta.get("val") for node in self.plan.placeholders]
        symbols = (fakes[p] if how is None else getattr(fakes[p], how)(dim) for p, how, dim in self._dynamic)
        sizes = dict(zip(map(str, symbols), self._key(inputs), strict=True))
        made = sizes, len(recording.graphs), request.memory.size, copied_in, copied_out
        self.history.append(RecordingMade(time.time(), why, seconds, *made))
        how = "replays natively" if recording.unit is not None else "replays in Python"
        memory, how = request.memory.size or request.memory.peak, "is not kept" if recorded.refused else how
        told = why, seconds * 1e3, len(recording.graphs), memory, how
        log.info("%s: recorded (%s) in %.1f ms: %d graph(s), %d bytes; %s", self.name, *told)


class EagerRuns:
    """Runs the whole schedule with plain allocations: in Python, natively after ``_RUNS_BEFORE_UNIT`` runs."""

    def __init__(self, name: str, flat: FlatFunction, inputs: int, functions: TorchFunctions) -> None:
        self._name, self._flat, self._inputs, self._functions = name, flat, inputs, functions
        self._calls, self._tried = 0, False
        self._unit: Callable[[list[Any]], Any] | None = None
        self._missed: Any = None

    def __call__(self, inputs: list[Any]) -> Any:
        if (unit := self._unit) is None:
            self._calls += 1
            if self._calls >= _RUNS_BEFORE_UNIT and not self._tried:
                self._make_unit()
        elif (outputs := unit(inputs)) is not self._missed:
            return outputs
        return (self._flat.profiled if self._functions.profiling() else self._flat.function)(inputs)

    def _make_unit(self) -> None:
        self._tried = True
        native = self._functions.native()
        if isinstance(native, str):
            return
        everything = [Part(self._flat.function, self._flat.lines, self._flat.result)]
        try:
            description = Description(self._inputs, True, give_back=self._flat.give_back)
            unit = make_unit(native, everything, self._inputs, description)
            self._missed, self._unit = native.missed, unit  # in this order: another thread may call it at once
        except CannotReplay as error:
            log.info("%s: eager runs stay in Python: %s", self._name, str(error))


def _eager_function(plan: ProgramPlan, name: str, give_back: GiveBack | None) -> FlatFunction:
    """The whole schedule as one flat function with plain allocations."""
    registers = {node: i for i, node in enumerate(plan.placeholders)}
    builder = FlatBuilder(constants(plan.graph), registers, repeats=functools.partial(_repeats, plan, give_back))
    for node in checks_on(plan.placeholders):
        if builder.available(node):
            builder.check(node)
    for partition in plan.partitions:
        builder.begin_range(partition_range(name, partition.index))
        builder.run_partition(plan, partition)
    builder.begin_range("")
    return builder.build(output_node(plan.graph).args[0], give_back)


def _repeats(plan: ProgramPlan, give_back: GiveBack | None, node: Node) -> bool:
    """Whether a step runs again after it was out of memory: none does where recordings have none to give back."""
    return give_back is not None and can_run_again(plan, node)


def _tensor_outputs(plan: ProgramPlan) -> list[tuple[int, int]]:
    found = []
    for position, value in enumerate(output_values(plan.graph)):
        if isinstance(value, Node):
            for index in plan.facts.of(value):
                if plan.facts.storages[index].origin in (Origin.ALLOCATION, Origin.EXTERN):
                    found.append((position, index))
    return found


def _inputs_counted_from_their_storage(plan: ProgramPlan) -> dict[Node, str]:
    """Inputs that an operator addresses from the start of their storage (``storage_offset=``), with its name."""
    facts, found = plan.facts, dict[Node, str]()
    for node in plan.graph.graph.nodes:
        if counts_from_storage(node):
            for index in facts.of(node.all_input_nodes[0]):
                if facts.storages[index].origin is Origin.INPUT:
                    found[plan.maker(index)] = operator_name(node)
    return found


def _weak_outputs(prepared: _Prepared, outputs: Any) -> list[tuple[int, StorageWeakRef]]:
    values = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    found = []
    for position, index in prepared.outputs:
        value = values[position]
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            found.append((index, StorageWeakRef(value.untyped_storage())))
    return found


def _dynamic_positions(placeholders: Sequence[Node]) -> list[tuple[int, str | None, int]]:
    """Where dynamic sizes are read: (input position, "size", "stride" or None for a number input, dimension)."""
    found: list[tuple[int, str | None, int]] = []
    for position, node in enumerate(placeholders):
        val = node.meta.get("val")
        if kind_of(node) is Kind.PLACEHOLDER and isinstance(val, torch.Tensor):
            for dim in range(val.dim()):
                if not isinstance(val.size(dim), int):
                    found.append((position, "size", dim))
                if not isinstance(val.stride(dim), int):
                    found.append((position, "stride", dim))
        elif is_symbolic_value(val):
            found.append((position, None, 0))
    return found
