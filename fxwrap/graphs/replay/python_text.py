"""Steps as Python: the text of what a step calls."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .steps import LITERALS, Bound, Function, Local, Operand, Register


@dataclass(frozen=True, eq=False)
class Call:
    """``function(*args, **kwargs)``; another call may be among the arguments.

    Attributes:
        unpacks: whether the results are the elements of what it returns.
    """

    function: Function
    args: tuple[Operand | list[Call], ...] = ()
    kwargs: Mapping[str, Operand] = field(default_factory=dict)
    unpacks: bool = False


class Text:
    """The text of one function, in whose ``namespace`` bound values are ``c0``, ``c1``, ..."""

    def __init__(self) -> None:
        # Operators may import something; C code does that with the builtins of the Python code that called it.
        self.namespace: dict[str, Any] = {"__builtins__": builtins}
        self._names: dict[Any, str] = {}

    def assigned(self, results: tuple[Local, ...], call: Call) -> str:
        """``results = call``"""
        if not results:
            return self.of(call)
        names = ", ".join(map(self.of, results))
        return f"({names},) = {self.of(call)}" if call.unpacks else f"{names} = {self.of(call)}"

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
        # Sizes and strides are the same if they are equal; of everything else there may be several.
        sizes = type(value) is tuple and all(type(item) is int for item in value)
        name = self._names.setdefault(value if sizes else id(value), f"c{len(self._names)}")
        self.namespace[name] = value
        return name
