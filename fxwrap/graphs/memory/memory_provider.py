"""Memory for recordings: what they will need, seen while programs warm up, and arenas that are large enough."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch.fx import Node

from ...errors import CaptureError
from ...host_graph.sizes import evaluate_sizes
from ...host_graph.tensors import has_address, reach, tensors_in
from ...packing import Reserved
from ...plan import MemoryPlan, PlacementHint, Planned, ProgramPlan, Reservations
from ..devices.runtime import current_stream, runtime_for
from .arenas import Arena
from .locks import LockOwner
from .shared_state import SHARED


class Planner(Protocol):
    """Decides about one host graph: ``pipeline.HostGraphPlanner``."""

    def partition(self, refused: Mapping[str, str]) -> ProgramPlan:
        """The plan before sizes are known, partitioned around operators whose capture failed (with the error)."""

    def plan(
        self,
        planned: Planned,
        reserved: Reservations = MappingProxyType({}),
        hint: PlacementHint | None = None,
        previous: MemoryPlan | None = None,
    ) -> MemoryPlan:
        """Plan one recording around what is reserved, and verify the plan.

        Args:
            hint: offsets from a joint plan of forward and backward; tried first.
            previous: this program's plan for other sizes.
        """

    def devices(self, planned: Planned) -> Collection[torch.device]:
        """Where a plan of it has storages."""

    def plan_pair(
        self, first: Planned, second: Planned, saved_as: Mapping[int, Sequence[str]]
    ) -> tuple[PlacementHint, PlacementHint]:
        """Hints for two programs, of which the second gets what the first saves."""

    @property
    def took(self) -> Mapping[str, tuple[int, float]]:
        """How often each stage ran, and the seconds that it took."""


@dataclass(eq=False)
class Estimate:
    """What is known of the memory of a specialization before anything is recorded: a plan ahead.

    A ``Prediction`` (plan.py) is made of it for reports: bytes by device, with what operators allocate.

    Attributes:
        planned: the program at the sizes.
        successor: the estimate of the program that gets what this one saves, and its inputs by storage of this one.
        memory: the first plan for it.
        hint: offsets from a joint plan of this program and its forward.
        static_inputs: bytes of inputs that stay where they are.
        follows: it is the successor of another.
    """

    planned: Planned
    memory: MemoryPlan
    static_inputs: int = 0
    follows: bool = False
    successor: tuple[weakref.ref[Estimate], Mapping[int, Sequence[str]]] | None = None
    hint: PlacementHint | None = None

    def is_for(self, planned: Planned) -> bool:
        """Whether a recording at the same sizes, whose graphs call again, is planned alike."""
        return self.planned.program is planned.program and self.planned.donated == planned.donated


@dataclass(frozen=True)
class Saved:
    """What a backward program gets of its forward program.

    Attributes:
        estimate: of the forward program.
        inputs: of the backward program, by storage of the forward program.
    """

    estimate: Estimate | None
    inputs: Mapping[int, Sequence[str]]


@dataclass(frozen=True)
class RecordingMemory:
    """The memory of one recording.

    Attributes:
        arenas: by device; the call that records holds their locks. Empty where graphs do not freeze addresses (CPU).
        reused_inputs: positions of donated inputs that are outputs live in an arena; the plan may reuse their bytes
            after their last use.
    """

    planned: Planned
    memory: MemoryPlan
    arenas: Mapping[torch.device, Arena] = field(default_factory=dict)
    reused_inputs: tuple[int, ...] = ()


@dataclass
class MemoryProvider:
    """Finds memory for the recordings of one program."""

    planner: Planner
    program: ProgramPlan
    # Inputs of which an operator may read what lies before their first element, and that operator.
    whole_storage: Mapping[Node, str]
    max_memory: int

    def estimate(self, inputs: Sequence[Any], previous: MemoryPlan | None, saved: Saved | None) -> Estimate:
        """Plan ahead, for a call that runs eagerly: the next one may be recorded.

        Args:
            previous: the plan before, for other sizes.
            saved: None but for a backward program.

        Raises:
            PlanError: the program cannot be recorded at all.
        """
        try:
            planned = self._planned(inputs, self.program.static_inputs)
        except CaptureError:
            planned = Planned(self.program, self._numbers(inputs), {})  # a report wants a plan all the same
        memory = self.planner.plan(planned, previous=previous)
        static_inputs = sum(map(reach, tensors_in([inputs[p] for p in self.program.static_inputs])))
        estimate = Estimate(planned, memory, static_inputs, follows=saved is not None)
        if saved is not None and saved.estimate is not None:
            saved.estimate.successor = weakref.ref(estimate), saved.inputs
            SHARED.arenas.withdraw(saved.estimate)  # what both need together is found when the first is recorded
        elif self.program.phase != "backward":
            for device, arena in memory.arenas.items():
                SHARED.arenas.announce(device, estimate, arena.size)
        return estimate

    def provide(
        self,
        inputs: Sequence[Any],
        static: Collection[int],
        estimate: Estimate | None,
        previous: MemoryPlan | None,
        owner: LockOwner,
        locked: list[Arena],
        exclude: Callable[[Arena], bool],
    ) -> RecordingMemory:
        """Plan a recording, in arenas that ``owner`` gets, and that grow if need be.

        Args:
            static: positions of inputs whose addresses stay.
            previous: a plan for other sizes.
            locked: the arenas are entered here, to be released.
            exclude: tells which arenas will not do.

        Raises:
            CaptureError: an input cannot have a static buffer.
            MemoryLimitError: more than ``max_memory`` would be kept, or the device is out of memory.
            PlanError: the verifier refused the plan.
        """
        planned = self._planned(inputs, static)
        if not planned.frozen:
            # Such a plan depends on no addresses: what the warm-up has planned still holds.
            if estimate is not None and estimate.is_for(planned):
                return RecordingMemory(planned, estimate.memory)
            return RecordingMemory(planned, self.planner.plan(planned))
        if estimate is not None:
            estimate.planned = planned  # it is known by now which inputs stay
        hint = self._with_successor(planned, estimate)
        donated = self._donated_positions(inputs, static)
        stream = current_stream(self.program.device)
        # That of the program's device always: its pool is where operators allocate during capture.
        arenas = {
            device: SHARED.arenas.acquire(device, stream, owner, locked, exclude)
            for device in dict.fromkeys([*self.planner.devices(planned), self.program.device])
        }
        while True:
            live = {device: self._live_outputs(arena, donated) for device, arena in arenas.items()}
            reserved = {device: [interval for interval, _ in outputs] for device, outputs in live.items()}
            memory = self.planner.plan(planned, reserved, hint, previous)
            sizes = {arenas[device]: region.size for device, region in memory.arenas.items()}
            for arena, nbytes in sizes.items():
                SHARED.arenas.lower(arena.device, estimate, nbytes)
            # Moved memory has no live outputs in it: another plan, if there were any.
            moved = any([SHARED.arenas.fit(arena, nbytes, self.max_memory) for arena, nbytes in sizes.items()])
            if not moved or not any(region.reserved for region in memory.regions):
                reused = {position for outputs in live.values() for _, last in outputs for position in last}
                return RecordingMemory(planned, memory, arenas, tuple(sorted(reused)))

    def _donated_positions(self, inputs: Sequence[Any], static: Collection[int]) -> Mapping[int, Sequence[int]]:
        """Donated inputs that are not copied: positions, by handle of their storage."""
        positions: dict[int, list[int]] = defaultdict(list)
        for position in self.program.donated.intersection(static):
            positions[inputs[position].untyped_storage()._cdata].append(position)
        return positions

    def _live_outputs(
        self, arena: Arena, donated: Mapping[int, Sequence[int]]
    ) -> list[tuple[Reserved, Sequence[int]]]:
        """The intervals of an arena that live outputs occupy, each with the inputs that hold the last references."""
        outputs = []
        for output, holders in arena.live().items():
            positions = donated.get(output.storage._cdata, ())
            last = positions if len(positions) == holders else ()
            names = tuple(self.program.placeholders[position].name for position in last)
            outputs.append((Reserved(output.low, output.high, nodes=names), last))
        return outputs

    def _with_successor(self, planned: Planned, estimate: Estimate | None) -> PlacementHint | None:
        """What suits the program that gets what this one saves, too."""
        if estimate is None or estimate.successor is None or (after := estimate.successor[0]()) is None:
            return estimate.hint if estimate is not None else None
        own, after.hint = self.planner.plan_pair(planned, after.planned, estimate.successor[1])
        return own

    def _planned(self, inputs: Sequence[Any], static: Collection[int]) -> Planned:
        runtime = runtime_for(self.program.device)
        if runtime.frozen_addresses:
            return Planned(self.program, self._numbers(inputs), self._input_buffers(inputs, static))
        donated = tuple(self._donated(inputs))
        return Planned(self.program, self._numbers(inputs), {}, False, donated=donated)

    def _donated(self, inputs: Sequence[Any]) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Storages of which all that share them are donated: bytes, and the inputs."""
        sharing: dict[int, list[int]] = defaultdict(list)
        for position, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and has_address(value):
                sharing[value.untyped_storage()._cdata].append(position)
        for positions in sharing.values():
            if self.program.donated.issuperset(positions):
                nbytes = inputs[positions[0]].untyped_storage().nbytes()
                yield nbytes, tuple(self.program.placeholders[p].name for p in positions)

    def _numbers(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        return evaluate_sizes(self.program.graph, dict(zip(self.program.placeholders, inputs, strict=True)))

    def _input_buffers(self, inputs: Sequence[Any], static: Collection[int]) -> dict[str, tuple[torch.device, int]]:
        """Inputs that are copied to static buffers in the arena: device and bytes."""
        found = {}
        for position, (node, value) in enumerate(zip(self.program.placeholders, inputs, strict=True)):
            if position in static or not isinstance(value, torch.Tensor) or not has_address(value):
                continue
            if node in self.whole_storage:
                raise CaptureError(
                    f"{self.whole_storage[node]} counts from the start of an input's storage, of which a device "
                    "graph would have a part",
                )
            found[node.name] = (value.device, reach(value))
        return found
