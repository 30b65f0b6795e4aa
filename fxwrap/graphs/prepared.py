"""What the parts of a program share: what never changes (``ProgramContext``), and its present plan (``Prepared``)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from ..hooks import ARENAS, class_for
from ..host_graph.nodes import (
    Kind,
    aligned_inputs,
    counts_from_storage,
    is_symbolic_value,
    kind_of,
    operator_name,
    output_values,
)
from ..host_graph.sizes import number_of
from ..host_graph.storages import Origin
from ..options import Options
from ..plan import ProgramPlan
from .devices.runtime import capture_check, freezes_addresses
from .eager import EagerRuns, calls_that_retain_nothing, eager_function
from .memory.arenas import Arena
from .memory.budget import Budget
from .memory.memory_provider import MemoryProvider
from .memory.planning import Planner
from .policy.counters import Counters
from .policy.eager_memory import GiveBack
from .policy.specializations import Specializations
from .replay.overlaps import MutatedInputs
from .replay.ranges import partition_range

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DynamicSizes:
    """The sizes that vary between calls, and where a call's inputs have them.

    Attributes:
        places: (input position, "size", "stride" or None for a number input, dimension).
    """

    places: Sequence[tuple[int, str | None, int]]

    @classmethod
    def of(cls, placeholders: Sequence[Node]) -> DynamicSizes:
        places: list[tuple[int, str | None, int]] = []
        for position, node in enumerate(placeholders):
            val = node.meta.get("val")
            if kind_of(node) is Kind.PLACEHOLDER and isinstance(val, torch.Tensor):
                for dim in range(val.dim()):
                    if not isinstance(val.size(dim), int):
                        places.append((position, "size", dim))
                    if not isinstance(val.stride(dim), int):
                        places.append((position, "stride", dim))
            elif is_symbolic_value(val):
                places.append((position, None, 0))
        return cls(places)

    def key(self, inputs: Sequence[Any]) -> Any:
        """The key of a call's specialization: sizes and strides that vary, and number inputs; None if none vary."""
        if not self.places:
            return None
        return tuple(
            number_of(inputs[position])
            if how is None
            else (inputs[position].size(dim) if how == "size" else inputs[position].stride(dim))
            for position, how, dim in self.places
        )

    def at(self, inputs: Sequence[Any]) -> list[tuple[tuple[int, str | None, int], Any]]:
        """The places, each with its value in a call."""
        return list(zip(self.places, self.key(inputs) or (), strict=True))

    def by_symbol(self, placeholders: Sequence[Node], inputs: Sequence[Any]) -> Mapping[str, Any]:
        """The sizes of a call, by symbolic expression."""
        fakes = [node.meta.get("val") for node in placeholders]
        return {
            str(fakes[position] if how is None else getattr(fakes[position], how)(dim)): number
            for (position, how, dim), number in self.at(inputs)
        }


@dataclass(frozen=True, eq=False)
class ProgramContext:
    """What belongs to one program for as long as it lives.

    Attributes:
        name: the program's name in logs, profiles and reports: its number in this process, and its phase.
        planner: plans its memory, and partitions its graph again.
        mutated_inputs: what must not overlap in a call; None if it may.
    """

    name: str
    planner: Planner
    options: Options
    sizes: DynamicSizes
    mutated_inputs: MutatedInputs | None
    specializations: Specializations
    counters: Counters = field(default_factory=Counters)

    @classmethod
    def of(cls, name: str, plan: ProgramPlan, planner: Planner, options: Options) -> ProgramContext:
        matters = freezes_addresses(plan.device) or options.inputs_apart
        mutated = MutatedInputs.of(plan) if matters else None
        sizes, specializations = DynamicSizes.of(plan.placeholders), Specializations(options.max_recordings)
        return cls(name, planner, options, sizes, mutated, specializations)

    def count(self, kind: str, reason: str) -> None:
        """Count an eager run's reason, or an event. Each thread logs the first of each."""
        if self.counters.count(kind, reason) == 1:
            log.info("%s: %s%s", self.name, "runs eagerly: " if kind == "eager" else "", reason)


@dataclass(frozen=True)
class Prepared:
    """A program's plan with everything derived from it. It is made again when the program is partitioned again."""

    plan: ProgramPlan
    eager: EagerRuns
    give_back: GiveBack | None  # None if recordings keep no memory (CPU)
    outputs: Sequence[tuple[int, int]]  # (position, storage) of outputs that the program or an operator allocates
    copied: frozenset[int]  # storages of outputs copied because of copy_outputs; saved ones are not
    overwritten: Sequence[int]  # positions of donated inputs whose memory may be written
    aligned: frozenset[int]  # positions of inputs that kernels expect to be aligned
    provider: MemoryProvider

    @classmethod
    def of(cls, plan: ProgramPlan, context: ProgramContext, budget: Budget) -> Prepared:
        """Everything derived from a plan. ``budget``: see ``MemoryProvider``."""
        name, options = context.name, context.options
        log.info("%s: %d partition(s) on %s", name, len(plan.partitions), plan.device)
        for partition in plan.partitions:
            counts = partition.verdict.value, partition.launches, partition.externs
            reason = partition.reason or partition.benefit
            log.info(
                "%s: %s, %d launches, %d library calls; %s", partition_range(name, partition.index), *counts, reason
            )
        written, frozen = plan.facts.all_written(), freezes_addresses(plan.device)
        outputs = _tensor_outputs(plan)
        give_back = GiveBack(plan.device, context.counters, capture_check(plan.device)) if frozen else None
        calls = calls_that_retain_nothing(plan) if budget.nbytes else {}
        return cls(
            plan,
            EagerRuns(name, eager_function(plan, name, give_back, calls), len(plan.placeholders)),
            give_back,
            outputs,
            frozenset(index for p, index in outputs if options.copy_outputs and p not in plan.inputs.saved),
            [p for p in sorted(plan.inputs.donated) if frozen or written & plan.facts.of(plan.placeholders[p])],
            aligned_inputs(plan.graph),
            MemoryProvider(
                context.planner,
                plan,
                _inputs_used_outside(plan),
                options.max_memory,
                budget,
                class_for(options, ARENAS, Arena),
                options.lanes,
            ),
        )

    def weak_outputs(self, outputs: Any) -> list[tuple[int, StorageWeakRef]]:
        """Weak references to the storages of a call's outputs, each with its storage index."""
        values = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        references = []
        for position, index in self.outputs:
            value = values[position]
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                references.append((index, StorageWeakRef(value.untyped_storage())))
        return references


def _tensor_outputs(plan: ProgramPlan) -> list[tuple[int, int]]:
    """(position, storage index) of outputs that the program or an operator allocates."""
    outputs = []
    for position, value in enumerate(output_values(plan.graph)):
        if isinstance(value, Node):
            for index in plan.facts.of(value):
                if plan.facts.storages[index].origin in (Origin.ALLOCATION, Origin.EXTERN):
                    outputs.append((position, index))
    return outputs


def _inputs_used_outside(plan: ProgramPlan) -> dict[Node, str]:
    """Inputs whose storage may be used outside of the tensor, each with the operator.

    A kernel does so (``InputFacts.used_outside``), or an operator that counts from the start of the storage.
    """
    facts = plan.facts
    operators = {plan.placeholders[position]: operator for position, operator in plan.inputs.used_outside.items()}
    for node in plan.graph.graph.nodes:
        if counts_from_storage(node):
            for index in facts.of(node.all_input_nodes[0]):
                if facts.storages[index].origin is Origin.INPUT:
                    operators[plan.maker(index)] = operator_name(node)
    return operators
