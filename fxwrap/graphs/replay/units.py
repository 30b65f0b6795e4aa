"""Native replay: flat functions as a unit, which the helper library runs without Python (codegen/native/replay.cpp).

::

    v0 = r[2]; r[2] = None
    v1 = empty_strided(...)         ->      slot 5 = empty (3, 8)
    r[5] = v1
    c6(c4, v0, c5, out=v1)          ->      aten::addmm.out(constant, slot 2, constant, 1, 1, slot 5)
    del v0                          ->      drop slot 2
    c13(c9, v1, c10)                ->      cpp_fused_relu_0 at 0x7f..(constant, slot 5, constant)

Registers are slots, and a local that is stored in one, or read from one, is that slot. What cannot be called natively
is called through Python; a unit may mix both.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...host_graph.nodes import Kernel, check, require, schema_of
from ..memory.regions import Resize
from ..memory.static_buffers import Fill
from .flat_lines import (
    LITERALS,
    AnyLine,
    Bound,
    Call,
    Delete,
    Item,
    Line,
    Local,
    Part,
    Range,
    Register,
    Store,
    operands_in,
)

log = logging.getLogger(__name__)


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
        unit: makes a unit from its description.
        missed: what a unit returns for calls that do not suit it.
        kernel_address: where the machine code of a kernel is; None if nobody knows.
        empty: allocates on the CPU: ``(size, stride, dtype)``.
        lay_out: ``(tensor, size, stride, offset)``.
        assert_layout: ``(tensor, size, stride, name)`` raises if a tensor looks otherwise.
        assert_alignment: ``(tensor, bytes, name)`` raises if a tensor is at another address.
    """

    unit: Callable[[Mapping[str, Any]], Unit]
    missed: Any
    kernel_address: Callable[[Kernel], int | None]
    empty: Any
    lay_out: Any
    assert_layout: Any
    assert_alignment: Any


@dataclass(frozen=True)
class Guards:
    """What a call has to look like for a unit.

    Attributes:
        addresses: (position, address) of static inputs.
        numbers: (position, value) of inputs that are numbers.
        dimensions: (position, whether it is a stride, dimension, value).
        packed: storages by their handles, of which no input at the positions ``overwritten`` may be in one.
        moving, static_spans, written_static_spans: of ``overlaps.MutatedInputs``.
        no_hooks: nobody packs what autograd saves in this thread.
        locks: owners of locks, of which there must be none, and where it is noted that a unit has the lock.
        device: the accelerator, which must be the current one; None for the CPU.
        streams: where work was issued last in each arena, which must be the current stream.
        caller_captures: whether somebody captures on the current stream.
    """

    addresses: Sequence[tuple[int, int]] = ()
    numbers: Sequence[tuple[int, int]] = ()
    dimensions: Sequence[tuple[int, bool, int, int]] = ()
    packed: Mapping[int, Any] | None = None
    overwritten: Sequence[int] = ()
    moving: Sequence[tuple[int, bool]] = ()
    static_spans: Sequence[tuple[int, int]] = ()
    written_static_spans: Sequence[tuple[int, int]] = ()
    no_hooks: bool = False
    locks: Sequence[tuple[dict[int, Any], ctypes.c_int64]] = ()
    device: torch.device | None = None
    streams: Sequence[ctypes.c_int64] = ()
    caller_captures: Callable[[], bool] | None = None


@dataclass
class Description:
    """A unit as the helper library takes it.

    Attributes:
        inputs: how many there are: they are the first slots.
        empties_inputs: whether the list of inputs is emptied at the start of the call instead of at its end: inputs
            then live no longer than they are needed.
        loads: (input, slot).
        kept_inputs: inputs that no slot holds, but the call does.
        used: slots that steps read or write.
        cleared: slots that hold something at the end of a call.
        clock: incremented at every call, and shared by all units.
        count: incremented at every call.
        name: of the range in profiles that a call is; empty if it is part of another one.
        ranges: (position of a step, name): the ranges inside of it, each up to the next one.
        give_back: called where one of the steps ``repeats`` is out of memory; then it runs again.
        repeats: positions of steps.
    """

    inputs: int
    empties_inputs: bool
    guards: Guards = field(default_factory=Guards)
    clock: ctypes.c_int64 | None = None
    count: ctypes.c_int64 | None = None
    name: str = ""
    slots: int = 0
    loads: list[tuple[int, int]] = field(default_factory=list)
    kept_inputs: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    cleared: list[int] = field(default_factory=list)
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    listing: list[str] = field(default_factory=list)
    ranges: list[tuple[int, str]] = field(default_factory=list)
    result: Any = None
    give_back: Callable[[], object] | None = None
    repeats: list[int] = field(default_factory=list)

    def for_library(self) -> Mapping[str, Any]:
        guards = {one.name: getattr(self.guards, one.name) for one in dataclasses.fields(Guards)}
        own = {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if one.name != "guards"}
        # Where numbers are that Python and the library share, beside what keeps them there.
        cells = {
            "count_address": ctypes.addressof(self.count) if self.count is not None else 0,
            "clock_address": ctypes.addressof(self.clock) if self.clock is not None else 0,
            "lock_addresses": [ctypes.addressof(cell) for _, cell in self.guards.locks],
            "stream_addresses": list(map(ctypes.addressof, self.guards.streams)),
        }
        return {**own, **guards, **cells}


@dataclass(frozen=True)
class Taken:
    """A local's value, which nobody else has from then on."""

    local: Local


# At the end of a listing's line: the step is a call of a Python function.
PYTHON = "  # Python"


class CannotReplay(Exception):
    """Lines that a unit has no steps for."""


def make_unit(native: NativeReplay, parts: Sequence[Part], registers: int, description: Description) -> Unit:
    """A unit of parts over the same registers, of which the last makes the result.

    ``description`` tells the rest, and gets the steps.

    Raises:
        CannotReplay: they have to be run in Python.
    """
    try:
        return _make_unit(native, parts, registers, description)
    except CannotReplay:
        raise
    except Exception as error:  # of a fault here: the call has run, and is not to fail for it
        log.warning("a recording replays in Python: its unit cannot be made", exc_info=True)
        raise CannotReplay(f"{type(error).__name__}: {error}".partition("\n")[0]) from error


def _make_unit(native: NativeReplay, parts: Sequence[Part], registers: int, description: Description) -> Unit:
    description.slots = registers
    below = False
    last: _Lowering | None = None
    for part in parts:
        if part.below_autograd is not below:
            below = part.below_autograd
            description.steps.append(("below autograd", below))
            description.listing.append(f"{'below' if below else 'through'} autograd:")
        if part.name:
            description.ranges.append((len(description.steps), part.name))
        last = _Lowering(native, part, description)
        last.lower()
        description.ranges.append((len(description.steps), ""))
    assert last is not None
    if below:
        description.steps.append(("below autograd", False))
        description.listing.append("through autograd:")
    description.result = last.value(parts[-1].result)
    description.listing.append(f"return {last.text(parts[-1].result)}")
    # Inputs live as long as the call, also those that no step reads: the plan takes them to be there, and steps know
    # static ones by their address.
    static = {position for position, _ in description.guards.addresses}
    unread = static - description.used
    description.loads = [(p, p) for p in range(description.inputs) if p not in unread]
    description.kept_inputs = sorted(unread) if description.empties_inputs else []
    dropped = {step[1] for step in description.steps if step[0] == "drop"}
    description.cleared = sorted(({slot for _, slot in description.loads} | description.used) - dropped)
    try:
        return native.unit(description.for_library())
    except RuntimeError as error:
        raise CannotReplay(str(error).partition("\n")[0]) from error


class _Lowering:
    """The lines of one part."""

    def __init__(self, native: NativeReplay, part: Part, description: Description) -> None:
        self._native, self._description, self._lines = native, description, part.lines
        self._slots: dict[Local, int] = {}
        self._borrowed: dict[Local, int] = {}  # registers that stay when the local goes
        self._stored = {
            line.value: line.register.number
            for line in self._lines
            if isinstance(line, Store) and isinstance(line.value, Local)
        }
        # Tuples of which nothing but elements is read, each of them once: an element goes with the local that has it.
        whole = {part for line in self._lines for part in _read_whole(line)} | set(operands_in(part.result))
        items = [line.value for line in self._lines if isinstance(line, Line) and isinstance(line.value, Item)]
        whole.update(item.of for item in items if item.position < 0 or items.count(item) > 1)
        self._taken_apart = {item.of for item in items} - whole
        self._elements: dict[tuple[Local, int], int] = {}
        self._temporaries = 0

    def lower(self) -> None:
        for position, line in enumerate(self._lines):
            match line:
                case Store():
                    self._store(line, self._lines[position - 1] if position else None)
                case Delete(gone):
                    for local in gone:
                        self._delete(local)
                case Line():
                    begin = len(self._description.steps)
                    self._line(line)
                    if line.repeats:
                        self._description.repeats += range(begin, len(self._description.steps))
                case Range(name):
                    self._description.ranges.append((len(self._description.steps), name))

    # -- lines ----------------------------------------------------------------------------------------

    def _store(self, line: Store, before: AnyLine | None) -> None:
        number, value = line.register.number, line.value
        if isinstance(value, Local):
            if self._slots[value] != number:
                self._description.used.add(number)
                self._add(("copy", number, self._slots[value]), f"slot {number} = {self.text(value)}")
        elif value is None and isinstance(before, Line) and before.value == line.register:
            del self._borrowed[before.results[0]]  # it goes when the local goes
        elif value is None:
            self._add(("drop", number), f"drop slot {number}")
        else:
            self._description.used.add(number)
            self._add(("set", number, self.value(value)), f"slot {number} = {self.text(value)}")

    def _delete(self, local: Local) -> None:
        if local in self._borrowed or local in self._taken_apart:
            return
        if local in self._stored and self._stored[local] == self._slots[local]:
            return
        self._add(("drop", self._slots[local]), f"drop {self.text(local)}")

    def _line(self, line: Line) -> None:
        value = line.value
        if isinstance(value, Register):
            (local,) = line.results
            self._slots[local] = self._borrowed[local] = value.number
        elif isinstance(value, Item):
            self._item(value, line.results[0])
        else:
            if not isinstance(value, Call):
                raise CannotReplay(f"a line that calls nothing: {line}")
            self._call(self._landed(value, line), line)

    def _landed(self, call: Call, line: Line) -> Call:
        """A call whose arguments are no calls: ``landing([f(x)])`` becomes two steps."""
        if len(call.args) != 1 or not isinstance(call.args[0], list) or not isinstance(call.args[0][0], Call):
            return call
        self._temporaries += 1
        result = Local(f"landing {self._temporaries}")
        self._call(call.args[0][0], dataclasses.replace(line, value=call.args[0][0], results=(result,)))
        return dataclasses.replace(call, args=([Taken(result)],))

    def _item(self, item: Item, local: Local) -> None:
        known = self._elements.get((item.of, item.position))
        if known is not None:
            self._slots[local] = known
            return
        slot = self._new(local)
        step = "item", slot, self._slots[item.of], item.position
        self._add(step, f"slot {slot} = {self.text(item.of)}[{item.position}]")

    def _call(self, call: Call, line: Line) -> None:
        natively = self._kernel, self._memory, self._assertion, self._arithmetic, self._operator
        if any(lower(call, line) for lower in natively):
            return
        named = ", ".join(f"{name}={self.text(value)}" for name, value in call.kwargs.items())
        given = ", ".join(map(self.text, call.args)) + (f", {named}" if named and call.args else named)
        python = self._python(call, line)
        made = ", ".join(f"slot {slot}" for slot in python[3])
        function = call.function.value
        name = function.name if isinstance(function, Kernel) else getattr(function, "__name__", None)
        name = name or type(function).__name__
        self._add(("python", *python), f"{made + ' = ' if made else ''}{name}({given}){PYTHON}")

    def _memory(self, call: Call, line: Line) -> bool:
        """What allocates, lays out and copies."""
        function, args = call.function.value, _known(call.args)
        if isinstance(function, Resize):
            step: tuple[Any, ...] = "resize", function.storage, function.nbytes
            self._add(step, f"resize a region to {function.nbytes} bytes")
        elif isinstance(function, Fill):
            fill = "fill", list(function.tensors), list(map(self.value, call.args))
            self._add(fill, f"fill static buffers with {', '.join(map(self.text, call.args))}")
        elif function is self._native.empty and _are_sizes(args[:2]):
            sizes, text = [self._numbers(arg) for arg in args[:2]], self.text(args[0])
            slot = self._new(line.results[0])
            self._add(("empty", slot, *sizes, args[2]), f"slot {slot} = empty {text}, {args[2]}")
        elif function is self._native.lay_out and _are_sizes(args[1:3]) and _is_number(args[3]):
            base, offset = self.value(call.args[0]), self.value(args[3])
            sizes = [self._numbers(arg) for arg in args[1:3]]
            text = f"{self.text(call.args[0])} as {self.text(args[1])}, strides {self.text(args[2])}"
            slot = self._new(line.results[0])
            self._add(("view", slot, base, *sizes, offset), f"slot {slot} = {text}, offset {_text_of(offset)}")
        else:
            return False
        return True

    def _assertion(self, call: Call, line: Line) -> bool:
        """What Python says only if it does not hold."""
        function, args = call.function.value, _known(call.args)
        if function is self._native.assert_layout and _are_sizes(args[1:3]):
            look: tuple[Any, ...] = "layout", self.value(call.args[0]), *map(self._numbers, args[1:3])
            text = f"{self.text(call.args[0])} is {self.text(args[1])}, strides {self.text(args[2])}"
        elif function is self._native.assert_alignment and type(args[1]) is int:
            look = "alignment", self.value(call.args[0]), args[1]
            text = f"{self.text(call.args[0])} is at a multiple of {args[1]}"
        elif function in (check, require) and isinstance(args[0], Local):
            look = "check", self.value(args[0])
            text = f"{self.text(args[0])}: {args[1] if len(args) > 1 else ''}"
        else:
            return False
        self._add((*look, *self._python(call, line)), f"assert {text}")
        return True

    def _arithmetic(self, call: Call, line: Line) -> bool:
        function, args = call.function.value, _known(call.args)
        operation = next((one for one in _ARITHMETIC if one.function is function), None)
        if operation is None or len(args) != operation.operands or not line.results:
            return False
        if not all(map(_is_number, args)) or call.kwargs:
            return False
        name, args = operation.name, (args * 2)[:2]  # of one operand: the second is ignored
        python, operands = self._python(call, line), list(map(self.value, args))
        (slot,) = python[3]
        text = f"slot {slot} = {name}({', '.join(map(_text_of, operands))})"
        self._add(("integer", slot, name, *operands, *python), text)
        return True

    def _numbers(self, sizes: Sequence[Any]) -> list[tuple[str, Any]]:
        return list(map(self.value, sizes))

    def _python(self, call: Call, line: Line) -> tuple[Any, ...]:
        function = call.function.value
        function = function.call if isinstance(function, Kernel) else function
        args, kwargs = list(map(self.value, call.args)), {name: self.value(v) for name, v in call.kwargs.items()}
        for local in line.results:  # nobody takes the elements out of what was returned, until ``item`` does
            self._taken_apart.discard(local)
        return function, args, kwargs, [self._new(local) for local in line.results], line.unpacks

    def _kernel(self, call: Call, line: Line) -> bool:
        kernel = call.function.value
        if not isinstance(kernel, Kernel) or line.results:
            return False
        types = [str(ctype) for ctype in kernel.arg_types or ()]
        if len(types) != len(call.args) or len(types) > _MOST_ARGUMENTS:
            return False
        described: list[tuple[Any, ...]] = []
        for ctype, arg, known in zip(types, call.args, _known(call.args), strict=True):
            if ctype.endswith("*") and (isinstance(arg, (Local, Register)) or isinstance(known, torch.Tensor)):
                described.append(("read" if ctype.startswith("const ") else "written", self.value(arg)))
            elif _is_number(known) and ctype.removeprefix("const ").strip() == "int64_t":
                described.append(("number", self.value(known)))
            else:
                return False
        address = self._native.kernel_address(kernel)
        if address is None:
            return False
        text = f"{kernel.name}({', '.join(map(self.text, call.args))})"
        self._add(("kernel", address, described), text)
        return True

    def _operator(self, call: Call, line: Line) -> bool:
        overload = call.function.value
        if not isinstance(overload, torch._ops.OpOverload):
            node = line.node
            if node is None or overload is not node.meta.get("call", node.target):
                return False
            overload = schema_of(node)
        if overload is None:
            return False
        schema = overload._schema
        described: list[Any] = []
        if len(call.args) > len(schema.arguments):
            return False
        named = dict(call.kwargs)
        for position, argument in enumerate(schema.arguments):
            if position < len(call.args) and not argument.kwarg_only:
                described.append(self.value(call.args[position]))
            elif argument.name in named:
                described.append(self.value(named.pop(argument.name)))
            elif argument.has_default_value():
                described.append(None)
            else:
                return False
        if named or sum(not argument.kwarg_only for argument in schema.arguments) < len(call.args):
            return False
        results: list[int | None] = []
        if line.results:
            (local,) = line.results
            if len(schema.returns) == 1:
                results = [self._new(local)]
                self._taken_apart.discard(local)  # a list is a value of its own: it goes when the local goes
            elif local in self._taken_apart:
                results = self._elements_of(local, len(schema.returns))
            else:
                return False
        made = ", ".join("_" if slot is None else f"slot {slot}" for slot in results)
        given = ", ".join("default" if one is None else _text_of(one) for one in described)
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        step = "operator", schema.name, schema.overload_name, described, results
        self._add(step, f"{made + ' = ' if made else ''}{name}({given})")
        return True

    def _elements_of(self, whole: Local, count: int) -> list[int | None]:
        """Slots for the elements of a tuple that somebody takes out."""
        results: list[int | None] = [None] * count
        for line in self._lines:
            if isinstance(line, Line) and isinstance(line.value, Item) and line.value.of == whole:
                position = line.value.position
                results[position] = self._elements[whole, position] = self._new(line.results[0])
        return results

    # -- operands -------------------------------------------------------------------------------------

    def _new(self, local: Local) -> int:
        slot = self._stored.get(local, self._description.slots)
        if slot == self._description.slots:
            self._description.slots += 1
        self._slots[local] = slot
        self._description.used.add(slot)
        return slot

    def _add(self, step: tuple[Any, ...], text: str) -> None:
        self._description.steps.append(step)
        self._description.listing.append(text)

    def value(self, operand: Any) -> tuple[str, Any]:
        """An operand as the helper library takes it."""
        match operand:
            case Local():
                return "slot", self._use(self._slots[operand])
            case Taken(local):
                return "taken", self._use(self._slots[local])
            case Register(number):
                return "slot", self._use(number)
            case Bound(value):
                return "constant", value.call if isinstance(value, Kernel) else value
            case tuple():
                return "tuple", tuple(map(self.value, operand))
            case list():
                return "list", list(map(self.value, operand))
            case slice():
                return "slice", tuple(map(self.value, (operand.start, operand.stop, operand.step)))
            case dict():
                return "dict", {name: self.value(part) for name, part in operand.items()}
        if type(operand) in LITERALS:
            return "constant", operand
        raise CannotReplay(f"an operand: {operand}")

    def _use(self, slot: int) -> int:
        self._description.used.add(slot)
        return slot

    def text(self, operand: Any) -> str:
        return _text_of(self.value(operand))


@dataclass(frozen=True)
class _Operation:
    """Arithmetic that the helper library has for integers, under ``name``."""

    name: str
    function: Callable[..., Any]
    operands: int = 2


_ARITHMETIC = [
    *(
        _Operation(name, getattr(operator, name))
        for name in ("add", "sub", "mul", "floordiv", "mod", "ge", "le", "gt", "lt", "eq", "ne")
    ),
    *(_Operation("max", max), _Operation("min", min)),
    *(_Operation("abs", abs, 1), _Operation("neg", operator.neg, 1)),
]
# As many arguments as the helper library can give a kernel.
_MOST_ARGUMENTS = 96


def _text_of(value: tuple[str, Any]) -> str:
    kind, content = value
    match kind:
        case "slot" | "taken":
            return f"slot {content}"
        case "constant":
            if isinstance(content, torch.Tensor):
                return f"<{str(content.dtype).removeprefix('torch.')}{list(content.shape)}>"
            if type(content) in (*LITERALS, float, tuple, list, torch.dtype, torch.device):
                return repr(content)
            return f"<{type(content).__name__}>"
        case "dict":
            return "{" + ", ".join(f"{name!r}: {_text_of(part)}" for name, part in content.items()) + "}"
        case "slice":
            return ":".join(map(_text_of, content))
    return f"({', '.join(map(_text_of, content))})"


def _known(operands: Sequence[Any]) -> list[Any]:
    """Operands with what is bound in the place of ``Bound``."""
    return [operand.value if isinstance(operand, Bound) else operand for operand in operands]


def _is_number(value: Any) -> bool:
    """Whether a value is an integer, or may turn out to be one."""
    return type(value) is int or isinstance(value, (Local, Register))


def _are_sizes(values: Sequence[Any]) -> bool:
    return all(isinstance(value, tuple) and all(map(_is_number, value)) for value in values)


def _read_whole(line: AnyLine) -> list[Any]:
    """What a line reads other than elements of it."""
    if isinstance(line, (Delete, Range)) or (isinstance(line, Line) and isinstance(line.value, Item)):
        return []
    return list(operands_in(line.value))
