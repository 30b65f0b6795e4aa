"""Parts of a replay: steps, and the Python function that is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .kinds import KINDS
from .python_text import Call, Text
from .steps import Operand, Range, Step


@dataclass(frozen=True)
class Part:
    """One piece of what a replay does.

    Attributes:
        run: does it in Python, on the registers.
        steps, result: the same for a unit.
        name: of its range in profiles; empty if it has none.
        below_autograd: whether a unit runs the steps below autograd. ``run`` sees to that itself.
    """

    run: Callable[[list[Any]], Any]
    steps: Sequence[Step]
    result: Operand = None
    name: str = ""
    below_autograd: bool = False

    @classmethod
    def of(cls, steps: Sequence[Step], name: str) -> Part:
        """A part that runs its steps as Python."""
        return cls(as_python(steps, None)[0], steps, name=name)


def as_python(
    steps: Sequence[Step], result: Operand, profiled: bool = False, give_back: Callable[[], object] | None = None
) -> tuple[Callable[[list[Any]], Any], str, Mapping[int, Node]]:
    """Straight-line Python, in which ``c``s are bound values and ``r`` are the registers.

    Args:
        profiled: whether ranges show in profiles.
        give_back: called where a step is out of memory that may run again; then it does.

    Returns:
        The function of the registers, its text, and the node behind a line of the text, by its number.
    """
    text, nodes = Text(), dict[int, Node]()
    body, indent = list[str](), ""
    for step in steps:
        if isinstance(step, Range):
            indent = "    " if profiled and step.name else ""
            if indent:
                body += [KINDS[Range].text(step, text), f"{indent}pass"]
            continue
        code = KINDS[type(step)].text(step, text)
        if give_back is not None and step.repeats:
            short, back = text.bound(torch.OutOfMemoryError), text.of(Call(give_back))
            body += [f"{indent}try: {code}", f"{indent}except {short}: {back}; {code}"]
            if step.node is not None:
                nodes[len(body)] = step.node
        else:
            body.append(indent + code)
        if step.node is not None:
            nodes[len(body) + 1] = step.node  # the first line is the head
    body.append(f"return {text.of(result)}")
    source = "def flat(r):\n" + "\n".join(f"    {line}" for line in body)
    exec(compile(source, "<fxwrap flat function>", "exec"), text.namespace)
    # Not in its own namespace: what is bound goes with the function, not with the next garbage collection.
    return text.namespace.pop("flat"), source, nodes
