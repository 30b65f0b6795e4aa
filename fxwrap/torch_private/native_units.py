"""The helper library of native replay (``torch_private/native/replay.cpp``), as Python sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol

# An operand, an object of the library.
Value = NewType("Value", object)


class NativeStep(Protocol):
    """A step of one unit.

    Attributes:
        note: "Python" if it is a call of Python; "BLAS" if it multiplies matrices with the BLAS that ATen calls, and
            calls the operator where that may be another thing.
        range: the name of its range in profiles; empty if it has none of its own.
    """

    range: str

    @property
    def note(self) -> str: ...


class Unit(Protocol):
    """A native replay: ``unit(inputs)`` returns the outputs.

    If the call does not satisfy its guards, it does nothing and returns ``missed``.

    Attributes:
        failed: the line, in the listing, of the step in which the last call raised; -1 if it did not raise.
        used: the value of ``clock`` at the last call.
        abandoned: whether this process was forked while another thread was in a call, which nobody will end here.
    """

    abandoned: bool
    failed: int
    used: int

    def __call__(self, inputs: list[Any]) -> Any: ...

    def expect(
        self, storages: Sequence[Any], counts: Sequence[int], versions: Sequence[tuple[ctypes.c_int64, int]]
    ) -> None:
        """Replay only if storages have these use counts, and cells these values."""

    def clear(self) -> None:
        """Drop all references. From now on every call misses."""


@dataclass(frozen=True)
class NativeReplay:
    """The helper library.

    Attributes:
        library: a function for each kind of operand, for each ``NATIVE`` of a step (which returns None if it cannot
            do it with such operands), and ``unit``.
        gemms: the addresses of the functions with which ATen multiplies matrices of float32 and of float64, and of
            MKL's function that sets how many threads it uses (0 if there is none); None if they are unknown.
    """

    library: Any
    gemms: tuple[int, int, int] | None = None

    @property
    def missed(self) -> object:
        """The value that a unit returns for calls that do not satisfy its guards."""
        return self.library.MISSED


class CannotReplay(Exception):
    """Steps cannot be run natively; the message says why."""
