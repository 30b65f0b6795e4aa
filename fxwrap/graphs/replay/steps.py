"""The kinds of steps, a class for each. Every replay is a list of steps; to replay a device graph is one of them.

A kind is its fields, and the call that Python makes of them (``call``). A kind that the helper library can do, too,
has ``NATIVE``: the name of a function of the library (``define_steps`` in native/made_steps.h), and what that
function takes. ``lowering.py`` needs no more, and the listing of a unit is the Python of its steps.
``record/flat.py`` (``_step``) chooses the kind of a node's step.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.fx import Node
from torch.profiler import record_function

from ...host_graph.control_flow import position_of, results_of_loop
from ...host_graph.nodes import Kernel, is_work
from ..devices.device_graph import DeviceGraph
from ..memory.static_buffers import fill_buffers
from .operands import Bound, Call, Function, Local, Number, Operand, Register, Sizes, Text, operands_in
from .ranges import work_range


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """One step. A subclass overrides ``call``, or ``python`` for a statement that is no call.

    Attributes:
        NATIVE: the library's function, then what it takes: attributes of the step ("kernel.address"), "results",
            "call" (the call of Python, for what the library leaves to it), and "gemms" (``NativeReplay.gemms``).
        results: the locals that it makes; None for an element that nobody reads.
        unpacks: the call returns a tuple, and ``results`` are its elements.
        node: the node that it runs; None for what belongs to several.
        may_retry: whether it may run again after it was out of memory.
        MOVES: it loads or stores what its node makes, and so has no range of its own in profiles.
    """

    NATIVE: ClassVar[tuple[str, ...]] = ()
    MOVES: ClassVar[bool] = False

    results: tuple[Local | None, ...] = ()
    unpacks: bool = False
    node: Node | None = None
    may_retry: bool = False

    def reads(self) -> Iterator[Local | Register | Bound]:
        own = (one.name for one in dataclasses.fields(self) if one.name not in Step.__dataclass_fields__)
        return operands_in([getattr(self, name) for name in own])

    @property
    def result(self) -> Local:
        """The only result."""
        (local,) = self.results
        assert local is not None
        return local

    @property
    def range(self) -> str:
        """The name of its own range in profiles; empty unless it is a launch or a library call."""
        return work_range(self.node) if self.node is not None and is_work(self.node) and not self.MOVES else ""

    def call(self) -> Call:
        raise NotImplementedError(f"{type(self).__name__} is no call")

    def python(self, text: Text) -> str:
        """The step as Python."""
        return text.assigned(self.results, self.unpacks, text.of(self.call()))

    def has_native_form(self) -> bool:
        """Whether the library may be asked. It says no itself where operands are not what its function takes."""
        return bool(self.NATIVE)


# -- memory -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Allocate(Step):
    """Allocates a tensor."""

    NATIVE = "empty", "results", "size", "stride", "dtype"

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

    def has_native_form(self) -> bool:
        return self.device.type == "cpu" and not self.pin_memory


@dataclass(frozen=True, eq=False)
class View(Step):
    """Lays a tensor out over the memory of another, ``offset`` elements after the first of that."""

    NATIVE = "view", "results", "base", "size", "stride", "offset"

    function: Function  # (base, size, stride, offset)
    base: Operand
    size: Sizes
    stride: Sizes
    offset: Number = 0

    def call(self) -> Call:
        return Call(self.function, (self.base, self.size, self.stride, self.offset))


@dataclass(frozen=True, eq=False)
class Resize(Step):
    """Gives a storage memory, or takes it back."""

    NATIVE = "resize", "storage", "nbytes"

    storage: torch.UntypedStorage
    nbytes: int

    def call(self) -> Call:
        return Call(torch.UntypedStorage.resize_, (Bound(self.storage), self.nbytes))


@dataclass(frozen=True, eq=False)
class Fill(Step):
    """Copies inputs to their static buffers (a list), which have one element along dimensions of stride 0."""

    NATIVE = "fill", "buffers", "inputs"

    buffers: Bound
    inputs: tuple[Operand, ...]

    def call(self) -> Call:
        return Call(fill_buffers, (self.buffers, *self.inputs))


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

    NATIVE: ClassVar[tuple[str, ...]] = "operator", "results", "overload", "args", "kwargs"

    overload: torch._ops.OpOverload = field(kw_only=True)


@dataclass(frozen=True, eq=False)
class Multiply(CallOperator):
    """Multiplies matrices: an operator, in whose place the library calls the BLAS if that computes the same bits."""

    NATIVE = "product", "results", "overload", "args", "kwargs", "gemms"
    OVERLOADS: ClassVar = (torch.ops.aten.mm.out, torch.ops.aten.addmm.out)


@dataclass(frozen=True, eq=False)
class ReadNumber(CallOperator):
    """Reads a number out of a tensor: an operator, in whose place the library reads integers from memory."""

    NATIVE = "number", "results", "overload", "args", "kwargs"
    OVERLOADS: ClassVar = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


@dataclass(frozen=True, eq=False)
class Arithmetic(CallPython):
    """Computes a number from numbers."""

    NATIVE = "arithmetic", "results", "function", "args", "call"


@dataclass(frozen=True, eq=False)
class Launch(Step):
    """Runs a compiled kernel."""

    NATIVE = "kernel", "kernel.address", "kernel.call", "args", "types"

    kernel: Kernel
    args: tuple[Operand, ...]

    @property
    def types(self) -> list[str]:
        """C types of the arguments; empty if they are unknown."""
        return [str(ctype).strip() for ctype in self.kernel.arg_types or ()]

    def call(self) -> Call:
        return Call(self.kernel.call, self.args, name=self.kernel.name)


@dataclass(frozen=True, eq=False)
class ReplayGraph(Step):
    """Replays a device graph."""

    graph: DeviceGraph

    def call(self) -> Call:
        return Call(self.graph.replay)


# -- checks: one that fails calls Python, which raises --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CheckLayout(CallPython):
    """Raises if a tensor has another size or stride: (tensor, size, stride), and perhaps the name of who made it."""

    NATIVE = "layout", "args", "call"


@dataclass(frozen=True, eq=False)
class CheckAlignment(CallPython):
    """Raises if the address of a tensor is no multiple: (tensor, bytes), and perhaps the name of who made it."""

    NATIVE = "alignment", "args", "call"


@dataclass(frozen=True, eq=False)
class CheckCondition(CallPython):
    """Raises unless a condition holds: (condition, message)."""

    NATIVE = "condition", "args", "call"


# -- branches and loops: steps inside of a step ----------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Steps inside of a branch or a loop: those of a subgraph.

    Attributes:
        values: what it returns.
    """

    steps: tuple[Step, ...]
    values: tuple[Operand, ...]

    @property
    def ended(self) -> tuple[Local, ...]:
        """The returned locals that this block has made. Its ``Drop`` steps have deleted all others."""
        made = {local for step in self.steps for local in step.results}
        moved = (value for value in self.values if isinstance(value, Local) and value in made)
        return tuple(dict.fromkeys(moved))

    def onto(self, results: tuple[Local | None, ...]) -> list[Step]:
        """The steps, then a ``Move`` of the returned values to ``results``."""
        return [*self.steps, Move(self.values, self.ended, results=results, unpacks=True)]

    def reads(self) -> Iterator[Local | Register | Bound]:
        for step in self.steps:
            yield from step.reads()
        yield from operands_in(self.values)


@dataclass(frozen=True, eq=False)
class Move(Step):
    """Names values anew, all at once.

    Attributes:
        ended: locals that nobody reads afterwards.
    """

    NATIVE = "move", "results", "values", "ended"

    values: tuple[Operand, ...]
    ended: tuple[Local, ...] = ()

    def python(self, text: Text) -> str:
        code = text.assigned(self.results, self.unpacks, text.of(self.values))
        return f"{code}; del {', '.join(map(text.of, self.ended))}" if self.ended else code


class Nested(Step):
    """A step that consists of steps."""

    def lines(self, text: Text) -> Iterator[str | Sequence[Step]]:
        """Its Python: lines, and steps in between."""
        raise NotImplementedError

    def python(self, text: Text) -> str:
        lines, indent = list[str](), ""
        for line in self.lines(text):
            if isinstance(line, str):
                lines.append(line)
                indent = indent_below(line)
            else:
                lines += [indent + code for step in line for code in text.in_range(step.range, step.python(text))]
        return "\n".join(lines)


def indent_below(line: str) -> str:
    """The indentation of what follows a line of Python."""
    return line[: len(line) - len(line.lstrip())] + "    " * line.endswith(":")


@dataclass(frozen=True, eq=False)
class Branch(Nested):
    """Runs one of several blocks, which a number or a tensor with one chooses (``switch``)."""

    NATIVE = "branch", "selector", "blocks", "by_truth"

    selector: Operand
    branches: tuple[Block, ...]
    by_truth: bool

    def reads(self) -> Iterator[Local | Register | Bound]:
        yield from operands_in(self.selector)
        for branch in self.branches:
            yield from branch.reads()

    def lines(self, text: Text) -> Iterator[str | Sequence[Step]]:
        yield f"match {text.of(Call(position_of, (self.selector, len(self.branches), self.by_truth)))}:"
        for position, branch in enumerate(self.branches):
            yield f"    case {position}:"
            yield branch.onto(self.results)


@dataclass(frozen=True, eq=False)
class Loop(Nested):
    """Runs a block again and again, while what another one returns is true.

    Attributes:
        initial: what the first iteration gets.
        carried: what each iteration gets: the values of the results, and places that these alternate between.
        passes: what each iteration has carried, if ``stacks``; otherwise whether there was an iteration.
        condition: returns one value.
        body: returns what is carried to the next iteration.
    """

    NATIVE = "loop", "results", "initial", "carried", "blocks", "going", "stacks"
    HEAD: ClassVar[str] = "while True:"
    TAIL: ClassVar[str] = ""  # behind the iterations

    initial: tuple[Operand, ...]
    carried: tuple[Local, ...]
    passes: Local
    condition: Block
    body: Block
    stacks: bool

    @property
    def going(self) -> Operand:
        (value,) = self.condition.values
        return value

    def reads(self) -> Iterator[Local | Register | Bound]:
        yield from operands_in(self.initial)
        yield from self.condition.reads()
        yield from self.body.reads()

    def lines(self, text: Text) -> Iterator[str | Sequence[Step]]:
        passes, carried = text.of(self.passes), text.of(self.carried)
        yield f"{carried} = {text.of(self.initial)}"
        yield f"{passes} = {'[]' if self.stacks else False}"
        yield self.HEAD
        yield self.condition.steps
        yield f"    if not {text.of(self.going)}: break"
        yield self.body.onto(self.carried)
        yield f"    {passes}{f'.append({carried})' if self.stacks else ' = True'}"
        yield from [self.TAIL] if self.TAIL else []
        results = text.of(Call(results_of_loop, (self.carried[: len(self.results)], self.passes)))
        yield f"{text.assigned(self.results, self.unpacks, results)}; del {passes}"
        yield f"del {', '.join(map(text.of, self.carried))}"


# -- moves between locals and registers: a unit makes few of them (``lowering.py``) ----------------------------------


@dataclass(frozen=True, eq=False)
class Load(Step):
    """Reads a register, and empties it if nobody reads it afterwards."""

    MOVES = True

    register: Register
    empties: bool

    def python(self, text: Text) -> str:
        local, register = text.of(self.result), text.of(self.register)
        return f"{local} = {register}" + (f"; {register} = None" if self.empties else "")


@dataclass(frozen=True, eq=False)
class Store(Step):
    """Writes a register."""

    MOVES = True

    register: Register
    value: Operand

    def python(self, text: Text) -> str:
        return f"{text.of(self.register)} = {text.of(self.value)}"


@dataclass(frozen=True, eq=False)
class Item(Step):
    """Takes an element out of a tuple."""

    NATIVE = "item", "results", "whole", "position"

    whole: Local
    position: int

    def call(self) -> Call:
        return Call(operator.getitem, (self.whole, self.position))


@dataclass(frozen=True, eq=False)
class Drop(Step):
    """Deletes locals after their last use."""

    locals: tuple[Local, ...]

    def python(self, text: Text) -> str:
        return f"del {', '.join(map(text.of, self.locals))}"


@dataclass(frozen=True, eq=False)
class Range(Step):
    """Begins a range of profiles, which ends where the next one begins; without a name it only ends one."""

    name: str

    def python(self, text: Text) -> str:
        return f"with {text.bound(record_function)}({self.name!r}):"
