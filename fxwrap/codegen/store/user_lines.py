"""Updates lines, modules and names of inputs in a cached program to those of the code that is compiled now.

Inductor's caches distinguish graphs by what they compute, not by where their code is. So a stored program has the
lines of the code that was compiled first, in a file that has changed since, or in another script.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch.fx import GraphModule

from ...host_graph.user_code import in_module, last_frame, module_path


@dataclass(frozen=True)
class UserLines:
    """The code that Dynamo traced a graph from.

    Attributes:
        structure: a digest of the operations, each with the numbers of its line and its module. Two graphs with the
            same digest have corresponding lines, modules and inputs.
        lines, modules: each line, and each module's path, once, in the order of its first operation.
        inputs: what the code calls each input (``codegen/dynamo/names.py``).
    """

    structure: str
    lines: tuple[str, ...]
    modules: tuple[str, ...]
    inputs: Mapping[str, str]

    @classmethod
    def of(cls, traced: GraphModule, inputs: Mapping[str, str]) -> UserLines:
        """The code of a graph of Dynamo's, with its branches and loop bodies."""
        by_trace, lines, modules = dict[str, str](), dict[str, int](), dict[str, int]()
        operations: list[Any] = [len(inputs)]
        for graph in (module.graph for module in traced.modules() if isinstance(module, GraphModule)):
            for node in graph.nodes:
                if node.op.startswith("call_"):
                    trace = node.meta.get("stack_trace") or ""
                    if trace not in by_trace:
                        by_trace[trace] = last_frame(trace)
                    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
                    line = lines.setdefault(by_trace[trace], len(lines))
                    operations.append((name, line, modules.setdefault(module_path(node), len(modules))))
        digest = hashlib.sha256(repr(operations).encode()).hexdigest()
        return cls(digest, tuple(lines), tuple(modules), inputs)

    @classmethod
    def from_data(cls, data: Any) -> UserLines:
        """What ``to_data`` has written."""
        return cls(data["structure"], tuple(data["lines"]), tuple(data["modules"]), data["inputs"])

    def to_data(self) -> Any:
        """As data for JSON."""
        return asdict(self)

    def renamed(self, stored: Any, now: UserLines) -> Any:
        """Stored data with the lines, modules and names of ``now`` in place of these.

        One without a counterpart is removed: no line is better than a wrong one.

        Args:
            stored: data of JSON: nodes have a ``line``, a ``module`` or a ``user_name``, and texts contain lines and
                modules as reports show them, alone or in parentheses.
        """
        if now == self:
            return stored
        lines, modules, inputs = (
            dict(zip(old, new, strict=False)) if now.structure == self.structure else {}
            for old, new in (
                (self.lines, now.lines),
                (self.modules, now.modules),
                (self.inputs.values(), now.inputs.values()),
            )
        )
        new = {line: lines.get(line, "") for line in _values_of("line", stored)}
        new |= {in_module(m): in_module(modules[m]) if modules.get(m) else "" for m in _values_of("module", stored)}
        names = {name: _new_name(name, inputs) for name in _values_of("user_name", stored)}
        stored = _replaced(stored, {"module": modules, "user_name": names})
        new = {_quoted(line): _quoted(counterpart) for line, counterpart in new.items() if line}
        if not new:
            return stored
        line = "|".join(map(re.escape, sorted(new, key=len, reverse=True)))

        def replacement(match: re.Match[str]) -> str:
            inside, alone = match.groups()
            if inside is None:
                return new[alone]
            return f" ({new[inside]})" if new[inside] else ""

        return json.loads(re.sub(rf" \(({line})\)|({line})", replacement, json.dumps(stored)))


def _values_of(key: str, data: Any) -> Iterator[str]:
    if isinstance(data, Mapping):
        if isinstance(data.get(key), str):
            yield data[key]
        data = data.values()
    elif not isinstance(data, list):
        return
    for part in data:
        yield from _values_of(key, part)


def _replaced(data: Any, new: Mapping[str, Mapping[str, str]]) -> Any:
    """Data with other texts under some keys."""
    if isinstance(data, Mapping):
        return {
            key: new[key].get(value, "") if key in new and isinstance(value, str) else _replaced(value, new)
            for key, value in data.items()
        }
    return [_replaced(part, new) for part in data] if isinstance(data, list) else data


def _new_name(name: str, new: Mapping[str, str]) -> str:
    """The new name of an input, or of what torch makes of one: a part (``x.inner``), a gradient of a result."""
    if name in new or name.startswith("grad_outputs["):
        return new.get(name, name)
    whole, dot, part = name.rpartition(".")
    return f"{new_whole}.{part}" if dot and (new_whole := _new_name(whole, new)) else ""


def _quoted(line: str) -> str:
    """A line as it is written within a JSON string."""
    return json.dumps(line)[1:-1]
