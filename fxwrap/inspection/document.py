"""The report as plain data: a document, which goes to JSON and back, and from which text, page and diff are made.

Its schema is the typed dictionaries below, and ``SCHEMA`` is its version: a key may be added under the same number;
when one goes, or means something else, the number grows. Sizes are bytes, times microseconds, steps the positions of
work nodes in the order in which they run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

import sympy
import torch
from torch.fx import GraphModule, Node
from typing_extensions import NotRequired

from ..codegen.dynamo.story import DynamoStory
from ..compilation import Compilation
from ..errors import InputError
from ..graphs.program import Program
from ..host_graph.listing import line_of, list_graph
from ..host_graph.nodes import Kernel, Kind, constants, is_work, kind_of, module_path, operator_name, user_line
from ..host_graph.typed_json import from_data, to_data
from ..plan import MemoryPlan, Origin, ProgramPlan
from .memory_map import MemoryData, memory_data

SCHEMA = "fxwrap.report/1"


class NodeData(TypedDict):
    """A node of a host graph that is no assert (but what the user asserted of data); by name, in the graph's order.

    ``reads`` and ``writes`` name storages; what an operator allocates for its results it writes, too.
    ``operator``, ``partition`` and ``verdict`` are those of work (a launch, an extern call); empty and
    None elsewhere. ``inherited`` tells that a node is eager because of what it works on.
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
    """Captured partitions, how many the dependencies demand, and what each order of the work needs at one time."""

    captured: int
    fewest_possible: int
    in_program_order: int
    chosen: int
    peak_bytes: int
    peak_bytes_in_program_order: int
    peak_budget: float


class CompiledData(TypedDict):
    """One configuration of a Triton kernel, compiled for a device that is not there."""

    configuration: dict[str, Any]
    registers: int
    spilled_bytes: int
    shared_bytes: int
    cubin_bytes: int


class KernelData(TypedDict):
    """``configurations`` are Triton's: block sizes, warps and stages; of a kernel that was tuned, the one chosen.

    ``compiled`` is there where ``explain(..., target=...)`` compiled for another machine.
    """

    name: str
    language: str
    device: str
    source: str
    launches: list[str]
    configurations: list[dict[str, Any]]
    compiled: NotRequired[list[CompiledData]]


class RecordingData(TypedDict):
    """``when`` is in seconds since 1970."""

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
    """A host graph, what was decided about it, and what became of it.

    ``name`` is that of its ranges in profiles and of its lines in logs.
    ``sizes`` are bytes of every allocation, in the symbols of the graph.
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
    """What Dynamo made of the function: ``codegen.dynamo_story.DynamoStory``, as plain data."""

    breaks: list[BreakData]
    skipped: list[SkippedData]
    frames: list[FrameData]
    seen: bool


class CallData(TypedDict):
    """One call that ``explain`` made: ``allocated_bytes`` is the most that it allocated at one time, by device."""

    us: float
    allocated_bytes: dict[str, int]


class Document(TypedDict):
    """``limits`` says what a report on another machine's device cannot tell."""

    schema: str
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
    """What is known besides programs."""

    compile_us: float = 0.0
    fallbacks: tuple[str, ...] = ()
    not_stored: tuple[str, ...] = ()
    dynamo: DynamoStory = DynamoStory()
    calls: tuple[CallData, ...] = ()

    @classmethod
    def of(
        cls, compilations: Sequence[Compilation], dynamo: DynamoStory | None, calls: Sequence[CallData] = ()
    ) -> Facts:
        return cls(
            sum(one.seconds for one in compilations) * 1e6,
            tuple(reason for one in compilations for reason in one.fallbacks),
            tuple(reason for one in compilations for reason in one.not_stored),
            dynamo or DynamoStory(),
            tuple(calls),
        )

    @classmethod
    def from_document(cls, known: Document) -> Facts:
        """What a document says besides its graphs."""
        return cls(
            known["compile_us"],
            tuple(known["fallbacks"]),
            tuple(known["not_stored"]),
            from_data(DynamoStory, from_data(DynamoData, known["dynamo"])),
            tuple(known["calls"]),
        )


def document_of(programs: Sequence[Program], about: Facts) -> Document:
    """What is known of programs at this moment."""
    return {
        "schema": SCHEMA,
        "versions": versions(),
        "compile_us": about.compile_us,
        "dynamo": cast(DynamoData, to_data(about.dynamo)),
        "graphs": list(map(graph_data, programs)),
        "fallbacks": list(about.fallbacks),
        "not_stored": list(about.not_stored),
        "calls": list(about.calls),
        "limits": [],
    }


def checked(data: Any) -> Document:
    """A document that was read from a file.

    Raises:
        InputError: it is none, one of another version, or one of which parts are missing.
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


def read(path: Path) -> Document:
    """The document in a file.

    Raises:
        InputError: there is none in it.
    """
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # no JSON, or no text
        got = f"{type(error).__name__}: {error}"
        remedy = "python -m fxwrap explain --json writes one, and so does fxwrap.explain(...).save"
        raise InputError(f"{path} is no report", expected="JSON", got=got, remedy=remedy) from error
    return checked(data)


def versions() -> dict[str, str]:
    from .. import __version__

    return {"fxwrap": __version__, "torch": torch.__version__, "python": platform.python_version()}


def planned_graph(document: Document, number: int) -> tuple[GraphData, MemoryData]:
    """A graph whose memory can be shown, by its number.

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
    """What is known of a program at this moment. Other threads may run it: what they change is taken at one time."""
    plan, planned, memory = program.plan, program.recorder.newest_planned, program.newest_plan
    return {
        "name": program.name,
        "phase": plan.phase,
        "device": str(plan.device),
        "graph": list_graph(plan.graph),
        "code": plan.graph.code.strip(),
        "nodes": _nodes(plan),
        "partitions": [cast(PartitionData, one.to_dict()) for one in plan.partitions],
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
        "memory": None if memory is None else memory_data(program, plan, planned, memory),
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
            "inputs": [one.name for one in node.all_input_nodes],
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
    """A line of the user's without the folders of its file."""
    file, line, code = user_line.partition(", line ")
    return file.rpartition(os.sep)[2] + line + code


def _names(plan: ProgramPlan, indices: frozenset[int]) -> list[str]:
    return [plan.facts.storages[index].name for index in sorted(indices)]


def kernels_of(graph: GraphModule) -> dict[Kernel, list[str]]:
    """The kernels of a host graph, of its branches and loops too, and the nodes that launch each."""
    found: dict[Kernel, list[str]] = {}
    for gm in (module for module in graph.modules() if isinstance(module, GraphModule)):
        for handle, value in constants(gm).items():
            if isinstance(value, Kernel):
                found.setdefault(value, []).extend(user.name for user in handle.users)
    return found


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
    """What the newest recording runs natively, a line for each step; empty if there is none that does."""
    listings = [recording.listing for recording in program.specializations.recordings() if recording.unit]
    return list(listings[-1]) if listings else []


def output_bytes(memory: MemoryPlan) -> int:
    return sum(memory.sizes.get(index, 0) for index in memory.outputs)


def sizes_in_symbols(plan: ProgramPlan) -> dict[str, str]:
    """Bytes of every allocation, in the symbols of the graph: they are planned again for each shape."""
    storages = plan.facts.storages
    values = {s.name: plan.nodes[s.node].meta.get("val") for s in storages if s.origin is Origin.ALLOCATION}
    return {name: bytes_expression(value) for name, value in values.items() if isinstance(value, torch.Tensor)}


def outside_the_plan(plan: ProgramPlan) -> dict[str, str]:
    """Storages that operators allocate by themselves: name -> operator and why it cannot be given memory."""
    return {
        storage.name: f"{operator_name(maker)}: " + maker.meta.get("outside_plan", "nothing tells what it returns")
        for storage, maker in ((storage, plan.nodes[storage.node]) for storage in plan.facts.storages)
        if storage.origin is Origin.EXTERN
    }


def bytes_expression(value: torch.Tensor) -> str:
    """Bytes that a fake tensor reaches, in the symbols of its sizes: ``32*s77``."""
    steps = zip(value.size(), value.stride(), strict=True)
    elements = 1 + sum((_expression(extent) - 1) * _expression(step) for extent, step in steps)
    return str(sympy.expand(elements * value.dtype.itemsize))


def _expression(number: Any) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt) else sympy.Integer(number)
