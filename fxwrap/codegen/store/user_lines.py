"""Updates source locations in a cached program to the code that is compiled now.

Inductor's caches distinguish graphs by what they compute, not by where their code is. So a stored program has the
lines of the code that was compiled first, in a file that has changed since, or in another script.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from ...host_graph.nodes import last_frame


@dataclass(frozen=True)
class UserLines:
    """The lines that Dynamo traced a graph from.

    Attributes:
        structure: a digest of the operations, each with the number of its line. Two graphs with the same digest have
            corresponding lines.
        lines: each line once, in the order of its first operation.
    """

    structure: str
    lines: tuple[str, ...]

    @classmethod
    def of(cls, traced: GraphModule) -> UserLines:
        """The lines of a graph of Dynamo's, with its branches and loop bodies."""
        by_trace, numbers, operations = dict[str, str](), dict[str, int](), list[tuple[str, int]]()
        for graph in (module.graph for module in traced.modules() if isinstance(module, GraphModule)):
            for node in graph.nodes:
                if node.op.startswith("call_"):
                    trace = node.meta.get("stack_trace") or ""
                    if trace not in by_trace:
                        by_trace[trace] = last_frame(trace)
                    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
                    operations.append((name, numbers.setdefault(by_trace[trace], len(numbers))))
        return cls(hashlib.sha256(repr(operations).encode()).hexdigest(), tuple(numbers))

    @classmethod
    def from_data(cls, data: Any) -> UserLines:
        """The lines that ``to_data`` has written."""
        return cls(data["structure"], tuple(data["lines"]))

    def to_data(self) -> Any:
        """The lines as data for JSON."""
        return {"structure": self.structure, "lines": list(self.lines)}

    def renamed(self, stored: Any, now: UserLines) -> Any:
        """Stored data with the lines of ``now`` in place of these lines.

        A line without a counterpart is removed: no line is better than a wrong one.

        Args:
            stored: data of JSON: nodes have a ``line``, and texts contain such lines, alone or in parentheses.
        """
        if now == self:
            return stored
        counterpart = dict(zip(self.lines, now.lines, strict=False)) if now.structure == self.structure else {}
        new = {_quoted(line): _quoted(counterpart.get(line, "")) for line in _lines_in(stored) if line}
        if not new:
            return stored
        line = "|".join(map(re.escape, sorted(new, key=len, reverse=True)))

        def replacement(match: re.Match[str]) -> str:
            inside, alone = match.groups()
            if inside is None:
                return new[alone]
            return f" ({new[inside]})" if new[inside] else ""

        return json.loads(re.sub(rf" \(({line})\)|({line})", replacement, json.dumps(stored)))


def _lines_in(data: Any) -> Iterator[str]:
    if isinstance(data, Mapping):
        if isinstance(data.get("line"), str):
            yield data["line"]
        data = data.values()
    elif not isinstance(data, list):
        return
    for part in data:
        yield from _lines_in(part)


def _quoted(line: str) -> str:
    """A line as it is written within a JSON string."""
    return json.dumps(line)[1:-1]
