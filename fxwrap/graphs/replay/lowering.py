"""Translates steps into steps of the helper library, over numbered slots.

The first slots are the registers. A local that is loaded from a register, or stored in one, shares its slot.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from ...torch_private.native_units import CannotReplay, NativeReplay, NativeStep, Unit, Value
from .flat_python import Part, StepsInLanes
from .guards import Description
from .operands import LITERALS, Bound, Listing, Local, Operand, Register
from .steps import Drop, Load, Loop, Nested, Range, Step, Store, indent_below

# At the end of a listing's line: the step is a call of a Python function.
PYTHON = "  # Python"


class Lowering:
    """A unit as it is made, part by part.

    Args:
        registers: the number of registers, which are the first slots.
    """

    def __init__(self, native: NativeReplay, registers: int, description: Description) -> None:
        self._native, self._description = native, description
        self._listing, self._indent = Listing(), ""
        self._inner: list[NativeStep] | None = None  # the steps of the block that is being lowered
        # Slots of inputs that are dropped in lanes: it needs the interpreter's lock, and is done behind them.
        self._after_lanes: list[int] | None = None
        self._count = registers  # of slots
        self._used, self._dropped = set[int](), set[int]()
        self._result: Operand = None
        self._below = False
        # Of the part that is being appended: the slots of locals, the registers in which locals are stored, and the
        # locals in the slot of a register that keeps its value when the local goes.
        self._slots, self._stored, self._borrowed = dict[Local, int](), dict[Local, int](), set[Local]()

    def append(self, part: Part) -> None:
        """Append a part. The unit returns the result of the last one."""
        stores = [step for step in part.steps if isinstance(step, Store)]
        self._stored = {store.value: store.register.number for store in stores if isinstance(store.value, Local)}
        self._slots, self._borrowed, self._result = {}, set(), part.result
        self._go_below_autograd(part.below_autograd)
        self._begin_range(part.name)
        position = 0
        for lanes in part.lanes:
            for step in part.steps[position : lanes.begin]:
                self._lower(step)
            position = lanes.begin + len(lanes.lanes)
            self._lower_in_lanes(part.steps[lanes.begin : position], lanes)
        for step in part.steps[position:]:
            self._lower(step)
        self._begin_range("")

    def unit(self) -> Unit:
        """The unit of all parts."""
        self._go_below_autograd(False)
        described = self._description
        self._note(f"return {self._listing.of(self._result)}")
        described.result = self._value(self._result)
        # Steps may hold the address of a static input without reading its slot. Such inputs are kept until the call
        # ends.
        unread = {position for position, _ in described.guards.addresses} - self._used
        described.loads = [position for position in range(described.inputs) if position not in unread]
        described.kept_inputs = sorted(unread) if described.empties_inputs else []
        described.cleared = sorted(self._used.union(described.loads) - self._dropped)
        described.slots = self._count
        return self._native.library.unit(described)  # type: ignore[no-any-return]

    def _lower(self, step: Step) -> None:
        library = self._native.library
        if not isinstance(step, Nested):
            self._note(step.python(self._listing))
        match step:
            case Range(name):
                self._begin_range(name)
            case Load(Register(number), empties):
                self._slots[step.result] = number
                if not empties:
                    self._borrowed.add(step.result)
            case Store(Register(number), value):
                if not (isinstance(value, Local) and self._slots[value] == number):
                    self._append(library.set(self._use(number), self._value(value)))
            case Drop(locals):
                for local in locals:
                    slot = self._slots[local]
                    if local not in self._borrowed and self._stored.get(local) != slot:
                        self._dropped.add(slot)
                        later = self._after_lanes if slot < self._description.inputs else None
                        self._append(library.drop(slot)) if later is None else later.append(slot)
            case Nested():
                line = len(self._description.listing)
                self._append(self._made(step), line)
            case _:
                if step.may_retry:
                    self._description.may_retry.append(len(self._description.steps))
                self._append(self._made(step))

    def _lower_in_lanes(self, own: Sequence[Step], lanes: StepsInLanes) -> None:
        """Lower steps to one that runs them in lanes; one after the other, if one of them needs Python."""
        members, lines = list[list[NativeStep]](), list[int]()
        self._after_lanes = []
        for step, lane in zip(own, lanes.lanes, strict=True):
            self._inner = []
            self._lower(step)
            members.append(self._inner)
            lines.append(len(self._description.listing) - 1)
            self._description.listing[-1] += f"  # lane {lane}"
        self._inner = None
        together = self._native.library.lanes(members, lanes.lanes, lanes.waits, lines)
        separate = [(one, line) for inner, line in zip(members, lines, strict=True) for one in inner]
        for one, line in separate if together is None else [(together, lines[0])]:
            self._append(one, line)
        for slot in self._after_lanes:
            self._append(self._native.library.drop(slot))
        self._after_lanes = None

    def _begin_range(self, name: str) -> None:
        self._description.ranges.append((len(self._description.steps), name))

    def _go_below_autograd(self, below: bool) -> None:
        """Have steps skip autograd's layer of the dispatcher from here on, or no more."""
        if below is not self._below:
            self._below = below
            self._note(f"# {'below' if below else 'through'} autograd")
            self._append(self._native.library.below_autograd(below))

    def _note(self, line: str) -> None:
        self._description.listing.append(self._indent + line)

    def _append(self, step: NativeStep, line: int = -1) -> None:
        if self._inner is None:
            self._description.steps.append(step)
            self._description.lines.append(range(len(self._description.listing))[line])
        else:
            self._inner.append(step)
        if step.note:
            self._description.listing[line] += f"  # {step.note}"

    def _blocks(self, step: Nested) -> list[list[NativeStep]]:
        """The blocks of a step, whose lines go to the listing."""
        outer, indent = self._inner, self._indent
        blocks = list[list[NativeStep]]()
        for line in step.lines(self._listing):
            if isinstance(line, str):
                self._indent = indent
                self._note(line)
                self._indent += indent_below(line)
                continue
            self._inner = []
            for inner in line:
                self._lower(inner)
            blocks.append(self._inner)
            self._inner = outer
        self._indent = indent
        return blocks

    def _made(self, step: Step) -> NativeStep:
        """A step of the library, with its range in profiles."""
        made = self._own_or_python(step)
        made.range = step.range
        return made

    def _own_or_python(self, step: Step) -> NativeStep:
        """A step of the step's own function of the library, or else a call of Python."""
        if step.has_native_form():
            function, *names = step.NATIVE
            made: NativeStep | None = getattr(self._native.library, function)(*(self._taken(step, n) for n in names))
            if made is not None:
                return made
        if isinstance(step, Nested):
            raise CannotReplay(f"{type(step).__name__}: operands that the library does not know")
        return self._python(step)

    def _taken(self, step: Step, name: str) -> object:
        """What a function of the library takes: an operand as a value, and anything else as it is."""
        if name == "results":
            return self._made_in(step.results)
        if name == "carried":
            assert isinstance(step, Loop)
            return self._made_in(step.carried)
        if name == "call":
            return self._python(step)
        if name == "gemms":
            return self._native.gemms
        if name == "blocks":
            assert isinstance(step, Nested)
            return self._blocks(step)
        taken = operator.attrgetter(name)(step)
        return self._value(taken) if isinstance(taken, _OPERANDS) else taken

    def _python(self, step: Step) -> NativeStep:
        call = step.call()
        args = list(map(self._value, (*call.args, *call.kwargs.values())))
        results = self._made_in(step.results)
        return self._native.library.python(call.function, args, tuple(call.kwargs), results, step.unpacks)

    def _made_in(self, locals: Sequence[Local | None]) -> Sequence[int | None]:
        """The slots of locals that a step makes."""
        for local in locals:
            if local is not None and local not in self._slots:
                self._slots[local] = slot = self._stored.get(local, self._count)
                self._count = max(self._count, slot + 1)
        return [None if local is None else self._use(self._slots[local]) for local in locals]

    def _value(self, operand: Operand) -> Value:
        """An operand as the library takes it."""
        library, values = self._native.library, lambda operands: list(map(self._value, operands))
        match operand:
            case Local():
                return library.slot(self._use(self._slots[operand]))
            case Register(number):
                return library.slot(self._use(number))
            case Bound(value):
                return library.constant(value)
            case tuple():
                return library.tuple(values(operand))
            case list():
                return library.list(values(operand))
            case slice():
                return library.slice(values((operand.start, operand.stop, operand.step)))
            case dict():
                return library.dict(values(operand.values()), list(operand))
        if type(operand) in LITERALS:
            return library.constant(operand)
        raise CannotReplay(f"an operand: {operand}")

    def _use(self, slot: int) -> int:
        self._used.add(slot)
        return slot


_OPERANDS = (Local, Register, Bound, tuple, list, slice, dict, *LITERALS)
