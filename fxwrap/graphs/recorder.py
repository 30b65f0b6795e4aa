"""The recorder of a program: plans memory, makes recordings, and adds them to the program's specializations."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from ..errors import CaptureError, MemoryLimitError, PlanError
from ..options import Options
from ..plan import MemoryPlan, ProgramPlan, SizedProgram
from .devices.runtime import capture_check, runtime_for
from .memory.arenas import OUT_OF_MEMORY, TOO_LARGE, Arena
from .memory.locks import LockOwner
from .memory.memory_provider import Estimate, Planner, RecordingMemory, Saved
from .memory.shared_state import SHARED
from .policy.counters import Counters, RecordingMade
from .policy.specialization import Decision, Specialization
from .policy.specializations import Specializations
from .prepared import DynamicSizes, Prepared
from .record.recording_builder import Recorded, RecordingBuilder
from .replay.guards import Guards
from .replay.overlaps import MutatedInputs
from .replay.ranges import recording as recording_range
from .replay.recording import RecordingRequest
from .torch_functions import TorchFunctions

log = logging.getLogger(__name__)

NOT_RECORDED = object()
# The number of recordings in a report.
_HISTORY = 200


class Recorder:
    """Plans, makes and keeps the recordings of one program.

    Attributes:
        prepared: the program's plan; replaced when the program is partitioned again around a failed operator.
        refused: the error of each operator whose capture failed, by operator.
        never_recorded: why the program can never be recorded; empty if it can.
        history: how the newest recordings were made.
        newest_plan, newest_sized: the newest memory plan, and the program with the sizes that it was made for; None
            before the first plan.
    """

    def __init__(
        self,
        name: str,
        plan: ProgramPlan,
        planner: Planner,
        options: Options,
        functions: TorchFunctions,
        counters: Counters,
        specializations: Specializations,
        sizes: DynamicSizes,
        mutated_inputs: MutatedInputs | None,
        count: Callable[[str, str], object],
    ) -> None:
        self._name, self._planner, self._options, self._functions = name, planner, options, functions
        self._counters, self._specializations, self._sizes, self._count = counters, specializations, sizes, count
        self._mutated_inputs = mutated_inputs
        self._prepare = functools.partial(
            Prepared.of, name=name, planner=planner, options=options, functions=functions, counters=counters
        )
        self._traces = functions.traces(name)
        self._traces.compiled(plan)
        self.prepared = self._prepare(plan)
        self.refused = dict[str, str]()
        self.never_recorded = ""
        self.history = deque[RecordingMade](maxlen=_HISTORY)
        self.newest_plan: MemoryPlan | None = None
        self.newest_sized: SizedProgram | None = None
        self._newest_estimate: weakref.ref[Estimate] | None = None
        self._forward: tuple[weakref.ref[Recorder], Mapping[int, Sequence[str]]] | None = None
        self._saved_tensors = frozenset[int]()  # positions of inputs that the forward program allocates

    # -- planning ahead ---------------------------------------------------------------------------------

    @property
    def newest_estimate(self) -> Estimate | None:
        """The newest, by the time at which it was made or recorded; None where its specialization was forgotten."""
        return self._newest_estimate() if self._newest_estimate is not None else None

    def estimate(self, inputs: Sequence[Any], specialization: Specialization) -> None:
        """Plan memory before a recording, for reports and so that arenas are large enough."""
        if self.newest_plan is not None and (not self.newest_plan.arenas or self._specializations.are_enough()):
            return
        try:
            estimate = self.prepared.provider.estimate(inputs, self.newest_plan, self._saved())
            self._keep_estimate(specialization, estimate)
            self._note_plan(estimate.sized, estimate.memory)
        except PlanError as error:
            if self._options.strict:
                raise
            self.never_recorded = str(error.subject)

    def _keep_estimate(self, specialization: Specialization, estimate: Estimate) -> None:
        specialization.estimate, self._newest_estimate = estimate, weakref.ref(estimate)

    def _note_plan(self, sized: SizedProgram, memory: MemoryPlan) -> None:
        if self.newest_plan is None:
            self._traces.planned(self.prepared.plan, memory)
        if self.newest_plan is not memory:
            sizes = memory.size, memory.peak, memory.lower_bound
            log.debug("%s: planned: arenas %d bytes, peak %d bytes, lower bound %d bytes", self._name, *sizes)
        self.newest_sized, self.newest_plan = sized, memory

    def follow(self, forward: Recorder, inputs: Mapping[int, Sequence[str]]) -> None:
        """Link a backward program's recorder to that of its forward.

        Args:
            inputs: names of the backward's inputs, by the storage of the forward program that they are saved in.
        """
        self._forward = weakref.ref(forward), inputs
        names = {name for several in inputs.values() for name in several}
        placeholders = enumerate(self.prepared.plan.placeholders)
        self._saved_tensors = frozenset(position for position, node in placeholders if node.name in names)

    @property
    def forward(self) -> tuple[Recorder | None, Mapping[int, Sequence[str]]]:
        """What ``follow`` has linked: the forward's recorder, and the inputs."""
        recorder, inputs = self._forward or (lambda: None, {})
        return recorder(), inputs

    def _saved(self) -> Saved | None:
        if self._forward is None:
            return None
        forward, inputs = self.forward
        return Saved(forward.newest_estimate if forward is not None else None, inputs)

    # -- recording --------------------------------------------------------------------------------------

    def record(
        self,
        specialization: Specialization,
        inputs: list[Any],
        decision: Decision,
        owner: LockOwner,
    ) -> tuple[Any, str]:
        """Record a call, and keep the recording.

        Returns:
            The outputs of the call; ``NOT_RECORDED`` and the reason if nothing has run. A failed attempt keeps no
            memory.

        Raises:
            MemoryLimitError, PlanError, CaptureError: with ``strict``.
        """
        prepared = self.prepared
        why, locked, device = decision.record, list[Arena](), prepared.plan.device
        short_of, outputs, begin = "", NOT_RECORDED, time.perf_counter()
        if why == "first":
            specialization.output_copies.add_live_warm_outputs()
            why = "first" if len(self._specializations) == 1 else "new shape"
        if runtime_for(device).frozen_addresses:
            self._free_workspaces_of_warm_ups(owner.stream)
        before = {shortage: SHARED.arenas.pressure(shortage, device) for shortage in (TOO_LARGE, OUT_OF_MEMORY)}
        try:
            static = specialization.static_inputs.positions(
                inputs,
                prepared.plan.static_inputs,
                others_copied=runtime_for(device).frozen_addresses,
                backward=prepared.plan.phase == "backward",
                saved=self._saved_tensors,
                aligned=prepared.aligned,
            )
            estimate = specialization.estimate
            decision.without_live_outputs |= specialization.without_live_outputs
            memory = prepared.provider.provide(
                inputs, static, estimate, self.newest_plan, owner, locked, decision.excludes
            )
            self._note_plan(memory.sized, memory.memory)
            self._keep_estimate(specialization, estimate or Estimate(memory.sized, memory.memory))
            request = self._request_for(prepared, specialization, inputs, static, memory)
            with record_function(recording_range(self._name)):
                recorded = RecordingBuilder(request).record(inputs)
            recording, outputs = recorded.recording, recorded.outputs
            short_of = OUT_OF_MEMORY if recording.ended == OUT_OF_MEMORY else ""
        except MemoryLimitError as error:
            short_of = OUT_OF_MEMORY if isinstance(error.__cause__, torch.OutOfMemoryError) else TOO_LARGE
            for arena in locked if short_of == OUT_OF_MEMORY else ():
                arena.clear(OUT_OF_MEMORY)  # also drops the pool: failed captures left allocations in it
            if self._options.strict:
                raise
        except (PlanError, CaptureError) as error:
            if self._options.strict:
                raise
            if isinstance(error, PlanError) and any(arena.live() for arena in locked):
                specialization.without_live_outputs = (
                    True  # these may be the cause: next time use an arena without any
                )
            else:
                self.never_recorded = str(error.subject)
            return NOT_RECORDED, str(error.subject)
        finally:
            for arena in locked:
                arena.lock.release(owner)
        if not short_of or self._options.strict:
            self._keep(specialization, recorded, inputs, why)
            self._note_recording(recorded, inputs, why, time.perf_counter() - begin)
            return outputs, ""
        # A retry waits until the pressure is below both values. Recordings that ended for this attempt have lowered
        # it, but they will be made again. This call's outputs raise it, but they will be dropped.
        specialization.shortage.note(short_of, min(before[short_of], SHARED.arenas.pressure(short_of, device)))
        if short_of == OUT_OF_MEMORY:
            SHARED.arenas.withdraw(specialization.estimate)  # arenas need not grow for this recording
        if outputs is not NOT_RECORDED:
            self._count("eager", short_of)
        return outputs, short_of

    def _free_workspaces_of_warm_ups(self, stream: Any) -> None:
        """Free the workspaces of libraries that warm-ups have left on the default stream, one for each thread.

        It is done before an arena is allocated, which can use the memory. No graph has captured a workspace there,
        since that stream cannot be captured. Nothing is freed while another thread runs: it may already have the
        address of its workspace.
        """
        if getattr(stream, "stream_id", None) == 0 and self._functions.other_threads_wait():
            self._functions.free_workspaces(stream)

    def _request_for(
        self,
        prepared: Prepared,
        specialization: Specialization,
        inputs: Sequence[Any],
        static: list[int],
        memory: RecordingMemory,
    ) -> RecordingRequest:
        return RecordingRequest(
            sized=memory.sized,
            memory=memory.memory,
            arenas=memory.arenas,
            reused_inputs=memory.reused_inputs,
            name=self._name,
            traces=self._traces,
            runtime=runtime_for(prepared.plan.device),
            functions=self._functions,
            static_inputs=static,
            copied=specialization.output_copies.of(index for _, index in prepared.outputs) | prepared.copied,
            mutated_inputs=self._mutated_inputs.with_static(inputs, static) if self._mutated_inputs else None,
            guards=self._guards(prepared, inputs),
            count=self._counters.cell(),
            policy=weakref.ref(specialization),
        )

    def _guards(self, prepared: Prepared, inputs: Sequence[Any]) -> Guards | None:
        """The conditions on native calls that all recordings share; None if a unit cannot check them.

        ``Recording.make_unit`` adds those of one recording: addresses, locks, streams.
        """
        sizes = self._sizes.at(inputs)
        numbers = [(p, value) for (p, how, _), value in sizes if how is None and value is not None]
        if not all(type(number) is int for _, number in numbers):
            return None
        return Guards(
            numbers=numbers,
            dimensions=[(p, how == "stride", dim, value) for (p, how, dim), value in sizes if how is not None],
            packed=SHARED.packed.known,
            overwritten=prepared.overwritten,
            no_hooks=prepared.plan.phase == "forward",
            caller_captures=capture_check(prepared.plan.device),
        )

    def _keep(self, specialization: Specialization, recorded: Recorded, inputs: list[Any], why: str) -> None:
        recording = recorded.recording
        if recording.eager_reasons and self._options.strict:
            raise CaptureError(
                f"{len(recording.eager_reasons)} partition(s) could not be captured",
                got="; ".join(f"partition {i}: {reason}" for i, reason in recording.eager_reasons.items()),
                remedy="list the operators in eager_ops, or leave strict out",
            )
        self._counters.count("recordings", why)
        for reason in recording.eager_reasons.values():
            self._count("events", reason)
        if not recorded.refused:
            specialization.add(recording, inputs)
            if recorded.not_native:
                self._count("events", f"replays in Python: {recorded.not_native}")
            if recording.unit is not None and not isinstance(native := self._functions.native(), str):
                self._specializations.missed = native.missed
            self._specializations.find_units()
            return
        # Partition again with these operators eager: otherwise each would make its whole partition eager.
        self.refused.update(recorded.refused)
        for operator, failure in recorded.refused.items():
            log.info("%s: is cut again around %s: %s", self._name, operator, failure)
        self.prepared = self._prepare(self._planner.partition(self.refused))
        for other in self._specializations.values():
            other.drop_recordings("cut again around what could not be captured")
        self._specializations.find_units()

    def _note_recording(self, recorded: Recorded, inputs: Sequence[Any], why: str, seconds: float) -> None:
        recording, request = recorded.recording, recorded.recording.request
        copied = request.copied if request.memory.arenas else ()  # without arenas outputs are new tensors, not copies
        copied_out = sum(request.memory.sizes.get(index, 0) for index in copied)
        copied_in = sum(nbytes for _, nbytes in request.sized.input_buffers.values())
        sizes = self._sizes.by_symbol(self.prepared.plan.placeholders, inputs)
        facts = sizes, len(recording.graphs), request.memory.size, copied_in, copied_out
        self.history.append(RecordingMade(time.time(), why, seconds, *facts))
        how = "replays natively" if recording.unit is not None else "replays in Python"
        memory, how = request.memory.size or request.memory.peak, "is not kept" if recorded.refused else how
        logged = why, seconds * 1e3, len(recording.graphs), memory, how
        log.info("%s: recorded (%s) in %.1f ms: %d graph(s), %d bytes; %s", self._name, *logged)
