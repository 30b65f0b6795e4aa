"""The lines of a flat function as data, and as Python.

A line names what changes from call to call by ``Local`` and ``Register``; everything else is ``Bound``. Numbers,
strings, tuples, lists, slices and dictionaries stand for themselves.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.profiler import record_function

from ...host_graph.nodes import Kernel

LITERALS = (int, bool, str, type(None))


@dataclass(frozen=True)
class Local:
    """What a line has made; gone at the latest when the function returns."""

    name: str


@dataclass(frozen=True)
class Register:
    """What others put in, or read afterwards."""

    number: int


@dataclass(frozen=True, eq=False)
class Bound:
    """A value that is known when the function is made: memory, a kernel, a function."""

    value: Any


@dataclass(frozen=True, eq=False)
class Call:
    """``function(*args, **kwargs)``."""

    function: Bound
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Item:
    """An element of a tuple."""

    of: Local
    position: int


@dataclass(frozen=True, eq=False)
class Line:
    """``results = value``: nothing, a local, or several of what is unpacked.

    Attributes:
        unpacks: whether the value is taken apart.
        node: that the line runs; None for what belongs to several.
        repeats: whether it may run again after it was out of memory.
    """

    value: Any
    results: tuple[Local, ...] = ()
    unpacks: bool = False
    node: Node | None = None
    repeats: bool = False


@dataclass(frozen=True, eq=False)
class Store:
    """``register = value``."""

    register: Register
    value: Any


@dataclass(frozen=True)
class Delete:
    """Locals that nobody reads any more."""

    locals: tuple[Local, ...]


@dataclass(frozen=True)
class Range:
    """Lines up to the next one are a range in profiles; in none, if it has no name."""

    name: str


AnyLine = Line | Store | Delete | Range


def operands_in(value: Any) -> Iterator[Any]:
    """Every local, register and bound value in an operand."""
    if isinstance(value, (Local, Register, Bound)):
        yield value
    elif isinstance(value, Item):
        yield value.of
    elif isinstance(value, Call):
        for part in (*value.args, *value.kwargs.values(), value.function):
            yield from operands_in(part)
    elif isinstance(value, slice):
        yield from operands_in((value.start, value.stop, value.step))
    elif isinstance(value, dict):
        yield from operands_in(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from operands_in(part)


@dataclass(frozen=True)
class Part:
    """One piece of what a replay does.

    Attributes:
        run: does it in Python, on the registers.
        lines, result: the same for a unit.
        name: of its range in profiles; empty if it has none.
        below_autograd: whether a unit runs the lines below autograd. ``run`` sees to that itself.
    """

    run: Callable[[list[Any]], Any]
    lines: Sequence[AnyLine]
    result: Any = None
    name: str = ""
    below_autograd: bool = False

    @classmethod
    def of(cls, lines: Sequence[AnyLine], name: str) -> Part:
        """A part that runs its lines as Python."""
        return cls(as_python(lines, None)[0], lines, name=name)


def as_python(
    lines: Sequence[AnyLine], result: Any, profiled: bool = False, give_back: Callable[[], object] | None = None
) -> tuple[Callable[[list[Any]], Any], str, Mapping[int, Node]]:
    """Straight-line Python, in which ``c``s are bound values and ``r`` are the registers.

    Args:
        profiled: whether ranges show in profiles.
        give_back: called where a line is out of memory that may run again; then it does.

    Returns:
        The function of the registers, its text, and the node behind a line of the text, by its number.
    """
    text, nodes = _Text(), dict[int, Node]()
    body, indent = list[str](), ""
    for line in lines:
        if isinstance(line, Range):
            indent = "    " if profiled and line.name else ""
            if indent:
                body += [f"with {text.of(Bound(record_function))}({line.name!r}):", f"{indent}pass"]
            continue
        code = text.of_line(line)
        if give_back is not None and isinstance(line, Line) and line.repeats:
            short, back = text.of(Bound(torch.OutOfMemoryError)), text.of(Call(Bound(give_back)))
            body += [f"{indent}try: {code}", f"{indent}except {short}: {back}; {code}"]
            if line.node is not None:
                nodes[len(body)] = line.node
        else:
            body.append(indent + code)
        if isinstance(line, Line) and line.node is not None:
            nodes[len(body) + 1] = line.node  # the first line is the head
    body.append(f"return {text.of(result)}")
    source = "def flat(r):\n" + "\n".join(f"    {line}" for line in body)
    exec(compile(source, "<fxwrap flat function>", "exec"), text.namespace)
    # Not in its own namespace: what is bound goes with the function, not with the next garbage collection.
    return text.namespace.pop("flat"), source, nodes


class _Text:
    def __init__(self) -> None:
        # Operators may import something; C code does that with the builtins of the Python code that called it.
        self.namespace: dict[str, Any] = {"__builtins__": builtins}
        self._names: dict[Any, str] = {}

    def of_line(self, line: Line | Store | Delete) -> str:
        match line:
            case Store(register, value):
                return f"{self.of(register)} = {self.of(value)}"
            case Delete(gone):
                return f"del {', '.join(map(self.of, gone))}"
            case Line(value, results):
                text = self.of(value)
                if not results:
                    return text
                names = ", ".join(map(self.of, results))
                return f"({names},) = {text}" if line.unpacks else f"{names} = {text}"

    def of(self, value: Any) -> str:
        """The text of an operand."""
        match value:
            case Local(name):
                return name
            case Register(number):
                return f"r[{number}]"
            case Bound(bound):
                return self._constant(bound)
            case Item(of, position):
                return f"{self.of(of)}[{position}]"
            case Call(function, args, kwargs):
                parts = [*map(self.of, args), *(f"{name}={self.of(part)}" for name, part in kwargs.items())]
                return f"{self.of(function)}({', '.join(parts)})"
            case tuple():
                return f"({', '.join(map(self.of, value))}{',' if len(value) == 1 else ''})"
            case list():
                return f"[{', '.join(map(self.of, value))}]"
            case slice():
                bounds = ", ".join(map(self.of, (value.start, value.stop, value.step)))
                return f"{self._constant(slice)}({bounds})"
            case dict():
                return "{" + ", ".join(f"{name!r}: {self.of(part)}" for name, part in value.items()) + "}"
        return repr(value)

    def _constant(self, value: Any) -> str:
        if isinstance(value, Kernel):
            value = value.call
        if type(value) in LITERALS:
            return repr(value)
        # Sizes and strides are the same if they are equal; of everything else there may be several.
        sizes = type(value) is tuple and all(type(item) is int for item in value)
        name = self._names.setdefault(value if sizes else id(value), f"c{len(self._names)}")
        self.namespace[name] = value
        return name
