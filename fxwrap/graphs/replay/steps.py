"""Steps: the one executable form of a program. Each kind is a dataclass; ``kinds.py`` has a row for each.

A step names what changes from call to call by ``Local`` and ``Register``; everything else is ``Bound``. Numbers,
strings, tuples, lists, slices and dictionaries stand for themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from ...host_graph.nodes import Kernel
from ..devices.device_graph import DeviceGraph

LITERALS = (int, bool, str, type(None))


# -- operands ---------------------------------------------------------------------------------------------------


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


def operands_in(value: object) -> Iterator[Local | Register | Bound]:
    """Every local, register and bound value in an operand, or in what a step reads."""
    match value:
        case Local() | Register() | Bound():
            yield value
        case Moved(local):
            yield local
        case Step():
            for one in dataclasses.fields(value):
                if one.name not in _ABOUT_THE_STEP:
                    yield from operands_in(getattr(value, one.name))
        case slice():
            yield from operands_in((value.start, value.stop, value.step))
        case Mapping():
            yield from operands_in(tuple(value.values()))
        case tuple() | list():
            for part in value:
                yield from operands_in(part)


# -- steps ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """
    Attributes:
        results: the locals that it makes.
        node: the node that it runs; None for what belongs to several.
        repeats: whether it may run again after it was out of memory.
    """

    results: tuple[Local, ...] = ()
    node: Node | None = None
    repeats: bool = False


_ABOUT_THE_STEP = frozenset(one.name for one in dataclasses.fields(Step))


@dataclass(frozen=True, eq=False)
class Allocate(Step):
    """Allocates a tensor.

    Attributes:
        on_cpu: a shorter way than torch's on the CPU: ``(size, stride, dtype)``.
    """

    size: Sizes
    stride: Sizes
    dtype: torch.dtype
    device: torch.device
    pin_memory: bool = False
    on_cpu: Function | None = None


@dataclass(frozen=True, eq=False)
class View(Step):
    """Lays a tensor out over the memory of another, ``offset`` elements after the first of that.

    Attributes:
        function: ``(base, size, stride, offset)``.
    """

    function: Function
    base: Operand
    size: Sizes
    stride: Sizes
    offset: Number = 0


@dataclass(frozen=True, eq=False)
class Launch(Step):
    """Runs a compiled kernel."""

    kernel: Kernel
    args: tuple[Operand, ...]


@dataclass(frozen=True, eq=False)
class CallOperator(Step):
    """Calls an operator of the dispatcher.

    Attributes:
        function: how Python calls it: the overload itself, or a binding of it.
    """

    overload: torch._ops.OpOverload
    function: Function
    args: tuple[Operand, ...]
    kwargs: Mapping[str, Operand] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class CallPython(Step):
    """Calls a function of Python.

    Attributes:
        unpacks: whether the results are the elements of what it returns.
    """

    function: Function
    args: tuple[Operand, ...] = ()
    kwargs: Mapping[str, Operand] = field(default_factory=dict)
    unpacks: bool = False


@dataclass(frozen=True, eq=False)
class Arithmetic(Step):
    """Computes a number from numbers."""

    function: Function
    args: tuple[Operand, ...]
    kwargs: Mapping[str, Operand] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class CheckLayout(Step):
    """Raises if a tensor has another size or stride.

    Attributes:
        function: ``(tensor, size, stride)``, and perhaps the name of who made it.
    """

    function: Function
    tensor: Operand
    size: Sizes
    stride: Sizes
    name: Operand = None


@dataclass(frozen=True, eq=False)
class CheckAlignment(Step):
    """Raises if the address of a tensor is no multiple of ``nbytes``.

    Attributes:
        function: ``(tensor, nbytes)``, and perhaps the name of who made it.
    """

    function: Function
    tensor: Operand
    nbytes: int
    name: Operand = None


@dataclass(frozen=True, eq=False)
class CheckCondition(Step):
    """Raises unless a condition holds.

    Attributes:
        function: ``(condition, message)``.
    """

    function: Function
    condition: Operand
    message: Operand = ""


@dataclass(frozen=True, eq=False)
class Fill(Step):
    """Copies inputs to their static buffers, which have one element along repeated dimensions."""

    buffers: tuple[torch.Tensor, ...]
    inputs: tuple[Operand, ...]


@dataclass(frozen=True, eq=False)
class Copy(Step):
    """Copies a tensor to another one."""

    target: Operand
    source: Operand


@dataclass(frozen=True, eq=False)
class Resize(Step):
    """Gives a storage memory, or takes it back."""

    storage: torch.UntypedStorage
    nbytes: int


@dataclass(frozen=True, eq=False)
class ReplayGraph(Step):
    """Replays a device graph."""

    graph: DeviceGraph


@dataclass(frozen=True, eq=False)
class PostProcess(Step):
    """Post-processing of a step's result.

    It is passed in a one-element list, so that the function can drop the last reference.
    """

    step: Step
    function: Function


@dataclass(frozen=True, eq=False)
class Load(Step):
    """Reads a register."""

    register: Register


@dataclass(frozen=True, eq=False)
class Store(Step):
    """Writes a register."""

    register: Register
    value: Operand


@dataclass(frozen=True, eq=False)
class Item(Step):
    """Takes an element out of a tuple."""

    whole: Local
    position: int


@dataclass(frozen=True, eq=False)
class Drop(Step):
    """Deletes locals after their last use."""

    locals: tuple[Local, ...]


@dataclass(frozen=True, eq=False)
class Range(Step):
    """Begins a range of profiles, which ends where the next one begins; without a name it only ends one."""

    name: str
