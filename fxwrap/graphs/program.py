"""A program: the callable made from one host graph. Each call replays a recording, makes one, or runs eagerly."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from ..errors import InputError
from ..host_graph.tensors import stands_for_memory
from ..options import Options
from ..plan import MemoryPlan, ProgramPlan
from ..torch_private.functions import primals, profiling, saved_tensors_hooks
from ..torch_private.native_units import Unit
from .devices.runtime import capture_check, current_stream, freezes_addresses
from .measured_run import run_measured
from .memory.locks import LockOwner
from .memory.planning import Planner
from .memory.shared_state import SHARED
from .policy.counters import RecordingMade
from .policy.specialization import Record, ReplayIt, Specialization
from .prepared import Prepared, ProgramContext
from .program_runs import RUNNERS
from .recorder import NOT_RUN, Recorder
from .replay.recording import Recording, next_use
from .resuming import resume_for

log = logging.getLogger(__name__)

WARM_UP = "warm-up"
# The warm-up of further sizes: all kernels are compiled and tuned already.
NEW_SIZES = "first call of these sizes"
WARM_UPS = WARM_UP, NEW_SIZES
CALLER_CAPTURES = "called while the caller captures"
_OVERLAP = "a mutated input overlaps another input"
# How long a call waits for another thread's capture before it runs eagerly, in seconds. A capture takes milliseconds.
_WAIT_S = 1.0
_serial_numbers = itertools.count()


class Program:
    """Runs a host graph: eagerly at first, then from recordings.

    Thread-safe: a recording serves one call at a time. Other calls use other recordings, or run eagerly.

    Attributes:
        context: what never changes of it; ``name``, ``options`` and others are its fields.
        recorder: makes recordings, and has the newest plan.
    """

    def __init__(
        self,
        plan: ProgramPlan,
        planner: Planner,
        options: Options,
    ) -> None:
        name = f"fxwrap {next(_serial_numbers)} {plan.phase}"
        self.context = context = ProgramContext.of(name, plan, planner, options)
        self.recorder = Recorder(context, plan)
        # Read at every call: attributes of their own.
        self.name, self.options, self.planner = name, options, planner
        self.counters, self.specializations, self._sizes = context.counters, context.specializations, context.sizes
        self._input_count = len(plan.placeholders)
        self._freezes_addresses = freezes_addresses(plan.device)
        self._profiling = profiling
        self._is_forward = plan.phase == "forward"
        self._on_accelerator = plan.device.type != "cpu"
        self._warm_ups = max(options.warmup, int(self._on_accelerator))
        self._no_room = f"{options.max_recordings} other recordings are used more often (max_recordings)"
        self._caller_captures = capture_check(plan.device)
        self._thread = threading.local()  # warm: this thread has made a warm-up run (accelerators only)

    @property
    def plan(self) -> ProgramPlan:
        return self.recorder.prepared.plan

    @property
    def newest_plan(self) -> MemoryPlan | None:
        """The newest memory plan; None before the first one."""
        return self.recorder.newest_plan

    @property
    def history(self) -> Sequence[RecordingMade]:
        """How the newest recordings were made."""
        return self.recorder.history

    # -- calling ----------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any) -> Any:
        return self.run(list(inputs))

    def run(self, inputs: list[Any]) -> Any:
        """Run the program on a list of inputs, which is emptied."""
        if RUNNERS and (runner := RUNNERS.get(threading.get_ident())) is not None:
            return runner(self, inputs)
        for unit in self.specializations.units or self._units_for(inputs):
            try:
                outputs = unit(inputs)
            except BaseException as error:
                self._failed(error, unit)
                raise
            if outputs is not self.specializations.missed:
                return outputs
        return self.run_without_unit(inputs)

    def run_without_unit(self, inputs: list[Any], unrecorded: str = "") -> Any:
        """Choose a recording, record, or run eagerly: for a call that no native unit accepts.

        Args:
            unrecorded: why this call must not record, nor count as a warm-up; empty if it may.
        """
        values = primals(list(inputs))
        inputs.clear()
        if len(values) != self._input_count:
            raise InputError(
                "program called with the wrong number of inputs",
                expected=str(self._input_count),
                got=str(len(values)),
            )
        try:
            # Saved-tensors hooks may have kept some of these inputs: those are copied before they are overwritten.
            if overwritten := self.recorder.prepared.overwritten:
                SHARED.packed_tensors.copy_from(values, overwritten)
            key = self._sizes.key(values)
            run = self._run_in_range if self._profiling() else self._run
            if self._on_accelerator:
                with self._on_device():
                    outputs = run(key, values, unrecorded)
            else:
                outputs = run(key, values, unrecorded)
            if self._is_forward and saved_tensors_hooks():
                SHARED.packed_tensors.note(outputs)
            return outputs
        except BaseException as error:
            self._failed(error)
            raise

    def _units_for(self, inputs: Sequence[Any]) -> tuple[Unit, ...]:
        by_key = self.specializations.units_by_key
        return by_key.get(self._sizes.key(inputs), ()) if by_key and len(inputs) == self._input_count else ()

    def _failed(self, error: BaseException, unit: Unit | None = None) -> None:
        self.context.count("events", f"a call raised {type(error).__name__}")
        for recording in self.specializations.recordings():
            if unit is None:
                recording.forget_inputs()
            elif recording.unit is unit:
                recording.failed_natively(error)

    def _run_in_range(self, key: Any, inputs: list[Any], unrecorded: str) -> Any:
        with record_function(self.name):
            return self._run(key, inputs, unrecorded)

    def _run(self, key: Any, inputs: list[Any], unrecorded: str) -> Any:
        specialization = self.specializations.get(key) or self._check_and_add(key, inputs)
        if specialization.recordings and (outputs := self._replay(specialization, inputs)) is not NOT_RUN:
            return outputs
        return self._after_miss(specialization, inputs, unrecorded)

    def _check_and_add(self, key: Any, inputs: Sequence[Any]) -> Specialization:
        for value in inputs:
            if stands_for_memory(value):
                raise InputError(
                    f"{self.name} called with a {type(value).__name__}",
                    expected="tensors that have memory",
                    got="a tensor without memory",
                    remedy="call the function that was compiled, not what torch.compile returned",
                )
        return self._add_specialization(key, inputs)

    def _add_specialization(self, key: Any, inputs: Sequence[Any]) -> Specialization:
        specialization = Specialization()
        if self.recorder.memory_limit:
            if self._freezes_addresses and not self._caller_captures():  # the warm-up, too, stays within the limit
                self._rehearse(specialization, inputs)
            self.recorder.fit(specialization, inputs)
        return self.specializations.add(key, specialization)

    def _replay(self, specialization: Specialization, inputs: list[Any]) -> Any:
        owner = self._owner()
        # If the caller is capturing, its graph would keep arena addresses without a reference to the memory.
        # Stream 0 cannot be captured: the driver, which answers slowly, is asked about other streams only.
        if getattr(owner.stream, "stream_id", 0) and self._caller_captures():
            return NOT_RUN
        for recording in specialization.recordings:
            if recording.acquire(owner):
                if recording.may_run(inputs, owner):
                    return self._run_recording(recording, inputs, owner)
                recording.release(owner)
        return NOT_RUN

    def _owner(self) -> LockOwner:
        return LockOwner(current_stream(self.plan.device) if self._on_accelerator else None)

    def _after_miss(self, specialization: Specialization, inputs: list[Any], unrecorded: str) -> Any:
        """Serve a call that ``_replay`` could not.

        Replay if memory was resumed, or if another thread has changed something; else record, or run eagerly.
        """
        if self.options.inputs_apart and (mutated := self.context.mutated_inputs) and not mutated.are_apart(inputs):
            raise InputError(
                f"{self.name}: {_OVERLAP}",
                expected="inputs that share no memory, as the option inputs_apart promises",
                got="two that do",
                remedy="copy one of them, or compile without inputs_apart",
            )
        if self.recorder.memory_limit and not specialization.fits:
            self.recorder.fit(specialization, inputs)
        specialization.eviction.missed_at.append(next_use())
        prepared, reason = self.recorder.prepared, self._eager_reason(specialization, inputs, unrecorded)
        if self._freezes_addresses:
            not_resumed, resumed = resume_for(self.context, specialization, reason == CALLER_CAPTURES)
            reason = not_resumed or reason
            if resumed and not reason and (outputs := self._replay(specialization, inputs)) is not NOT_RUN:
                return outputs
        if not reason:
            outputs, reason = self._run_as_decided(specialization, inputs)
            if outputs is not NOT_RUN:
                return outputs
        return self._run_eagerly(prepared, inputs, reason, specialization)

    def _run_as_decided(self, specialization: Specialization, inputs: list[Any]) -> tuple[Any, str]:
        """Replay or record; returns the outputs, or ``NOT_RUN`` and why the call must run eagerly."""
        owner, capturing = self._owner(), SHARED.capturing[self.plan.device]
        # Take the capture lock before deciding: another thread may be making the recording that this call needs.
        if self._freezes_addresses and not capturing.acquire(owner, _WAIT_S):
            return NOT_RUN, "another capture is under way"
        try:
            decided = specialization.decide(inputs, owner, self.specializations.is_full())
            if decided.event:
                self.context.count("events", decided.event)
            if isinstance(decided, Record):
                return self._record_if_there_is_room(specialization, inputs, decided, owner)
        finally:
            capturing.release(owner)
        if isinstance(decided, ReplayIt):
            return self._run_recording(decided.recording, inputs, owner), ""
        return NOT_RUN, decided.why

    def _record_if_there_is_room(
        self, specialization: Specialization, inputs: list[Any], decided: Record, owner: LockOwner
    ) -> tuple[Any, str]:
        if short_of := specialization.shortage.reason_to_wait(self.plan.device):
            return NOT_RUN, short_of
        if not self.specializations.make_room(specialization, owner):
            return NOT_RUN, self._no_room
        return self._record(specialization, inputs, decided, owner)

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

    def _eager_reason(self, specialization: Specialization, inputs: Sequence[Any], unrecorded: str) -> str:
        if self._caller_captures():
            return CALLER_CAPTURES
        if unrecorded:
            return unrecorded
        if self.recorder.never_recorded:
            return self.recorder.never_recorded
        mutated = self.context.mutated_inputs
        if mutated is not None and not mutated.are_apart(inputs):
            return _OVERLAP
        # One-time work cannot be captured: kernels are loaded and tuned, libraries make a handle for each thread.
        # Therefore each thread warms up first.
        if self._on_accelerator and not getattr(self._thread, "warm", False):
            return WARM_UP
        if self._measures and not specialization.measured:
            return WARM_UP
        if specialization.recordings:
            return ""
        if specialization.eager_runs < self._warm_ups:
            others = (other for other in self.specializations.values() if other is not specialization)
            return NEW_SIZES if any(other.eager_runs for other in others) else WARM_UP
        return self._no_room if specialization.eviction.must_wait() else ""

    @property
    def _measures(self) -> bool:
        """Whether an eager run at each size has to measure what is allocated beyond the plan."""
        return bool(self.recorder.memory_limit) and not self._freezes_addresses

    @property
    def stages(self) -> Mapping[str, tuple[int, float]]:
        """How often each stage of the pipeline ran for this program, and its seconds, by the stage's name."""
        return self.planner.took

    def set_memory_limit(self, nbytes: int) -> None:
        """Set the most bytes that a call may take beside its inputs (0: no limit).

        The program then warms up and records again.
        """
        self.release()
        self.recorder.set_memory_limit(nbytes)
        self.specializations.clear()

    def release(self) -> None:
        """End every recording that no other call uses at this moment; the next call records again."""
        for recording in self.specializations.recordings():
            if recording.end_if_suspended("released"):
                continue
            owner = LockOwner()
            if recording.acquire(owner):
                try:
                    recording.end("released")
                finally:
                    recording.release(owner)

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        return torch.get_device_module(self.plan.device).device(self.plan.device)

    # -- eager ------------------------------------------------------------------------------------------

    def _run_eagerly(self, prepared: Prepared, inputs: list[Any], reason: str, specialization: Specialization) -> Any:
        self.context.count("eager", reason)
        if reason not in WARM_UPS:
            return self._run_schedule(prepared, inputs, specialization)
        if specialization.estimate is None:
            self.recorder.estimate(inputs, specialization)
        # Input addresses are remembered: inputs that have not moved until the next call are recorded as static.
        last = specialization.eager_runs + 1 >= self._warm_ups
        if last:
            specialization.static_inputs.note(inputs)
        outputs = self._run_schedule(prepared, inputs, specialization)
        if self._on_accelerator:
            self._thread.warm = True
        specialization.eager_runs += 1
        if last and self._freezes_addresses:
            specialization.output_copies.warm_outputs = prepared.weak_outputs(outputs)
            self._rehearse(specialization)
        return outputs

    def _rehearse(self, specialization: Specialization, inputs: Sequence[Any] | None = None) -> None:
        owner, capturing = self._owner(), SHARED.capturing[self.plan.device]
        if capturing.acquire(owner, _WAIT_S):
            try:
                self.recorder.rehearse(specialization, inputs)
            finally:
                capturing.release(owner)

    def _run_schedule(self, prepared: Prepared, inputs: list[Any], specialization: Specialization) -> Any:
        try:
            if not specialization.measured and (self.recorder.memory_limit or self.options.moves_work):
                return run_measured(self.context, self.recorder.budget, specialization, prepared, inputs)
            return prepared.eager(inputs)
        except torch.OutOfMemoryError:
            if prepared.give_back is not None:
                prepared.give_back()  # this step cannot be retried, but the next call should have the memory
            raise

    def plan_ahead(self, inputs: Sequence[Any]) -> None:
        """Plan memory for a call with inputs like these, without making the call."""
        key = self._sizes.key(inputs)
        specialization = self.specializations.get(key) or self._add_specialization(key, inputs)
        if specialization.estimate is None:
            self.recorder.estimate(inputs, specialization)

    def sizes_of(self, inputs: Sequence[Any]) -> tuple[Any, Mapping[str, Any]]:
        """The key of a call's specialization, and the sizes that vary, by symbol."""
        return self._sizes.key(inputs), self._sizes.by_symbol(self.plan.placeholders, inputs)

    def link_forward(self, forward: Program, inputs: Mapping[int, Sequence[str]]) -> None:
        """Link this backward program to its forward: see ``Recorder.link_forward``."""
        self.recorder.link_forward(forward.recorder, inputs)

    def _record(
        self, specialization: Specialization, inputs: list[Any], decided: Record, owner: LockOwner
    ) -> tuple[Any, str]:
        """Record a call; returns its outputs, or ``NOT_RUN`` and the reason. Checked programs override it."""
        return self.recorder.record(specialization, inputs, decided, owner)
