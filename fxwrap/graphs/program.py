"""A program: the callable made from one host graph. Warms up, records, replays."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import CaptureError, FxwrapError, InputError, MemoryLimitError, PlanError
from ..host_graph import (
    Kind,
    checks_on,
    constants,
    counts_from_storage,
    is_symbolic_value,
    kind_of,
    operator_name,
    output_node,
    output_values,
)
from ..options import Options
from ..plan import MemoryPlan, Origin, Prediction, ProgramPlan
from .counters import Counters
from .device_graph import DeviceRuntime, runtime_for
from .flat import FlatBuilder
from .memory import Arena
from .outputs import OUTPUT_ADDRESSES
from .provision import Forecast, Planners, Provider
from .recording import Recording, RecordingRequest
from .torch_functions import TorchFunctions
from .turn import Call, Turn

# Names of operators that captures have failed at -> the program cut around them.
Cutter = Callable[[Mapping[str, str]], ProgramPlan]
SizeEvaluator = Callable[[GraphModule, Mapping[Node, Any]], dict[Node, Any]]


# Recordings that one family may make, times max_output_sets, while others hold on to the memory it needs.
_MOST_RECORDINGS = 4


@dataclass(frozen=True)
class _Seen:
    """Where an input was, without holding it.

    An address alone says little: what a call allocates often lands where the call before had freed. A storage
    that is still alive is the same one.

    Attributes:
        start: the address of the storage, where that of an output is.
    """

    address: int
    start: int
    storage: StorageWeakRef

    @classmethod
    def of(cls, value: Any) -> _Seen | None:
        """None for what has no address: numbers, opaque tensors."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        if value.is_conj() or value.is_neg():
            return None  # the memory alone does not say what the value is
        try:
            storage = value.untyped_storage()
            return cls(value.data_ptr(), storage.data_ptr(), StorageWeakRef(storage))
        except RuntimeError:
            return None

    def is_still(self, other: _Seen) -> bool:
        alive = not self.storage.expired()
        return alive and self.storage.cdata == other.storage.cdata and self.address == other.address


@dataclass(eq=False)
class Family:
    """The recordings of one shape (and stream), and what was learnt about its inputs and outputs.

    Attributes:
        seen: where the last eager run's static inputs were.
        moved: positions of inputs that were taken to stay where they are, and did not.
        copied: storages of outputs that are copied when handed out, because they were found held.
        settled: positions of inputs that were at one address call after call, and are taken to stay there.
        warm_outputs: outputs of the last eager run by position, to see whether the caller holds on to them.
        cut_anew: whether its recordings were dropped because the program was cut anew.
        kept: whether somebody else had inputs that were taken to be given away.
        made: how many recordings there have been.
        forecast: of the memory it needs.
        too_large: whether that is more than it may have.
    """

    recordings: list[Recording] = field(default_factory=list)
    eager_runs: int = 0
    moved: set[int] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)
    settled: set[int] = field(default_factory=set)
    seen: dict[int, _Seen | None] = field(default_factory=dict)
    warm_outputs: list[tuple[int, int, StorageWeakRef]] = field(default_factory=list)
    cut_anew: bool = False
    kept: bool = False
    made: int = 0
    forecast: Forecast | None = None
    too_large: bool = False


class Program:
    """Runs a host graph: eagerly at first, then from recordings.

    Safe to call from several threads: a call that finds its recording in use runs eagerly.
    """

    def __init__(
        self,
        cut: Cutter,
        options: Options,
        functions: TorchFunctions,
        planners: Planners,
        evaluate: SizeEvaluator,
    ) -> None:
        self._cut, self._refused = cut, dict[str, str]()
        self.options, self.functions, self._planners, self._evaluate = options, functions, planners, evaluate
        self.counters = Counters()
        self.families: dict[Any, Family] = {}
        self.newest_plan: MemoryPlan | None = None
        self._recording = Turn()
        self._never_recorded = ""
        self._adopt(cut({}))
        self._dynamic = _dynamic_positions(self._placeholders)
        self._on_accelerator = self.plan.device.type != "cpu"

    def _adopt(self, plan: ProgramPlan) -> None:
        """Run by a plan from now on."""
        self.plan = plan
        self._placeholders = [n for n in plan.graph.graph.nodes if n.op == "placeholder"]
        self._eager = self._eager_function()
        self._output_nodes = self._tensor_outputs()
        self._provider = Provider(
            self._planners,
            functools.partial(self._evaluate, plan.graph),
            self.functions,
            self._placeholders,
            self._inputs_counted_from_their_storage(),
            self.options.max_memory,
        )

    # -- calling ----------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any) -> Any:
        return self.run(list(inputs))

    def run(self, inputs: list[Any]) -> Any:
        """Run the program on a list of inputs."""
        if len(inputs) != len(self._placeholders):
            raise InputError(
                "program called with the wrong number of inputs",
                expected=str(len(self._placeholders)),
                got=str(len(inputs)),
            )
        try:
            if self._on_accelerator:
                with self._guard():
                    return self._run(self._key(inputs), inputs)
            return self._run(self._key(inputs) if self._dynamic else None, inputs)
        except BaseException as error:
            self.counters.count_event(f"a call raised {type(error).__name__}")
            raise

    def _run(self, key: Any, inputs: list[Any]) -> Any:
        family = self.families.get(key)
        if family is not None:
            for recording in family.recordings:
                if not recording.same_addresses(inputs):
                    continue
                call = Call()
                try:
                    if recording.take(call) and not recording.settled and recording.has_its_memory(inputs):
                        outputs = recording.run(inputs)
                        self.counters.count_replay()
                        return outputs
                finally:
                    recording.give(call)
        return self._not_replayed(key, inputs)

    def _key(self, inputs: Sequence[Any]) -> Any:
        """What tells recordings apart: every size that may vary, and the stream."""
        sizes = tuple(
            inputs[position]
            if how is None
            else (inputs[position].size(dim) if how == "size" else inputs[position].stride(dim))
            for position, how, dim in self._dynamic
        )
        if self._on_accelerator:
            return sizes, torch.get_device_module(self.plan.device).current_stream(self.plan.device)
        return sizes

    def _not_replayed(self, key: Any, inputs: list[Any]) -> Any:
        call = Call()
        try:
            if not self._recording.take(call):
                return self._run_eagerly(inputs, "another call is being recorded")
            family = self.families.get(key)
            if family is None and len(self.families) < self.options.max_recordings:
                family = self.families[key] = Family()
            reason = self._eager_reason(family)
            if reason or family is None:
                return self._run_eagerly(inputs, reason, family)
            why = self._adapt(family, inputs)
            if not why:
                return self._run_eagerly(inputs, "called while another call of the program runs")
            return self._record(family, inputs, why)
        finally:
            self._recording.give(call)

    def _eager_reason(self, family: Family | None) -> str:
        if self._never_recorded:
            return self._never_recorded
        if family is None:
            return f"more than {self.options.max_recordings} shapes (max_recordings)"
        if family.too_large:
            return "more than max_memory"
        if family.recordings:
            return ""
        # Hardware cannot capture what happens once only: kernels load and are tuned, libraries make workspaces.
        if family.eager_runs < max(self.options.warmup, int(self._on_accelerator)):
            return "warm-up"
        if sum(len(other.recordings) for other in self.families.values()) >= self.options.max_recordings:
            return f"more than {self.options.max_recordings} shapes (max_recordings)"
        return ""

    @property
    def forecast(self) -> Forecast | None:
        """Of the newest shape that is known; None where nothing will be recorded."""
        found = [family.forecast for family in self.families.values() if family.forecast is not None]
        return found[-1] if found else None

    def predict(self) -> list[Prediction]:
        """The memory of calls with the newest shape that is known, by device; empty where nothing is planned."""
        return self._provider.predict(self.forecast) if self.forecast is not None else []

    def release(self) -> None:
        """End every recording, but those that another call uses at this moment; the next call records anew."""
        for recording in [recording for family in list(self.families.values()) for recording in family.recordings]:
            call = Call()
            try:
                if recording.take(call):
                    recording.end("released")
            finally:
                recording.give(call)

    # -- eager ------------------------------------------------------------------------------------------

    def _run_eagerly(self, inputs: list[Any], reason: str, family: Family | None = None) -> Any:
        self.counters.count_eager(reason)
        forecast = self._expect(inputs, family)
        outputs = self._eager(inputs)
        if family is not None:
            family.eager_runs += 1
            family.seen = {p: _Seen.of(inputs[p]) for p in self.plan.static_inputs}
            family.warm_outputs = self._weak_outputs(outputs)
            family.forecast = forecast
            if forecast is not None:
                self._provider.hand_out(forecast, [(position, ref) for position, _, ref in family.warm_outputs])
        return outputs

    def _expect(self, inputs: list[Any], family: Family | None) -> Forecast | None:
        """Plan memory before anything is recorded: for a report, and for arenas to be large enough."""
        if family is not None and family.forecast is not None:
            return family.forecast  # planned once: a family beyond max_recordings runs eagerly at every call
        if self._never_recorded or (family is None and self.newest_plan is not None):
            return None
        try:
            moved = family.moved if family else ()
            forecast, self.newest_plan = self._provider.expect(self.plan, inputs, moved, self.newest_plan)
        except PlanError as error:
            if self.options.strict:
                raise
            self._never_recorded = str(error.subject)
            return None
        return forecast

    def _eager_function(self) -> Callable[[list[Any]], Any]:
        """The whole schedule as one flat function with plain allocations."""
        gm = self.plan.graph
        builder = FlatBuilder(constants(gm), {node: i for i, node in enumerate(self._placeholders)})
        for node in checks_on(self._placeholders):
            if builder.available(node):
                builder.check(node)
        for partition in self.plan.partitions:
            builder.run_partition(self.plan, partition)
        return builder.build(output_node(gm).args[0]).function

    def _tensor_outputs(self) -> list[tuple[int, int]]:
        """(position among the outputs, storage) of outputs in memory that a recording would own."""
        found = []
        for position, value in enumerate(output_values(self.plan.graph)):
            if isinstance(value, Node):
                for index in self.plan.facts.of.get(value, ()):
                    if self.plan.facts.storages[index].origin in (Origin.ALLOCATION, Origin.EXTERN):
                        found.append((position, index))
        return found

    def _inputs_counted_from_their_storage(self) -> dict[Node, str]:
        """Inputs of which an operator may read what lies before their first element, and that operator."""
        facts, found = self.plan.facts, dict[Node, str]()
        for node in self.plan.graph.graph.nodes:
            if counts_from_storage(node):
                for index in facts.of.get(node.all_input_nodes[0], ()):
                    if facts.storages[index].origin is Origin.INPUT:
                        found[facts.storages[index].node] = operator_name(node)
        return found

    def _weak_outputs(self, outputs: Any) -> list[tuple[int, int, StorageWeakRef]]:
        values = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        found = []
        for position in dict(self._output_nodes):
            value = values[position]
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                found.append((position, storage.nbytes(), StorageWeakRef(storage)))
        return found

    # -- recording --------------------------------------------------------------------------------------

    def _adapt(self, family: Family, inputs: list[Any]) -> str:
        """Find out why no recording could be replayed, and change the family's ways; empty if one is busy."""
        moved = [recording for recording in family.recordings if recording.ended]
        if moved:
            family.recordings[:] = [recording for recording in family.recordings if not recording.ended]
            if not family.recordings:
                return moved[-1].ended
        whole = [recording for recording in family.recordings if not recording.spoiled()]
        if len(whole) < len(family.recordings):
            # Whoever sends outputs away, or frees them, will do so again: from now on they get copies.
            for recording in family.recordings:
                family.copied |= recording.moved_outputs()
            family.recordings[:] = [r for r in whole if r.request.copied >= family.copied]
            return "an output's holder moved its memory"
        settled = [recording for recording in family.recordings if recording.settled]
        if settled:
            family.settled.update(*(recording.settled for recording in settled))
            family.recordings[:] = [recording for recording in family.recordings if not recording.settled]
            return "inputs stay where they are"
        if not family.recordings:
            # Who kept the warm-up's outputs until now will keep the next ones, too.
            kept = [(position, nbytes) for position, nbytes, ref in family.warm_outputs if not ref.expired()]
            small = {position for position, nbytes in kept if nbytes <= self.options.copy_outputs_below}
            family.copied |= {index for position, index in self._output_nodes if position in small}
            family.warm_outputs = []
            if family.cut_anew:
                family.cut_anew = False
                return "cut anew around what could not be captured"
            return "first" if len(self.families) == 1 else "new shape"
        at_place = [recording for recording in family.recordings if recording.same_addresses(inputs)]
        if not at_place:
            return self._adapt_to_move(family, inputs)
        held = [recording for recording in at_place if recording.held()]
        if len(held) == len(at_place):
            return self._adapt_to_held(family, held)
        free = [recording for recording in at_place if recording not in held]
        if any(recording.has_its_memory(inputs) for recording in free):
            return ""  # another call has it
        if family.made >= _MOST_RECORDINGS * self.options.max_output_sets:
            return ""
        if not all(recording.has_given_away(inputs) for recording in free):
            family.kept = True
        if len(family.recordings) >= self.options.max_output_sets:
            family.recordings.remove(free[0])
        self.counters.count_event("an output of another program was held in memory that was needed")
        return "memory held by other outputs"

    def _adapt_to_move(self, family: Family, inputs: list[Any]) -> str:
        recording = family.recordings[-1]
        moved = {
            position
            for position in recording.request.bound_inputs
            if inputs[position].data_ptr() != recording.bound_addresses[position]
        }
        lent = {p for p in moved if inputs[p].untyped_storage().data_ptr() in OUTPUT_ADDRESSES}
        stable = lent == moved
        if stable and len(family.recordings) < self.options.max_output_sets:
            return "inputs from another recording of the program before"
        # They come from anywhere: from now on they are inputs like others.
        family.moved |= moved if stable else moved - lent
        family.recordings.clear()
        self.counters.count_event("an input taken to stay in place has moved")
        return "inputs moved"

    def _adapt_to_held(self, family: Family, held: list[Recording]) -> str:
        sizes = {output.index: output.storage.nbytes() for recording in held for output in recording.held()}
        small = {index for index, nbytes in sizes.items() if nbytes <= self.options.copy_outputs_below}
        large = set(sizes) - small
        self.counters.count_event("an output was still held at the next call")
        if large and len(family.recordings) >= self.options.max_output_sets:
            small, large = set(sizes), set()
        if small:
            family.copied |= small
            # Recordings that hand these out uncopied are of no more use.
            family.recordings[:] = [r for r in family.recordings if r.request.copied >= family.copied]
        return "large outputs held" if large else "small outputs held"

    def _record(self, family: Family, inputs: list[Any], why: str) -> Any:
        may_give_away = self.plan.phase == "backward" and not family.kept
        alone = self._provider.nobody_else_has(inputs, self.plan.static_inputs if may_give_away else ())
        bound = [p for p in sorted(self.plan.static_inputs | family.settled) if self._stays(family, p, inputs[p])]
        call, turns = Call(), list[Arena]()
        try:
            copied = frozenset(family.copied)
            memory = self._provider.provide(
                self.plan, inputs, bound, alone, copied, family.forecast, self.newest_plan, call, turns
            )
            self.newest_plan = memory.memory
            request = RecordingRequest(self._runtime(), self.functions, memory, bound, copied)
            recording, outputs = Recording.record(request, inputs)
        except MemoryLimitError:
            if self.options.strict:
                raise
            family.too_large = True
            return self._run_eagerly(inputs, "more than max_memory")
        except FxwrapError as error:
            if self.options.strict or not isinstance(error, (PlanError, CaptureError)):
                raise
            self._never_recorded = str(error.subject)
            return self._run_eagerly(inputs, self._never_recorded)
        finally:
            for arena in turns:
                arena.busy.give(call)
        if recording.eager_reasons and self.options.strict:
            raise CaptureError(
                f"{len(recording.eager_reasons)} partition(s) could not be captured",
                got="; ".join(f"partition {i}: {reason}" for i, reason in recording.eager_reasons.items()),
                remedy="list the operators in eager_ops, or leave strict out",
            )
        family.made += 1
        self.counters.count_recording(why)
        for reason in recording.eager_reasons.values():
            self.counters.count_event(reason)
        if recording.refused:
            self._cut_around(recording.refused)
        else:
            family.recordings.append(recording)
        return outputs

    def _cut_around(self, refused: Mapping[str, str]) -> None:
        """Have the next recordings leave operators out of captured partitions, instead of losing whole ones."""
        self._refused.update(refused)
        before = self._output_nodes
        self._adopt(self._cut(self._refused))
        for family in self.families.values():
            copied = {position for position, index in before if index in family.copied}
            family.copied = {index for position, index in self._output_nodes if position in copied}
            family.recordings.clear()
            family.cut_anew = True

    def _runtime(self) -> DeviceRuntime:
        return runtime_for(self.plan.device)

    def _guard(self) -> contextlib.AbstractContextManager[Any]:
        return torch.get_device_module(self.plan.device).device(self.plan.device)

    def _stays(self, family: Family, position: int, value: Any) -> bool:
        """Whether to take an input's address as fixed: it was there before, or another recording owns it."""
        if position in family.moved or (here := _Seen.of(value)) is None:
            return False
        if here.start in OUTPUT_ADDRESSES or position in family.settled:
            return True
        if not family.seen:
            return True  # no call to compare with (warmup=0): AOTAutograd's word is all there is
        before = family.seen.get(position)
        return before is not None and before.is_still(here)


def _dynamic_positions(placeholders: Sequence[Node]) -> list[tuple[int, str | None, int]]:
    """Where sizes that may vary can be read: (input, None | "size" | "stride", dimension)."""
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
