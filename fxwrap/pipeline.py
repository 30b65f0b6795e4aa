"""The pipeline: the stages that turn a host graph into a program, and memory planning.

::

    compile_host_graph           rewrites
    HostGraphPlanner.partition   aliasing, workspace, dependencies; within a limit, gathers; capturability, cut, cost
                                 model, order, fit, partitions that compile_partition replaces
    HostGraphPlanner.plan_memory

A stage is a function of what earlier stages return. Most results have a type of their own, so that most wrong orders
are type errors. What decides an order or memory is checked beside its call, by code that shares nothing with it
(``passes/verify``). Analysis runs once for a graph. Partitioning runs again when a capture fails, with the failed
operator kept eager, and when a call would take more than ``memory_limit``. Memory planning runs at concrete sizes:
for an estimate before the first recording; for every recording where addresses are frozen, and elsewhere for those
that the estimate does not fit; and, where addresses are frozen, to compare a call with ``memory_limit``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule

from .devices import capture_cost, device_support
from .eager_rules import EagerRule
from .errors import MemoryLimitError
from .graphs.compilation import Compilation
from .graphs.devices.runtime import conditional_nodes_of, freezes_addresses
from .graphs.memory.budget import nearest
from .graphs.memory.planning import Planner
from .graphs.program import Program
from .hooks import PROGRAMS, class_for
from .host_graph.storages import StorageFacts
from .limit import Limit, Repeated
from .options import Options
from .passes.analysis.aliasing import analyse_storages, overlap_groups
from .passes.analysis.dependencies import build_dependency_graph
from .passes.analysis.saved_tensors import saved_tensors
from .passes.memory.bodies import workspace_of
from .passes.memory.fit import fit_memory
from .passes.memory.gathers import gather_again
from .passes.memory.order import order_for_memory
from .passes.memory.planner import WorkInLanes, bytes_of_call, plan_pair, plan_program, unmeasured_calls
from .passes.memory.requirements import Requirements, expected_sizes
from .passes.partition.capturability import DECIDED_ON_HOST, FROZEN_ADDRESS_RULES, judge, main_device
from .passes.partition.cost_model import apply_cost_model
from .passes.partition.cut import NEGLIGIBLE, cut
from .passes.partition.export import CompilePartition, replace_partitions
from .passes.rewrites.body_memory import place_bodies
from .passes.rewrites.shared_views import share_views
from .passes.verify import verify_bodies, verify_lanes, verify_memory, verify_same_results, verify_schedule
from .plan import (
    InputFacts,
    MemoryPlan,
    PlacementHint,
    ProgramPlan,
    Reservations,
    SizedProgram,
)
from .stages import Rewrite, Times, stage
from .torch_private.functions import without_modes

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class CompileRequest:
    """Everything besides the graph that compiling needs.

    Attributes:
        compilation: collects the programs (see ``fxwrap.explain``).
        compile_partition: called with each partition; may return a callable that replaces it.
    """

    options: Options = field(default_factory=Options)
    inputs: InputFacts = field(default_factory=InputFacts)
    compilation: Compilation | None = None
    compile_partition: CompilePartition | None = None


def _place_bodies(gm: GraphModule) -> None:
    place_bodies(gm, alternates=not freezes_addresses(main_device(gm)))
    verify_bodies(gm)


REWRITES = (
    Rewrite("shared views", share_views, lint=False),
    Rewrite("memory of branches and loops", _place_bodies, lint=False),
)


def _workspace(gm: GraphModule, symbols: Mapping[object, int] | None = None) -> Mapping[str, int]:
    """Measure the workspace of library calls; only for the CPU, whose plan counts it in the library call's step.

    Args:
        symbols: the sizes; by default those that the program was compiled for.
    """
    device = main_device(gm)
    if device.type != "cpu" or freezes_addresses(device):
        return {}
    with without_modes():
        return workspace_of(gm, symbols)


def _check_schedule(plan: ProgramPlan) -> None:
    verify_schedule(plan.graph, plan.schedule, plan.device.type if plan.inputs.apart else "")


def _check_memory(memory: MemoryPlan, sized: SizedProgram) -> None:
    plan = sized.plan
    replaced = [partition.nodes for partition in plan.partitions if partition.index in plan.compiled]
    donated = {plan.placeholders[position].name for position in plan.inputs.donated}
    workspace = {node: own.workspace_bytes for node, own in sized.operators.items()}
    verify_memory(plan.graph, plan.schedule, plan.facts, memory, sized.symbol_values, replaced, donated, workspace)
    verify_lanes(plan.graph, plan.schedule, plan.facts, memory, plan.device.type if plan.inputs.apart else "")


# -- running stages -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostGraphPlanner:
    """Runs the stages for one host graph, which is rewritten already.

    Implements ``graphs.memory.planning.Planner``.

    Attributes:
        compile_partition: see ``CompileRequest``.
        stored_workspace: workspace of library calls in bytes by node, from a stored plan; None if it has to be
            measured.
    """

    graph: GraphModule
    options: Options
    compile_partition: CompilePartition | None = None
    stored_workspace: Mapping[str, int] | None = None
    took: Times = field(default_factory=dict)

    @functools.cached_property
    def _analysis(self) -> tuple[StorageFacts, Mapping[str, int], nx.DiGraph]:
        graph, workspace = self.graph, self.stored_workspace
        with stage("aliasing", self.took):
            facts = analyse_storages(graph)
        if workspace is None:
            with stage("workspace", self.took):
                workspace = _workspace(graph)
        with stage("dependencies", self.took):
            apart_on = main_device(graph).type if self.options.inputs_apart else ""
            dependencies = build_dependency_graph(graph, facts, apart_on)
        return facts, workspace, dependencies

    def partition(
        self, inputs: InputFacts, capture_errors: Mapping[str, str] = MappingProxyType({}), limit: Limit | None = None
    ) -> ProgramPlan:
        plan = self._ordered(inputs, capture_errors) if limit is None else self._within(limit, inputs, capture_errors)
        with stage("partitions compiled elsewhere", self.took):
            return replace_partitions(plan, self.compile_partition)

    def _ordered(
        self,
        inputs: InputFacts,
        capture_errors: Mapping[str, str],
        repeated: tuple[Repeated, ...] = (),
        may_grow: bool = True,
    ) -> ProgramPlan:
        """
        Args:
            may_grow: whether fewer partitions may take more memory.
        """
        graph, options, took = self.graph, self.options, self.took
        facts, workspace, dependencies = self._analysis
        device, sizes = main_device(graph), expected_sizes(graph, facts)
        inner = {index: sizes[index] for index in facts.inner() if index in sizes}

        with stage("capturability", took):
            has_nodes = conditional_nodes_of(device) is not None
            verdicts = judge(graph, self._eager_ops(device, has_nodes), capture_errors, has_nodes)
        with stage("cut", took):
            budget = (options.peak_budget, NEGLIGIBLE) if may_grow else (1.0, 0)
            partitions = cut(dependencies, verdicts, device, facts, inner, *budget)
            plan = ProgramPlan(graph, facts, verdicts, partitions, device, inputs, workspace, repeated=repeated)
        with stage("cost model", took):
            cost = capture_cost(device.type)
            plan = apply_cost_model(plan, cost, sizes, options.capture, options.min_launches)
            _check_schedule(plan)
        if options.moves_work:
            with stage("order", took):
                plan = order_for_memory(plan, dependencies, sizes)
                _check_schedule(plan)
        return plan

    def _within(self, limit: Limit, inputs: InputFacts, capture_errors: Mapping[str, str]) -> ProgramPlan:
        planner, repeated = self._gathering_again
        plan = planner._ordered(inputs, capture_errors, repeated)
        try:
            return planner._fit(plan, limit)
        except MemoryLimitError as error:
            if plan.cut.peak <= plan.cut.program_order_peak:
                raise
            least = planner._ordered(inputs, capture_errors, repeated, may_grow=False)
            try:
                return planner._fit(least, limit)
            except MemoryLimitError as other:
                raise min(error, other, key=lambda one: one.least) from None

    @functools.cached_property
    def _gathering_again(self) -> tuple[HostGraphPlanner, tuple[Repeated, ...]]:
        """The planner of the graph within any limit, and the gathers that are repeated in it."""
        (facts, workspace, _), graph = self._analysis, self.graph
        apart_on = main_device(graph).type if self.options.inputs_apart else ""
        with stage("gathers", self.took):
            groups = overlap_groups(graph, facts, apart_on)
            gathered, repeated = gather_again(graph, facts, expected_sizes(graph, facts), groups)
            if gathered is graph:
                return self, ()
            verify_same_results(graph, gathered, apart_on)
        return dataclasses.replace(self, graph=gathered, stored_workspace=workspace), repeated

    def _eager_ops(self, device: torch.device, has_nodes: bool) -> Sequence[str | EagerRule]:
        decided = () if has_nodes else (DECIDED_ON_HOST,)
        address_rules = (*FROZEN_ADDRESS_RULES, *decided) if freezes_addresses(device) else ()
        return *self.options.eager_ops, *device_support(device.type).eager_ops, *address_rules

    def _fit(self, plan: ProgramPlan, limit: Limit) -> ProgramPlan:
        with stage("fit", self.took):
            workspace = {**self.workspace(plan.graph, limit.symbols), **limit.workspace}
            sizes = expected_sizes(plan.graph, plan.facts, limit.symbols)
            fitting = fit_memory(plan, self._analysis[2], sizes, dataclasses.replace(limit, workspace=workspace))
            verify_same_results(plan.graph, fitting.graph, plan.device.type if plan.inputs.apart else "")
            _check_schedule(fitting)
        return fitting

    def plan_memory(
        self,
        sized: SizedProgram,
        reserved: Reservations = MappingProxyType({}),
        hint: PlacementHint | None = None,
        previous: MemoryPlan | None = None,
    ) -> MemoryPlan:
        with stage("memory", self.took):
            memory = plan_program(sized, reserved, hint, previous, self._in_lanes(sized))
            _check_memory(memory, sized)
        return memory

    def _in_lanes(self, sized: SizedProgram) -> WorkInLanes | None:
        """What decides which work runs at the same time; None where nothing does."""
        if sized.lanes < 2 or sized.frozen or sized.plan.graph is not self.graph:
            return None
        return WorkInLanes(sized.lanes, lambda: self._analysis[2], (self.options.peak_budget, NEGLIGIBLE))

    def bytes_of_call(self, sized: SizedProgram, in_pool: int) -> int:
        return bytes_of_call(sized, self.plan_memory(sized) if sized.frozen else None, in_pool)

    def unmeasured_calls(self, sized: SizedProgram) -> Collection[str]:
        return unmeasured_calls(sized)

    def workspace(self, gm: GraphModule, symbols: Mapping[object, int]) -> Mapping[str, int]:
        return _workspace(gm, symbols) if symbols else {}

    def plan_pair(
        self, first: SizedProgram, second: SizedProgram, saved_as: Mapping[int, Sequence[str]]
    ) -> tuple[PlacementHint, PlacementHint]:
        return plan_pair(first, second, saved_as)

    def devices(self, sized: SizedProgram) -> Collection[torch.device]:
        return Requirements.of(sized).planned.keys()

    def for_graph(self, gm: GraphModule) -> HostGraphPlanner:
        return dataclasses.replace(self, graph=gm, stored_workspace=None, took={})


def compile_host_graph(gm: GraphModule, request: CompileRequest, rewrites: Iterable[Rewrite] = ()) -> Program:
    """Run the stages on a host graph and make its program. Memory is planned later, for concrete sizes.

    Args:
        rewrites: the first stages; ``FxwrapCodegen`` has ``REWRITES``, and passes of the user's.

    Raises:
        PipelineError: a user's pass leaves an invalid graph.
        PlanError: the verifier refused the schedule.
    """
    took: Times = {}
    for rewrite in rewrites:
        gm = rewrite.run(gm, took)
    planner = HostGraphPlanner(gm, request.options, request.compile_partition, took=took)
    return _program(_partitioned(planner, request.inputs, request.options), planner, request)


def restore_program(plan: ProgramPlan, request: CompileRequest) -> Program:
    """Make a program from a stored plan, whose graph is already rewritten.

    ``request.inputs`` and ``request.compile_partition`` are not used: the plan has its own inputs.

    Raises:
        PlanError: the verifier refused the schedule.
    """
    _check_schedule(plan)
    stored = plan.workspace
    planner = HostGraphPlanner(plan.graph, request.options, stored_workspace=stored)
    return _program(plan, planner, request)


def compile_variant(
    program: Program, gm: GraphModule, inputs: InputFacts, compilation: Compilation | None
) -> Program:
    """Compile ``gm``, a modified copy of the program's rewritten graph, through the same stages."""
    planner = program.planner.for_graph(gm)
    request = CompileRequest(program.options, compilation=compilation)
    return _program(_partitioned(planner, inputs, program.options), planner, request)


def with_static_inputs(program: Program, positions: Iterable[int]) -> Program:
    """Another program with the same plan, for which just these inputs are static. It is in no compilation."""
    inputs = dataclasses.replace(program.plan.inputs, static=frozenset(positions))
    plan = dataclasses.replace(program.plan, inputs=inputs)
    return _program(plan, program.planner, CompileRequest(program.options))


def _partitioned(planner: Planner, inputs: InputFacts, options: Options) -> ProgramPlan:
    """The plan within ``memory_limit``; if no plan keeps it, the one with the lowest peak: its first call raises."""
    limit = Limit(options.memory_limit) if options.memory_limit else None
    return nearest(lambda within: planner.partition(inputs, limit=within), limit)


def _program(plan: ProgramPlan, planner: Planner, request: CompileRequest) -> Program:
    """Make a program, and add it to its compilation. A backward is linked to its forward."""
    program_class: type[Program] = class_for(request.options, PROGRAMS, Program)
    program = program_class(plan, planner, request.options)
    if (compilation := request.compilation) is not None:
        forwards = [earlier for earlier in compilation.programs if earlier.plan.phase == "forward"]
        if plan.phase == "backward" and forwards:
            program.link_forward(forwards[-1], saved_tensors(forwards[-1].plan, plan))
        compilation.programs.append(program)
    return program
