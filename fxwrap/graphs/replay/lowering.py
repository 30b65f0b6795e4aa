"""Steps of one part as steps of the helper library, over slots.

Registers are slots, and a local that is stored in one, or read from one, is that slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...host_graph.nodes import Kernel
from .guards import Description
from .native import CannotReplay, NativeReplay, NativeStep, Value
from .operands import LITERALS, Bound, Call, Local, Moved, Operand, Register, is_number, known, operands_in
from .steps import Drop, Item, Step, Store

# At the end of a listing's line: the step is a call of a Python function.
PYTHON = "  # Python"
# As many arguments as the library can give a kernel.
_MOST_ARGUMENTS = 96


class Lowering:
    """What has been made of the steps of one part.

    Attributes:
        slots: of locals.
    """

    def __init__(
        self, native: NativeReplay, steps: Sequence[Step], result: Operand, description: Description
    ) -> None:
        self.library, self.operations, self._kernel_address = native.library, native.operations, native.kernel_address
        self._steps, self._description = steps, description
        self.slots: dict[Local, int] = {}
        self._borrowed = set[Local]()  # in registers that stay when the local goes
        self._stored = {
            step.value: step.register.number
            for step in steps
            if isinstance(step, Store) and isinstance(step.value, Local)
        }
        # Tuples of which nothing but elements is read, each of them once: an element goes with the local that has it.
        items = [step for step in steps if isinstance(step, Item)]
        whole = {part for step in steps if not isinstance(step, (Item, Drop)) for part in step.reads()}
        whole.update(operands_in(result))
        taken = [(item.whole, item.position) for item in items]
        whole.update(
            item.whole for item in items if item.position < 0 or taken.count((item.whole, item.position)) > 1
        )
        self._taken_apart = {item.whole for item in items} - whole
        self._elements: dict[tuple[Local, int], int] = {}
        self._temporaries = 0

    # -- operands -------------------------------------------------------------------------------------

    def value(self, operand: Any) -> Value:
        """An operand as the library takes it."""
        library = self.library
        match operand:
            case Local():
                return library.slot(self._use(self.slots[operand]))
            case Moved(local):
                return library.moved(self._use(self.slots[local]))
            case Register(number):
                return library.slot(self._use(number))
            case Bound(value):
                return library.constant(value)
            case tuple():
                return library.tuple(self.values(operand))
            case list():
                return library.list(self.values(operand))
            case slice():
                return library.slice(self.values((operand.start, operand.stop, operand.step)))
            case dict():
                return library.dict(self.values(list(operand.values())), list(operand))
        if type(operand) in LITERALS:
            return library.constant(operand)
        raise CannotReplay(f"an operand: {operand}")

    def values(self, operands: Sequence[Operand]) -> list[Value]:
        return list(map(self.value, operands))

    def text(self, operand: Any) -> str:
        """An operand in a listing."""
        match operand:
            case Local():
                return f"slot {self.slots[operand]}"
            case Moved(local):
                return self.text(local)
            case Register(number):
                return f"slot {number}"
            case Bound(value):
                if isinstance(value, torch.Tensor):
                    return f"<{str(value.dtype).removeprefix('torch.')}{list(value.shape)}>"
                plain = type(value) in (*LITERALS, float, tuple, list, torch.dtype, torch.device)
                return repr(value) if plain else f"<{type(value).__name__}>"
            case tuple() | list():
                return f"({self.texts(operand)})"
            case dict():
                return "{" + ", ".join(f"{name!r}: {self.text(part)}" for name, part in operand.items()) + "}"
            case slice():
                return ":".join(map(self.text, (operand.start, operand.stop, operand.step)))
        return repr(operand)

    def texts(self, operands: Sequence[Operand]) -> str:
        return ", ".join(map(self.text, operands))

    def new(self, local: Local) -> int:
        """The slot of a local that a step makes."""
        slot = self._stored.get(local, self._description.slots)
        if slot == self._description.slots:
            self._description.slots += 1
        self.slots[local] = slot
        return self._use(slot)

    def temporary(self) -> Local:
        """A local between two steps of the library that are one here."""
        self._temporaries += 1
        return Local(f"temporary {self._temporaries}")

    def _use(self, slot: int) -> int:
        self._description.used.add(slot)
        return slot

    # -- steps ----------------------------------------------------------------------------------------

    def add(self, step: NativeStep, text: str) -> bool:
        self._description.steps.append(step)
        self._description.listing.append(text)
        return True

    def below_autograd(self, below: bool) -> None:
        """Steps skip autograd's layer of the dispatcher from here on, or do so no more."""
        self.add(self.library.below_autograd(below), f"{'below' if below else 'through'} autograd:")

    def python(self, call: Call, results: Sequence[Local]) -> NativeStep:
        """A call of Python."""
        args = self.values((*call.args, *call.kwargs.values()))  # type: ignore[arg-type]
        for local in results:  # nobody takes the elements out of what was returned, until ``item`` does
            self._taken_apart.discard(local)
        slots = [self.new(local) for local in results]
        return self.library.python(call.function, args, tuple(call.kwargs), slots, call.unpacks)

    def call_python(self, call: Call, results: Sequence[Local], name: str = "") -> bool:
        """Append a call of Python."""
        named = [f"{name}={self.text(value)}" for name, value in call.kwargs.items()]
        given = ", ".join([*map(self.text, call.args), *named])
        step = self.python(call, results)
        made = f"{', '.join(map(self.text, results))} = " if results else ""
        name = name or getattr(call.function, "__name__", None) or type(call.function).__name__
        return self.add(step, f"{made}{name}({given}){PYTHON}")

    def kernel(self, kernel: Kernel, args: Sequence[Operand]) -> bool:
        """A call of a kernel by its address, if it takes pointers and integers of 64 bits."""
        types = [str(ctype) for ctype in kernel.arg_types or ()]
        if len(types) != len(args) or len(types) > _MOST_ARGUMENTS:
            return False
        read, written = list[int](), list[int]()
        for position, (ctype, arg) in enumerate(zip(types, args, strict=True)):
            if ctype.endswith("*") and (isinstance(arg, (Local, Register)) or isinstance(known(arg), torch.Tensor)):
                (read if ctype.startswith("const ") else written).append(position)
            elif not (is_number(arg) and ctype.removeprefix("const ").strip() == "int64_t"):
                return False
        address = self._kernel_address(kernel)
        if address is None:
            return False
        step = self.library.kernel(address, self.values(args), read, written)
        return self.add(step, f"{kernel.name}({self.texts(args)})")

    def operator(self, overload: torch._ops.OpOverload, call: Call, results: Sequence[Local]) -> bool:
        """A call through the dispatcher, if the arguments are in the order of the schema."""
        schema, args, named = overload._schema, call.args, dict(call.kwargs)
        described, texts = list[Value | None](), list[str]()
        for position, argument in enumerate(schema.arguments):
            if position < len(args) and not argument.kwarg_only:
                operand = args[position]
            elif argument.name in named:
                operand = named.pop(argument.name)
            elif argument.has_default_value():
                described.append(None)
                texts.append("default")
                continue
            else:
                return False
            described.append(self.value(operand))
            texts.append(self.text(operand))
        if named or sum(not argument.kwarg_only for argument in schema.arguments) < len(args):
            return False
        slots: list[int | None] = []
        if results:
            (local,) = results
            if len(schema.returns) == 1:
                slots = [self.new(local)]
                self._taken_apart.discard(local)  # a list is a value of its own: it goes when the local goes
            elif local in self._taken_apart:
                slots = self._elements_of(local, len(schema.returns))
            else:
                return False
        made = ", ".join("_" if slot is None else f"slot {slot}" for slot in slots)
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        step = self.library.operator(schema.name, schema.overload_name, described, slots)
        return self.add(step, f"{made + ' = ' if made else ''}{name}({', '.join(texts)})")

    def _elements_of(self, whole: Local, count: int) -> list[int | None]:
        """Slots for the elements of a tuple that somebody takes out."""
        results: list[int | None] = [None] * count
        for step in self._steps:
            if isinstance(step, Item) and step.whole == whole:
                results[step.position] = self._elements[whole, step.position] = self.new(step.results[0])
        return results

    def load(self, local: Local, number: int, empties: bool) -> bool:
        self.slots[local] = number
        if not empties:
            self._borrowed.add(local)
        return True

    def store(self, number: int, value: Operand) -> bool:
        if not isinstance(value, Local):
            step = self.library.set(self._use(number), self.value(value))
        elif self.slots[value] != number:
            step = self.library.copy(self._use(number), self.slots[value])
        else:
            return True
        return self.add(step, f"slot {number} = {self.text(value)}")

    def drop(self, locals: Sequence[Local]) -> bool:
        for local in locals:
            stays = local in self._borrowed or local in self._taken_apart
            if not stays and self._stored.get(local) != self.slots[local]:
                self._drop(self.slots[local])
        return True

    def _drop(self, slot: int) -> bool:
        self._description.dropped.add(slot)
        return self.add(self.library.drop(slot), f"drop slot {slot}")

    def item(self, local: Local, whole: Local, position: int) -> bool:
        element = self._elements.get((whole, position))
        if element is not None:
            self.slots[local] = element
            return True
        slot = self.new(local)
        text = f"slot {slot} = {self.text(whole)}[{position}]"
        return self.add(self.library.item(slot, self.slots[whole], position), text)

    def begin_range(self, name: str) -> bool:
        self._description.ranges.append((len(self._description.steps), name))
        return True
