"""What steps work on: locals, registers and bound values.

A step names what changes from call to call by ``Local`` and ``Register``; everything else is ``Bound``. Numbers,
strings, tuples, lists, slices and dictionaries stand for themselves.
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
    """A value that the caller puts in, or reads afterwards."""

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
    """An operand, with what is bound in the place of ``Bound``."""
    return operand.value if isinstance(operand, Bound) else operand


def is_number(operand: Operand) -> bool:
    """Whether an operand is an integer, or may turn out to be one."""
    return type(known(operand)) is int or isinstance(operand, (Local, Register))


def are_sizes(*operands: Sizes) -> bool:
    return all(isinstance(sizes := known(one), tuple) and all(map(is_number, sizes)) for one in operands)
