"""Memory for recordings: estimates while a program warms up, and arenas that are large enough when it is recorded.

Why there are estimates: all recordings of a device lie in one arena, one over the other, since no two of them run at
one time on one stream. Graphs have its addresses compiled in, so it cannot grow: a larger arena takes its place, and
every recording in it ends. Programs warm up first and are recorded later, forward and backward in turn. As each tells
at its warm-up what it will need, the first recording makes an arena that is large enough for all.

Why the plan is made twice: an estimate knows sizes. The plan of a recording also knows the outputs of earlier calls
that are alive in the arena, around which it has to lie, and which of its inputs it may overwrite.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from ...errors import CaptureError
from ...host_graph.sizes import evaluate_sizes, symbols_at
from ...host_graph.tensors import has_address, reach, tensors_in
from ...packing import Reserved
from ...plan import MemoryPlan, PlacementHint, ProgramPlan, SizedProgram
from ..devices.runtime import current_stream, runtime_for
from .arenas import Arena
from .budget import Budget, PlannedCall
from .locks import LockOwner
from .operator_memory import known_memory
from .planning import Planner
from .shared_state import SHARED

# Of a call that does not say how many: with more, the threads take longer to meet, and few programs are as wide.
_MOST_LANES = 4


@dataclass(eq=False)
class Estimate:
    """A memory plan for one set of sizes that is made before a recording, while the program runs eagerly.

    Reports make a ``Prediction`` (``passes/memory/planner.py``) of it.

    Attributes:
        sized: the program at these sizes.
        memory: its first plan.
        static_input_bytes: bytes of inputs whose addresses stay.
        follows_forward: whether it is of a backward program whose forward is known.
        successor: the estimate of the backward program, and the inputs of that by storage of this program.
        hint: offsets from a joint plan of this program and its forward.
    """

    sized: SizedProgram
    memory: MemoryPlan
    static_input_bytes: int = 0
    follows_forward: bool = False
    successor: tuple[weakref.ref[Estimate], Mapping[int, Sequence[str]]] | None = None
    hint: PlacementHint | None = None

    def is_for(self, sized: SizedProgram) -> bool:
        """Whether a recording of ``sized``, at the estimate's sizes and without frozen addresses, can use it."""
        own = self.sized
        same = (own.donated, own.workspace, own.lanes) == (sized.donated, sized.workspace, sized.lanes)
        return own.plan is sized.plan and same


@dataclass(frozen=True)
class Saved:
    """The tensors that a forward program saves for its backward.

    Attributes:
        estimate: the estimate of the forward program.
        inputs: inputs of the backward program, by storage of the forward program.
    """

    estimate: Estimate | None
    inputs: Mapping[int, Sequence[str]]


@dataclass(frozen=True)
class RecordingMemory:
    """The memory of one recording.

    Attributes:
        arenas: the arena on each device; the call that records holds their locks. Empty if graphs do not freeze
            addresses (CPU).
        reused_inputs: positions of donated inputs that are live outputs in an arena; the plan may reuse their bytes
            after their last use.
    """

    sized: SizedProgram
    memory: MemoryPlan
    arenas: Mapping[torch.device, Arena] = field(default_factory=dict)
    reused_inputs: tuple[int, ...] = ()


@dataclass
class MemoryProvider:
    """Plans the memory of one program's recordings, and acquires their arenas.

    Attributes:
        whole_storage: inputs of which bytes outside of the tensor may be used, with the operator that does so.
        max_memory: the option, in bytes.
        budget: the most bytes that a call may take. If there is such a limit, no memory is kept for later calls, and
            arenas are no larger than needed.
        arena_class: the class of their arenas.
        lanes: the most work that a call does at the same time; 0 for as much as torch has threads, and at most four.
    """

    planner: Planner
    program: ProgramPlan
    whole_storage: Mapping[Node, str]
    max_memory: int
    budget: Budget
    arena_class: type[Arena] = Arena
    lanes: int = 0

    @property
    def limited(self) -> bool:
        """Whether a call may take no more than a limit."""
        return bool(self.budget.nbytes)

    def planned_call(
        self, inputs: Sequence[Any], static: Collection[int] | None, saved: Collection[int] = ()
    ) -> PlannedCall:
        """What memory is planned for.

        Args:
            static: positions of inputs whose addresses stay; None for all, as in an eager run.
            saved: positions of those that a backward's forward has saved; of these a limit counts the bytes.
        """
        if runtime_for(self.program.device).frozen_addresses:
            stay = range(len(inputs)) if static is None else static
            buffers = self._input_buffers(inputs, stay)
            there = (p for p in saved if self.program.placeholders[p].name not in buffers)
            return PlannedCall(tuple(inputs), buffers, True, saved=self._shared(inputs, _by_storage(inputs, there)))
        of_forward = self._shared(inputs, _by_storage(inputs, saved))
        return PlannedCall(tuple(inputs), {}, False, self._donated(inputs), of_forward)

    def symbols(self, inputs: Sequence[Any]) -> Mapping[Any, int]:
        """The sizes of a call, by symbol."""
        return symbols_at(self._numbers(inputs))

    def estimate(self, inputs: Sequence[Any], previous: MemoryPlan | None, saved: Saved | None) -> Estimate:
        """Plan ahead during a call that runs eagerly: the next one may be recorded.

        Args:
            previous: an earlier plan, for other sizes.
            saved: what a backward program gets from its forward; None for any other program.

        Raises:
            PlanError: the program cannot be recorded at all.
        """
        try:
            sized = self._sized(inputs, self.program.inputs.static)
        except CaptureError:
            sized = SizedProgram(self.program, self._numbers(inputs), {})  # a report wants a plan all the same
        memory = self.planner.plan_memory(sized, previous=previous)
        static_input_bytes = sum(map(reach, tensors_in([inputs[p] for p in self.program.inputs.static])))
        estimate = Estimate(sized, memory, static_input_bytes, follows_forward=saved is not None)
        if saved is not None and saved.estimate is not None:
            saved.estimate.successor = weakref.ref(estimate), saved.inputs
            SHARED.arenas.withdraw(saved.estimate)  # the need of both together is known when the first is recorded
        self._announce(estimate)
        return estimate

    def _announce(self, estimate: Estimate) -> None:
        if self.program.phase != "backward":
            for device, arena in estimate.memory.arenas.items():
                SHARED.arenas.announce(device, estimate, arena.size)

    def estimate_again(self, estimate: Estimate) -> None:
        """Plan ahead once more, with other partitions, and with what operators were found to allocate since."""
        sized = estimate.sized
        operators = known_memory(self.program, symbols_at(sized.symbol_values))
        if sized.frozen and (operators != sized.operators or sized.plan is not self.program):
            estimate.sized = replace(sized, plan=self.program, operators=operators)
            estimate.memory = self.planner.plan_memory(estimate.sized)
            self._announce(estimate)

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
        """Plan a recording, and acquire and resize its arenas.

        Args:
            static: positions of inputs whose addresses stay.
            estimate: the plan that was made ahead.
            previous: the newest plan, whose order of offsets is tried first.
            owner: the call, which gets the locks of the arenas.
            locked: acquired arenas are appended to this list; the caller releases them.
            exclude: returns whether an arena must not be used.

        Raises:
            CaptureError: an input cannot have a static buffer.
            MemoryLimitError: more than ``max_memory`` would be kept, or the device is out of memory.
            PlanError: the verifier refused the plan.
        """
        sized = self._sized(inputs, static)
        if not sized.frozen:
            # Such a plan does not depend on addresses: the one made ahead is still right.
            memory = (
                estimate.memory
                if estimate is not None and estimate.is_for(sized)
                else self.planner.plan_memory(sized)
            )
            kept = self.max_memory if not self.limited else 0
            return RecordingMemory(sized, memory.keeping(kept) if kept or self.limited else memory)
        hint = self._with_successor(sized, estimate)
        donated = self._donated_positions(inputs, static)
        stream = current_stream(self.program.device)
        # The program's own device always has an arena: operators allocate in its pool during a capture.
        arenas = {
            device: SHARED.arenas.acquire(device, stream, owner, locked, exclude, self.arena_class)
            for device in dict.fromkeys([*self.planner.devices(sized), self.program.device])
        }
        while True:
            live = {device: self._live_outputs(arena, donated) for device, arena in arenas.items()}
            reserved = {device: [interval for interval, _ in outputs] for device, outputs in live.items()}
            memory = self.planner.plan_memory(sized, reserved, hint, previous)
            sizes = {arenas[device]: region.size for device, region in memory.arenas.items()}
            for arena, nbytes in sizes.items():
                SHARED.arenas.lower(arena.device, estimate, nbytes)
            # An arena that moved has no live outputs: a plan that avoids some is larger than needed. Plan again.
            fit = functools.partial(SHARED.arenas.fit, limit=self.max_memory, exactly=self.limited)
            moved = any([fit(arena, nbytes) for arena, nbytes in sizes.items()])
            if not moved or not any(region.reserved for region in memory.regions):
                reused = {position for outputs in live.values() for _, last in outputs for position in last}
                return RecordingMemory(sized, memory, arenas, tuple(sorted(reused)))

    def _donated_positions(self, inputs: Sequence[Any], static: Collection[int]) -> Mapping[int, Sequence[int]]:
        """Positions of donated inputs that are not copied, by the handle of their storage."""
        return _by_storage(inputs, self.program.inputs.donated.intersection(static))

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

    def _with_successor(self, sized: SizedProgram, estimate: Estimate | None) -> PlacementHint | None:
        """The hint from a joint plan with the backward program, whose estimate gets its hint as well."""
        if estimate is None or estimate.successor is None or (backward := estimate.successor[0]()) is None:
            return estimate.hint if estimate is not None else None
        hint, backward.hint = self.planner.plan_pair(sized, backward.sized, estimate.successor[1])
        return hint

    def _sized(self, inputs: Sequence[Any], static: Collection[int]) -> SizedProgram:
        sized = self.budget.sized(self.program, self.planned_call(inputs, static))
        if sized.frozen or self.limited:  # of what is alive in lanes a bound is known, which a limit need not keep
            return sized
        return replace(sized, lanes=self.lanes or min(torch.get_num_threads(), _MOST_LANES))

    def _donated(self, inputs: Sequence[Any]) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Storages whose sharing inputs are all donated: the bytes of each, and the inputs."""
        sharing = _by_storage(inputs, range(len(inputs)))
        return self._shared(
            inputs, {h: ps for h, ps in sharing.items() if self.program.inputs.donated.issuperset(ps)}
        )

    def _shared(
        self, inputs: Sequence[Any], sharing: Mapping[int, Sequence[int]]
    ) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """The bytes of each storage, and the inputs that share it."""
        names = [node.name for node in self.program.placeholders]
        return tuple(
            (inputs[positions[0]].untyped_storage().nbytes(), tuple(names[p] for p in positions))
            for positions in sharing.values()
        )

    def _numbers(self, inputs: Sequence[Any]) -> dict[Node, Any]:
        return evaluate_sizes(self.program.graph, dict(zip(self.program.placeholders, inputs, strict=True)))

    def _input_buffers(self, inputs: Sequence[Any], static: Collection[int]) -> dict[str, tuple[torch.device, int]]:
        """Device and bytes of the static input buffer of each input that is copied."""
        buffers = {}
        for position, (node, value) in enumerate(zip(self.program.placeholders, inputs, strict=True)):
            if position in static or not isinstance(value, torch.Tensor) or not has_address(value):
                continue
            if node in self.whole_storage:
                raise CaptureError(
                    f"{self.whole_storage[node]} uses an input's storage outside of the input, and a device graph "
                    "would have the input alone",
                )
            buffers[node.name] = (value.device, reach(value))
        return buffers


def _by_storage(inputs: Sequence[Any], positions: Iterable[int]) -> dict[int, list[int]]:
    """The positions of inputs that have memory, in order, by the handle of their storage."""
    sharing: dict[int, list[int]] = defaultdict(list)
    for position in sorted(positions):
        value = inputs[position]
        if isinstance(value, torch.Tensor) and has_address(value):
            sharing[value.untyped_storage()._cdata].append(position)
    return sharing
