"""The table of steps, the only executable form of a program: one class for each kind.

A step's fields are what it reads, and ``results`` are the locals it makes. ``call`` is the call that Python makes.
``native`` appends the step of the helper library, with its line of the listing. A new kind is a class here, and one
in ``codegen/native/`` if the library has it. ``record/flat.py`` (``_step``) chooses the kind of a node's step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node
from torch.profiler import record_function

from ...host_graph.nodes import Kernel
from ..devices.device_graph import DeviceGraph
from ..memory.static_buffers import fill_buffers
from .lowering import Lowering
from .operands import (
    Bound,
    Call,
    Function,
    Local,
    Moved,
    Number,
    Operand,
    Register,
    Sizes,
    Text,
    are_sizes,
    is_number,
    known,
    operands_in,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """One step. A kind overrides ``call``, or else ``python``; and ``native`` if the library has it.

    Attributes:
        results: the locals that it makes; None for an element that nobody reads.
        unpacks: the call returns a tuple, and ``results`` are its elements.
        node: the node that it runs; None for what belongs to several.
        repeats: whether it may run again after it was out of memory.
    """

    results: tuple[Local | None, ...] = ()
    unpacks: bool = False
    node: Node | None = None
    repeats: bool = False

    def reads(self) -> Iterator[Local | Register | Bound]:
        own = (one.name for one in dataclasses.fields(self) if one.name not in Step.__dataclass_fields__)
        return operands_in([getattr(self, name) for name in own])

    @property
    def result(self) -> Local:
        """The only result."""
        (local,) = self.results
        assert local is not None
        return local

    def call(self) -> Call:
        raise NotImplementedError(f"{type(self).__name__} is no call")

    def python(self, text: Text) -> str:
        """The step as Python."""
        return text.assigned(self.results, self.unpacks, text.of(self.call()))

    def native(self, unit: Lowering) -> bool:
        """Append the step to a unit. False where the library cannot do it: then it is a call of Python."""
        return False

    def lower(self, unit: Lowering) -> None:
        """Append the step to a unit."""
        if not self.native(unit):
            unit.call_python(self.call(), self.results, self.unpacks)


# -- memory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Allocate(Step):
    """Allocates a tensor."""

    size: Sizes
    stride: Sizes
    dtype: torch.dtype
    device: torch.device
    pin_memory: bool = False
    on_cpu: Function | None = None  # of (size, stride, dtype): takes less time than torch's

    def call(self) -> Call:
        if self.on_cpu is not None:
            return Call(self.on_cpu, (self.size, self.stride, Bound(self.dtype)))
        options: dict[str, Operand] = {"dtype": Bound(self.dtype), "device": Bound(self.device)}
        pinned: dict[str, Operand] = {"pin_memory": True} if self.pin_memory else {}
        return Call(torch.empty_strided, (self.size, self.stride), options | pinned)

    def native(self, unit: Lowering) -> bool:
        if self.device.type != "cpu" or self.pin_memory or not are_sizes(self.size, self.stride):
            return False
        size, stride = unit.values((self.size, self.stride))
        text, slot = unit.text(self.size), unit.new(self.result)
        return unit.add(
            unit.library.empty(slot, size, stride, self.dtype), f"slot {slot} = empty {text}, {self.dtype}"
        )


@dataclass(frozen=True, eq=False)
class View(Step):
    """Lays a tensor out over the memory of another, ``offset`` elements after the first of that."""

    function: Function  # (base, size, stride, offset)
    base: Operand
    size: Sizes
    stride: Sizes
    offset: Number = 0

    def call(self) -> Call:
        return Call(self.function, (self.base, self.size, self.stride, self.offset))

    def native(self, unit: Lowering) -> bool:
        if not are_sizes(self.size, self.stride) or not is_number(self.offset):
            return False
        operands = self.base, self.size, self.stride, self.offset
        values, (base, size, stride, offset) = unit.values(operands), map(unit.text, operands)
        slot = unit.new(self.result)
        text = f"slot {slot} = {base} as {size}, strides {stride}, offset {offset}"
        return unit.add(unit.library.view(slot, *values), text)


@dataclass(frozen=True, eq=False)
class Resize(Step):
    """Gives a storage memory, or takes it back."""

    storage: torch.UntypedStorage
    nbytes: int

    def call(self) -> Call:
        return Call(self.storage.resize_, (self.nbytes,))

    def native(self, unit: Lowering) -> bool:
        return unit.add(unit.library.resize(self.storage, self.nbytes), f"resize a region to {self.nbytes} bytes")


@dataclass(frozen=True, eq=False)
class Fill(Step):
    """Copies inputs to their static buffers, which have one element along dimensions of stride 0."""

    buffers: tuple[torch.Tensor, ...]
    inputs: tuple[Operand, ...]

    def call(self) -> Call:
        return Call(fill_buffers, (Bound(list(self.buffers)), *self.inputs))

    def native(self, unit: Lowering) -> bool:
        step = unit.library.fill(self.buffers, unit.values(self.inputs))
        return unit.add(step, f"fill static buffers with {unit.texts(self.inputs)}")


@dataclass(frozen=True, eq=False)
class Copy(Step):
    """Copies a tensor to another one."""

    target: Operand
    source: Operand

    def call(self) -> Call:
        return Call(torch.ops.aten.copy_.default, (self.target, self.source))

    def native(self, unit: Lowering) -> bool:
        return unit.operator(torch.ops.aten.copy_.default, self.call(), ())


# -- calls ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CallPython(Step):
    """Calls a function of Python."""

    function: Function
    args: tuple[Operand, ...] = ()
    kwargs: Mapping[str, Operand] = field(default_factory=dict)

    def call(self) -> Call:
        return Call(self.function, self.args, self.kwargs)


@dataclass(frozen=True, eq=False)
class CallOperator(CallPython):
    """Calls an operator of the dispatcher; ``function`` is the overload itself, or a binding of it."""

    overload: torch._ops.OpOverload = field(kw_only=True)

    def native(self, unit: Lowering) -> bool:
        return unit.operator(self.overload, self.call(), self.results)


@dataclass(frozen=True, eq=False)
class Multiply(CallOperator):
    """Multiplies matrices: an operator, in whose place the library calls the BLAS if that computes the same bits."""

    OVERLOADS = (torch.ops.aten.mm.out, torch.ops.aten.addmm.out)

    def native(self, unit: Lowering) -> bool:
        return unit.operator(self.overload, self.call(), self.results, product=True)


@dataclass(frozen=True, eq=False)
class Arithmetic(CallPython):
    """Computes a number from numbers."""

    def native(self, unit: Lowering) -> bool:
        number, count = unit.operations.get(self.function, (-1, -1))
        if count != len(self.args) or self.kwargs or not self.results or not all(map(is_number, self.args)):
            return False
        first, second = unit.values((self.args * 2)[:2])  # a function of one operand ignores the second
        given, python = unit.texts(self.args), unit.python(self.call(), self.results)
        slot = unit.slots[self.result]
        step = unit.library.arithmetic(slot, number, first, second, python)
        return unit.add(step, f"slot {slot} = {self.function.__name__}({given})")


@dataclass(frozen=True, eq=False)
class Launch(Step):
    """Runs a compiled kernel."""

    kernel: Kernel
    args: tuple[Operand, ...]

    def call(self) -> Call:
        return Call(self.kernel.call, self.args)

    def native(self, unit: Lowering) -> bool:
        return unit.kernel(self.kernel, self.args) or unit.call_python(self.call(), name=self.kernel.name)


@dataclass(frozen=True, eq=False)
class ReplayGraph(Step):
    """Replays a device graph."""

    graph: DeviceGraph

    def call(self) -> Call:
        return Call(self.graph.replay)


@dataclass(frozen=True, eq=False)
class PostProcess(Step):
    """Post-processing of a step's result, passed in a list so that the function can drop the last reference."""

    step: Step
    function: Function

    def reads(self) -> Iterator[Local | Register | Bound]:
        return self.step.reads()

    def python(self, text: Text) -> str:
        code = f"{text.bound(self.function)}([{text.of(self.step.call())}])"
        return text.assigned(self.results, self.unpacks, code)

    def native(self, unit: Lowering) -> bool:
        result = unit.temporary()
        dataclasses.replace(self.step, results=(result,)).lower(unit)
        return unit.call_python(Call(self.function, ([Moved(result)],)), self.results, self.unpacks)


# -- checks: where one does not hold, Python says so --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CheckLayout(Step):
    """Raises if a tensor has another size or stride."""

    function: Function  # (tensor, size, stride), and perhaps the name of who made it
    tensor: Operand
    size: Sizes
    stride: Sizes
    name: Operand = None

    def call(self) -> Call:
        return Call(self.function, (self.tensor, self.size, self.stride, *([self.name] if self.name else [])))

    def native(self, unit: Lowering) -> bool:
        if not are_sizes(self.size, self.stride):
            return False
        operands = self.tensor, self.size, self.stride
        step = unit.library.layout(*unit.values(operands), unit.python(self.call()))
        tensor, size, stride = map(unit.text, operands)
        return unit.add(step, f"assert {tensor} is {size}, strides {stride}")


@dataclass(frozen=True, eq=False)
class CheckAlignment(Step):
    """Raises if the address of a tensor is no multiple of ``nbytes``."""

    function: Function  # (tensor, nbytes), and perhaps the name of who made it
    tensor: Operand
    nbytes: int
    name: Operand = None

    def call(self) -> Call:
        return Call(self.function, (self.tensor, self.nbytes, *([self.name] if self.name else [])))

    def native(self, unit: Lowering) -> bool:
        python = unit.python(self.call())
        step = unit.library.alignment(unit.value(self.tensor), self.nbytes, python)
        return unit.add(step, f"assert {unit.text(self.tensor)} is at a multiple of {self.nbytes}")


@dataclass(frozen=True, eq=False)
class CheckCondition(Step):
    """Raises unless a condition holds."""

    function: Function  # (condition, message)
    condition: Operand
    message: Operand = ""

    def call(self) -> Call:
        return Call(self.function, (self.condition, self.message))

    def native(self, unit: Lowering) -> bool:
        if not isinstance(self.condition, Local):
            return False
        step = unit.library.condition(unit.value(self.condition), unit.python(self.call()))
        return unit.add(step, f"assert {unit.text(self.condition)}: {known(self.message)}")


# -- locals and registers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Load(Step):
    """Reads a register, and empties it if nobody reads it afterwards."""

    register: Register
    empties: bool

    def python(self, text: Text) -> str:
        local, register = text.of(self.result), text.of(self.register)
        return f"{local} = {register}" + (f"; {register} = None" if self.empties else "")

    def native(self, unit: Lowering) -> bool:
        return unit.load(self.result, self.register.number, self.empties)


@dataclass(frozen=True, eq=False)
class Store(Step):
    """Writes a register."""

    register: Register
    value: Operand

    def python(self, text: Text) -> str:
        return f"{text.of(self.register)} = {text.of(self.value)}"

    def native(self, unit: Lowering) -> bool:
        return unit.store(self.register.number, self.value)


@dataclass(frozen=True, eq=False)
class Item(Step):
    """Takes an element out of a tuple."""

    whole: Local
    position: int

    def python(self, text: Text) -> str:
        return f"{text.of(self.result)} = {text.of(self.whole)}[{self.position}]"

    def native(self, unit: Lowering) -> bool:
        return unit.item(self.result, self.whole, self.position)


@dataclass(frozen=True, eq=False)
class Drop(Step):
    """Deletes locals after their last use."""

    locals: tuple[Local, ...]

    def python(self, text: Text) -> str:
        return f"del {', '.join(map(text.of, self.locals))}"

    def native(self, unit: Lowering) -> bool:
        return unit.drop(self.locals)


@dataclass(frozen=True, eq=False)
class Range(Step):
    """Begins a range of profiles, which ends where the next one begins; without a name it only ends one."""

    name: str

    def python(self, text: Text) -> str:
        return f"with {text.bound(record_function)}({self.name!r}):"

    def native(self, unit: Lowering) -> bool:
        return unit.begin_range(self.name)
