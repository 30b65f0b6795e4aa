"""The pipeline: one list of stages, from a host graph to the plans of the program that runs it.

A stage reads some fields of a ``State`` and fills in others. It declares which. Hooks run after each stage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
from .passes.memory.requirements import hinted_sizes, inner_storages
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
    Planned,
    ProgramPlan,
    ReservedIn,
    Signature,
    StorageFacts,
    nothing_reserved,
)

if TYPE_CHECKING:
    import networkx as nx

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompileRequest:
    """What the compiler knows about a host graph in addition to the graph.

    Attributes:
        static_inputs: positions of inputs that AOTAutograd marks as static: their addresses stay the same.
        donated: positions of inputs that AOTAutograd lets a backward graph overwrite.
        saved: AOTAutograd's names of the outputs that only backward gets, by output position.
        inputs: AOTAutograd's names of the inputs.
        phase: "inference", "forward" or "backward".
        compilation: collects the programs (see ``fxwrap.explain``).
        compile_partition: may return a callable that replaces a partition.
    """

    torch: TorchFunctions
    options: Options = field(default_factory=Options)
    static_inputs: tuple[int, ...] = ()
    donated: frozenset[int] = frozenset()
    saved: Mapping[int, str] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    phase: str = "inference"
    compilation: Compilation | None = None
    compile_partition: Callable[[PartitionGraph], Callable[..., Any] | None] | None = None


class Scope(enum.Enum):
    """How often a stage runs."""

    GRAPH = "once, on the host graph that Inductor emits"
    PARTITION = "once, and again without the operators whose capture failed"
    SIZES = "for each set of concrete sizes"


@dataclass
class State:
    """Results so far. Stages fill in the fields.

    Attributes:
        sizes: bytes of storages at the sizes the program was compiled for.
        workspace: measured bytes of library calls' workspace, by node.
        refused: operators whose capture failed, with the error.
        reserved_in: returns the intervals of a device's arena that live outputs of other recordings occupy.
        hint: offsets from a joint plan of forward and backward.
        like: this program's plan for other sizes; its order of offsets is tried first.
    """

    graph: GraphModule
    request: CompileRequest
    # Scope.GRAPH
    device: torch.device | None = None
    facts: StorageFacts | None = None
    dependencies: nx.DiGraph | None = None
    sizes: Mapping[int, int] | None = None
    workspace: Mapping[str, int] | None = None
    # Scope.PARTITION
    refused: Mapping[str, str] = field(default_factory=dict)
    verdicts: Mapping[str, NodeVerdict] | None = None
    cut: Cut | None = None
    plan: ProgramPlan | None = None
    # Scope.SIZES
    planned: Planned | None = None
    reserved_in: ReservedIn = nothing_reserved
    hint: PlacementHint | None = None
    like: MemoryPlan | None = None
    memory: MemoryPlan | None = None
    # By stage: runs, and total seconds with checks. Copies of the state share this dict.
    took: dict[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One step.

    Attributes:
        run: reads what it requires of a state, and fills in what it provides.
        requires, provides: fields of the state.
        check: raises if the stage's result is wrong. It shares no code with the stage.
    """

    name: str
    scope: Scope
    run: Callable[[Any], object]
    requires: tuple[str, ...] = ("graph",)
    provides: tuple[str, ...] = ("graph",)
    check: Callable[[Any], object] | None = None


# ``hook(stage, state, seconds)`` is called after each stage: for logs, timing and dumps.
Hook = Callable[[Stage, State, float], object]
_hooks: ContextVar[tuple[Hook, ...]] = ContextVar("fxwrap_hooks", default=())


@contextlib.contextmanager
def observed_by(hook: Hook) -> Iterator[None]:
    """Call ``hook`` after each stage that runs on this thread inside of the context."""
    token = _hooks.set((*_hooks.get(), hook))
    try:
        yield
    finally:
        _hooks.reset(token)


def run_stages(stages: Sequence[Stage], state: State, scope: Scope) -> State:
    """Run the stages of one scope, in order.

    Raises:
        PipelineError: a stage does not get what it requires, or does not provide what it declares.
        PlanError: a check failed.
    """
    for stage in stages:
        if stage.scope is not scope:
            continue
        _check_fields(stage, state, stage.requires, "requires")
        begin = time.perf_counter()
        stage.run(state)
        _check_fields(stage, state, stage.provides, "provides")
        if stage.check is not None:
            stage.check(state)
        seconds = time.perf_counter() - begin
        runs, before = state.took.get(stage.name, (0, 0.0))
        state.took[stage.name] = runs + 1, before + seconds
        log.debug("%s: %.1f ms", stage.name, seconds * 1e3)
        for hook in _hooks.get():
            hook(stage, state, seconds)
    return state


def _check_fields(stage: Stage, state: State, fields: Sequence[str], what: str) -> None:
    missing = [name for name in fields if getattr(state, name) is None]
    if missing:
        raise PipelineError(
            f"stage {stage.name!r} {what} {', '.join(fields)}",
            got=f"a state without {', '.join(missing)}",
            remedy="look at the order of the stages, and at what each declares",
        )


def rewrite(name: str, function: Callable[[GraphModule], GraphModule | None], lint: bool = True) -> Stage:
    """Make a stage from a function that edits the host graph in place or returns a new one.

    Args:
        lint: whether to run ``Graph.lint`` afterwards.
    """

    def run(state: State) -> None:
        state.graph = function(state.graph) or state.graph

    def check(state: State) -> None:
        try:
            state.graph.graph.lint()
        except Exception as error:
            raise PipelineError(
                f"pass {name!r} leaves an invalid graph",
                expected="a torch.fx graph that passes its lint()",
                got=str(error),
            ) from error

    return Stage(name, Scope.GRAPH, run, check=check if lint else None)


# -- the stages -----------------------------------------------------------------------------------------------


def _analyse(state: Any) -> None:
    state.device = main_device(state.graph)
    state.facts = analyse_storages(state.graph)
    state.sizes = hinted_sizes(state.graph, state.facts)


def _measure_workspace(state: Any) -> None:
    """Where memory comes and goes with each call, the plan leaves room for what library calls take."""
    if state.workspace is not None:
        return  # a stored program has it in its plan
    state.workspace = {}
    if state.device.type == "cpu" and not freezes_addresses(state.device):
        work = (node for node in state.graph.graph.nodes if node.op == "call_function")
        with state.request.torch.without_modes():
            state.workspace = measure_workspace(work, state.request.torch.allocations)


def _find_dependencies(state: Any) -> None:
    state.dependencies = build_dependency_graph(state.graph, state.facts)


def _judge(state: Any) -> None:
    fixed = FIXED_ADDRESSES if freezes_addresses(state.device) else ()
    eager_ops = (*state.request.options.eager_ops, *device_support(state.device.type).eager_ops, *fixed)
    state.verdicts = judge(state.graph, eager_ops, state.refused)


def _cut(state: Any) -> None:
    inner_sizes = {i: state.sizes[i] for i in inner_storages(state.graph, state.facts) if i in state.sizes}
    budget = state.request.options.peak_budget
    state.cut = cut(state.dependencies, state.verdicts, state.device, state.facts, inner_sizes, budget)


def _apply_cost_model(state: Any) -> None:
    request, options, device = state.request, state.request.options, state.device
    plan = ProgramPlan(
        state.graph,
        state.facts,
        state.verdicts,
        state.cut,
        device,
        static_inputs=frozenset(request.static_inputs),
        phase=request.phase,
        donated=request.donated,
        saved=request.saved,
        inputs=request.inputs,
        workspace=state.workspace,
    )
    cost = capture_cost(device.type)
    state.plan = apply_cost_model(plan, cost, state.sizes, options.capture, options.min_launches)


def _replace_partitions(state: Any) -> None:
    """Let ``request.compile_partition`` replace partitions."""
    signatures, calls = dict[int, Signature](), dict[int, Callable[..., Any]]()
    for partition in state.plan.partitions if state.request.compile_partition is not None else ():
        graph = partition_graph(state.plan, partition)
        call = state.request.compile_partition(graph)
        if call is not None:
            signatures[partition.index], calls[partition.index] = graph.signature, call
    state.plan = dataclasses.replace(state.plan, compiled=signatures, calls=calls)


def _plan_memory(state: Any) -> None:
    state.memory = plan_program(state.planned, state.reserved_in, state.hint, state.like)


def _check_schedule(state: Any) -> None:
    verify_schedule(state.graph, state.plan.schedule)


def _check_memory(state: Any) -> None:
    planned, program = state.planned, state.planned.program
    replaced = [partition.nodes for partition in program.partitions if partition.index in program.compiled]
    verify_memory(program.graph, program.schedule, program.facts, state.memory, planned.symbol_values, replaced)


REWRITES = (
    rewrite("needless copies", view_needless_copies, lint=False),
    rewrite("shared views", share_views, lint=False),
)
DECISIONS = (
    Stage("aliasing", Scope.GRAPH, _analyse, ("graph",), ("device", "facts", "sizes")),
    Stage("workspace", Scope.GRAPH, _measure_workspace, ("graph", "request", "device"), ("workspace",)),
    Stage("dependencies", Scope.GRAPH, _find_dependencies, ("graph", "facts"), ("dependencies",)),
    Stage("capturability", Scope.PARTITION, _judge, ("graph", "request", "device", "refused"), ("verdicts",)),
    Stage(
        "cut", Scope.PARTITION, _cut, ("request", "device", "facts", "sizes", "dependencies", "verdicts"), ("cut",)
    ),
    Stage(
        "cost model",
        Scope.PARTITION,
        _apply_cost_model,
        ("graph", "request", "device", "facts", "sizes", "workspace", "verdicts", "cut"),
        ("plan",),
        _check_schedule,
    ),
    Stage("partitions compiled elsewhere", Scope.PARTITION, _replace_partitions, ("request", "plan"), ("plan",)),
    Stage("memory", Scope.SIZES, _plan_memory, ("planned",), ("memory",), _check_memory),
)


# -- what runs them -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostGraphPlanner:
    """Partitions one host graph and plans its memory when its program asks.

    Implements ``graphs.memory_provider.Planner``.
    """

    stages: Sequence[Stage]
    state: State

    @property
    def took(self) -> Mapping[str, tuple[int, float]]:
        return self.state.took

    def partition(self, refused: Mapping[str, str]) -> ProgramPlan:
        state = dataclasses.replace(self.state, refused=refused)
        if state.dependencies is None:  # a restored program: its graph is already rewritten
            run_stages([stage for stage in self.stages if "graph" not in stage.provides], state, Scope.GRAPH)
        return _result(run_stages(self.stages, state, Scope.PARTITION), "plan")

    def plan(
        self,
        planned: Planned,
        reserved_in: ReservedIn = nothing_reserved,
        hint: PlacementHint | None = None,
        like: MemoryPlan | None = None,
    ) -> MemoryPlan:
        state = dataclasses.replace(self.state, planned=planned, reserved_in=reserved_in, hint=hint, like=like)
        return _result(run_stages(self.stages, state, Scope.SIZES), "memory")

    def plan_pair(
        self, first: Planned, second: Planned, saved_as: Mapping[int, Sequence[str]]
    ) -> tuple[PlacementHint, PlacementHint]:
        return plan_pair(first, second, saved_as)


def _result(state: State, name: str) -> Any:
    if getattr(state, name) is None:
        raise PipelineError(f"no stage provides {name}", remedy="add a stage that provides it")
    return getattr(state, name)


def compile_host_graph(gm: GraphModule, request: CompileRequest, stages: Sequence[Stage] = DECISIONS) -> Program:
    """Run the stages on a host graph and make its program. Memory is planned later, for concrete sizes.

    Args:
        stages: by default no rewrites run.

    Raises:
        PipelineError: a stage does not get what it requires, or does not provide what it declares.
        PlanError: the verifier refused the schedule.
    """
    state = State(gm, request)
    for scope in (Scope.GRAPH, Scope.PARTITION):
        run_stages(stages, state, scope)
    return _add_to_compilation(_program(HostGraphPlanner(stages, state), request), request)


def restore_program(plan: ProgramPlan, request: CompileRequest) -> Program:
    """Make a program from a stored plan. Its graph is already rewritten.

    Raises:
        PlanError: the verifier refused the schedule.
    """
    static = tuple(sorted(plan.static_inputs))
    request = dataclasses.replace(
        request,
        static_inputs=static,
        donated=plan.donated,
        saved=plan.saved,
        inputs=plan.inputs,
        phase=plan.phase,
    )
    state = State(plan.graph, request, plan.device, plan.facts, workspace=plan.workspace, plan=plan)
    _check_schedule(state)
    return _add_to_compilation(_program(HostGraphPlanner(DECISIONS, state), request), request)


def _program(planner: HostGraphPlanner, request: CompileRequest) -> Program:
    plan = _result(planner.state, "plan")
    if not (request.options.checked or request.options.through_capture):
        return Program(plan, planner, request.options, request.torch)
    from .checked.program import CheckedProgram  # imported only if an option asks for it

    return CheckedProgram(plan, planner, request.options, request.torch)


def _add_to_compilation(program: Program, request: CompileRequest) -> Program:
    """Add a program to its compilation. A backward is linked to its forward."""
    if (compilation := request.compilation) is not None:
        forwards = [one for one in compilation.programs if one.plan.phase == "forward"]
        if program.plan.phase == "backward" and forwards:
            program.follow(forwards[-1], saved_tensors(forwards[-1].plan, program.plan))
        compilation.programs.append(program)
    return program
