"""Operands of steps: locals, registers and bound values; and their text in Python (``Text``).

``Local`` and ``Register`` name values that change from call to call; other values are ``Bound``. Numbers, strings,
tuples, lists, slices and dictionaries stand for themselves.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.profiler import record_function

LITERALS = (int, bool, str, type(None))


@dataclass(frozen=True)
class Local:
    """A local variable of the flat function."""

    name: str


@dataclass(frozen=True)
class Register:
    """An entry of the list of registers, by position."""

    number: int


@dataclass(frozen=True, eq=False)
class Bound:
    """A value that is known when the function is made: memory, a dtype, a subgraph."""

    value: Any


Operand: TypeAlias = (
    "Local | Register | Bound | int | str | tuple[Operand, ...] | list[Operand] | slice | dict[str, Operand] | None"
)
Number: TypeAlias = "Local | Register | Bound | int"
Sizes: TypeAlias = "Bound | tuple[Operand, ...]"
Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Call:
    """``function(*args, **kwargs)`` in Python.

    Attributes:
        name: of the function in listings, if it is not the function's own.
    """

    function: Function
    args: tuple[Operand, ...] = ()
    kwargs: Mapping[str, Operand] = field(default_factory=dict)
    name: str = ""


def operands_in(value: object) -> Iterator[Local | Register | Bound]:
    """Every local, register and bound value in an operand."""
    match value:
        case Local() | Register() | Bound():
            yield value
        case slice():
            yield from operands_in((value.start, value.stop, value.step))
        case dict():
            yield from operands_in(tuple(value.values()))
        case tuple() | list():
            for part in value:
                yield from operands_in(part)


class Text:
    """The text of one function, in whose ``namespace`` bound values are ``c0``, ``c1``, ...

    Args:
        profiled: whether ranges show in profiles.
    """

    def __init__(self, profiled: bool = False) -> None:
        self.profiled = profiled
        # An operator in C may import a module, and uses the builtins of the Python code that called it.
        self.namespace: dict[str, Any] = {"__builtins__": builtins}
        self._names: dict[Any, str] = {}

    def assigned(self, results: Sequence[Local | None], unpacks: bool, code: str) -> str:
        """``results = code``"""
        names = ["_" if local is None else local.name for local in results]
        target = f"({', '.join(names)},)" if unpacks else names[0] if names else ""
        return f"{target} = {code}{'; del _' * ('_' in names)}" if target else code

    def in_range(self, name: str, code: str) -> list[str]:
        """The lines of a step: in a range if ranges show, and it has one."""
        lines = code.splitlines()
        if not self.profiled or not name:
            return lines
        return [f"with {self.bound(record_function)}({name!r}):", *(f"    {line}" for line in lines)]

    def of(self, value: object) -> str:
        """The text of an operand, or of a call."""
        match value:
            case Local(name):
                return name
            case Register(number):
                return f"r[{number}]"
            case Bound(bound):
                return self.bound(bound)
            case Call(args=args, kwargs=kwargs):
                parts = [*map(self.of, args), *(f"{name}={self.of(part)}" for name, part in kwargs.items())]
                return f"{self.called(value)}({', '.join(parts)})"
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

    def called(self, call: Call) -> str:
        return self.bound(call.function)

    def bound(self, value: object) -> str:
        """The name of a value in the namespace."""
        if type(value) in LITERALS:
            return repr(value)
        # Equal sizes share a name; other values share one only if they are the same object.
        sizes = type(value) is tuple and all(type(item) is int for item in value)
        name = self._names.setdefault(value if sizes else id(value), f"c{len(self._names)}")
        self.namespace[name] = value
        return name


class Listing(Text):
    """The same text for people to read, in which functions have their names, and bound values are described."""

    def called(self, call: Call) -> str:
        return call.name or super().called(call)

    def bound(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"<{str(value.dtype).removeprefix('torch.')}{list(value.shape)}>"
        if isinstance(value, (tuple, list)):
            return self.of(type(value)(map(Bound, value)))
        if isinstance(value, torch._ops.OpOverload):
            return str(value)
        if type(value) in (*LITERALS, float, torch.dtype, torch.device):
            return repr(value)
        value = getattr(value, "func", value)  # of a functools.partial
        return getattr(value, "__name__", None) or f"<{type(value).__name__}>"
