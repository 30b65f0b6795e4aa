"""The document: a report as plain data, from which text, page and comparison are made; it can be stored as JSON.

The dataclasses below, in ``memory_map.py`` and in ``plan.py`` are its schema. ``SCHEMA`` is the version: adding a key
keeps the number (its field says ``added``); removing a key or changing its meaning raises it. Sizes are in bytes,
times in microseconds; a step is the position of a work node in the order in which these run.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ..codegen.dynamo.report import DynamoReport
from ..graphs.policy.counters import RecordingMade
from ..graphs.program import Program
from ..graphs.replay.ranges import work_range
from ..host_graph.listing import line_of, list_graph
from ..host_graph.nodes import Kernel, Kind, constants, is_work, kind_of, operator_name
from ..host_graph.sizes import expression
from ..host_graph.storages import Origin
from ..host_graph.user_code import module_path, user_line
from ..limit import Repeated
from ..plan import Partition, ProgramPlan, Verdict
from .memory_map import MemoryData, memory_data

SCHEMA = "fxwrap.report/1"


@dataclass(frozen=True)
class NodeData:
    """A node of a host graph. Asserts are left out, except those of the user's about data.

    ``reads`` and ``writes`` are names of storages; the storages that an operator allocates for its results count as
    written. ``operator``, ``partition`` and ``verdict`` are set for work (a launch, an extern call) only.
    ``inherited`` means that a node is eager only because one of its operands is.
    """

    kind: str
    operator: str
    line: str
    inputs: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    partition: int | None
    verdict: str
    reason: str
    to_capture_it: str
    inherited: bool
    user_line: str
    module: str


@dataclass(frozen=True)
class CutData:
    """The numbers of captured partitions that are possible, and the memory peak of each order of the work."""

    captured: int
    fewest_possible: int
    in_program_order: int
    chosen: int
    peak_bytes: int
    peak_bytes_in_program_order: int
    peak_budget: float


@dataclass(frozen=True)
class CompiledData:
    """One configuration of a Triton kernel that was compiled for a device which this machine lacks."""

    configuration: dict[str, Any]
    registers: int
    spilled_bytes: int
    shared_bytes: int
    cubin_bytes: int


@dataclass(frozen=True)
class KernelData:
    """A compiled kernel.

    ``configurations`` are those of a Triton kernel: block sizes, warps and stages; of a tuned kernel, the chosen one.
    ``compiled`` is empty unless ``explain(..., target=...)`` compiled for another machine.
    """

    name: str
    language: str
    device: str
    source: str
    launches: tuple[str, ...]
    configurations: tuple[dict[str, Any], ...]
    compiled: tuple[CompiledData, ...] = field(default=(), metadata={"added": ()})


@dataclass(frozen=True)
class WorkData:
    """A launch or a library call of a captured partition.

    ``range`` is its name in profiles. ``one_kernel`` is true of a launch: it is one kernel of the device graph, with
    the name that the launch has; a library call may be several kernels, or none.
    """

    node: str
    range: str
    module: str
    one_kernel: bool


@dataclass(frozen=True)
class StageData:
    stage: str
    runs: int
    us: float


@dataclass(frozen=True)
class CountersData:
    replays: int
    recordings: dict[str, int]
    eager: dict[str, int]
    events: dict[str, int]


@dataclass(frozen=True)
class GraphData:
    """A host graph, the decisions about it, and the counters of its program.

    ``name`` is the program's name in profiles and logs.
    ``sizes`` are the bytes of every allocation, as expressions in the symbols of the graph.
    ``in_graphs`` is the work of each captured partition in the order in which its device graph runs it, by the
    partition's index.
    """

    name: str
    phase: str
    device: str
    graph: str
    code: str
    nodes: dict[str, NodeData]
    partitions: tuple[Partition, ...]
    cut: CutData
    kernels: tuple[KernelData, ...]
    memory: MemoryData | None
    sizes: dict[str, str]
    outside_the_plan: dict[str, str]
    unit: tuple[str, ...]
    stages: tuple[StageData, ...]
    recordings: tuple[RecordingMade, ...]
    counters: CountersData
    repeated: tuple[Repeated, ...] = field(default=(), metadata={"added": ()})
    in_graphs: dict[str, tuple[WorkData, ...]] = field(default_factory=dict, metadata={"added": {}})


@dataclass(frozen=True)
class CallData:
    """One call that ``explain`` made; ``allocated_bytes`` is the peak of what it allocated, by device."""

    us: float
    allocated_bytes: dict[str, int]


def versions(with_triton: bool = False) -> dict[str, str]:
    from .. import __version__

    triton = getattr(sys.modules.get("triton"), "__version__", "") if with_triton else ""
    found = {"fxwrap": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return {**found, "triton": triton} if triton else found


@dataclass(frozen=True)
class Document:
    """A whole report; ``limits`` says what a report for a device that this machine lacks cannot contain.

    ``function`` is what is reported on, and ``when`` the time of the report, in seconds since 1970. ``sections`` is
    plain data that features add (``hooks.REPORT_SECTIONS``), by key.
    """

    schema: str = SCHEMA
    function: str = field(default="", metadata={"added": ""})
    when: float = field(default_factory=time.time, metadata={"added": 0.0})
    versions: dict[str, str] = field(default_factory=versions)
    compile_us: float = 0.0
    dynamo: DynamoReport = DynamoReport()
    graphs: tuple[GraphData, ...] = ()
    fallbacks: tuple[str, ...] = ()
    not_stored: tuple[str, ...] = ()
    calls: tuple[CallData, ...] = ()
    limits: tuple[str, ...] = ()
    sections: dict[str, Any] = field(default_factory=dict, metadata={"added": {}})

    def of(self, programs: Iterable[Program]) -> Document:
        """The same report, with the graphs of programs in their present state."""
        graphs = tuple(map(graph_data, programs))
        triton = any(kernel.language == "triton" for graph in graphs for kernel in graph.kernels)
        return replace(self, graphs=graphs, versions=versions(triton))


def graph_data(program: Program) -> GraphData:
    """The data of a program in its present state. Its plan is read once, because other threads may run it."""
    plan, sized, memory = program.plan, program.recorder.newest_sized, program.newest_plan
    cut = plan.cut
    return GraphData(
        name=program.name,
        phase=plan.phase,
        device=str(plan.device),
        graph=list_graph(plan.graph),
        code=plan.graph.code.strip(),
        nodes=_nodes(plan),
        partitions=plan.partitions,
        cut=CutData(
            captured=cut.captured,
            fewest_possible=cut.fewest,
            in_program_order=cut.in_program_order,
            chosen=cut.chosen,
            peak_bytes=cut.peak,
            peak_bytes_in_program_order=cut.program_order_peak,
            peak_budget=cut.peak_budget,
        ),
        kernels=tuple(_kernel(kernel, launches) for kernel, launches in kernels_of(plan.graph).items()),
        memory=None if memory is None else memory_data(program, plan, sized, memory),
        sizes=sizes_in_symbols(plan),
        outside_the_plan=outside_the_plan(plan),
        unit=unit_of(program),
        stages=tuple(StageData(name, runs, s * 1e6) for name, (runs, s) in list(program.stages.items())),
        recordings=tuple(list(program.history)),  # a list first: calls append to it
        counters=CountersData(**program.counters.to_dict()),
        repeated=plan.repeated,
        in_graphs={str(p.index): _work(plan, p) for p in plan.partitions if p.verdict is Verdict.CAPTURED},
    )


def _work(plan: ProgramPlan, partition: Partition) -> tuple[WorkData, ...]:
    """The work of a partition in its order; none where ``compile_partition`` has replaced it."""
    work = filter(is_work, plan.work_in(partition)) if partition.index not in plan.compiled else ()
    return tuple(
        WorkData(node.name, work_range(node), module_path(node), kind_of(node) is Kind.LAUNCH) for node in work
    )


def _nodes(plan: ProgramPlan) -> dict[str, NodeData]:
    partition_of = {name: partition.index for partition in plan.partitions for name in partition.nodes}
    made: dict[str, frozenset[int]] = {}
    for storage in plan.facts.storages:
        if storage.origin is Origin.EXTERN:
            made[storage.node] = made.get(storage.node, frozenset()) | {storage.index}

    def names(indices: frozenset[int]) -> tuple[str, ...]:
        return tuple(map(plan.shown_name, sorted(indices)))

    def data(node: Node) -> NodeData:
        verdict, work = plan.verdicts.get(node.name), is_work(node)
        return NodeData(
            kind=kind_of(node).value,
            operator=operator_name(node) if work else "",
            line=line_of(node),
            inputs=tuple(operand.name for operand in node.all_input_nodes),
            reads=names(plan.facts.reads(node)),
            writes=names(plan.facts.writes(node) | made.get(node.name, frozenset())),
            partition=partition_of.get(node.name),
            verdict=verdict.verdict.value if verdict is not None and work else "",
            reason=verdict.reason if verdict is not None else "",
            to_capture_it=verdict.remedy if verdict is not None else "",
            inherited=verdict is not None and verdict.inherited,
            user_line=user_line(node),
            module=module_path(node),
        )

    shown = (n for n in plan.nodes.values() if kind_of(n) is not Kind.CHECK or n.name in partition_of)
    return {node.name: data(node) for node in shown}


def short_line(user_line: str) -> str:
    """A line of user code, without the folders of its file."""
    file, line, code = user_line.partition(", line ")
    return file.rpartition(os.sep)[2] + line + code


def kernels_of(graph: GraphModule) -> dict[Kernel, list[str]]:
    """The kernels of a host graph, including those of branches and loops, with the nodes that launch each."""
    launches: dict[Kernel, list[str]] = {}
    for gm in (module for module in graph.modules() if isinstance(module, GraphModule)):
        for handle, value in constants(gm).items():
            if isinstance(value, Kernel):
                launches.setdefault(value, []).extend(user.name for user in handle.users)
    return launches


def _kernel(kernel: Kernel, launches: Sequence[str]) -> KernelData:
    def plain(value: Any) -> Any:
        """A kernel of the user's may be configured by anything, such as a type of numbers."""
        return value if value is None or type(value) in (bool, int, float, str) else str(value)

    return KernelData(
        name=kernel.name,
        language=kernel.language,
        device=str(kernel.device),
        source=kernel.source,
        launches=tuple(launches),
        configurations=tuple({name: plain(value) for name, value in one.items()} for one in kernel.configurations),
    )


def unit_of(program: Program) -> tuple[str, ...]:
    """The steps of the newest recording with a native unit, a line for each; empty if there is none."""
    listings = [recording.listing for recording in program.specializations.recordings() if recording.unit]
    return tuple(listings[-1]) if listings else ()


def sizes_in_symbols(plan: ProgramPlan) -> dict[str, str]:
    """The bytes of every allocation by name, as expressions in the symbols of the graph."""
    storages = plan.facts.storages
    values = {s.name: plan.nodes[s.node].meta.get("val") for s in storages if s.origin is Origin.ALLOCATION}
    return {name: bytes_expression(value) for name, value in values.items() if isinstance(value, torch.Tensor)}


def outside_the_plan(plan: ProgramPlan) -> dict[str, str]:
    """Storages that operators allocate themselves, by name: the operator, and why its memory cannot be planned."""
    return {
        storage.name: f"{operator_name(maker)}: " + maker.meta.get("outside_plan", "nothing tells what it returns")
        for storage, maker in ((storage, plan.nodes[storage.node]) for storage in plan.facts.storages)
        if storage.origin is Origin.EXTERN
    }


def bytes_expression(value: torch.Tensor) -> str:
    """The bytes that a fake tensor spans, as an expression in its symbols: ``32*s77``."""
    steps = zip(value.size(), value.stride(), strict=True)
    elements = 1 + sum((expression(extent) - 1) * expression(step) for extent, step in steps)
    return str(sympy.expand(elements * value.dtype.itemsize))
