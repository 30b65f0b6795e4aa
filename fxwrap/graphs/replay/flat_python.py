"""A piece of a replay (``Part``): steps, and the Python function that they are (``as_python``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from .operands import Call, Operand, Text
from .steps import Range, Step


@dataclass(frozen=True)
class StepsInLanes:
    """Consecutive steps of a part, each in a lane (``plan.Lanes``).

    Attributes:
        begin: the position of the first.
        lanes: the lane of each.
        waits: for each, (a lane, how many of its steps have to have ended before this one begins).
    """

    begin: int
    lanes: Sequence[int]
    waits: Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True)
class Part:
    """One piece of a replay. ``of`` makes it of steps.

    Attributes:
        run: runs the steps in Python, on the registers.
        steps, result: the steps and the returned operand.
        name: the name of its range in profiles; empty if it has none.
        below_autograd: whether a unit runs the steps below autograd; ``run`` does so itself.
        lanes: steps that a unit may run at the same time; ``run`` does not.
        give_back, source, nodes: see ``as_python``.
    """

    run: Callable[[list[Any]], Any]
    steps: Sequence[Step]
    result: Operand = None
    name: str = ""
    below_autograd: bool = False
    lanes: Sequence[StepsInLanes] = ()
    give_back: Callable[[], object] | None = None
    source: str = ""
    nodes: Mapping[int, Node] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        steps: Sequence[Step],
        result: Operand = None,
        name: str = "",
        give_back: Callable[[], object] | None = None,
    ) -> Part:
        run, source, nodes = as_python(steps, result, give_back=give_back)
        return cls(run, steps, result, name, give_back=give_back, source=source, nodes=nodes)

    @functools.cached_property
    def run_profiled(self) -> Callable[[list[Any]], Any]:
        """The same with the ranges that are among the steps, and one around each launch and library call."""
        return as_python(self.steps, self.result, profiled=True, give_back=self.give_back)[0]

    def node_at(self, error: BaseException) -> Node | None:
        """The node whose call raised ``error``."""
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code is self.run.__code__:
                return self.nodes.get(trace.tb_lineno)
            trace = trace.tb_next
        return None


def as_python(
    steps: Sequence[Step], result: Operand, profiled: bool = False, give_back: Callable[[], object] | None = None
) -> tuple[Callable[[list[Any]], Any], str, Mapping[int, Node]]:
    """Straight-line Python, in which ``c``s are bound values and ``r`` are the registers.

    Args:
        profiled: whether ranges show in profiles.
        give_back: frees memory; called when a step that may run again is out of memory, before it runs again.

    Returns:
        The function of the registers, its text, and the node of each line of the text, by line number.
    """
    text, nodes = Text(profiled), dict[int, Node]()
    body, indent = list[str](), ""
    for step in steps:
        if isinstance(step, Range):
            indent = "    " if profiled and step.name else ""
            if indent:
                body += [step.python(text), f"{indent}pass"]
            continue
        code = step.python(text)
        if give_back is not None and step.may_retry:
            short, back = text.bound(torch.OutOfMemoryError), text.of(Call(give_back))
            # It runs again after the handler: in it, the error's frames would still hold what the step had allocated.
            code = f"try: {code}\nexcept {short}: again = True\nelse: again = False\nif again: {back}; {code}"
        lines = text.in_range(step.range, code)
        body += [indent + line for line in lines]
        if step.node is not None:
            # The first line is the head. What is inside of a step stands for the step.
            nodes.update(dict.fromkeys(range(len(body) - len(lines) + 2, len(body) + 2), step.node))
    body.append(f"return {text.of(result)}")
    source = "def flat(r):\n" + "\n".join(f"    {line}" for line in body)
    exec(compile(source, "<fxwrap flat function>", "exec"), text.namespace)
    # Removed from its own namespace: in a cycle, bound values would live until the next garbage collection.
    return text.namespace.pop("flat"), source, nodes
