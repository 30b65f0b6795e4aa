"""A report as text, for a terminal."""

from __future__ import annotations

import datetime
import io
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..codegen.dynamo.report import DynamoReport
from ..graphs.replay.lowering import PYTHON
from ..hooks import report_sections
from ..plan import Partition, Verdict
from .document import CountersData, Document, GraphData, short_line
from .memory_map import MemoryData

_WIDTH = 118
_AT_PEAK, _RECORDINGS, _REPEATED = 5, 10, 10


def text_of(document: Document) -> str:
    file = io.StringIO()
    console = Console(file=file, width=_WIDTH, color_system=None, highlight=False)
    sections = report_sections(document.sections)
    if not document.graphs and not document.fallbacks:
        console.print(Text(nothing_compiled(document.dynamo)))
    for number, graph in enumerate(document.graphs):
        console.print(_graph(number, graph))
        for text in filter(None, (section.text(graph.name) for section in sections)):
            console.print(Text(f"{text}\n"), soft_wrap=True)
    for reason in document.fallbacks:
        console.print(Text(f"runs through Inductor's own wrapper: {reason}"))
    for reason in document.not_stored:
        console.print(Text(f"compiled again in every process: no cache can hold {reason}"))
    if told := str(document.dynamo):
        console.print(Text(told))
    for number, call in enumerate(document.calls):
        peaks = ", ".join(f"{nbytes:,} bytes on {device}" for device, nbytes in call.allocated_bytes.items())
        took = f"call {number}: {call.us:,.0f} us"
        console.print(Text(f"{took}, allocated at one time at most {peaks}" if peaks else took))
    for limit in document.limits:
        console.print(Text(f"limit of this report: {limit}"))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def nothing_compiled(dynamo: DynamoReport) -> str:
    """The text of a report without graphs."""
    if str(dynamo):
        return "nothing was compiled"  # what follows says why
    if not dynamo.seen:
        return (
            "nothing was compiled: Dynamo has looked at no function\n"
            "  none was called, what was compiled is gone, or compiling is switched off\n"
            "  (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE, torch.compiler.set_stance)"
        )
    return "nothing was compiled: the function has no tensor operations"


def _graph(number: int, graph: GraphData) -> RenderableType:
    parts: list[RenderableType] = [
        Rule(f"graph {number}: {graph.phase} on {graph.device}", align="left", characters="-"),
        Text(graph.graph),
        Text(),
        _partitions(graph.partitions),
        *_cut(graph),
        Text(),
        _memory(graph, graph.memory) if graph.memory else Text("memory: planned when a shape is recorded"),
        *_repeated(graph),
        Text(),
        Text(f"in logs and profiles: {graph.name}"),
        _counters(graph.counters),
        *_recordings(graph),
        *_compiled(graph),
    ]
    if steps := graph.unit:
        python = sum(step.endswith(PYTHON) for step in steps)
        parts.append(Text(f"replayed natively: {len(steps)} steps, {python} of them in Python (GraphReport.unit)"))
    return Group(*parts, Text())


def _commas(number: int) -> str:
    return f"{number:,}"


def _partitions(partitions: Sequence[Partition]) -> Table:
    table = Table("partition", "verdict", "launches", "library calls", "reason", box=None, pad_edge=False)
    for p in partitions:
        reason = p.reason or ("-" if p.benefit is None else f"estimate: {p.benefit}")
        table.add_row(str(p.index), p.verdict.value, str(p.launches), str(p.externs), Text(reason))
    return table


def _cut(graph: GraphData) -> list[Text]:
    """How the partitions compare with the best possible ones, and what would have to change to capture more."""
    lines, cut = list[str](), graph.cut
    if cut.in_program_order > 1 or cut.fewest_possible > 1:
        least = f"{cut.fewest_possible} is the least that dependencies allow"
        lines.append(f"captured partitions: {cut.captured}; {least}, program order has {cut.in_program_order}")
    if cut.chosen > cut.fewest_possible:
        lines.append(
            f"peak_budget={cut.peak_budget} decided: fewer partitions need more than {cut.peak_bytes:,} bytes, "
            f"program order {cut.peak_bytes_in_program_order:,}"
        )
    eager = (graph.nodes[name] for p in graph.partitions if p.verdict is Verdict.EAGER for name in p.nodes)
    causes = (n for n in eager if n.operator and n.to_capture_it and not n.inherited)
    remedies = dict.fromkeys(f"{n.operator}: {n.to_capture_it}" for n in causes)
    if remedies:
        lines += ["to have more captured:", *(f"  {remedy}" for remedy in remedies)]
    return list(map(Text, lines))


def _memory(graph: GraphData, memory: MemoryData) -> RenderableType:
    table = Table("memory", "storages", "bytes", "lower bound", "without reuse", box=None, pad_edge=False)
    for arena in memory.arenas:
        sizes = arena.bytes, arena.lower_bound_bytes, arena.without_reuse_bytes
        table.add_row(f"arena on {arena.device}", str(arena.storages), *map(_commas, sizes))
    storages = memory.storages
    outputs = sum(storage.use in ("output", "saved for backward") for storage in storages)
    if not memory.arenas:
        planned = [s for s in storages if s.use not in ("result of an operator", "workspace")]
        shared = [storage for storage in planned if storage.region is not None]
        sizes = memory.peak_bytes, memory.lower_bound_bytes, memory.without_reuse_bytes
        table.add_row("comes and goes with each call", str(len(planned)), *map(_commas, sizes))
        table.add_row(f"  of which in {memory.regions} region(s)", str(len(shared)), f"{memory.region_bytes:,}")
        if memory.kept_bytes:
            table.add_row("  of which kept for later calls", "", f"{memory.kept_bytes:,}")
    outside = graph.outside_the_plan
    table.add_row("  of which outputs", str(outputs), f"{memory.output_bytes:,}")
    table.add_row("allocated by operators", str(len(outside)), "not planned")
    lines = [f"  {count} by {reason}" for reason, count in Counter(outside.values()).items()]
    symbolic = {name: size for name, size in graph.sizes.items() if not size.isdigit()}
    if symbolic:
        lines.append(f"bytes by shape: {', '.join(f'{name} {n}' for name, n in symbolic.items())}")
    lines += [
        f"at the same time, in {len(one.nodes)} lanes: {sum(map(len, one.nodes))} nodes ({one.waits} wait for "
        f"another lane), estimated {one.in_lanes_us:.0f} us; one after the other {one.one_after_the_other_us:.0f} us"
        for one in memory.lanes
    ]
    lines += _peak(memory)
    lines += [f"every replay copies {c.what} {c.name}: {c.bytes:,} bytes" for c in memory.copies]
    lines += _prediction(memory)
    return Group(table, *map(Text, lines))


def _repeated(graph: GraphData) -> list[Text]:
    """What runs again to stay within ``memory_limit``, the largest first."""
    if not graph.repeated:
        return []
    moved = sum(again.moved for again in graph.repeated)
    largest = sorted(graph.repeated, key=lambda again: -again.nbytes)
    lines = [f"launched again, within memory_limit: {len(largest)} nodes, which move {moved:,} bytes"]
    lines += [f"  {a.node}: {a.nbytes:,} bytes were free, for {a.moved:,} moved" for a in largest[:_REPEATED]]
    if more := len(largest) - _REPEATED:
        lines += [f"  and {more} more"] if more > 0 else []
    return list(map(Text, lines))


def _peak(memory: MemoryData) -> list[str]:
    peak = memory.peak
    if peak is None:
        return []
    sizes = {storage.name: storage.size for storage in memory.storages}
    largest = [f"{name} {sizes[name]:,}" for name in peak.storages[:_AT_PEAK]]
    if more := len(peak.storages) - len(largest):
        largest.append(f"{more} more")
    where = f" ({short_line(peak.user_line)})" if peak.user_line else ""
    return [f"most is alive at {peak.node}{where}: {', '.join(largest)}"]


def _prediction(memory: MemoryData) -> list[str]:
    if memory.predicted_with == "forward":
        return ["predicted with the forward graph"]
    lines = []
    for part in memory.predicted:
        together = memory.predicted_with == "backward"
        subject = "forward and backward take" if together else "a call takes"
        parts = [f"arena {part.arena:,}"] if part.arena or not part.outside else []
        if part.outside:
            parts.append(f"allocated when needed {part.outside:,}, by operators {part.operators:,} of it")
        lines.append(f"predicted on {part.device}: {subject} {part.total:,} bytes ({'; '.join(parts)})")
        static = memory.static_input_bytes
        stay = f", and {static:,} bytes of inputs stay where they are" if static else ""
        lines.append(f"  {part.outputs:,} bytes are the caller's in the end{stay}")
    return lines


def _counters(counters: CountersData) -> Text:
    def many(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{count} ({reason})" for reason, count in counts.items()) or "0"

    return Text(
        f"replays: {counters.replays}\n"
        f"recordings: {many(counters.recordings)}\n"
        f"eager runs: {many(counters.eager)}" + (f"\nevents: {many(counters.events)}" if counters.events else "")
    )


def _recordings(graph: GraphData) -> list[RenderableType]:
    """A table of when and why each recording was made, if there is more than one."""
    recordings = graph.recordings
    if len(recordings) < 2:
        return []
    table = Table("recorded", "why", "sizes", "took", "copies at each replay", box=None, pad_edge=False)
    for recording in recordings[-_RECORDINGS:]:
        when = datetime.datetime.fromtimestamp(recording.when).strftime("%H:%M:%S.%f")[:-3]
        sizes = ", ".join(f"{name}={value}" for name, value in recording.sizes.items())
        copied = f"{recording.copied_in_bytes + recording.copied_out_bytes:,} bytes"
        table.add_row(when, Text(recording.why), Text(sizes), f"{recording.us / 1e3:.1f} ms", copied)
    earlier = len(recordings) - len(recordings[-_RECORDINGS:])
    return [table, *([Text(f"and {earlier} before")] if earlier else [])]


def _compiled(graph: GraphData) -> list[RenderableType]:
    """A table of the resources of kernels that were compiled for a device which this machine lacks."""
    columns = "compiled kernel", "configuration", "registers", "spilled bytes", "shared bytes", "cubin bytes"
    table = Table(*columns, box=None, pad_edge=False)
    for kernel in graph.kernels:
        for code in kernel.compiled:
            numbers = code.registers, code.spilled_bytes, code.shared_bytes, code.cubin_bytes
            configuration = ", ".join(f"{name} {value}" for name, value in code.configuration.items())
            table.add_row(kernel.name, configuration, *map(_commas, numbers))
    return [table] if table.row_count else []
