"""Turns steps into a Python function (``as_python``). ``Part``, a piece of a replay, has both."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .operands import LITERALS, Bound, Call, Local, Operand, Register
from .steps import Range, Step


@dataclass(frozen=True)
class Part:
    """One piece of a replay.

    Attributes:
        run: runs the steps in Python, on the registers.
        steps, result: the steps and the returned operand, for a native unit.
        name: the name of its range in profiles; empty if it has none.
        below_autograd: whether a unit runs the steps below autograd; ``run`` does so itself.
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
        give_back: frees memory; called when a step that may run again is out of memory, before it runs again.

    Returns:
        The function of the registers, its text, and the node of each line of the text, by line number.
    """
    text, nodes = Text(), dict[int, Node]()
    body, indent = list[str](), ""
    for step in steps:
        if isinstance(step, Range):
            indent = "    " if profiled and step.name else ""
            if indent:
                body += [step.python(text), f"{indent}pass"]
            continue
        code = step.python(text)
        if give_back is not None and step.repeats:
            short, back = text.bound(torch.OutOfMemoryError), text.of(Call(give_back))
            # It runs again after the handler: in it, the error's frames would still hold what the step had allocated.
            again = [f"except {short}: again = True", "else: again = False", f"if again: {back}; {code}"]
            body += [indent + line for line in (f"try: {code}", *again)]
            if step.node is not None:
                nodes[len(body) - len(again) + 1] = step.node
        else:
            body.append(indent + code)
        if step.node is not None:
            nodes[len(body) + 1] = step.node  # the first line is the head
    body.append(f"return {text.of(result)}")
    source = "def flat(r):\n" + "\n".join(f"    {line}" for line in body)
    exec(compile(source, "<fxwrap flat function>", "exec"), text.namespace)
    # Removed from its own namespace: in a cycle, bound values would live until the next garbage collection.
    return text.namespace.pop("flat"), source, nodes


class Text:
    """The text of one function, in whose ``namespace`` bound values are ``c0``, ``c1``, ..."""

    def __init__(self) -> None:
        # An operator in C may import a module, and uses the builtins of the Python code that called it.
        self.namespace: dict[str, Any] = {"__builtins__": builtins}
        self._names: dict[Any, str] = {}

    def assigned(self, step: Step, code: str) -> str:
        """``results = code``"""
        names = ["_" if local is None else local.name for local in step.results]
        target = f"({', '.join(names)},)" if step.unpacks else names[0] if names else ""
        return f"{target} = {code}{'; del _' * ('_' in names)}" if target else code

    def of(self, value: object) -> str:
        """The text of an operand, or of a call."""
        match value:
            case Local(name):
                return name
            case Register(number):
                return f"r[{number}]"
            case Bound(bound):
                return self.bound(bound)
            case Call(function, args, kwargs):
                parts = [*map(self.of, args), *(f"{name}={self.of(part)}" for name, part in kwargs.items())]
                return f"{self.bound(function)}({', '.join(parts)})"
            case tuple():
                return f"({', '.join(map(self.of, value))}{',' if len(value) == 1 else ''})"
            case list():
                return f"[{', '.join(map(self.of, value))}]"
            case slice():
                bounds = ", ".join(map(self.of, (value.start, value.stop, value.step)))
                return f"{self.bound(slice)}({bounds})"
            case dict():
                return "{" + ", ".join(f"{name!r}: {self.of(part)}" for name, part in value.items()) + "}"
        return repr(value)

    def bound(self, value: object) -> str:
        """The name of a value in the namespace."""
        if type(value) in LITERALS:
            return repr(value)
        # Equal sizes share a name; other values share one only if they are the same object.
        sizes = type(value) is tuple and all(type(item) is int for item in value)
        name = self._names.setdefault(value if sizes else id(value), f"c{len(self._names)}")
        self.namespace[name] = value
        return name
