"""The pipeline: the stages that turn a host graph into a program, and memory planning.

::

    GraphModule --rewrites--> Emitted --aliasing, workspace, dependencies--> Analysed
    Analysed --capturability--> Judged --cut--> Divided --cost_model, compiled_elsewhere--> ProgramPlan
    ProgramPlan at concrete sizes --memory--> MemoryPlan

After the rewrites, each stage takes a frozen dataclass made of what earlier stages return, so that a wrong order is a
type error. ``Stages`` is the list. Analysis runs once for a graph. Partitioning runs again when the capture of an
operator fails, with that operator eager. Memory planning runs at concrete sizes, for each recording.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch.fx import GraphModule

from .compilation import Compilation
from .devices import capture_cost, device_support
from .errors import PipelineError
from .graphs.devices.runtime import freezes_addresses
from .graphs.program import Program
from .graphs.torch_functions import TorchFunctions
from .options import Options
from .passes.analysis.aliasing import analyse_storages
from .passes.analysis.dependencies import build_dependency_graph
from .passes.analysis.saved_tensors import saved_tensors
from .passes.memory.planner import plan_pair, plan_program
from .passes.memory.requirements import Requirements, hinted_sizes, inner_storages
from .passes.memory.workspace import measure_workspace
from .passes.partition.capturability import FIXED_ADDRESSES, judge, main_device
from .passes.partition.cost_model import apply_cost_model
from .passes.partition.cut import cut
from .passes.partition.export import partition_graph
from .passes.rewrites.shared_views import share_views
from .passes.rewrites.view_copies import view_needless_copies
from .passes.verify import verify_memory, verify_schedule
from .plan import (
    Cut,
    MemoryPlan,
    NodeVerdict,
    PartitionGraph,
    PlacementHint,
    ProgramPlan,
    Reservations,
    Signature,
    SizedProgram,
    StorageFacts,
)

if TYPE_CHECKING:
    import networkx as nx

log = logging.getLogger(__name__)


class PartitionFunction(Protocol):
    """The replacement of a partition: it takes the partition's inputs and returns its outputs, in order."""

    def __call__(self, *inputs: object) -> Sequence[object]: ...


@dataclass(frozen=True)
class CompileRequest:
    """Everything besides the graph that compiling needs.

    Attributes:
        functions: private functions of torch that the running program needs.
        static_inputs, donated, write_only, used_outside, saved, inputs, phase: facts of inputs and outputs; see
            ``ProgramPlan``.
        compilation: collects the programs (see ``fxwrap.explain``).
        compile_partition: called with each partition; may return a callable that replaces it.
    """

    functions: TorchFunctions
    options: Options = field(default_factory=Options)
    static_inputs: tuple[int, ...] = ()
    donated: frozenset[int] = frozenset()
    write_only: frozenset[int] = frozenset()
    used_outside: Mapping[int, str] = field(default_factory=dict)
    saved: Mapping[int, str] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    phase: str = "inference"
    compilation: Compilation | None = None
    compile_partition: Callable[[PartitionGraph], PartitionFunction | None] | None = None


# -- inputs and results of stages -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Emitted:
    """A host graph after the rewrites.

    Attributes:
        workspace: workspace of library calls in bytes by node, from a stored plan; None if it has to be measured.
    """

    graph: GraphModule
    request: CompileRequest
    workspace: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Aliased(Emitted):
    """A host graph with its storages.

    Attributes:
        device: where captured partitions run.
        facts: its alias analysis.
        sizes: bytes of storages at the sizes that the program was compiled for, by storage index.
    """

    device: torch.device = field(kw_only=True)
    facts: StorageFacts = field(kw_only=True)
    sizes: Mapping[int, int] = field(kw_only=True)


@dataclass(frozen=True)
class Analysed:
    """A host graph with all results of analysis.

    Attributes:
        aliased: the graph with the storages that alias analysis has found.
        workspace: measured workspace of library calls in bytes, by node.
        dependencies: the dependency graph of its work nodes.
    """

    aliased: Aliased
    workspace: Mapping[str, int]
    dependencies: nx.DiGraph


@dataclass(frozen=True)
class Uncut:
    """A graph to be partitioned.

    Attributes:
        refused: the error of each operator whose capture failed, by operator.
    """

    analysed: Analysed
    refused: Mapping[str, str]


@dataclass(frozen=True)
class Judged:
    """A graph with a verdict for every node."""

    analysed: Analysed
    verdicts: Mapping[str, NodeVerdict]


@dataclass(frozen=True)
class Divided:
    """A graph that is cut into partitions."""

    analysed: Analysed
    verdicts: Mapping[str, NodeVerdict]
    cut: Cut


@dataclass(frozen=True)
class Partitioned:
    """The plan as it is before ``request.compile_partition`` has replaced any partition."""

    plan: ProgramPlan
    request: CompileRequest


@dataclass(frozen=True)
class MemoryInput:
    """The input of memory planning: a program at concrete sizes, and what live outputs occupy.

    Attributes:
        reserved: intervals of arenas that live outputs of other recordings occupy.
        hint: offsets from a joint plan of forward and backward; tried first.
        previous: this program's plan for other sizes; its order of offsets is also tried.
    """

    sized: SizedProgram
    reserved: Reservations = field(default_factory=dict)
    hint: PlacementHint | None = None
    previous: MemoryPlan | None = None


Before = TypeVar("Before")
After = TypeVar("After")


@dataclass(frozen=True)
class Stage(Generic[Before, After]):
    """One stage of the pipeline.

    Attributes:
        name: shown in logs and timings.
        run: makes the stage's result.
        check: raises if the result is wrong; it shares no code with ``run``.
    """

    name: str
    run: Callable[[Before], After]
    check: Callable[[Before, After], None] | None = None


Rewrite = Stage[GraphModule, GraphModule]
# ``hook(name, result, seconds)``: called after each stage, for logs, timing and dumps.
Hook = Callable[[str, object, float], object]
_hooks: ContextVar[tuple[Hook, ...]] = ContextVar("fxwrap_hooks", default=())


@contextlib.contextmanager
def observed_by(hook: Hook) -> Iterator[None]:
    """Call ``hook`` after each stage that runs on this thread inside of the context."""
    token = _hooks.set((*_hooks.get(), hook))
    try:
        yield
    finally:
        _hooks.reset(token)


def rewrite(name: str, function: Callable[[GraphModule], GraphModule | None], lint: bool = True) -> Rewrite:
    """Make a stage from a function that edits the host graph in place or returns a new one.

    Args:
        lint: whether to run ``Graph.lint`` afterwards.
    """

    def check(before: GraphModule, after: GraphModule) -> None:
        try:
            after.graph.lint()
        except Exception as error:
            raise PipelineError(
                f"pass {name!r} leaves an invalid graph",
                expected="a torch.fx graph that passes its lint()",
                got=str(error),
            ) from error

    return Stage(name, lambda graph: function(graph) or graph, check if lint else None)


# -- the stages -----------------------------------------------------------------------------------------------


def _analyse_storages(emitted: Emitted) -> Aliased:
    graph, facts = emitted.graph, analyse_storages(emitted.graph)
    return Aliased(
        graph,
        emitted.request,
        emitted.workspace,
        device=main_device(graph),
        facts=facts,
        sizes=hinted_sizes(graph, facts),
    )


def _measure_workspace(aliased: Aliased) -> Mapping[str, int]:
    """Measure the workspace of library calls; only for the CPU, whose plan counts it as in use in the call's step."""
    if aliased.workspace is not None:
        return aliased.workspace
    if aliased.device.type != "cpu" or freezes_addresses(aliased.device):
        return {}
    work = (node for node in aliased.graph.graph.nodes if node.op == "call_function")
    with aliased.request.functions.without_modes():
        return measure_workspace(work, aliased.request.functions.allocations)


def _find_dependencies(aliased: Aliased) -> nx.DiGraph:
    return build_dependency_graph(aliased.graph, aliased.facts)


def _judge(uncut: Uncut) -> Mapping[str, NodeVerdict]:
    aliased = uncut.analysed.aliased
    fixed = FIXED_ADDRESSES if freezes_addresses(aliased.device) else ()
    eager_ops = (*aliased.request.options.eager_ops, *device_support(aliased.device.type).eager_ops, *fixed)
    return judge(aliased.graph, eager_ops, uncut.refused)


def _cut(judged: Judged) -> Cut:
    aliased = judged.analysed.aliased
    graph, facts, sizes = aliased.graph, aliased.facts, aliased.sizes
    inner_sizes = {index: sizes[index] for index in inner_storages(graph, facts) if index in sizes}
    budget = aliased.request.options.peak_budget
    return cut(judged.analysed.dependencies, judged.verdicts, aliased.device, facts, inner_sizes, budget)


def _apply_cost_model(divided: Divided) -> ProgramPlan:
    aliased = divided.analysed.aliased
    request, options = aliased.request, aliased.request.options
    plan = ProgramPlan(
        aliased.graph,
        aliased.facts,
        divided.verdicts,
        divided.cut,
        aliased.device,
        static_inputs=frozenset(request.static_inputs),
        phase=request.phase,
        donated=request.donated,
        write_only=request.write_only,
        used_outside=request.used_outside,
        saved=request.saved,
        inputs=request.inputs,
        workspace=divided.analysed.workspace,
    )
    cost = capture_cost(aliased.device.type)
    return apply_cost_model(plan, cost, aliased.sizes, options.capture, options.min_launches)


def _replace_partitions(partitioned: Partitioned) -> ProgramPlan:
    """Let ``request.compile_partition`` replace partitions. A replacement is stored as an attribute of the graph."""
    plan, compile_partition = partitioned.plan, partitioned.request.compile_partition
    compiled = dict[int, Signature]()
    for partition in plan.partitions if compile_partition is not None else ():
        graph = partition_graph(plan, partition)
        if compile_partition is not None and (function := compile_partition(graph)) is not None:
            target = next(name for n in itertools.count() if not hasattr(plan.graph, name := f"compiled_{n}"))
            setattr(plan.graph, target, function)
            compiled[partition.index] = dataclasses.replace(graph.signature, target=target)
    return dataclasses.replace(plan, compiled=compiled)


def _plan_memory(given: MemoryInput) -> MemoryPlan:
    return plan_program(given.sized, given.reserved, given.hint, given.previous)


def _check_schedule(divided: Divided, plan: ProgramPlan) -> None:
    verify_schedule(plan.graph, plan.schedule)


def _check_memory(given: MemoryInput, memory: MemoryPlan) -> None:
    sized, program = given.sized, given.sized.program
    replaced = [partition.nodes for partition in program.partitions if partition.index in program.compiled]
    donated = {program.placeholders[position].name for position in program.donated}
    verify_memory(program.graph, program.schedule, program.facts, memory, sized.symbol_values, replaced, donated)


REWRITES = (
    rewrite("needless copies", view_needless_copies, lint=False),
    rewrite("shared views", share_views, lint=False),
)


@dataclass(frozen=True)
class Stages:
    """The list of stages, in order. ``dataclasses.replace`` makes a list with other stages."""

    rewrites: tuple[Rewrite, ...] = ()
    aliasing: Stage[Emitted, Aliased] = Stage("aliasing", _analyse_storages)
    workspace: Stage[Aliased, Mapping[str, int]] = Stage("workspace", _measure_workspace)
    dependencies: Stage[Aliased, nx.DiGraph] = Stage("dependencies", _find_dependencies)
    capturability: Stage[Uncut, Mapping[str, NodeVerdict]] = Stage("capturability", _judge)
    cut: Stage[Judged, Cut] = Stage("cut", _cut)
    cost_model: Stage[Divided, ProgramPlan] = Stage("cost model", _apply_cost_model, _check_schedule)
    compiled_elsewhere: Stage[Partitioned, ProgramPlan] = Stage("partitions compiled elsewhere", _replace_partitions)
    memory: Stage[MemoryInput, MemoryPlan] = Stage("memory", _plan_memory, _check_memory)


# -- running stages -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostGraphPlanner:
    """Runs the stages for one host graph: partitioning, also after a failed capture, and memory planning.

    Implements ``graphs.memory.memory_provider.Planner``.

    Attributes:
        took: how often each stage ran, and its seconds including its check, by the stage's name.
    """

    stages: Stages
    emitted: Emitted
    took: dict[str, tuple[int, float]]

    @functools.cached_property
    def _analysed(self) -> Analysed:
        aliased = self._run(self.stages.aliasing, self.emitted)
        workspace = self._run(self.stages.workspace, aliased)
        return Analysed(aliased, workspace, self._run(self.stages.dependencies, aliased))

    def partition(self, refused: Mapping[str, str]) -> ProgramPlan:
        stages, analysed = self.stages, self._analysed
        verdicts = self._run(stages.capturability, Uncut(analysed, refused))
        division = self._run(stages.cut, Judged(analysed, verdicts))
        plan = self._run(stages.cost_model, Divided(analysed, verdicts, division))
        return self._run(stages.compiled_elsewhere, Partitioned(plan, self.emitted.request))

    def plan(
        self,
        sized: SizedProgram,
        reserved: Reservations = MappingProxyType({}),
        hint: PlacementHint | None = None,
        previous: MemoryPlan | None = None,
    ) -> MemoryPlan:
        return self._run(self.stages.memory, MemoryInput(sized, reserved, hint, previous))

    def plan_pair(
        self, first: SizedProgram, second: SizedProgram, saved_as: Mapping[int, Sequence[str]]
    ) -> tuple[PlacementHint, PlacementHint]:
        return plan_pair(first, second, saved_as)

    def devices(self, sized: SizedProgram) -> Collection[torch.device]:
        return Requirements.of(sized).planned.keys()

    def _run(self, stage: Stage[Before, After], before: Before) -> After:
        return run_stage(stage, before, self.took)


def run_stage(stage: Stage[Before, After], before: Before, took: dict[str, tuple[int, float]]) -> After:
    """Run one stage and its check, and call the hooks.

    Raises:
        PipelineError: the stage returns nothing, or is a rewrite that leaves an invalid graph.
        PlanError: the verifier refused the result.
    """
    begin = time.perf_counter()
    after = stage.run(before)
    if after is None:
        raise PipelineError(f"stage {stage.name!r} returns nothing", expected="the input of the next stage")
    if stage.check is not None:
        stage.check(before, after)
    seconds = time.perf_counter() - begin
    runs, total = took.get(stage.name, (0, 0.0))
    took[stage.name] = runs + 1, total + seconds
    log.debug("%s: %.1f ms", stage.name, seconds * 1e3)
    for hook in _hooks.get():
        hook(stage.name, after, seconds)
    return after


def compile_host_graph(gm: GraphModule, request: CompileRequest, stages: Stages | None = None) -> Program:
    """Run the stages on a host graph and make its program. Memory is planned later, for concrete sizes.

    Args:
        stages: ``Stages()`` by default, without rewrites; ``FxwrapCodegen.stages`` adds ``REWRITES``.

    Raises:
        PipelineError: a stage returns nothing, or a rewrite leaves an invalid graph.
        PlanError: the verifier refused the schedule.
    """
    stages, took = stages or Stages(), dict[str, tuple[int, float]]()
    for stage in stages.rewrites:
        gm = run_stage(stage, gm, took)
    planner = HostGraphPlanner(stages, Emitted(gm, request), took)
    return _add_to_compilation(_program(planner.partition({}), planner, request), request)


def restore_program(plan: ProgramPlan, request: CompileRequest) -> Program:
    """Make a program from a stored plan, whose graph is already rewritten.

    Raises:
        PlanError: the verifier refused the schedule.
    """
    request = dataclasses.replace(
        request,
        static_inputs=tuple(sorted(plan.static_inputs)),
        donated=plan.donated,
        write_only=plan.write_only,
        used_outside=plan.used_outside,
        saved=plan.saved,
        inputs=plan.inputs,
        phase=plan.phase,
    )
    verify_schedule(plan.graph, plan.schedule)
    planner = HostGraphPlanner(Stages(), Emitted(plan.graph, request, plan.workspace), {})
    return _add_to_compilation(_program(plan, planner, request), request)


def with_static_inputs(program: Program, positions: Iterable[int]) -> Program:
    """Another program with the same plan, for which just these inputs are static. It is in no compilation."""
    planner, static = program.planner, tuple(positions)
    assert isinstance(planner, HostGraphPlanner)
    request = dataclasses.replace(planner.emitted.request, static_inputs=static, compilation=None)
    planner = dataclasses.replace(planner, emitted=dataclasses.replace(planner.emitted, request=request))
    return _program(dataclasses.replace(program.plan, static_inputs=frozenset(static)), planner, request)


def _program(plan: ProgramPlan, planner: HostGraphPlanner, request: CompileRequest) -> Program:
    if not (request.options.checked or request.options.through_capture):
        return Program(plan, planner, request.options, request.functions)
    from .checked.program import CheckedProgram  # imported only if an option asks for it

    return CheckedProgram(plan, planner, request.options, request.functions)


def _add_to_compilation(program: Program, request: CompileRequest) -> Program:
    """Add a program to its compilation. A backward is linked to its forward."""
    if (compilation := request.compilation) is not None:
        forwards = [earlier for earlier in compilation.programs if earlier.plan.phase == "forward"]
        if program.plan.phase == "backward" and forwards:
            program.follow(forwards[-1], saved_tensors(forwards[-1].plan, program.plan))
        compilation.programs.append(program)
    return program
