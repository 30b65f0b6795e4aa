"""Steps of one part as steps of the helper library, over slots.

Registers are slots, and a local that is stored in one, or read from one, is that slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ...host_graph.nodes import Kernel
from .guards import Description
from .native import CannotReplay, NativeReplay, NativeStep, Value
from .operands import LITERALS, Bound, Call, Local, Moved, Operand, Register, is_number, known

# At the end of a listing's line: the step is a call of a Python function.
PYTHON = "  # Python"
# The step multiplies matrices with the BLAS that ATen calls, and calls the operator where that may be another thing.
BLAS = "  # BLAS"
# As many arguments as the library can give a kernel.
_MOST_ARGUMENTS = 96


class Lowering:
    """What has been made of the steps of one part.

    Args:
        stored: the registers in which locals are stored.

    Attributes:
        slots: of locals.
    """

    def __init__(self, native: NativeReplay, stored: Mapping[Local, int], description: Description) -> None:
        self.library, self.operations, self._kernel_address = native.library, native.operations, native.kernel_address
        self._gemms = native.gemms
        self._description = description
        self.slots: dict[Local, int] = {}
        self._borrowed = set[Local]()  # in registers that stay when the local goes
        self._stored = stored
        self._temporaries = 0

    # -- operands -------------------------------------------------------------------------------------

    def value(self, operand: Operand) -> Value:
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

    def text(self, operand: Operand) -> str:
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

    def texts(self, operands: Iterable[Operand]) -> str:
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

    def python(self, call: Call, results: Sequence[Local | None] = (), unpacks: bool = False) -> NativeStep:
        """A call of Python."""
        args = self.values((*call.args, *call.kwargs.values()))
        slots = [self.new(local) for local in results if local is not None]
        return self.library.python(call.function, args, tuple(call.kwargs), slots, unpacks)

    def call_python(
        self, call: Call, results: Sequence[Local | None] = (), unpacks: bool = False, name: str = ""
    ) -> bool:
        """Append a call of Python."""
        named = [f"{name}={self.text(value)}" for name, value in call.kwargs.items()]
        given = ", ".join([*map(self.text, call.args), *named])
        made: list[Local] = [local or self.temporary() for local in results]
        native = self.python(call, made, unpacks)
        name = name or getattr(call.function, "__name__", None) or type(call.function).__name__
        self.add(native, f"{f'{self.texts(made)} = ' if made else ''}{name}({given}){PYTHON}")
        return self.drop([local for local in made if local not in results])

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
        step = self.library.kernel(address, kernel.call, self.values(args), read, written)
        return self.add(step, f"{kernel.name}({self.texts(args)})")

    def operator(
        self, overload: torch._ops.OpOverload, call: Call, results: Sequence[Local | None], product: bool = False
    ) -> bool:
        """A call through the dispatcher, if the arguments are in the order of the schema.

        Of a ``product`` of matrices, the library may call the BLAS itself.
        """
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
        if results and len(results) != len(schema.returns):
            return False  # a tuple
        slots = [None if local is None else self.new(local) for local in results]
        made = ", ".join("_" if slot is None else f"slot {slot}" for slot in slots)
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        text = f"{made + ' = ' if made else ''}{name}({', '.join(texts)})"
        described_so = schema.name, schema.overload_name, described, slots
        if product and self._gemms is not None:
            return self.add(self.library.product(*described_so, self._gemms), text + BLAS)
        return self.add(self.library.operator(*described_so), text)

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
            if local not in self._borrowed and self._stored.get(local) != self.slots[local]:
                self._drop(self.slots[local])
        return True

    def _drop(self, slot: int) -> bool:
        self._description.dropped.add(slot)
        return self.add(self.library.drop(slot), f"drop slot {slot}")

    def item(self, local: Local, whole: Local, position: int) -> bool:
        slot = self.new(local)
        text = f"slot {slot} = {self.text(whole)}[{position}]"
        return self.add(self.library.item(slot, self.slots[whole], position), text)

    def begin_range(self, name: str) -> bool:
        self._description.ranges.append((len(self._description.steps), name))
        return True
