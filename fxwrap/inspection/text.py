"""A document as text, for people at a terminal."""

from __future__ import annotations

import datetime
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..graphs.replay.lowering import PYTHON
from .document import BenefitData, Document, DynamoData, GraphData, PartitionData, short_line
from .memory_map import MemoryData

_WIDTH = 118
_AT_PEAK, _RECORDINGS = 5, 10


def text_of(document: Document) -> str:
    file = io.StringIO()
    print_document(document, Console(file=file, width=_WIDTH, color_system=None, highlight=False))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def print_document(document: Document, console: Console) -> None:
    if not document["graphs"] and not document["fallbacks"]:
        console.print(Text(nothing_compiled(document["dynamo"])))
    for number, graph in enumerate(document["graphs"]):
        console.print(_graph(number, graph))
    for reason in document["fallbacks"]:
        console.print(Text(f"runs through Inductor's own wrapper: {reason}"))
    for reason in document["not_stored"]:
        console.print(Text(f"compiled again in every process: no cache can hold {reason}"))
    for one in document["dynamo"]["breaks"]:
        console.print(Text(f"graph break at {one['user_line']}\n  {one['reason']}"))
    for one in document["dynamo"]["skipped"]:
        console.print(Text(f"not compiled: {one['function']}, {one['user_line']}\n  {one['reason']}"))
    for number, call in enumerate(document["calls"]):
        peaks = ", ".join(f"{nbytes:,} bytes on {device}" for device, nbytes in call["allocated_bytes"].items())
        took = f"call {number}: {call['us']:,.0f} us"
        console.print(Text(f"{took}, allocated at one time at most {peaks}" if peaks else took))
    for limit in document["limits"]:
        console.print(Text(f"limit of this report: {limit}"))


def nothing_compiled(dynamo: DynamoData) -> str:
    """What is said where there is no graph."""
    if dynamo["breaks"] or dynamo["skipped"]:
        return "nothing was compiled"  # what follows says why
    if not dynamo["seen"]:
        return (
            "nothing was compiled: Dynamo has looked at no function\n"
            "  none was called, what was compiled is gone, or compiling is switched off\n"
            "  (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE, torch.compiler.set_stance)"
        )
    return "nothing was compiled: the function has no tensor operations"


def _graph(number: int, graph: GraphData) -> RenderableType:
    memory = graph["memory"]
    if memory is None:
        about_memory: list[RenderableType] = [Text("memory: planned when a shape is recorded"), Text()]
    else:
        about_memory = [_memory(graph, memory), Text()]
    parts: list[RenderableType] = [
        Rule(f"graph {number}: {graph['phase']} on {graph['device']}", align="left", characters="-"),
        Text(graph["graph"]),
        Text(),
        _partitions(graph["partitions"]),
        *_cut(graph),
        Text(),
        *about_memory,
        Text(f"in logs and profiles: {graph['name']}"),
        _counters(graph["counters"]),
        *_recordings(graph),
        *_compiled(graph),
    ]
    if steps := graph["unit"]:
        python = sum(step.endswith(PYTHON) for step in steps)
        parts.append(Text(f"replayed natively: {len(steps)} steps, {python} of them in Python (GraphReport.unit)"))
    return Group(*parts, Text())


def _partitions(partitions: Sequence[PartitionData]) -> Table:
    table = Table("partition", "verdict", "launches", "extern calls", "reason", box=None, pad_edge=False)
    for p in partitions:
        reason = p["reason"] or (f"estimate: {_benefit(p['benefit_us'])}" if p["benefit_us"] is not None else "-")
        table.add_row(str(p["index"]), p["verdict"], str(p["launches"]), str(p["extern_calls"]), Text(reason))
    return table


def _benefit(benefit: BenefitData) -> str:
    costs = f"{benefit['replay']:.0f} us of replay and {benefit['copies']:.0f} us of copies"
    return f"saves {benefit['saved']:.0f} us of calls for {costs}"


def _cut(graph: GraphData) -> list[Text]:
    """How good the cut is, and what would have to change for more to be captured."""
    lines, cut = list[str](), graph["cut"]
    if cut["in_program_order"] > 1 or cut["fewest_possible"] > 1:
        least = f"{cut['fewest_possible']} is the least that dependencies allow"
        lines.append(f"captured partitions: {cut['captured']}; {least}, program order has {cut['in_program_order']}")
    if cut["chosen"] > cut["fewest_possible"]:
        lines.append(
            f"peak_budget={cut['peak_budget']} decided: fewer partitions need more than {cut['peak_bytes']:,} bytes, "
            f"program order {cut['peak_bytes_in_program_order']:,}"
        )
    eager = (graph["nodes"][name] for p in graph["partitions"] if p["verdict"] == "eager" for name in p["nodes"])
    asked = (n for n in eager if n["operator"] and n["to_capture_it"] and not n["inherited"])
    remedies = dict.fromkeys(f"{n['operator']}: {n['to_capture_it']}" for n in asked)
    if remedies:
        lines += ["to have more captured:", *(f"  {remedy}" for remedy in remedies)]
    return list(map(Text, lines))


def _memory(graph: GraphData, memory: MemoryData) -> RenderableType:
    table = Table("memory", "storages", "bytes", "lower bound", "without reuse", box=None, pad_edge=False)
    for arena in memory["arenas"]:
        sizes = (f"{arena[key]:,}" for key in ("bytes", "lower_bound_bytes", "without_reuse_bytes"))
        table.add_row(f"arena on {arena['device']}", str(arena["storages"]), *sizes)
    outputs = sum(one["use"] in ("output", "saved for backward") for one in memory["storages"])
    if not memory["arenas"]:
        planned = [one for one in memory["storages"] if one["use"] not in ("result of an operator", "workspace")]
        shared = [one for one in planned if one["region"] is not None]
        sizes = (f"{memory[key]:,}" for key in ("peak_bytes", "lower_bound_bytes", "without_reuse_bytes"))  # type: ignore[literal-required]
        table.add_row("comes and goes with each call", str(len(planned)), *sizes)
        table.add_row(f"  of which in {memory['regions']} region(s)", str(len(shared)), f"{memory['region_bytes']:,}")
    outside = graph["outside_the_plan"]
    table.add_row("  of which outputs", str(outputs), f"{memory['output_bytes']:,}")
    table.add_row("allocated by operators", str(len(outside)), "not planned")
    lines = [f"  {count} by {reason}" for reason, count in Counter(outside.values()).items()]
    symbolic = {name: size for name, size in graph["sizes"].items() if not size.isdigit()}
    if symbolic:
        lines.append(f"bytes by shape: {', '.join(f'{name} {n}' for name, n in symbolic.items())}")
    lines += [*_peak(memory), *_copies(memory), *_prediction(memory)]
    return Group(table, *map(Text, lines))


def _peak(memory: MemoryData) -> list[str]:
    peak = memory["peak"]
    if peak is None:
        return []
    sizes = {one["name"]: one["bytes"] for one in memory["storages"]}
    largest = [f"{name} {sizes[name]:,}" for name in peak["storages"][:_AT_PEAK]]
    if more := len(peak["storages"]) - len(largest):
        largest.append(f"{more} more")
    where = f" ({short_line(peak['user_line'])})" if peak["user_line"] else ""
    return [f"most is alive at {peak['node']}{where}: {', '.join(largest)}"]


def _copies(memory: MemoryData) -> list[str]:
    return [f"every replay copies {one['what']} {one['name']}: {one['bytes']:,} bytes" for one in memory["copies"]]


def _prediction(memory: MemoryData) -> list[str]:
    if memory["predicted_with"] == "forward":
        return ["predicted with the forward graph"]
    lines = []
    for one in memory["predicted"]:
        together = memory["predicted_with"] == "backward"
        who = "forward and backward take" if together else "a call takes"
        parts = [f"arena {one['arena']:,}"] if one["arena"] or not one["outside"] else []
        if one["outside"]:
            parts.append(f"allocated when needed {one['outside']:,}, by operators {one['operators']:,} of it")
        lines.append(f"predicted on {one['device']}: {who} {one['total']:,} bytes ({'; '.join(parts)})")
        static = memory["static_input_bytes"]
        stay = f", and {static:,} bytes of inputs stay where they are" if static else ""
        lines.append(f"  {one['outputs']:,} bytes are the caller's in the end{stay}")
    return lines


def _counters(counters: Mapping[str, Any]) -> Text:
    def many(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{count} ({reason})" for reason, count in counts.items()) or "0"

    return Text(
        f"replays: {counters['replays']}\n"
        f"recordings: {many(counters['recordings'])}\n"
        f"eager runs: {many(counters['eager'])}"
        + (f"\nevents: {many(counters['events'])}" if counters["events"] else "")
    )


def _recordings(graph: GraphData) -> list[RenderableType]:
    """When each recording was made, and why, if there was more than one."""
    made = graph["recordings"]
    if len(made) < 2:
        return []
    table = Table("recorded", "why", "sizes", "took", "copies at each replay", box=None, pad_edge=False)
    for one in made[-_RECORDINGS:]:
        when = datetime.datetime.fromtimestamp(one["when"]).strftime("%H:%M:%S.%f")[:-3]
        sizes = ", ".join(f"{name}={value}" for name, value in one["sizes"].items())
        copied = f"{one['copied_in_bytes'] + one['copied_out_bytes']:,} bytes"
        table.add_row(when, Text(one["why"]), Text(sizes), f"{one['us'] / 1e3:.1f} ms", copied)
    earlier = len(made) - len(made[-_RECORDINGS:])
    return [table, *([Text(f"and {earlier} before")] if earlier else [])]


def _compiled(graph: GraphData) -> list[RenderableType]:
    """What kernels take on a device that is not there, a line for each configuration."""
    columns = "compiled kernel", "configuration", "registers", "spilled bytes", "shared bytes", "cubin bytes"
    table = Table(*columns, box=None, pad_edge=False)
    for kernel in graph["kernels"]:
        for one in kernel.get("compiled", ()):
            numbers = one["registers"], one["spilled_bytes"], one["shared_bytes"], one["cubin_bytes"]
            configuration = ", ".join(f"{name} {value}" for name, value in one["configuration"].items())
            table.add_row(kernel["name"], configuration, *(f"{number:,}" for number in numbers))
    return [table] if table.row_count else []
