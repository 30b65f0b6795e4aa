"""The helper library of native replay (``codegen/native/replay.cpp``), as Python sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol

from ...host_graph.nodes import Kernel
from .operands import Function

# Objects of the library's: an operand, and a step, which one unit takes.
Value = NewType("Value", object)
NativeStep = NewType("NativeStep", object)


class Unit(Protocol):
    """``unit(inputs)`` returns the outputs, or ``missed`` if the call does not suit it: then it has done nothing.

    Attributes:
        failed: the position of the step that the last call raised in; -1 if it did not.
        used: what ``clock`` was at the last call.
    """

    failed: int
    used: int

    def __call__(self, inputs: list[Any]) -> Any: ...

    def expect(
        self, storages: Sequence[Any], counts: Sequence[int], versions: Sequence[tuple[ctypes.c_int64, int, int]]
    ) -> None:
        """Replay only if storages have these use counts, and cells (with their addresses) these values."""

    def clear(self) -> None:
        """Let go of everything; it misses from now on."""


@dataclass(frozen=True)
class NativeReplay:
    """The helper library.

    Attributes:
        library: a function for each kind of operand and step, and ``unit``.
        operations: functions of integers that it computes: their numbers there, and how many operands they take.
        kernel_address: where the machine code of a kernel is; None if nobody knows.
        gemms: where the functions are with which ATen multiplies matrices of float32 and of float64; None if nobody
            knows.
    """

    library: Any
    operations: Mapping[Function, tuple[int, int]]
    kernel_address: Callable[[Kernel], int | None]
    gemms: tuple[int, int] | None = None

    @property
    def missed(self) -> object:
        """What a unit returns for calls that do not suit it."""
        return self.library.MISSED


class CannotReplay(Exception):
    """Steps that no unit can have."""
