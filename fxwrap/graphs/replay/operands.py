"""Operands of steps: locals, registers and bound values.

``Local`` and ``Register`` name values that change from call to call; other values are ``Bound``. Numbers, strings,
tuples, lists, slices and dictionaries stand for themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

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


@dataclass(frozen=True)
class Moved:
    """The value of a local that gives up its reference."""

    local: Local


Operand: TypeAlias = (
    "Local | Register | Bound | Moved | int | str | tuple[Operand, ...] | list[Operand] | slice"
    " | dict[str, Operand] | None"
)
Number: TypeAlias = "Local | Register | Bound | int"
Sizes: TypeAlias = "Bound | tuple[Operand, ...]"
Function: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Call:
    """``function(*args, **kwargs)`` in Python."""

    function: Function
    args: tuple[Operand, ...] = ()
    kwargs: Mapping[str, Operand] = field(default_factory=dict)


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


def known(operand: Any) -> Any:
    """The value of a bound operand; another operand itself."""
    return operand.value if isinstance(operand, Bound) else operand


def is_number(operand: Operand) -> bool:
    """Whether an operand is an integer, or may hold one at a call."""
    return type(known(operand)) is int or isinstance(operand, (Local, Register))


def are_sizes(*operands: Sizes) -> bool:
    """Whether every operand is a tuple of integers, or may hold one at a call."""
    values = map(known, operands)
    return all(isinstance(value, tuple) and all(map(is_number, value)) for value in values)
