"""Memory for recordings: what they will need, seen while programs warm up, and arenas that are large enough."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import CaptureError, MemoryLimitError
from ..host_graph import output_values
from ..plan import Allocations, MemoryPlan, Origin, Planned, Prediction, ProgramPlan, Suggestion, Taken
from .device_graph import runtime_for
from .links import LINKS
from .memory import ARENAS, Arena, reach, tensors_in
from .torch_functions import TorchFunctions
from .turn import Call

# How many times what anybody needs an arena may be large.
_SLACK = 2

# What outputs of other recordings have in a device's arena.
TakenIn = Callable[[torch.device], Sequence[Taken]]


@dataclass(frozen=True)
class Planners:
    """
    Attributes:
        plan: plans one recording, in what is free, and verifies the plan; it may be told what to try, and a plan for
            other sizes.
        plan_pair: what to try for two programs, of which the second gets what the first saves.
        predict: the memory of one program, or of two that are planned together.
        measure: bytes that work nodes allocate beyond what they return, found by running some of them.
    """

    plan: Callable[[Planned, TakenIn, Suggestion | None, MemoryPlan | None], MemoryPlan]
    plan_pair: Callable[[Planned, Planned, Mapping[int, Sequence[Node]]], tuple[Suggestion, Suggestion]]
    predict: Callable[[Sequence[Planned], Mapping[int, Sequence[Node]]], list[Prediction]]
    measure: Callable[[Sequence[Node], Allocations], Mapping[Node, int]]


@dataclass(eq=False)
class Forecast:
    """What is known of the memory of one family of recordings before it is made.

    Attributes:
        planned: the program at the family's sizes.
        successor: the forecast of the program that gets what this one saves, and positions of its inputs by those of
            this one's outputs: programs may be cut anew, with other nodes and storages.
        suggestion: from a plan for this program and the one before.
        static_inputs: bytes of inputs that stay where they are.
        follows: it is the successor of another.
    """

    planned: Planned
    static_inputs: int = 0
    follows: bool = False
    successor: tuple[weakref.ref[Forecast], Mapping[int, Sequence[int]]] | None = None
    suggestion: Suggestion | None = None


@dataclass(frozen=True)
class Provision:
    """What a recording gets.

    Attributes:
        arenas: by device; the call that records has their turns.
        given_away: positions of inputs that nobody else has, and whose memory is used again after their last use.
    """

    planned: Planned
    memory: MemoryPlan
    arenas: Mapping[torch.device, Arena]
    given_away: tuple[int, ...]


@dataclass
class Provider:
    """Finds memory for the recordings of one program."""

    planners: Planners
    evaluate: Callable[[Mapping[Node, Any]], dict[Node, Any]]
    functions: TorchFunctions
    placeholders: Sequence[Node]
    # Inputs of which an operator may read what lies before their first element, and that operator.
    whole_storage: Mapping[Node, str] = field(default_factory=dict)
    max_memory: int = 0
    # Of work nodes, at the sizes that the program was compiled for.
    _workspace: Mapping[Node, int] | None = None

    def expect(
        self, plan: ProgramPlan, inputs: Sequence[Any], moved: Collection[int], like: MemoryPlan | None
    ) -> tuple[Forecast, MemoryPlan]:
        """Plan ahead, for a call that runs eagerly: the next one may be recorded.

        Args:
            moved: positions of static inputs that do not stay where they are after all.
            like: the plan before, for other sizes.

        Raises:
            PlanError: the program cannot be recorded at all.
        """
        bound = plan.static_inputs.difference(moved)
        try:
            planned = self._planned(plan, inputs, bound)
        except CaptureError:
            planned = Planned(plan, self._numbers(inputs), {})  # a report wants a plan all the same
        memory = self.planners.plan(planned, lambda device: (), None, like)
        forecast = Forecast(planned, sum(map(reach, tensors_in([inputs[p] for p in bound]))))
        found = LINKS.made_by(inputs, range(len(inputs)))
        fed: dict[torch.device, dict[int, int]] = defaultdict(dict)
        handed_on: dict[Forecast, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for position, (before, output) in found.items():
            storage = inputs[position].untyped_storage()
            fed[storage.device][storage._cdata] = storage.nbytes()
            handed_on[before][output].append(position)
        if plan.phase == "backward":
            for before, positions in handed_on.items():
                before.successor = weakref.ref(forecast), positions
                forecast.follows = True
                ARENAS.withdraw(before)  # what both need together is found when the first is recorded
        else:
            try:
                stream = runtime_for(plan.device).stream_key()
            except CaptureError:
                return forecast, memory  # nothing will be recorded
            for device, arena in memory.arenas.items():
                ARENAS.expect(device, stream, forecast, arena.placement.size + sum(fed[device].values()))
        return forecast, memory

    def predict(self, forecast: Forecast) -> list[Prediction]:
        """The memory of a family's calls, with that of the program that gets what they save, by device."""
        programs, handed_on = [forecast.planned], dict[int, Sequence[Node]]()
        if forecast.successor is not None and (after := forecast.successor[0]()) is not None:
            programs = [forecast.planned, after.planned]
            handed_on.update(_handed_on(forecast.planned, after.planned, forecast.successor[1]))
        return self.planners.predict(programs, handed_on)

    def hand_out(self, forecast: Forecast, outputs: Sequence[tuple[int, StorageWeakRef]]) -> None:
        """Note where the outputs of an eager run are, by position, to see who gets them."""
        LINKS.hand_out(forecast, outputs)

    def nobody_else_has(self, inputs: list[Any], positions: Collection[int]) -> list[int]:
        """Those of some inputs that only this call has. To be asked before anything else is done with them."""
        only = [p for p in sorted(positions) if isinstance(inputs[p], torch.Tensor)]
        return [p for p in only if self.functions.nobody_else_has([p])(inputs)]

    def provide(
        self,
        plan: ProgramPlan,
        inputs: Sequence[Any],
        bound: Collection[int],
        alone: Collection[int],
        copied: frozenset[int],
        forecast: Forecast | None,
        like: MemoryPlan | None,
        call: Call,
        turns: list[Arena],
    ) -> Provision:
        """Plan a recording in arenas that ``call`` gets, and that grow if need be.

        Args:
            bound: positions of inputs whose addresses stay.
            alone: of these, what nobody else has.
            copied: storages of outputs that are held, and so copied, or allocated anew.
            like: the plan before.
            turns: the arenas are entered here, to be given back.

        Raises:
            CaptureError: an input cannot have a place.
            MemoryLimitError: more than ``max_memory`` would be kept.
            PlanError: the verifier refused the plan.
        """
        planned = self._planned(plan, inputs, bound, copied)
        if forecast is not None:
            forecast.planned = planned  # it is known by now which inputs stay
        suggestion = self._with_successor(planned, forecast)
        handed_in: dict[int, list[int]] = defaultdict(list)  # positions by storage
        for position in set(bound).intersection(alone):
            handed_in[inputs[position].untyped_storage()._cdata].append(position)
        given_away: set[int] = set()
        stream = runtime_for(plan.device).stream_key()

        def arena_of(device: torch.device) -> Arena:
            found = next((arena for arena in turns if arena.device == device), None)
            return found or ARENAS.take(device, stream, call, turns)

        def taken(device: torch.device) -> list[Taken]:
            found = []
            for output, holders in arena_of(device).held().items():
                positions = handed_in.get(output.storage._cdata, [])
                last = positions if len(positions) == holders else []
                found.append(Taken(output.low, output.high, tuple(self.placeholders[p] for p in last)))
                given_away.update(last)
            return found

        while True:
            given_away.clear()
            memory = self.planners.plan(planned, taken, suggestion, like)
            sizes = {arena_of(device): one.placement.size for device, one in memory.arenas.items()}
            for arena, nbytes in sizes.items():
                ARENAS.correct(arena.device, stream, forecast, nbytes)
            # Moved memory has nobody's outputs in it: another plan.
            if not any([self._fit(arena, nbytes, stream) for arena, nbytes in sizes.items()]):
                # The arena's pool is where operators allocate during capture.
                used = {*memory.arenas, plan.device} if planned.frozen else set(memory.arenas)
                arenas = {device: arena_of(device) for device in used}
                return Provision(planned, memory, arenas, tuple(sorted(given_away)))

    def _fit(self, arena: Arena, nbytes: int, stream: Any) -> bool:
        """Make an arena large enough, and at most twice as large as anybody needs; whether its memory moved."""
        for expected in (ARENAS.expected(arena.device, stream), 0):
            needed = max(nbytes, arena.needed(), expected)
            size = arena.nbytes if nbytes <= arena.nbytes <= _SLACK * needed else needed
            if not self.max_memory or ARENAS.make_room(arena, size, self.max_memory):
                if size != arena.nbytes:
                    arena.resize(size)
                    return True
                return False
        raise MemoryLimitError(
            f"recording needs {nbytes:,} bytes on {arena.device}",
            expected=f"no more than max_memory, {self.max_memory:,}, with what other calls use now",
            remedy="raise max_memory, or free outputs that are kept",
        )

    def _with_successor(self, planned: Planned, forecast: Forecast | None) -> Suggestion | None:
        """What suits the program that gets what this one saves, too."""
        if forecast is None or forecast.successor is None or (after := forecast.successor[0]()) is None:
            return forecast.suggestion if forecast is not None else None
        handed_on = _handed_on(planned, after.planned, forecast.successor[1])
        own, after.suggestion = self.planners.plan_pair(planned, after.planned, handed_on)
        return own

    def _planned(
        self, plan: ProgramPlan, inputs: Sequence[Any], bound: Collection[int], anew: frozenset[int] = frozenset()
    ) -> Planned:
        runtime = runtime_for(plan.device)
        if runtime.frozen_addresses:
            places, places_results = self._places(inputs, bound), runtime.place_allocations is not None
            return Planned(plan, self._numbers(inputs), places, places_results=places_results)
        if self._workspace is None:
            self._workspace = self.planners.measure(plan.schedule, self.functions.allocations)
        return Planned(plan, self._numbers(inputs), {}, False, anew, self._workspace)

    def _numbers(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        return self.evaluate(dict(zip(self.placeholders, inputs, strict=True)))

    def _places(self, inputs: Sequence[Any], bound: Collection[int]) -> dict[Node, tuple[torch.device, int]]:
        """Inputs that are copied to places in the arena: device and bytes."""
        found = {}
        for position, (node, value) in enumerate(zip(self.placeholders, inputs, strict=True)):
            if position in bound or not isinstance(value, torch.Tensor):
                continue
            if node in self.whole_storage:
                raise CaptureError(
                    f"{self.whole_storage[node]} counts from the start of an input's storage, of which a device "
                    "graph would have a part",
                )
            found[node] = (value.device, reach(value))
        return found


def _handed_on(first: Planned, second: Planned, positions: Mapping[int, Sequence[int]]) -> dict[int, list[Node]]:
    """Inputs of the second program by storage of the first, from positions of inputs by those of outputs."""
    facts, found = first.program.facts, defaultdict[int, list[Node]](list)
    outputs = output_values(first.program.graph)
    inputs = [node for node in second.program.graph.graph.nodes if node.op == "placeholder"]
    for output, places in positions.items():
        for index in facts.of.get(outputs[output], ()):
            if facts.storages[index].origin in (Origin.ALLOCATION, Origin.EXTERN):
                found[index] += [inputs[position] for position in places]
    return dict(found)
