"""The document: a report as plain data, from which text, page and comparison are made; it can be stored as JSON.

The typed dictionaries below are its schema, and ``SCHEMA`` is the version: adding a key keeps the number; removing a
key or changing its meaning raises it. Sizes are in bytes, times in microseconds; a step is the position of a work
node in the order in which these run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

import sympy
import torch
from torch.fx import GraphModule, Node
from typing_extensions import NotRequired

from ..codegen.dynamo.report import DynamoReport
from ..compilation import Compilation
from ..errors import InputError
from ..graphs.program import Program
from ..host_graph.listing import line_of, list_graph
from ..host_graph.nodes import Kernel, Kind, constants, is_work, kind_of, operator_name
from ..host_graph.sizes import expression
from ..host_graph.typed_json import from_data, to_data
from ..host_graph.user_code import module_path, user_line
from ..plan import Origin, ProgramPlan
from .memory_map import MemoryData, memory_data

SCHEMA = "fxwrap.report/1"


class NodeData(TypedDict):
    """A node of a host graph. Asserts are left out, except those of the user's about data.

    ``reads`` and ``writes`` are names of storages; the storages that an operator allocates for its results count as
    written. ``operator``, ``partition`` and ``verdict`` are set for work (a launch, an extern call) only.
    ``inherited`` means that a node is eager only because one of its operands is.
    """

    kind: str
    operator: str
    line: str
    inputs: list[str]
    reads: list[str]
    writes: list[str]
    partition: int | None
    verdict: str
    reason: str
    to_capture_it: str
    inherited: bool
    user_line: str
    module: str


class BenefitData(TypedDict):
    saved: float
    replay: float
    copies: float


class PartitionData(TypedDict):
    index: int
    verdict: str
    launches: int
    extern_calls: int
    device: str
    reason: str
    benefit_us: BenefitData | None
    nodes: list[str]


class CutData(TypedDict):
    """The numbers of captured partitions that are possible, and the memory peak of each order of the work."""

    captured: int
    fewest_possible: int
    in_program_order: int
    chosen: int
    peak_bytes: int
    peak_bytes_in_program_order: int
    peak_budget: float


class CompiledData(TypedDict):
    """One configuration of a Triton kernel that was compiled for a device which this machine lacks."""

    configuration: dict[str, Any]
    registers: int
    spilled_bytes: int
    shared_bytes: int
    cubin_bytes: int


class KernelData(TypedDict):
    """A compiled kernel.

    ``configurations`` are those of a Triton kernel: block sizes, warps and stages; of a tuned kernel, the chosen one.
    ``compiled`` is present if ``explain(..., target=...)`` compiled for another machine.
    """

    name: str
    language: str
    device: str
    source: str
    launches: list[str]
    configurations: list[dict[str, Any]]
    compiled: NotRequired[list[CompiledData]]


class RecordingData(TypedDict):
    """How one recording was made; ``when`` is in seconds since 1970."""

    when: float
    why: str
    us: float
    sizes: dict[str, Any]
    graphs: int
    arena_bytes: int
    copied_in_bytes: int
    copied_out_bytes: int


class StageData(TypedDict):
    stage: str
    runs: int
    us: float


class CountersData(TypedDict):
    replays: int
    recordings: dict[str, int]
    eager: dict[str, int]
    events: dict[str, int]


class GraphData(TypedDict):
    """A host graph, the decisions about it, and the counters of its program.

    ``name`` is the program's name in profiles and logs.
    ``sizes`` are the bytes of every allocation, as expressions in the symbols of the graph.
    """

    name: str
    phase: str
    device: str
    graph: str
    code: str
    nodes: dict[str, NodeData]
    partitions: list[PartitionData]
    cut: CutData
    kernels: list[KernelData]
    memory: MemoryData | None
    sizes: dict[str, str]
    outside_the_plan: dict[str, str]
    unit: list[str]
    stages: list[StageData]
    recordings: list[RecordingData]
    counters: CountersData


class BreakData(TypedDict):
    reason: str
    user_line: str


class SkippedData(TypedDict):
    function: str
    user_line: str
    reason: str


class FrameData(TypedDict):
    function: str
    user_line: str
    graphs: int


class DynamoData(TypedDict):
    """Graph breaks, skipped functions and compiled frames: ``codegen.dynamo.report.DynamoReport`` as plain data."""

    breaks: list[BreakData]
    skipped: list[SkippedData]
    frames: list[FrameData]
    seen: bool


class CallData(TypedDict):
    """One call that ``explain`` made; ``allocated_bytes`` is the peak of what it allocated, by device."""

    us: float
    allocated_bytes: dict[str, int]


class Document(TypedDict):
    """A whole report; ``limits`` says what a report for a device that this machine lacks cannot contain.

    ``function`` is what is reported on, and ``when`` the time of the report, in seconds since 1970.
    """

    schema: str
    function: NotRequired[str]
    when: NotRequired[float]
    versions: dict[str, str]
    compile_us: float
    dynamo: DynamoData
    graphs: list[GraphData]
    fallbacks: list[str]
    not_stored: list[str]
    calls: list[CallData]
    limits: list[str]


@dataclasses.dataclass(frozen=True)
class Facts:
    """The parts of a report that do not belong to a single program."""

    function: str = ""
    when: float = dataclasses.field(default_factory=time.time)
    compile_us: float = 0.0
    fallbacks: tuple[str, ...] = ()
    not_stored: tuple[str, ...] = ()
    dynamo: DynamoReport = DynamoReport()
    calls: tuple[CallData, ...] = ()

    @classmethod
    def of(
        cls,
        compilations: Sequence[Compilation],
        function: str = "",
        dynamo: DynamoReport | None = None,
        calls: Sequence[CallData] = (),
    ) -> Facts:
        return cls(
            function,
            compile_us=sum(compilation.seconds for compilation in compilations) * 1e6,
            fallbacks=tuple(reason for compilation in compilations for reason in compilation.fallbacks),
            not_stored=tuple(reason for compilation in compilations for reason in compilation.not_stored),
            dynamo=dynamo or DynamoReport(),
            calls=tuple(calls),
        )

    @classmethod
    def from_document(cls, document: Document) -> Facts:
        """The facts of a document."""
        return cls(
            document.get("function", ""),
            document.get("when", 0.0),
            document["compile_us"],
            tuple(document["fallbacks"]),
            tuple(document["not_stored"]),
            from_data(DynamoReport, from_data(DynamoData, document["dynamo"])),
            tuple(document["calls"]),
        )


def document_of(programs: Sequence[Program], about: Facts) -> Document:
    """The document of programs in their present state."""
    graphs = list(map(graph_data, programs))
    return {
        "schema": SCHEMA,
        "function": about.function,
        "when": about.when,
        "versions": versions(any(kernel["language"] == "triton" for graph in graphs for kernel in graph["kernels"])),
        "compile_us": about.compile_us,
        "dynamo": cast(DynamoData, to_data(about.dynamo)),
        "graphs": graphs,
        "fallbacks": list(about.fallbacks),
        "not_stored": list(about.not_stored),
        "calls": list(about.calls),
        "limits": [],
    }


def checked(data: Any) -> Document:
    """Check that data from a file is a document, and return it.

    Raises:
        InputError: it is no document, one of another version, or an incomplete one.
    """
    schema = data.get("schema") if isinstance(data, Mapping) else None
    got = repr(schema) if schema is not None else "data without a schema"
    if schema == SCHEMA:
        try:
            from_data(Document, data)  # type: ignore[type-var]
            return data  # type: ignore[no-any-return]
        except (TypeError, ValueError) as error:
            got = str(error)
    raise InputError(
        "this is not a report that can be read here",
        expected=f"a document with schema {SCHEMA!r}",
        got=got,
        remedy="write it with this version of fxwrap: fxwrap.explain(...).to_dict()",
    )


def read(path: Path) -> Any:
    """Read the JSON data in a file, which ``checked`` checks.

    Raises:
        InputError: the file holds no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # no JSON, or no text
        got = f"{type(error).__name__}: {error}"
        remedy = "python -m fxwrap explain --json writes one, and so does fxwrap.explain(...).save"
        raise InputError(f"{path} is no report", expected="JSON", got=got, remedy=remedy) from error


def versions(with_triton: bool) -> dict[str, str]:
    from .. import __version__

    triton = getattr(sys.modules.get("triton"), "__version__", "") if with_triton else ""
    found = {"fxwrap": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {**found, "triton": triton} if triton else found


def planned_graph(document: Document, number: int) -> tuple[GraphData, MemoryData]:
    """The graph with a number, and its memory plan.

    Raises:
        InputError: there is no such graph, or it has no plan.
    """
    graphs = document["graphs"]
    graph = graphs[number] if 0 <= number < len(graphs) else None
    memory = graph["memory"] if graph is not None else None
    if graph is None or memory is None or not memory["storages"]:
        got = f"number {number}" if graph is None else f"number {number}, {graph['phase']}, without a plan"
        raise InputError("there is no memory to show", expected=f"a planned graph below {len(graphs)}", got=got)
    return graph, memory


def graph_data(program: Program) -> GraphData:
    """The data of a program in its present state. Its plan is read once, because other threads may run it."""
    plan, sized, memory = program.plan, program.recorder.newest_sized, program.newest_plan
    return {
        "name": program.name,
        "phase": plan.phase,
        "device": str(plan.device),
        "graph": list_graph(plan.graph),
        "code": plan.graph.code.strip(),
        "nodes": _nodes(plan),
        "partitions": [cast(PartitionData, partition.to_dict()) for partition in plan.partitions],
        "cut": {
            "captured": plan.cut.captured,
            "fewest_possible": plan.cut.fewest,
            "in_program_order": plan.cut.in_program_order,
            "chosen": plan.cut.chosen,
            "peak_bytes": plan.cut.peak,
            "peak_bytes_in_program_order": plan.cut.program_order_peak,
            "peak_budget": plan.cut.peak_budget,
        },
        "kernels": _kernels(plan.graph),
        "memory": None if memory is None else memory_data(program, plan, sized, memory),
        "sizes": sizes_in_symbols(plan),
        "outside_the_plan": outside_the_plan(plan),
        "unit": unit_of(program),
        "stages": [{"stage": name, "runs": n, "us": s * 1e6} for name, (n, s) in list(program.stages.items())],
        "recordings": [
            {
                "when": made.when,
                "why": made.why,
                "us": made.seconds * 1e6,
                "sizes": dict(made.sizes),
                "graphs": made.graphs,
                "arena_bytes": made.arenas,
                "copied_in_bytes": made.copied_in,
                "copied_out_bytes": made.copied_out,
            }
            for made in list(program.history)
        ],
        "counters": cast(CountersData, program.counters.to_dict()),
    }


def _nodes(plan: ProgramPlan) -> dict[str, NodeData]:
    partition_of = {name: partition.index for partition in plan.partitions for name in partition.nodes}
    made: dict[str, frozenset[int]] = {}
    for storage in plan.facts.storages:
        if storage.origin is Origin.EXTERN:
            made[storage.node] = made.get(storage.node, frozenset()) | {storage.index}

    def data(node: Node) -> NodeData:
        verdict, work = plan.verdicts.get(node.name), is_work(node)
        return {
            "kind": kind_of(node).value,
            "operator": operator_name(node) if work else "",
            "line": line_of(node),
            "inputs": [operand.name for operand in node.all_input_nodes],
            "reads": _names(plan, plan.facts.reads(node)),
            "writes": _names(plan, plan.facts.writes(node) | made.get(node.name, frozenset())),
            "partition": partition_of.get(node.name),
            "verdict": verdict.verdict.value if verdict is not None and work else "",
            "reason": verdict.reason if verdict is not None else "",
            "to_capture_it": verdict.remedy if verdict is not None else "",
            "inherited": verdict is not None and verdict.inherited,
            "user_line": user_line(node),
            "module": module_path(node),
        }

    shown = (n for n in plan.nodes.values() if kind_of(n) is not Kind.CHECK or n.name in partition_of)
    return {node.name: data(node) for node in shown}


def short_line(user_line: str) -> str:
    """A line of user code, without the folders of its file."""
    file, line, code = user_line.partition(", line ")
    return file.rpartition(os.sep)[2] + line + code


def _names(plan: ProgramPlan, indices: frozenset[int]) -> list[str]:
    return list(map(plan.shown_name, sorted(indices)))


def kernels_of(graph: GraphModule) -> dict[Kernel, list[str]]:
    """The kernels of a host graph, including those of branches and loops, with the nodes that launch each."""
    launches: dict[Kernel, list[str]] = {}
    for gm in (module for module in graph.modules() if isinstance(module, GraphModule)):
        for handle, value in constants(gm).items():
            if isinstance(value, Kernel):
                launches.setdefault(value, []).extend(user.name for user in handle.users)
    return launches


def _kernels(graph: GraphModule) -> list[KernelData]:
    return [
        {
            "name": kernel.name,
            "language": kernel.language,
            "device": str(kernel.device),
            "source": kernel.source,
            "launches": launches,
            "configurations": list(map(dict, kernel.configurations)),
        }
        for kernel, launches in kernels_of(graph).items()
    ]


def unit_of(program: Program) -> list[str]:
    """The steps of the newest recording with a native unit, a line for each; empty if there is none."""
    listings = [recording.listing for recording in program.specializations.recordings() if recording.unit]
    return list(listings[-1]) if listings else []


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
