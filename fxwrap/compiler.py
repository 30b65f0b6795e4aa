"""The straight line: from a host graph to the program that runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .compilation import Owner
from .devices import capture_cost, device_support
from .graphs.devices.runtime import freezes_addresses, places_results
from .graphs.memory_provider import Planners
from .graphs.program import Program
from .graphs.torch_functions import TorchFunctions
from .options import Options
from .passes.analysis.aliasing import analyse_storages
from .passes.analysis.dependencies import build_dependency_graph
from .passes.analysis.sizes import evaluate_sizes
from .passes.memory.operator_results import placeable_results
from .passes.memory.planner import plan_pair, plan_program, predict_memory
from .passes.memory.requirements import hinted_sizes, inner_storages
from .passes.memory.workspace import measure_workspace
from .passes.partition.capturability import FIXED_ADDRESSES, captured, judge, main_device
from .passes.partition.cost_model import apply_cost_model
from .passes.partition.cut import cut
from .passes.partition.export import partition_graph
from .passes.verify import verify_memory, verify_schedule
from .plan import (
    CompiledPartition,
    MemoryPlan,
    NodeVerdict,
    PartitionGraph,
    PlacementHint,
    Planned,
    ProgramPlan,
    StorageFacts,
    Taken,
)


@dataclass(frozen=True)
class CompileRequest:
    """What is known about a host graph beside the graph itself.

    Attributes:
        static_inputs: positions of inputs whose address AOTAutograd expects to stay.
        donated: positions of inputs that AOTAutograd lets a backward graph overwrite.
        saved: positions of outputs that are for backward alone.
        phase: "inference", "forward" or "backward".
        owner: collects the programs (see ``fxwrap.explain``).
        compile_partition: may return what runs in a partition's place.
    """

    torch: TorchFunctions
    options: Options = field(default_factory=Options)
    static_inputs: tuple[int, ...] = ()
    donated: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    phase: str = "inference"
    owner: Owner | None = None
    compile_partition: Callable[[PartitionGraph], Callable[..., Any] | None] | None = None


def compile_host_graph(gm: GraphModule, request: CompileRequest) -> Program:
    """Analyse, cut and check a host graph; memory is planned, and checked, when a shape is recorded.

    An operator that turns out not to be capturable has the program cut anew around it.

    Raises:
        PlanError: the verifier refused the schedule.
    """
    device, options, facts = main_device(gm), request.options, analyse_storages(gm)
    fixed = FIXED_ADDRESSES if freezes_addresses(device) else ()
    eager_ops = (*options.eager_ops, *device_support(device.type).eager_ops, *fixed)
    sizes, dependencies = hinted_sizes(facts), build_dependency_graph(gm, facts)
    inside = {index: sizes[index] for index in inner_storages(gm, facts) if index in sizes}

    def cut_program(refused: Mapping[str, str]) -> ProgramPlan:
        verdicts = judge(gm, eager_ops, refused)
        placed = _placed(gm, facts, verdicts, device)
        found = cut(dependencies, verdicts, device, facts, inside, options.peak_budget)
        static, donated, saved = frozenset(request.static_inputs), request.donated, request.saved
        plan = ProgramPlan(gm, facts, verdicts, found, device, static, request.phase, donated, saved)
        plan = apply_cost_model(plan, capture_cost(device.type), sizes, options.capture, options.min_launches, placed)
        verify_schedule(gm, plan.schedule)
        return dataclasses.replace(plan, compiled=_compiled_elsewhere(plan, request))

    def plan_recording(
        planned: Planned,
        taken: Callable[[torch.device], Sequence[Taken]],
        hint: PlacementHint | None,
        like: MemoryPlan | None,
    ) -> MemoryPlan:
        memory = plan_program(planned, taken, hint, like)
        program = planned.program
        verify_memory(program.graph, program.schedule, program.facts, memory, planned.numbers)
        return memory

    program = Program(
        cut_program,
        request.options,
        request.torch,
        Planners(plan_recording, plan_pair, predict_memory, measure_workspace),
        evaluate_sizes,
    )
    if request.owner is not None:
        request.owner.programs.append(program)
    return program


def _placed(
    gm: GraphModule, facts: StorageFacts, verdicts: Mapping[Node, NodeVerdict], device: torch.device
) -> Mapping[int, int]:
    """Results that the device's allocator is told where to put: bytes by storage."""
    return placeable_results(facts, gm, device, captured(verdicts)) if places_results(device) else {}


def _compiled_elsewhere(plan: ProgramPlan, request: CompileRequest) -> dict[int, CompiledPartition]:
    """What the request's hook makes of each partition, where it makes something."""
    compile_partition = request.compile_partition
    if compile_partition is None:
        return {}
    found: dict[int, CompiledPartition] = {}
    for partition in plan.partitions:
        graph = partition_graph(plan, partition)
        call = compile_partition(graph)
        if call is not None:
            found[partition.index] = CompiledPartition(call, graph.signature)
    return found
