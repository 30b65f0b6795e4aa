"""The recorder of a program: plans memory, makes recordings, and adds them to the program's specializations.

Why it is more than a capture: a device graph has its addresses compiled in, and memory is shared with other programs,
with outputs that callers hold, and with torch's allocator. What stands in the way of a capture shows only when it is
tried. So a call that records is an attempt (``_try``), with one of three ends. ``Recorded``: the call has run; if the
capture of an operator failed, the program is partitioned again with that operator eager. ``Refused``: nothing has
run, the call runs eagerly. ``Short`` of memory: the call runs eagerly, unless memory ran out after its outputs were
made, and calls try again when more is free. Before an attempt, ``fit`` plans so that the call stays within
``memory_limit``.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule
from torch.profiler import record_function

from ..errors import CaptureError, MemoryLimitError, PlanError
from ..host_graph.nodes import operator_name
from ..host_graph.sizes import hinted_layout, storage_bytes, symbols_at
from ..limit import Limit
from ..plan import MemoryPlan, ProgramPlan, SizedProgram
from ..torch_private import native_library
from .devices.runtime import runtime_for
from .memory.arenas import OUT_OF_MEMORY, TOO_LARGE, Arena
from .memory.budget import Budget, PlannedCall, nearest
from .memory.locks import LockOwner
from .memory.memory_provider import Estimate, Saved
from .memory.operator_memory import refuse
from .memory.shared_state import SHARED
from .policy.counters import RecordingMade
from .policy.specialization import Record, Specialization
from .prepared import Prepared, ProgramContext
from .record.capture import free_workspaces_of_warm_ups
from .record.recording_builder import Recorded, RecordingBuilder
from .record.rehearsal import rehearse
from .replay.ranges import recording as recording_range
from .requests import request_for
from .traces import ProgramTraces

log = logging.getLogger(__name__)

# In place of a call's outputs: nothing has run.
NOT_RUN = object()
_MORE_BY_LIBRARIES = "more than memory_limit with the workspace of libraries"
# How many entries ``history`` keeps.
_HISTORY = 200


@dataclass(frozen=True)
class Attempt:
    """An attempt to record a call.

    Attributes:
        static: positions of inputs whose addresses stay.
        locked: the arenas that the call, ``owner``, has locked for it.
    """

    specialization: Specialization
    inputs: list[Any]
    static: list[int]
    decided: Record
    owner: LockOwner
    locked: list[Arena] = field(default_factory=list)


@dataclass(frozen=True)
class Refused:
    """An attempt to record that cannot succeed, and why. Nothing has run."""

    why: str


@dataclass(frozen=True)
class Short:
    """An attempt to record that was short of memory.

    Attributes:
        of: ``TOO_LARGE`` or ``OUT_OF_MEMORY``.
        outputs: those of the call; ``NOT_RUN`` if nothing has run.
    """

    of: str
    outputs: Any = NOT_RUN


# The recorder of a forward program; inputs of its backward, by the storage that they are saved in; the forward's
# graph when they were linked.
_Forward = tuple["weakref.ref[Recorder]", Mapping[int, Sequence[str]], "weakref.ref[GraphModule]"]


class Recorder:
    """Plans, makes and keeps the recordings of one program.

    Attributes:
        prepared: the plan and what is derived from it; replaced whenever the program is partitioned again.
        capture_errors: the error of each operator whose capture failed, by operator.
        budget: the most bytes that a call may take beside its inputs, and what is known of those that it takes.
        never_recorded: why the program can never be recorded; empty if it can.
        history: how the newest recordings were made.
        newest_plan, newest_sized: the newest memory plan, and the program with the sizes that it was made for; None
            before the first plan.
    """

    def __init__(self, context: ProgramContext, plan: ProgramPlan) -> None:
        self._context = context
        self._traces = ProgramTraces(context.name)
        self._traces.compiled(plan)
        self.budget = Budget(context.planner, context.options.memory_limit)
        self._limit = Limit(self.memory_limit) if self.memory_limit else None  # that the present plan was made for
        self.prepared = Prepared.of(plan, context, self.budget)
        self.capture_errors = dict[str, str]()
        self.never_recorded = ""
        self.history = deque[RecordingMade](maxlen=_HISTORY)
        self.newest_plan: MemoryPlan | None = None
        self.newest_sized: SizedProgram | None = None
        self._newest_estimate: weakref.ref[Estimate] | None = None
        self._forward: _Forward | None = None
        self._backward: weakref.ref[Recorder] | None = None
        self._saved_tensors = frozenset[int]()  # positions of inputs that the forward program allocates
        self._saved_as_compiled = list[tuple[int, tuple[str, ...]]]()  # bytes, and the inputs that share them

    # -- planning ahead ---------------------------------------------------------------------------------

    @property
    def newest_estimate(self) -> Estimate | None:
        """The estimate last made, or last used for a recording; None if it was freed with its specialization."""
        return self._newest_estimate() if self._newest_estimate is not None else None

    def estimate(self, inputs: Sequence[Any], specialization: Specialization) -> None:
        """Plan memory before a recording, for reports and so that arenas are large enough."""
        newest, enough = self.newest_plan, self._context.specializations.should_stop_planning
        if newest is not None and (not newest.arenas or enough()):
            return
        try:
            estimate = self.prepared.provider.estimate(inputs, self.newest_plan, self._saved())
            self._keep_estimate(specialization, estimate)
            self._note_plan(estimate.sized, estimate.memory)
        except PlanError as error:
            if self._context.options.strict:
                raise
            self.never_recorded = str(error.subject)

    def rehearse(self, specialization: Specialization, inputs: Sequence[Any] | None = None) -> None:
        """Find out what operators allocate in a capture, and plan with it.

        The caller holds the lock of captures.

        Args:
            inputs: those of the first call, before it; None after a warm-up, which has let go of its inputs.
        """
        estimate, provider = specialization.estimate, self.prepared.provider
        if inputs is not None:
            rehearse(self.prepared.plan, provider.symbols(inputs), has_run=False)
        elif estimate is not None and rehearse(self.prepared.plan, symbols_at(estimate.sized.symbol_values)):
            self.prepared.provider.estimate_again(estimate)
            self._note_plan(estimate.sized, estimate.memory)

    def _keep_estimate(self, specialization: Specialization, estimate: Estimate) -> None:
        specialization.estimate, self._newest_estimate = estimate, weakref.ref(estimate)

    def _note_plan(self, sized: SizedProgram, memory: MemoryPlan) -> None:
        if self.newest_plan is None:
            self._traces.planned(self.prepared.plan, memory)
        if self.newest_plan is not memory:
            sizes = memory.size, memory.peak, memory.lower_bound
            log.debug("%s: planned: arenas %d bytes, peak %d bytes, lower bound %d bytes", self._context.name, *sizes)
        self.newest_sized, self.newest_plan = sized, memory

    def link_forward(self, forward: Recorder, inputs: Mapping[int, Sequence[str]]) -> None:
        """Link a backward program's recorder to that of its forward.

        Args:
            inputs: names of the backward's inputs, by the storage of the forward program that they are saved in.
        """
        self._forward = weakref.ref(forward), inputs, weakref.ref(forward.prepared.plan.graph)
        forward._backward = weakref.ref(self)
        names = {name for several in inputs.values() for name in several}
        placeholders = enumerate(self.prepared.plan.placeholders)
        self._saved_tensors = frozenset(position for position, node in placeholders if node.name in names)
        plan = forward.prepared.plan
        self._saved_as_compiled = [(_bytes_as_compiled(plan, index), tuple(all_)) for index, all_ in inputs.items()]

    @property
    def forward(self) -> tuple[Recorder | None, Mapping[int, Sequence[str]]]:
        """The forward's recorder (None if it is gone), and the linked inputs (none if it has another graph)."""
        if self._forward is None or (recorder := self._forward[0]()) is None:
            return None, {}
        _, inputs, graph = self._forward
        return recorder, inputs if recorder.prepared.plan.graph is graph() else {}

    def _saved(self) -> Saved | None:
        if self._forward is None:
            return None
        forward, inputs = self.forward
        return Saved(forward.newest_estimate if forward is not None and inputs else None, inputs)

    # -- within a limit ---------------------------------------------------------------------------------

    @property
    def memory_limit(self) -> int:  # 0: no limit
        return self.budget.nbytes

    def set_memory_limit(self, nbytes: int) -> None:
        """Set ``memory_limit``. The caller forgets the specializations: each has to ``fit`` anew."""
        self.budget.nbytes = nbytes
        self._replace_plan(None, "another memory_limit")

    def fit(
        self, specialization: Specialization, inputs: Sequence[Any], static: Collection[int] | None = None
    ) -> None:
        """Plan again until a call at these sizes takes no more than ``memory_limit``. Nothing runs.

        Args:
            static: positions of inputs whose addresses stay; None for an eager run.

        Raises:
            MemoryLimitError: a call, or the call of the backward that is compiled for it, would take more; or what it
                takes cannot be known.
        """
        provider, present = self.prepared.provider, self.prepared.plan
        call = provider.planned_call(inputs, static, self._saved_tensors)
        backward = self._backward() if self._backward is not None and not provider.symbols(inputs) else None
        found, least = None, 0
        try:
            found = self.budget.within(self.memory_limit, call, present, self._limit, self.partition)
        except MemoryLimitError as error:
            if not error.least:
                raise
            least = error.least
        if found is None or (backward is not None and not backward.is_within_limit()):
            with contextlib.suppress(
                CaptureError
            ):  # count a buffer for each input that may move: then it fits later, too
                moving = present.inputs.static | self._saved_tensors
                call = provider.planned_call(inputs, moving, self._saved_tensors)
            least = max(least, self.budget.least(call, present, self.partition))
            least = max(least, backward.least_as_compiled()) if backward is not None else least
            raise self.budget.does_not_fit(self.memory_limit, least, present)
        plan, limit = found
        if plan is not present:
            self._replace_plan(limit, "planned again within memory_limit", plan)
        specialization.fits = True

    def call_compiled_for(self) -> PlannedCall:
        """A call with the sizes that the program was compiled for."""
        return PlannedCall.compiled_for(self.prepared.plan, self._saved_as_compiled)

    def least_as_compiled(self) -> int:
        """The lowest limit that fits a call with these sizes."""
        return self.budget.least(self.call_compiled_for(), self.prepared.plan, self.partition)

    def is_within_limit(self) -> bool:
        """Whether a call with the sizes that the program was compiled for can stay within ``memory_limit``."""
        plan = self.prepared.plan
        try:
            self.budget.within(self.memory_limit, self.call_compiled_for(), plan, self._limit, self.partition)
        except MemoryLimitError:
            return False
        return True

    def partition(self, limit: Limit | None) -> ProgramPlan:
        """The program's plan within a limit, or without one. The present one stays."""
        return self._context.planner.partition(self.prepared.plan.inputs, self.capture_errors, limit)

    # -- recording --------------------------------------------------------------------------------------

    def record(
        self,
        specialization: Specialization,
        inputs: list[Any],
        decided: Record,
        owner: LockOwner,
    ) -> tuple[Any, str]:
        """Record a call, and keep the recording.

        Returns:
            The outputs of the call; ``NOT_RUN`` and the reason if nothing has run. A failed attempt keeps no
            memory.

        Raises:
            MemoryLimitError: the call would take more than ``memory_limit``. With ``strict``: also PlanError,
                CaptureError, and MemoryLimitError of other causes.
        """
        why, begin, device = decided.why, time.perf_counter(), self.prepared.plan.device
        if decided.first:
            specialization.output_copies.add_live_warm_outputs()
            why = "first" if len(self._context.specializations) == 1 else "new shape"
        if runtime_for(device).frozen_addresses:
            free_workspaces_of_warm_ups(owner.stream)
        before = {shortage: SHARED.arenas.pressure(shortage, device) for shortage in (TOO_LARGE, OUT_OF_MEMORY)}
        static = self._static_inputs(specialization, inputs)
        attempt = Attempt(specialization, inputs, static, decided, owner)
        try:
            result = self._try(attempt)
            if isinstance(result, Recorded) and self._takes_more(inputs, static):
                # Libraries took more during the capture than was known: the next call plans again before it runs.
                self._context.count("events", _MORE_BY_LIBRARIES)
                self._context.specializations.clear()
                result.recording.end(_MORE_BY_LIBRARIES)
                for arena in attempt.locked:
                    if not arena.users():
                        arena.clear("")
        finally:
            for arena in attempt.locked:
                arena.lock.release(owner)
        if isinstance(result, Refused):
            return NOT_RUN, result.why
        if isinstance(result, Recorded):
            self._keep(specialization, result, inputs, why)
            self._note_recording(result, inputs, why, time.perf_counter() - begin)
            return result.outputs, ""
        # Retry when the pressure is below both that before the attempt and that now. With the earlier value only, the
        # retry would come at once, since the attempt ended recordings, which will be made again. With the present
        # value only, it would come as soon as this call's outputs are freed.
        pressure = min(before[result.of], SHARED.arenas.pressure(result.of, device))
        specialization.shortage.note(result.of, pressure)
        if result.of == OUT_OF_MEMORY:
            SHARED.arenas.withdraw(specialization.estimate)  # arenas need not grow for this recording
        if result.outputs is not NOT_RUN:
            self._context.count("eager", result.of)
        return result.outputs, result.of

    def _takes_more(self, inputs: Sequence[Any], static: Collection[int]) -> bool:
        prepared = self.prepared
        taken = (
            self.budget.taken(prepared.plan, prepared.provider.planned_call(inputs, static, self._saved_tensors))
            if self.memory_limit
            else 0
        )
        return taken > self.memory_limit

    def _try(self, attempt: Attempt) -> Recorded | Refused | Short:
        """Plan and make a recording. Raises with ``strict``; an error of ``memory_limit`` always."""
        specialization, strict = attempt.specialization, self._context.options.strict
        try:
            if self.memory_limit:
                self.fit(specialization, attempt.inputs, attempt.static)  # with static buffers for those that move
            recorded = self._make(attempt)
        except MemoryLimitError as error:
            if error.least:  # only an error of memory_limit sets it
                raise
            short = Short(OUT_OF_MEMORY if isinstance(error.__cause__, torch.OutOfMemoryError) else TOO_LARGE)
            for arena in attempt.locked if short.of == OUT_OF_MEMORY else ():
                arena.clear(OUT_OF_MEMORY)  # also drops the pool: failed captures left allocations in it
            if strict:
                raise
            return short
        except (PlanError, CaptureError) as error:
            if strict:
                raise
            if isinstance(error, PlanError) and any(arena.live() for arena in attempt.locked):
                # These may be the cause: next time use an arena without any.
                specialization.avoids_live_outputs = True
            else:
                self.never_recorded = str(error.subject)
            return Refused(str(error.subject))
        ran_out = recorded.recording.ended == OUT_OF_MEMORY
        return Short(OUT_OF_MEMORY, recorded.outputs) if ran_out and not strict else recorded

    def _make(self, attempt: Attempt) -> Recorded:
        specialization, inputs, static = attempt.specialization, attempt.inputs, attempt.static
        prepared, estimate = self.prepared, specialization.estimate

        def excludes(arena: Arena) -> bool:
            return specialization.excludes(arena, attempt.decided)

        rehearse(prepared.plan, prepared.provider.symbols(inputs))
        memory = prepared.provider.provide(
            inputs, static, estimate, self.newest_plan, attempt.owner, attempt.locked, excludes
        )
        self._note_plan(memory.sized, memory.memory)
        self._keep_estimate(specialization, estimate or Estimate(memory.sized, memory.memory))
        request = request_for(self._context, prepared, self._traces, specialization, inputs, static, memory)
        arena = memory.arenas.get(prepared.plan.device)
        before = arena.pool_bytes() if arena is not None else 0
        with record_function(recording_range(self._context.name)):
            recorded = RecordingBuilder(request).record(inputs)
        if arena is not None:
            self.budget.in_pool = max(self.budget.in_pool or 0, arena.pool_bytes() - before)
        return recorded

    def _static_inputs(self, specialization: Specialization, inputs: Sequence[Any]) -> list[int]:
        plan = self.prepared.plan
        return specialization.static_inputs.positions(
            inputs,
            plan.inputs.static,
            others_copied=runtime_for(plan.device).frozen_addresses,
            backward=plan.phase == "backward",
            saved=self._saved_tensors,
            aligned=self.prepared.aligned,
        )

    def _keep(self, specialization: Specialization, recorded: Recorded, inputs: list[Any], why: str) -> None:
        recording = recorded.recording
        if recording.eager_reasons and self._context.options.strict:
            raise CaptureError(
                f"{len(recording.eager_reasons)} partition(s) could not be captured",
                got="; ".join(f"partition {i}: {reason}" for i, reason in recording.eager_reasons.items()),
                remedy="list the operators in eager_ops, or leave strict out",
            )
        self._context.counters.count("recordings", why)
        for reason in recording.eager_reasons.values():
            self._context.count("events", reason)
        for node, how in recorded.not_placed.items():
            self._context.count(
                "events", f"{operator_name(node)} allocates outside of the plan: {how.splitlines()[0]}"
            )
        refuse(self.prepared.plan, symbols_at(recording.request.sized.symbol_values), recorded.not_placed)
        if recorded.capture_errors:
            self._partition_again(recorded.capture_errors)
            return
        if specialization.estimate is not None:
            specialization.estimate.sized = recording.request.sized  # by now it is known which inputs stay
        specialization.add(recording, inputs)
        if recorded.not_native:
            self._context.count("events", f"replays in Python: {recorded.not_native}")
        if recording.unit is not None and not isinstance(native := native_library.native_replay(), str):
            self._context.specializations.missed = native.missed
        self._context.specializations.find_units()

    def _partition_again(self, capture_errors: Mapping[str, str]) -> None:
        """Partition with these operators eager: otherwise each would make its whole partition eager."""
        self.capture_errors.update(capture_errors)
        for operator, failure in capture_errors.items():
            log.info("%s: is cut again around %s: %s", self._context.name, operator, failure)
        self._replace_plan(self._limit, "cut again around what could not be captured")

    def _replace_plan(self, limit: Limit | None, why: str, plan: ProgramPlan | None = None) -> None:
        """Take ``plan``, or partition again within ``limit``. ``why``: the reason for which all recordings end."""
        plan = plan or nearest(self.partition, limit)
        same_graph = plan.graph is self.prepared.plan.graph
        if not same_graph:
            self.newest_plan = self.newest_sized = None  # they are about storages of another graph
        self._limit, self.prepared = limit, Prepared.of(plan, self._context, self.budget)
        for other in self._context.specializations.values():
            other.fits = False
            if other.estimate is not None and same_graph:
                self.prepared.provider.estimate_again(other.estimate)
        self._drop_recordings(why)
        if (forward := self.forward[0]) is not None:  # its plan is one for both
            forward._drop_recordings("its backward is planned anew")

    def _drop_recordings(self, why: str) -> None:
        for specialization in self._context.specializations.values():
            specialization.drop_recordings(why)
        self._context.specializations.find_units()

    def _note_recording(self, recorded: Recorded, inputs: Sequence[Any], why: str, seconds: float) -> None:
        recording, request = recorded.recording, recorded.recording.request
        copied = request.copied if request.memory.arenas else ()  # without arenas outputs are new tensors, not copies
        made = RecordingMade(
            when=time.time(),
            why=why,
            us=seconds * 1e6,
            sizes=self._context.sizes.by_symbol(self.prepared.plan.placeholders, inputs),
            graphs=len(recording.graphs),
            arena_bytes=request.memory.size,
            copied_in_bytes=sum(nbytes for _, nbytes in request.sized.input_buffers.values()),
            copied_out_bytes=sum(request.memory.sizes.get(index, 0) for index in copied),
        )
        self.history.append(made)
        kept = "replays natively" if recording.unit is not None else "replays in Python"
        how = "is not kept" if recorded.capture_errors else kept
        logged = why, seconds * 1e3, len(recording.graphs), request.memory.size or request.memory.peak, how
        log.info("%s: recorded (%s) in %.1f ms: %d graph(s), %d bytes; %s", self._context.name, *logged)


def _bytes_as_compiled(plan: ProgramPlan, index: int) -> int:
    """Bytes of a storage at the sizes that a program was compiled for; 0 if data decide on them."""
    value = plan.facts.storages[index].value(plan.maker(index))
    layout = hinted_layout(value)
    return storage_bytes(*layout, value.dtype) if value is not None and layout is not None else 0
