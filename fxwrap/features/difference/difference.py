"""Comparison of two reports: before and after an edit, for two shapes, on two versions of torch.

Names shift when anything is added before them: lines are compared with each value named by the operator that made it,
and by its position among the results of that. All else is numbers, and is compared by its path in the documents.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...graphs.replay.lowering import PYTHON
from ...host_graph.typed_json import to_data
from ...inspection.document import Document, GraphData, KernelData, NodeData, short_line
from ...inspection.explanation import Explanation

SCHEMA = "fxwrap.difference/2"
# The lines that are printed of each graph; ``to_dict`` has all of them.
_SHOWN = 12
_NAME = re.compile(r"(?<![\w.])\w(?:[\w.]|\[[^\[\]]*\])*(?![\w.(=])")
# Parts of the document that only look changed: names and positions, estimates, and what other numbers say.
_LEFT_OUT = {"index", "nodes", "node", "name", "repeats", "device", "storages", "peak", "user_line", "benefit_us"}


@dataclass(frozen=True)
class Change:
    """One value that changed, by its path in the report; ``before`` or ``after`` is None if it did not exist."""

    what: str
    before: Any
    after: Any

    def __str__(self) -> str:
        was, now = (f"{one:,}" if isinstance(one, (int, float)) else str(one) for one in (self.before, self.after))
        if self.before is None or self.after is None:
            return f"+ {self.what}: {now}" if self.before is None else f"- {self.what}: {was}"
        both_numbers = isinstance(self.before, (int, float)) and isinstance(self.after, (int, float))
        share = f" ({self.after / self.before - 1:+.0%})" if both_numbers and self.before else ""
        return f"  {self.what}: {was} -> {now}{share}"


@dataclass(frozen=True)
class Difference:
    """The changes between two reports; false if there are none. Print it, or read its attributes.

    Attributes:
        numbers: versions, fallbacks, allocations; of each graph its work by verdict, memory, counters, native steps.
        lines: by graph: lines of the listing (except allocations) and kernels that are gone ("-") or new ("+"). One
            that changed, or works on other values than before, is both.
        times: in microseconds; they are no difference.
    """

    numbers: tuple[Change, ...]
    lines: dict[str, tuple[str, ...]]
    times: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.numbers or self.lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {"schema": SCHEMA, "different": bool(self), **dataclasses.asdict(self)}

    def __str__(self) -> str:
        text = [*([] if self else ["no difference"]), *map(str, self.numbers)]
        for graph, lines in self.lines.items():
            more = [f"and {len(lines) - _SHOWN} lines more (to_dict() has them)"] if len(lines) > _SHOWN else []
            text += [f"-- {graph} ".ljust(118, "-"), *lines[:_SHOWN], *more]
        return "\n".join([*text, *(["times, which are no difference:"] if self.times else []), *map(str, self.times)])

    __repr__ = __str__


def diff(explanation: Explanation, other: Explanation) -> Difference:
    """The changes from this report to ``other``: print it; it is false if there are none."""
    before, after = explanation.to_document(), other.to_document()
    numbers, lines = [*_changes(_of_document(before), _of_document(after))], dict[str, tuple[str, ...]]()
    pairs = _pairs(before.graphs, after.graphs)
    for what, graphs, paired in (("gone", before.graphs, pairs.keys()), ("added", after.graphs, {*pairs.values()})):
        for at in (at for at in range(len(graphs)) if at not in paired):
            work = sum(bool(node.operator) for node in graphs[at].nodes.values())
            said = f"{graphs[at].phase} on {graphs[at].device}, {work} launches and library calls"
            numbers.append(Change(f"graph {at}", *((said, None) if what == "gone" else (None, said))))
    for old, new in pairs.items():
        was, now, name = (
            before.graphs[old],
            after.graphs[new],
            f"graph {old}" + (f", now {new}" if old != new else ""),
        )
        numbers += _changes(_of_graph(was), _of_graph(now), f"{name}, ")
        if found := (*_gone_and_new(_kernels(was), _kernels(now)), *_lines(was, now)):
            lines[f"{name}: {was.phase} on {was.device}"] = found
    return Difference(tuple(numbers), lines, _changes(_times(before), _times(after)))


def _pairs(before: Sequence[GraphData], after: Sequence[GraphData]) -> dict[int, int]:
    """The positions of graphs that correspond: those with equal lines, else by phase and order."""
    texts = [[[*_described(graph)[0].values()] for graph in graphs] for graphs in (before, after)]
    pairs = dict[int, int]()
    for equal, old, new in itertools.product((True, False), range(len(before)), range(len(after))):
        alike = before[old].phase == after[new].phase and (not equal or texts[0][old] == texts[1][new])
        if alike and old not in pairs and new not in pairs.values():
            pairs[old] = new
    return dict(sorted(pairs.items()))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> tuple[Change, ...]:
    both = {path: (before.get(path), after.get(path)) for path in (*before, *after)}
    return tuple(Change(prefix + path, was, now) for path, (was, now) in both.items() if was != now)


def _numbers(data: Any) -> dict[str, Any]:
    """What data say, by path. The numbers of a list are added up; its texts are counted."""
    found: dict[str, Any] = {}

    def read(value: Any, path: tuple[str, ...], in_list: bool) -> None:
        if isinstance(value, dict):
            for key in (key for key in value if key not in _LEFT_OUT):
                read(value[key], (*path, key), in_list)
        elif isinstance(value, list):
            for one in value:
                read(one, path, True)
        elif in_list and value:
            counted = f"{'.'.join(path)} {value}", 1
            name, number = counted if isinstance(value, str) else (".".join(path), value)
            found[name] = found.get(name, 0) + number
        elif not in_list:
            found[".".join(path)] = value

    read(to_data(data), (), False)
    return found


def _of_document(document: Document) -> dict[str, Any]:
    parts = {part: getattr(document, part) for part in ("versions", "fallbacks", "not_stored", "limits")}
    return _numbers({**parts, "calls": [{"allocated_bytes": one.allocated_bytes} for one in document.calls[-1:]]})


def _times(document: Document) -> dict[str, int]:
    last_call = {"the last call, us": round(document.calls[-1].us)} if document.calls else {}
    return {"compiling, us": round(document.compile_us), **last_call}


def _of_graph(graph: GraphData) -> dict[str, Any]:
    verdicts = {part.index: (part.verdict.value, part.reason) for part in graph.partitions}
    work = Counter[str]()
    for node in filter(lambda node: node.operator, graph.nodes.values()):
        verdict, why = verdicts.get(node.partition, (node.verdict, node.reason))  # type: ignore[arg-type]
        why = why and (node.reason or why)
        work[f"{_operator(node)}: {verdict}{why and ': '}{why}"] += 1
    in_python = sum(step.endswith(PYTHON) for step in graph.unit)
    parts = {part: getattr(graph, part) for part in ("partitions", "memory", "counters", "repeated")}
    return {**work, **_numbers({**parts, "native steps": len(graph.unit), "native steps in Python": in_python})}


# -- lines ----------------------------------------------------------------------------------------------------------


def _operator(node: NodeData) -> str:
    return re.sub(r"_\d+$", "", node.operator) or node.kind


def _described(graph: GraphData) -> tuple[dict[str, str], dict[str, list[str]]]:
    """By node: its line, in which values have the names of what made them; and the nodes that made them."""
    made: dict[str, tuple[str, str]] = {}
    texts, makers = dict[str, str](), dict[str, list[str]]()
    for name, node in graph.nodes.items():
        operator, line, by = _operator(node), node.line, makers.setdefault(name, [])
        if node.kind == "placeholder":
            called, _, line = re.sub(r" \(.*\)$", "", line).partition(": ")
            made[called] = operator, name
        if node.kind != "launch":  # which is no value, and a word of lines
            made.setdefault(name, (operator, name))

        def named(found: re.Match[str], by: list[str] = by) -> str:
            word = found[0] if found[0] in made else re.split(r"\W", found[0])[0]
            if word not in made:
                return found[0]
            by.append(made[word][1])
            return made[word][0] + found[0][len(word) :]

        if node.line and node.kind != "allocation":
            text = re.sub(r"\b[su]\d+\b", "s", _NAME.sub(named, line)).replace(node.operator or "\0", operator)
            texts[name] = f"{node.kind} {text}"
        if node.kind == "view" and by:
            made[name] = operator, by[0]  # views are alike: what matters is whose they are
        for position, storage in enumerate(node.writes):
            made[storage] = f"{operator}.{position}", name
    return texts, makers


def _lines(before: GraphData, after: GraphData) -> Iterator[str]:
    (old, makers), (new, new_makers) = _described(before), _described(after)
    inputs = [[name for name, text in texts.items() if text.startswith("placeholder")] for texts in (old, new)]
    # Of the same number, they are the same inputs, of any sizes.
    same = dict(zip(*inputs, strict=True)) if len(inputs[0]) == len(inputs[1]) else {}
    paired = set(same.values())
    names, new_names = [name for name in old if name not in same], [name for name in new if name not in paired]
    matcher = difflib.SequenceMatcher(None, [old[n] for n in names], [new[n] for n in new_names], autojunk=False)
    changed = list[tuple[Sequence[str], Sequence[str]]]()
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            same.update(zip(names[a:b], new_names[c:d], strict=True))
        else:
            changed.append((names[a:b], new_names[c:d]))
    for name, now in same.items():
        # A maker without a counterpart is a change of its own.
        operands = zip(makers[name], new_makers[now], strict=False)
        if old[name] != new[now] or any(same.get(was, became) != became for was, became in operands):
            changed.append(([name], [now]))
    for gone, come in changed:
        for sign, graph, some in (("-", before, gone), ("+", after, come)):
            for node in (graph.nodes[name] for name in some):
                yield f"{sign} {node.line}" + (f"   [{short_line(node.user_line)}]" if node.user_line else "")


def _gone_and_new(old: Mapping[Hashable, str], new: Mapping[Hashable, str]) -> Iterator[str]:
    yield from (f"- {line}" for one, line in old.items() if one not in new)
    yield from (f"+ {line}" for one, line in new.items() if one not in old)


def _kernels(graph: GraphData) -> dict[Hashable, str]:
    """A line for each kernel, by all but its name and the folder of torch's headers."""

    def source(kernel: KernelData) -> str:
        return re.sub(r'(#include ")/.*/', r"\1", kernel.source.replace(kernel.name, "kernel"))

    configured = ((kernel, str(list(kernel.configurations) or "")) for kernel in graph.kernels)
    return {(one.language, how, source(one)): f"kernel {one.name} {how}".rstrip() for one, how in configured}
