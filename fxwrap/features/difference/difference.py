"""Comparison of two reports: before and after an edit, for two shapes, on two versions of torch.

Names of nodes and kernels shift when anything is added before them. Therefore lines are compared without names: first
by what they do, then, for equal lines, by their operands. Times differ at every run: they are shown, but do not count
as a difference.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from ...graphs.replay.lowering import PYTHON
from ...inspection.document import Document, GraphData, KernelData, NodeData, short_line
from ...inspection.explanation import Explanation
from ...plan import Verdict

SCHEMA = "fxwrap.difference/1"
_WIDTH = 118
# The number of lines of each kind that are printed; ``to_dict`` has all of them.
_SHOWN = 12


@dataclass(frozen=True)
class Change:
    """One value that changed; ``before`` or ``after`` is None if it did not exist."""

    what: str
    before: Any
    after: Any


@dataclass(frozen=True)
class GraphDifference:
    """The changes in one host graph.

    Attributes:
        title: its number, phase and device.
        before, after: its position in each report; None if it has no counterpart.
        lines: inputs, launches and library calls that were removed, added, or have other operands (then both lines
            are present); ``what`` is the user's line.
        others: the numbers of allocations, views and outputs that were removed and added.
        partitions: numbers of partitions and of work in them, and work whose verdict changed, with reasons.
        memory: sizes in bytes.
        kernels: sources that were removed, added or changed, by the kernel's name.
        counters: numbers of replays, recordings and eager runs, and of native steps.
    """

    title: str
    before: int | None
    after: int | None
    lines: tuple[Change, ...] = ()
    others: tuple[int, int] = (0, 0)
    partitions: tuple[Change, ...] = ()
    memory: tuple[Change, ...] = ()
    kernels: tuple[Change, ...] = ()
    counters: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        changes = self.lines or self.partitions or self.memory or self.kernels or self.counters
        return None in (self.before, self.after) or bool(changes) or self.others != (0, 0)


@dataclass(frozen=True)
class Difference:
    """The changes between two reports; false if there are none. Print it, or read its attributes.

    Attributes:
        versions: versions of torch, fxwrap and Python.
        graphs: graphs that changed, were removed or added.
        other: fallbacks, parts that no cache can hold, and measured allocations of calls.
        times: times of compiling and of calls, in microseconds; they do not count as a difference.
    """

    versions: tuple[Change, ...]
    graphs: tuple[GraphDifference, ...]
    other: tuple[Change, ...]
    times: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.versions or self.graphs or self.other)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {"schema": SCHEMA, "different": bool(self), **dataclasses.asdict(self)}

    def __str__(self) -> str:
        file = io.StringIO()
        self._print(Console(file=file, width=_WIDTH, color_system=None, highlight=False))
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    __repr__ = __str__

    def _print(self, console: Console) -> None:
        if not self:
            console.print("no difference")
        for change in (*self.versions, *self.other):
            console.print(_line(change))
        for graph in self.graphs:
            console.print(Rule(graph.title, align="left", characters="-"))
            for line in _graph_lines(graph):
                console.print(line)
        if self.times:
            console.print("times, which are no difference:")
        for change in self.times:
            console.print(_line(change, " us"))


def diff(explanation: Explanation, other: Explanation) -> Difference:
    """The changes from this report to ``other``: print it; it is false if there are none."""
    return difference(explanation.to_document(), other.to_document())


def difference(before: Document, after: Document) -> Difference:
    """Compare two reports."""
    graphs = [_graphs(before.graphs, after.graphs, *pair) for pair in _pairs(before.graphs, after.graphs)]
    other: list[Change] = []
    for what in ("fallbacks", "not_stored", "limits"):
        gone, come = Counter(getattr(before, what)), Counter(getattr(after, what))
        other += [Change(what, line, None) for line in gone - come]
        other += [Change(what, None, line) for line in come - gone]
    return Difference(
        _changes(before.versions, after.versions),
        tuple(filter(None, graphs)),
        (*other, *_changes(_allocated(before), _allocated(after))),
        _changes(_times(before), _times(after)),
    )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    names = dict.fromkeys((*before, *after))
    return tuple(Change(n, before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n))


def _times(document: Document) -> dict[str, int]:
    stages = sum(stage.us for graph in document.graphs for stage in graph.stages)
    times = {"compiling": document.compile_us, "fxwrap's stages in it": stages}
    if document.calls:
        times["the last call"] = document.calls[-1].us
    return {name: round(us) for name, us in times.items()}


def _allocated(document: Document) -> dict[str, int]:
    last = document.calls[-1].allocated_bytes if document.calls else {}
    return {f"bytes that a call allocates on {device}, measured": nbytes for device, nbytes in last.items()}


# -- graphs ---------------------------------------------------------------------------------------------------------


def _pairs(before: Sequence[GraphData], after: Sequence[GraphData]) -> list[tuple[int | None, int | None]]:
    """The positions of graphs that correspond: first those with equal lines, then by phase and order."""
    old_keys, new_keys = ([(graph.phase, *_keys(graph).values()) for graph in graphs] for graphs in (before, after))
    pairs: list[tuple[int | None, int | None]] = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old_keys, new_keys, autojunk=False).get_opcodes():
        if tag == "equal":
            pairs += zip(range(a, b), range(c, d), strict=True)
            continue
        unpaired = list(range(c, d))
        for old in range(a, b):
            new = next((number for number in unpaired if after[number].phase == before[old].phase), None)
            pairs.append((old, new))
            if new is not None:
                unpaired.remove(new)
        pairs += [(None, new) for new in unpaired]
    return pairs


def _graphs(
    befores: Sequence[GraphData], afters: Sequence[GraphData], old: int | None, new: int | None
) -> GraphDifference:
    graph = befores[old] if old is not None else afters[new or 0]
    what = f"{graph.phase} on {graph.device}"
    if old is None or new is None:
        where = "added" if old is None else "gone"
        work = sum(bool(node.operator) for node in graph.nodes.values())
        number = new if old is None else old
        return GraphDifference(f"graph {number}: {what}, {where} ({work} launches and library calls)", old, new)
    before, after = befores[old], afters[new]
    numbers = f"graph {old}" if old == new else f"graph {old}, now {new}"
    same, gone, come = _aligned(before, after)
    others = [
        sum(not _is_shown(graph.nodes[name]) for name in names) for graph, names in ((before, gone), (after, come))
    ]
    return GraphDifference(
        f"{numbers}: {what}",
        old,
        new,
        _lines(before, after, same, gone, come),
        (others[0], others[1]),
        (*_changes(_counts(before), _counts(after)), *_verdicts(before, after, same)),
        _changes(_memory(before), _memory(after)),
        _kernels(before.kernels, after.kernels),
        _changes(_counters(before), _counters(after)),
    )


_WORD = re.compile(r"(?<![.\w])[A-Za-z_]\w*(?![\w.(=])")
_SYMBOL = re.compile(r"\b[su]\d+\b")


def _without_number(kernel: str) -> str:
    return re.sub(r"_\d+$", "", kernel)


def _keys(graph: GraphData) -> dict[str, str]:
    """The text of each node's line without names, by node."""
    nodes = graph.nodes
    # What the user's code calls inputs is no word: layers.0.weight.
    called = {nodes[name].line.partition(": ")[0] for name in _inputs(graph)} - nodes.keys()
    names = re.compile(rf"(?<![.\w])({'|'.join(sorted(map(re.escape, called), reverse=True)) or '(?!)'})(?![.\w\[])")

    def key(node: NodeData) -> str:
        text = re.sub(r" \(.*\)$", "", node.line) if node.kind == "placeholder" else node.line
        text = _WORD.sub(lambda word: "%" if word[0] in nodes else word[0], names.sub("%", text))
        if node.kind == "launch":
            text = text.replace(node.operator, _without_number(node.operator))
        return f"{node.kind} {_SYMBOL.sub('s', text)}"

    return {name: key(node) for name, node in nodes.items() if node.line}


def _aligned(before: GraphData, after: GraphData) -> tuple[dict[str, str], list[str], list[str]]:
    """The nodes of ``before`` with their counterparts in ``after``, the names of removed nodes, and of added ones."""
    old, new = _keys(before), _keys(after)
    inputs, as_inputs = _inputs(before), _inputs(after)
    # If the number of inputs is the same, they are the same inputs, of any size.
    same = dict(zip(inputs, as_inputs, strict=True)) if len(inputs) == len(as_inputs) else {}
    gone, come = list[str](), list[str]()
    names, named = [name for name in old if name not in same], [name for name in new if name not in same.values()]
    matcher = difflib.SequenceMatcher(None, [old[n] for n in names], [new[n] for n in named], autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            same.update(zip(names[a:b], named[c:d], strict=True))
        else:
            gone += names[a:b]
            come += named[c:d]
    return same, gone, come


def _inputs(graph: GraphData) -> list[str]:
    return [name for name, node in graph.nodes.items() if node.kind == "placeholder" and node.line]


def _is_shown(node: NodeData) -> bool:
    """Whether a node's line is shown (the others are counted)."""
    return bool(node.operator) or node.kind == "placeholder"


def _lines(
    before: GraphData, after: GraphData, same: Mapping[str, str], gone: Sequence[str], come: Sequence[str]
) -> tuple[Change, ...]:
    old, new = before.nodes, after.nodes
    changes = [Change(old[n].user_line, old[n].line, None) for n in gone if _is_shown(old[n])]
    changes += [Change(new[n].user_line, None, new[n].line) for n in come if _is_shown(new[n])]
    old_keys, new_keys = _keys(before), _keys(after)
    for name, now in same.items():
        # An operand without a counterpart is a change of its own.
        inputs = zip(old[name].inputs, new[now].inputs, strict=False)
        other_operands = old[name].operator and any(same.get(was, is_now) != is_now for was, is_now in inputs)
        if other_operands or old_keys[name] != new_keys[now]:
            changes.append(Change(new[now].user_line, old[name].line, new[now].line))
    return tuple(changes)


def _counts(graph: GraphData) -> dict[str, int]:
    partitions = graph.partitions
    verdicts = Counter(partition.verdict for partition in partitions)
    return {
        **{f"{verdict.value} partitions": verdicts[verdict] for verdict in Verdict},
        "launches": sum(partition.launches for partition in partitions),
        "library calls": sum(partition.externs for partition in partitions),
    }


def _verdict(graph: GraphData, name: str) -> tuple[str, str]:
    """The verdict on a node, and the reason if it is eager."""
    node = graph.nodes[name]
    partition = next((part for part in graph.partitions if part.index == node.partition), None)
    if partition is None:
        return node.verdict, node.reason
    captured = partition.verdict is Verdict.CAPTURED
    return partition.verdict.value, "" if captured else node.reason or partition.reason


def _verdicts(before: GraphData, after: GraphData, same: Mapping[str, str]) -> tuple[Change, ...]:
    counts = Counter[tuple[str, str, str]]()
    for name, now in same.items():
        node, (was, why_not), (became, why) = after.nodes[now], _verdict(before, name), _verdict(after, now)
        if node.operator and was != became:
            texts = (f"{was}: {why_not}" if why_not else was), (f"{became}: {why}" if why else became)
            counts[(_without_number(node.operator), *texts)] += 1
    return tuple(
        Change(f"{count} x {operator}" if count > 1 else operator, was, became)
        for (operator, was, became), count in counts.items()
    )


def _memory(graph: GraphData) -> dict[str, int]:
    memory = graph.memory
    if memory is None:
        return {}
    copies = Counter[str]()
    for copy in memory.copies:
        copies[f"copied at every replay: {copy.what}s"] += copy.bytes
    return {
        "peak": memory.peak_bytes,
        "lower bound": memory.lower_bound_bytes,
        "Inductor's peak": memory.inductor_peak_bytes,
        "without reuse": memory.without_reuse_bytes,
        "arenas": memory.arena_bytes,
        "outputs": memory.output_bytes,
        "allocated by operators": memory.operator_bytes,
        "inputs that stay in place": memory.static_input_bytes,
        **{f"predicted on {prediction.device}": prediction.total for prediction in memory.predicted},
        **copies,
    }


def _kernels(before: Sequence[KernelData], after: Sequence[KernelData]) -> tuple[Change, ...]:
    unpaired = list(after)

    def take(old: KernelData, key: Callable[[KernelData], Hashable]) -> KernelData | None:
        new = next((kernel for kernel in unpaired if key(kernel) == key(old)), None)
        if new is not None:
            unpaired.remove(new)
        return new

    pairs = [(old, take(old, _source)) for old in before]
    changes = []
    for old, new in pairs:
        if new is not None:
            if old.configurations != new.configurations:
                what = f"configuration of {old.name}"
                changes.append(Change(what, str(list(old.configurations)), str(list(new.configurations))))
            continue
        now = take(old, lambda kernel: _without_number(kernel.name))
        changes.append(Change(f"kernel {old.name}", old.source, now.source if now is not None else None))
    return (*changes, *(Change(f"kernel {kernel.name}", None, kernel.source) for kernel in unpaired))


def _source(kernel: KernelData) -> tuple[str, str]:
    """The language and the source of a kernel, without its own name and the folder of torch's headers."""
    source = kernel.source.replace(kernel.name, "kernel")
    return kernel.language, re.sub(r'(#include ")/.*/', r"\1", source)


def _counters(graph: GraphData) -> dict[str, int]:
    counters = graph.counters
    kinds = {"recordings": counters.recordings, "eager runs": counters.eager, "events": counters.events}
    return {
        "replays": counters.replays,
        **{f"{kind}, {why}": count for kind, counts in kinds.items() for why, count in counts.items()},
        "native steps of a replay": len(graph.unit),
        "of them in Python": sum(step.endswith(PYTHON) for step in graph.unit),
    }


# -- as text --------------------------------------------------------------------------------------------------------


def _line(change: Change, unit: str = "") -> Text:
    def shown(value: Any) -> str:
        return f"{value:,}{unit}" if isinstance(value, int) else str(value)

    if change.before is None:
        return Text(f"+ {change.what}: {shown(change.after)}")
    if change.after is None:
        return Text(f"- {change.what}: {shown(change.before)}")
    text = f"  {change.what}: {shown(change.before)} -> {shown(change.after)}"
    if isinstance(change.before, int) and isinstance(change.after, int) and change.before:
        text += f" ({(change.after / change.before - 1) * 100:+.0f}%)"
    return Text(text)


def _graph_lines(graph: GraphDifference) -> Iterator[Text]:
    yield from map(_line, graph.partitions)
    for change in graph.memory:
        yield _line(change, " bytes")
    yield from map(_line, graph.counters)
    yield from _some(list(map(_kernel_line, graph.kernels)))
    yield from _some([line for change in graph.lines for line in _node_lines(change)])
    if graph.others != (0, 0):
        yield Text("  allocations, views and outputs: {} gone, {} new".format(*graph.others))


def _some(lines: list[Text]) -> Iterator[Text]:
    yield from lines[:_SHOWN]
    if len(lines) > _SHOWN:
        yield Text(f"  and {len(lines) - _SHOWN} lines more (to_dict() has them)")


def _kernel_line(change: Change) -> Text:
    if change.before is None or change.after is None:
        return Text(f"{'+' if change.before is None else '-'} {change.what}")
    if not change.what.startswith("kernel"):
        return _line(change)
    lines = list(difflib.unified_diff(change.before.splitlines(), change.after.splitlines(), n=0, lineterm=""))[2:]
    new, gone = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return Text(f"  {change.what}: another source ({new} lines new, {gone} gone)")


def _node_lines(change: Change) -> list[Text]:
    lines = ((sign, line) for sign, line in (("-", change.before), ("+", change.after)) if line is not None)
    where = f"   [{short_line(change.what)}]" if change.what else ""
    return [Text(f"{sign} {line}{where}") for sign, line in lines]
