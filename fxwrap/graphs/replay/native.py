"""The helper library of native replay (``codegen/native/replay.cpp``), as Python sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NewType, ParamSpec, Protocol, TypeVar

import torch

from ...host_graph.nodes import Kernel
from .steps import Function

P = ParamSpec("P")
T = TypeVar("T")
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


class Library(Protocol):
    """Makes operands, steps and units. ``slot`` is where a step puts its result; sizes are lists of numbers.

    Attributes:
        OPERATIONS: (name in ``ARITHMETIC``, operands): what ``arithmetic`` computes, by its number.
    """

    MISSED: object
    OPERATIONS: Sequence[tuple[str, int]]

    def unit(self, description: Mapping[str, Any]) -> Unit: ...

    # Operands: what a slot has, what it gives up, a known value, and what is made of others.
    def slot(self, slot: int) -> Value: ...
    def moved(self, slot: int) -> Value: ...
    def constant(self, value: object) -> Value: ...
    def tuple(self, parts: Sequence[Value]) -> Value: ...
    def list(self, parts: Sequence[Value]) -> Value: ...
    def slice(self, start: Value, stop: Value, step: Value) -> Value: ...
    def dict(self, names: Sequence[object], parts: Sequence[Value]) -> Value: ...

    # Steps.
    def kernel(self, address: int, args: Sequence[Value], read: Sequence[int], written: Sequence[int]) -> NativeStep:
        """``read`` and ``written`` are the positions of tensors; the others are numbers."""

    def operator(
        self, name: str, overload: str, args: Sequence[Value | None], results: Sequence[int | None]
    ) -> NativeStep:
        """An argument that is None has its default; a result that is None is dropped."""

    def python(
        self, function: Function, args: Sequence[Value], names: Sequence[str], results: Sequence[int], unpacks: bool
    ) -> NativeStep:
        """The last of ``args`` have ``names``."""

    def empty(self, slot: int, size: Sequence[Value], stride: Sequence[Value], dtype: torch.dtype) -> NativeStep: ...
    def view(
        self, slot: int, base: Value, size: Sequence[Value], stride: Sequence[Value], offset: Value
    ) -> NativeStep: ...
    def fill(self, buffers: Sequence[torch.Tensor], inputs: Sequence[Value]) -> NativeStep: ...
    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> NativeStep: ...
    def item(self, slot: int, whole: int, position: int) -> NativeStep: ...
    def set(self, slot: int, value: Value) -> NativeStep: ...
    def copy(self, slot: int, source: int) -> NativeStep: ...
    def drop(self, slot: int) -> NativeStep: ...
    def below_autograd(self, below: bool) -> NativeStep: ...

    # What Python does where it cannot be done natively, or what Python says is wrong.
    def layout(
        self, tensor: Value, size: Sequence[Value], stride: Sequence[Value], python: NativeStep
    ) -> NativeStep: ...
    def alignment(self, tensor: Value, nbytes: int, python: NativeStep) -> NativeStep: ...
    def condition(self, condition: Value, python: NativeStep) -> NativeStep: ...
    def arithmetic(
        self, slot: int, operation: int, first: Value, second: Value, python: NativeStep
    ) -> NativeStep: ...


@dataclass(frozen=True)
class NativeReplay:
    """
    Attributes:
        operations: the number of each function of integers that the library has, and how many operands it takes.
        kernel_address: where the machine code of a kernel is; None if nobody knows.
    """

    library: Library
    operations: Mapping[Function, tuple[int, int]]
    kernel_address: Callable[[Kernel], int | None]

    @property
    def missed(self) -> object:
        """What a unit returns for calls that do not suit it."""
        return self.library.MISSED


class CannotReplay(Exception):
    """Steps that no unit can have."""


def refusing(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the library makes; what it refuses has to be run in Python.

    Raises:
        CannotReplay: it refuses.
    """
    try:
        return make(*args, **kwargs)
    except RuntimeError as error:
        raise CannotReplay(str(error).partition("\n")[0]) from error
