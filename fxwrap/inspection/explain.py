"""SHOW: what was decided about a function, from the very objects that run."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch.fx import GraphModule

from ..backend import fxwrap as backend
from ..codegen.dynamo import compilations_of, with_own_code
from ..compilation import Compilation, live_compilations
from ..errors import FxwrapError
from ..graphs.program import Program
from ..graphs.units import PYTHON
from ..host_graph.listing import list_graph
from ..host_graph.nodes import Kernel, constants, kind_of, operator_name, user_line
from ..passes.analysis.sizes import bytes_expression
from ..passes.partition.capturability import is_work
from ..plan import MemoryPlan, Origin, Partition, Prediction, ProgramPlan, Verdict

_WIDTH = 118


@dataclass(frozen=True)
class GraphReport:
    """One host graph and what was decided about it."""

    program: Program

    @property
    def phase(self) -> str:
        """inference, forward or backward."""
        return self.program.plan.phase

    @property
    def graph(self) -> GraphModule:
        return self.program.plan.graph

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return self.program.plan.partitions

    @property
    def memory(self) -> MemoryPlan | None:
        """The newest plan; None if no shape was planned."""
        return self.program.newest_plan

    @property
    def predicted(self) -> tuple[Prediction, ...]:
        """The memory of the newest shape that is known, by device: that of a forward is with its backward, as soon as
        that has run, and that of a backward is with its forward."""
        estimate = self.program.estimate
        if estimate is None or estimate.follows:
            return ()
        return tuple(self.program.predict())

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels, with their source; those of branches and loops, too."""
        graphs = [module for module in self.graph.modules() if isinstance(module, GraphModule)]
        found = (value for gm in graphs for value in constants(gm).values())
        return tuple(dict.fromkeys(kernel for kernel in found if isinstance(kernel, Kernel)))

    @property
    def unit(self) -> str:
        """What the newest recording runs natively, a line for each step; empty if there is none that does."""
        listings = [recording.listing for recording in self.program.specializations.recordings() if recording.unit]
        return "\n".join(listings[-1]) if listings else ""

    @property
    def counters(self) -> dict[str, Any]:
        return self.program.counters.to_dict()

    def to_dict(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "phase": self.phase,
            "graph": list_graph(self.graph),
            "partitions": [
                {
                    "index": p.index,
                    "verdict": p.verdict.value,
                    "launches": p.launches,
                    "extern_calls": p.externs,
                    "device": str(p.device),
                    "reason": p.reason,
                    "benefit_us": None if p.benefit is None else dataclasses.asdict(p.benefit),
                    "nodes": list(p.nodes),
                }
                for p in self.partitions
            ],
            "cut": {
                "captured": self.program.plan.cut.captured,
                "fewest_possible": self.program.plan.cut.fewest,
                "in_program_order": self.program.plan.cut.in_program_order,
                "peak_bytes": self.program.plan.cut.peak,
                "peak_bytes_in_program_order": self.program.plan.cut.program_order_peak,
            },
            "nodes": {
                name: {
                    "kind": kind_of(node).value,
                    "operator": operator_name(node) if is_work(node) else "",
                    "verdict": v.verdict.value,
                    "reason": v.reason,
                    "to_capture_it": v.remedy,
                    "user_line": user_line(node),
                }
                for name, v in self.program.plan.verdicts.items()
                for node in [self.program.plan.nodes[name]]
            },
            "memory": None
            if memory is None
            else {
                "arena_bytes": memory.size,
                "peak_bytes": memory.peak,
                "lower_bound_bytes": memory.lower_bound,
                "without_reuse_bytes": memory.plain,
                "output_bytes": output_bytes(memory),
                "predicted": [
                    {**dataclasses.asdict(one), "device": str(one.device), "total": one.total}
                    for one in self.predicted
                ],
                "bytes": sizes_in_symbols(self.program.plan),
                "outside_the_plan": outside_the_plan(self.program.plan),
            },
            "kernels": {kernel.name: kernel.source for kernel in self.kernels},
            "unit": self.unit.splitlines(),
            "counters": self.counters,
        }


@dataclass
class Explanation:
    """Everything decided while a function was compiled and run once. Print it, or read ``graphs``.

    Attributes:
        graphs: one report per host graph, in the order in which they were compiled.
        fallbacks: graphs that run through Inductor's own wrapper, with the reason.
        not_stored: why no cache could hold what was compiled; empty where nobody asked for it.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    not_stored: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, compilations: Sequence[Compilation]) -> Explanation:
        graphs = [GraphReport(program) for one in compilations for program in one.programs]
        fallbacks = [reason for one in compilations for reason in one.fallbacks]
        return cls(graphs, fallbacks, [reason for one in compilations for reason in one.not_stored])

    def __str__(self) -> str:
        file = io.StringIO()
        self._print(Console(file=file, width=_WIDTH, color_system=None, highlight=False))
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        graphs = [report.to_dict() for report in self.graphs]
        return {"graphs": graphs, "fallbacks": list(self.fallbacks), "not_stored": list(self.not_stored)}

    def to_html(self, path: str) -> None:
        """Write the printed form as a page."""
        console = Console(file=io.StringIO(), width=_WIDTH, record=True, highlight=False)
        self._print(console)
        console.save_html(path)

    def _print(self, console: Console) -> None:
        if not self.graphs and not self.fallbacks:
            console.print("nothing was compiled: the function has no tensor operations")
        for number, report in enumerate(self.graphs):
            console.print(_render(number, report))
        for reason in self.fallbacks:
            console.print(Text(f"runs through Inductor's own wrapper: {reason}"))
        for reason in self.not_stored:
            console.print(Text(f"compiled again in every process: no cache can hold {reason}"))


def explain(
    fn: Callable[..., Any], *args: Any, fxwrap_options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """Compile ``fn`` afresh, run it once on the arguments and return everything that was decided.

    Args:
        fn: a function or module; one that is compiled already is unwrapped.
        fxwrap_options: options as for ``torch.compile(..., options=...)``.
    """
    compilation = Compilation()
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    fn = getattr(fn, "_orig_mod", fn)
    compiled = torch.compile(
        with_own_code(fn),
        backend=functools.partial(backend, compilation=compilation),
        options=dict(fxwrap_options) if fxwrap_options else None,
    )
    compiled(*args, **kwargs)
    return Explanation.of([compilation])


def report(fn: Callable[..., Any] | None = None) -> Explanation:
    """What was decided about code that is compiled and in use; compiles and runs nothing.

    Args:
        fn: what ``torch.compile`` returned; None for everything that is alive. What a function calls is included
            if it was compiled in a call of that function (an optimizer's step, at which Dynamo breaks the graph).

    Raises:
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    compilations = live_compilations() if fn is None else compilations_of(fn)
    if fn is not None and not compilations:
        raise FxwrapError(
            f"{fn!r} has no program",
            expected='a function compiled with backend="fxwrap" that was called at least once',
            remedy="leave the argument out for all programs: what it calls may have been compiled for another caller",
        )
    return Explanation.of(compilations)


def output_bytes(memory: MemoryPlan) -> int:
    return sum(memory.sizes.get(index, 0) for index in memory.outputs)


def sizes_in_symbols(plan: ProgramPlan) -> dict[str, str]:
    """Bytes of every allocation, in the symbols of the graph: they are planned for each shape anew."""
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


def _render(number: int, report: GraphReport) -> RenderableType:
    parts: list[RenderableType] = [
        Rule(f"graph {number}: {report.phase} on {report.program.plan.device}", align="left", characters="-"),
        Text(list_graph(report.graph)),
        Text(),
        _partition_table(report.partitions),
        *_cut_lines(report.program.plan),
        Text(),
    ]
    memory = report.memory
    if memory is not None:
        parts += [_memory_table(report, memory), Text()]
    else:
        parts += [Text("memory: planned when a shape is recorded"), Text()]
    parts.append(_counter_lines(report.counters))
    if steps := report.unit.splitlines():
        python = sum(step.endswith(PYTHON) for step in steps)
        parts.append(Text(f"replayed natively: {len(steps)} steps, {python} of them in Python (GraphReport.unit)"))
    return Group(*parts, Text())


def _partition_table(partitions: tuple[Partition, ...]) -> Table:
    table = Table("partition", "verdict", "launches", "extern calls", "reason", box=None, pad_edge=False)
    for p in partitions:
        reason = p.reason or (f"estimate: {p.benefit}" if p.benefit is not None else "-")
        table.add_row(str(p.index), p.verdict.value, str(p.launches), str(p.externs), Text(reason))
    return table


def _cut_lines(plan: ProgramPlan) -> list[Text]:
    """How good the cut is, and what would have to change for more to be captured."""
    lines = []
    cut = plan.cut
    if cut.in_program_order > 1 or cut.fewest > 1:
        reordered = f"{cut.fewest} is the least that dependencies allow, program order has {cut.in_program_order}"
        lines.append(f"captured partitions: {cut.captured}; {reordered}")
    if cut.partitions_cost_memory:
        lines.append(
            f"peak_budget={cut.peak_budget} decided: fewer partitions need more than {cut.peak:,} bytes, program "
            f"order {cut.program_order_peak:,}"
        )
    remedies = dict.fromkeys(
        f"{operator_name(node)}: {plan.verdicts[node.name].remedy}"
        for p in plan.partitions
        if p.verdict is Verdict.EAGER
        for node in plan.work_in(p)
        if plan.verdicts[node.name].remedy and not plan.verdicts[node.name].inherited and is_work(node)
    )
    if remedies:
        lines += ["to have more captured:", *(f"  {remedy}" for remedy in remedies)]
    return [Text(line) for line in lines]


def _memory_table(report: GraphReport, memory: MemoryPlan) -> RenderableType:
    table = Table("memory", "storages", "bytes", "lower bound", "without reuse", box=None, pad_edge=False)
    for device, arena in memory.arenas.items():
        table.add_row(
            f"arena on {device}",
            str(len(memory.inside(arena))),
            f"{arena.size:,}",
            f"{arena.lower_bound:,}",
            f"{arena.plain:,}",
        )
    if not memory.arenas:
        shared = sum(len(memory.inside(region)) for region in memory.regions)
        regions = f"{sum(region.size for region in memory.regions):,}"
        bounds = f"{memory.peak:,}", f"{memory.lower_bound:,}", f"{memory.plain:,}"
        table.add_row("comes and goes with each call", str(shared + len(memory.per_call)), *bounds)
        table.add_row(f"  of which in {len(memory.regions)} region(s)", str(shared), regions, "", "")
    outside = outside_the_plan(report.program.plan)
    table.add_row("  of which outputs", str(len(memory.outputs)), f"{output_bytes(memory):,}", "", "")
    table.add_row("allocated by operators", str(len(outside)), "not planned", "", "")
    why = [Text(f"  {count} by {reason}") for reason, count in Counter(outside.values()).items()]
    symbolic = {name: n for name, n in sizes_in_symbols(report.program.plan).items() if not n.isdigit()}
    sizes = [Text(f"bytes by shape: {', '.join(f'{name} {n}' for name, n in symbolic.items())}")] if symbolic else []
    return Group(table, *why, *sizes, *_prediction_lines(report))


def _prediction_lines(report: GraphReport) -> list[Text]:
    estimate = report.program.estimate
    if estimate is None:
        return []
    if estimate.follows:
        return [Text("predicted with the forward graph")]
    lines = []
    together = report.phase == "forward" and estimate.successor is not None
    who = "forward and backward take" if together else "a call takes"
    for one in report.predicted:
        parts = [f"arena {one.arena:,}"] if one.arena or not one.outside else []
        if one.outside:
            parts.append(f"allocated when needed {one.outside:,}, by operators {one.operators:,} of it")
        lines.append(f"predicted on {one.device}: {who} {one.total:,} bytes ({'; '.join(parts)})")
        kept = f"{one.outputs:,} bytes are the caller's in the end"
        stay = f", and {estimate.static_inputs:,} bytes of inputs stay where they are"
        lines.append(f"  {kept}{stay if estimate.static_inputs else ''}")
    return [Text(line) for line in lines]


def _counter_lines(counters: Mapping[str, Any]) -> Text:
    def many(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{count} ({reason})" for reason, count in counts.items()) or "0"

    return Text(
        f"replays: {counters['replays']}\n"
        f"recordings: {many(counters['recordings'])}\n"
        f"eager runs: {many(counters['eager'])}"
        + (f"\nevents: {many(counters['events'])}" if counters["events"] else "")
    )


def total(programs: list[Program]) -> dict[str, Any]:
    """Add up the counters of programs."""
    result: dict[str, Any] = {"programs": len(programs), "replays": 0}
    sums: dict[str, Counter[str]] = {name: Counter() for name in ("recordings", "eager", "events")}
    for program in programs:
        counters = program.counters.to_dict()
        result["replays"] += counters["replays"]
        for name, counter in sums.items():
            counter.update(counters[name])
    return {**result, **{name: dict(counter) for name, counter in sums.items()}, "fallbacks": {}, "not_stored": {}}
