"""The table of steps: each kind does the same in Python and in a unit, and a new kind is one class."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import os
import signal
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_calls import native
from random_graphs import CPU, PROPERTY
from torch.multiprocessing.reductions import StorageWeakRef

from fxwrap.graphs.devices.cpu_graph import CPUGraph
from fxwrap.graphs.replay import steps
from fxwrap.graphs.replay.flat_python import Part, as_python
from fxwrap.graphs.replay.guards import Description
from fxwrap.graphs.replay.lowering import PYTHON
from fxwrap.graphs.replay.operands import Bound, Call, Local, Operand, Register
from fxwrap.graphs.replay.steps import Block, Step
from fxwrap.graphs.replay.units import make_unit
from fxwrap.host_graph.arithmetic import ARITHMETIC
from fxwrap.host_graph.nodes import Kernel, check, reinterpret, require
from fxwrap.torch_private.native_library import native_replay

A, B, C, D, E, F, G = map(Local, "abcdefg")
R0, R1 = Register(0), Register(1)


@dataclass
class Example:
    """Steps on registers: the first are ``inputs``.

    Attributes:
        memory: what the steps write beside what they return.
        lines: of the listing that are calls of Python.
    """

    steps: Sequence[Step]
    result: Operand = None
    inputs: Callable[[], list[Any]] = lambda: [torch.arange(6.0)]
    memory: Sequence[torch.Tensor] = ()
    lines: int = 0
    registers: int = 2
    listing: list[str] = field(default_factory=list)

    def in_python(self) -> Any:
        registers = self.inputs()
        registers += [None] * (self.registers - len(registers))
        return as_python(self.steps, self.result)[0](registers)

    def natively(self) -> Any:
        library = native_replay()
        assert not isinstance(library, str)
        inputs = self.inputs()
        description = Description(len(inputs), False)
        function = as_python(self.steps, self.result)[0]
        unit = make_unit(library, [Part(function, self.steps, self.result)], self.registers, description)
        self.listing = description.listing
        return unit(inputs)


def _replaying(work: Callable[[], object]) -> CPUGraph:
    graph = CPUGraph()
    graph.capture_begin()
    graph.add(work)
    graph.capture_end()
    return graph


def _scaled(tensor: torch.Tensor, factor: int, into: torch.Tensor) -> None:
    into.copy_(tensor * factor)


def _guards() -> Any:
    return torch._C._dynamo.guards  # type: ignore[attr-defined]


def _examples() -> Iterator[tuple[type[Step], Callable[[], Example]]]:
    """For each kind: steps that use it, with memory of their own."""
    sin, sort, split = torch.ops.aten.sin.default, torch.ops.aten.sort.default, torch.ops.aten.split.Tensor
    mul = torch.ops.aten.mul.Tensor
    size = steps.Load(R1, False, results=(B,))
    sized: Any = {"inputs": lambda: [torch.arange(6.0), 3]}

    def load(empties: bool = False) -> Step:
        return steps.Load(R0, empties, results=(A,))

    def allocate() -> Example:
        made = steps.Allocate((B, 2), (2, 1), torch.float32, CPU, results=(C,))
        zero = steps.CallOperator(torch.zero_, (C,), overload=torch.ops.aten.zero_.default)
        return Example([size, made, zero], C, **sized)

    def view() -> Example:
        made = steps.View(reinterpret, A, (2, B), Bound((3, 1)), 0, results=(C,))
        return Example([load(), size, made], C, **sized)

    def launch() -> Example:
        out = torch.zeros(6)
        kernel = Kernel("scaled", "cpp", "", CPU, _scaled, (2,))
        return Example([load(), steps.Launch(kernel, (A, 3, Bound(out)))], memory=[out], lines=1)

    def fill() -> Example:
        buffer = torch.zeros(6)
        return Example([steps.Fill(Bound([buffer]), (R0,))], memory=[buffer])

    def resize() -> Example:
        storage = torch.UntypedStorage(0)
        over = torch.empty(0).set_(storage, 0, (4,), (1,))  # type: ignore[call-overload]
        write = steps.CallPython(torch.Tensor.fill_, (Bound(over), 7), results=(A,))
        read = steps.CallPython(torch.Tensor.tolist, (A,), results=(B,))
        return Example([steps.Resize(storage, 16), write, read, steps.Resize(storage, 0)], B, lines=2)

    def replay() -> Example:
        buffer = torch.zeros(3)
        return Example([steps.ReplayGraph(_replaying(lambda: buffer.add_(1)))], memory=[buffer], lines=1)

    def element() -> Example:
        made = steps.CallOperator(split, (A, 3), overload=split, results=(B,))
        item = steps.Item(B, 1, results=(C,))
        return Example([load(), made, item, steps.Drop((B,))], C)

    def multiply() -> Example:
        mm, out, given = torch.ops.aten.mm.out, torch.zeros(6, 6), (Bound(torch.ones(6, 2)), Bound(torch.ones(2, 6)))
        return Example([steps.Multiply(mm, given, {"out": Bound(out)}, overload=mm)], memory=[out])

    def number(tensor: torch.Tensor, overload: Any = torch.ops.aten.item.default) -> Callable[[], Example]:
        read = steps.ReadNumber(overload, (A,), overload=overload, results=(B,))
        return lambda: Example([load(), read], B, inputs=lambda: [tensor])

    def condition(value: int) -> Callable[[], Example]:
        def make() -> Example:
            compared = steps.Arithmetic(operator.gt, (B, 2), results=(C,))
            checks = [steps.CheckCondition(function, (C, "it is small")) for function in (check, require)]
            return Example([size, compared, *checks], C, inputs=lambda: [torch.zeros(1), value])

        return make

    def layout(tensor: torch.Tensor) -> Callable[[], Example]:
        looks = steps.CheckLayout(_guards().assert_size_stride, (A, Bound((2, 3)), (3, 1), "it"))
        return lambda: Example([load(), looks], A, inputs=lambda: [tensor])

    def alignment(offset: int) -> Callable[[], Example]:
        looks = steps.CheckAlignment(_guards().assert_alignment, (A, 16, "it"))
        return lambda: Example([load(), looks], A, inputs=lambda: [torch.zeros(64)[offset:]])

    def branch(selector: Any, count: int, by_truth: bool = False) -> Callable[[], Example]:
        """``(r[0].sin(), 1)``, ``(r[0], r[0])``, or ``(1, r[0])``."""
        blocks = [Block((steps.CallOperator(sin, (A,), overload=sin, results=(D,)),), (D, 1)), Block((), (A, A))]
        blocks = [*blocks, Block((), (1, A))][:count]
        step = steps.Branch(B, tuple(blocks), by_truth, results=(C, E), unpacks=True)
        return lambda: Example([load(), size, step], (C, E), inputs=lambda: [torch.arange(6.0), selector])

    def loop(times: int, stacks: bool = False, results: tuple[Local | None, ...] = (F, G)) -> Callable[[], Example]:
        """Doubles ``r[0]`` and counts."""
        count, value = Local("count"), Local("value")
        less: Step = steps.Arithmetic(operator.lt, (count, B), results=(D,))
        doubled = steps.CallOperator(mul, (value, 2), overload=mul, results=(A,))
        counted: Step = steps.Arithmetic(operator.add, (count, 1), results=(E,))
        if stacks:
            tensor, item = torch.ops.aten.add.Tensor, torch.ops.aten.lt.Scalar
            counted = steps.CallOperator(tensor, (count, 1), overload=tensor, results=(E,))
            less = steps.CallOperator(item, (count, B), overload=item, results=(D,))
        step = steps.Loop(
            initial=(C, A),
            carried=(count, value),
            passes=Local("passes"),
            condition=Block((less,), (D,)),
            body=Block((doubled, counted), (E, A)),
            stacks=stacks,
            results=results,
            unpacks=bool(results),
        )
        zero = steps.Load(Register(2), False, results=(C,))
        inputs = [torch.arange(3.0), times, torch.tensor(0) if stacks else 0]
        returned = tuple(one for one in results if one is not None)
        return lambda: Example([load(), size, zero, step], returned, inputs=lambda: list(inputs), registers=3)

    def nested(times: int) -> Callable[[], Example]:
        """A loop in which a branch counts by two or by one."""
        count, odd = Local("count"), Local("odd")
        less = steps.Arithmetic(operator.lt, (count, B), results=(D,))
        rest = steps.Arithmetic(operator.mod, (count, 2), results=(odd,))
        adds = [steps.Arithmetic(operator.add, (count, by), results=(E,)) for by in (2, 1)]
        chosen = steps.Branch(odd, tuple(Block((add,), (E,)) for add in adds), False, results=(F,), unpacks=True)
        condition, body = Block((less,), (D,)), Block((rest, chosen), (F,))
        step = steps.Loop((1,), (count,), Local("passes"), condition, body, False, results=(G,), unpacks=True)
        return lambda: Example([size, step], G, inputs=lambda: [torch.zeros(1), times])

    operand = steps.CallOperator(sin, (A,), overload=sin)
    swapped = steps.Move((B, A, 3, B), results=(A, B, C, None), unpacks=True)
    moved = steps.Move((A, B, A), (A, B), results=(D, E, F), unpacks=True)
    yield steps.Move, lambda: Example([load(), size, swapped, moved], (C, D, E, F), **sized)
    numbers = (False, 1, [1.0], [2, 2], 4, 0.25, float("nan"), -1.0)
    for selector in (0, 1, True, -1, 2, 3, 0.5, None, *map(torch.tensor, numbers)):
        for count in (1, 2, 3):
            yield steps.Branch, branch(selector, count)
        yield steps.Branch, branch(selector, 2, by_truth=True)
    for times in (0, 1, 5):
        yield steps.Loop, loop(times)
        yield steps.Loop, loop(times, stacks=True)
        yield steps.Loop, loop(times, results=())
        yield steps.Loop, loop(times, results=(None, F))
        yield steps.Loop, nested(times)
    yield steps.Allocate, allocate
    yield steps.View, view
    yield steps.Launch, launch
    yield steps.CallOperator, lambda: Example([load(), dataclasses.replace(operand, results=(B,))], B)
    elements: Any = {"args": (A, 0, True), "results": (None, C), "unpacks": True}
    yield steps.CallOperator, lambda: Example([load(), steps.CallOperator(torch.sort, overload=sort, **elements)], C)
    whole = steps.CallOperator(torch.sort, (A, 0, True), overload=sort, results=(B,))
    yield steps.CallOperator, lambda: Example([load(), whole], (B, [A]), lines=1)
    yield steps.CallPython, lambda: Example([load(), steps.CallPython(torch.sort, **elements)], C, lines=1)
    unpacked = steps.CallPython(torch.Tensor.split, (A, 3), {"dim": 0}, unpacks=True, results=(B, C))
    yield steps.CallPython, lambda: Example([load(), unpacked], (C, [B], {"b": B}, slice(None, 2)), lines=1)
    yield steps.Multiply, multiply
    for tensor in (torch.tensor(3), torch.tensor([-1]), torch.tensor(3, dtype=torch.int32), torch.tensor(2**62)):
        yield steps.ReadNumber, number(tensor)
        yield steps.ReadNumber, number(tensor, torch.ops.aten._local_scalar_dense.default)
    for other in (torch.tensor(True), torch.tensor(1.5), torch.tensor(1, dtype=torch.uint8), torch.ones(2)):
        yield steps.ReadNumber, number(other)
    yield (
        steps.Arithmetic,
        lambda: Example([size, steps.Arithmetic(operator.floordiv, (B, 2), results=(C,))], (C, B), **sized),
    )
    yield steps.CheckLayout, layout(torch.zeros(2, 3))
    yield steps.CheckLayout, layout(torch.zeros(3, 2))
    if hasattr(_guards(), "assert_alignment"):
        yield steps.CheckAlignment, alignment(0)
        yield steps.CheckAlignment, alignment(1)
    yield steps.CheckCondition, condition(3)
    yield steps.CheckCondition, condition(2)
    yield steps.Fill, fill
    yield steps.Resize, resize
    yield steps.ReplayGraph, replay
    yield steps.Load, lambda: Example([load(True)], A)
    stores = [steps.Store(R1, A), steps.Store(Register(2), (A, Bound(3))), steps.Store(R0, None)]
    yield steps.Store, lambda: Example([load(), *stores], (R0, R1, Register(2)), registers=3)
    yield steps.Item, element
    yield steps.Drop, element
    yield steps.Range, lambda: Example([steps.Range("a range"), load(), steps.Range("")], A)


def _python(example: Example) -> str:
    return as_python(example.steps, example.result)[1]


def _plain(value: Any) -> Any:
    """A value that can be compared, with the types of all that is in it."""
    if isinstance(value, torch.Tensor):
        return value.tolist(), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return type(value), [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return type(value), value


def _outcome(run: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return _plain(run()), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _kinds(kind: type[Step] = Step) -> Iterator[type[Step]]:
    for one in kind.__subclasses__():
        if one.__module__ == steps.__name__:
            yield one
        yield from _kinds(one)


EXAMPLES = list(_examples())


@native
def test_every_kind_is_in_the_table() -> None:
    """Each says what Python calls, or is a statement; what the library has is in the library; and has an example."""
    kinds, library = set(_kinds()) - {steps.Nested}, native_replay()
    assert not isinstance(library, str)
    assert len(kinds) > 15
    for kind in kinds:
        assert (kind.call is not Step.call) is not (kind.python is not Step.python), kind
        assert not kind.NATIVE or hasattr(library.library, kind.NATIVE[0]), kind
        assert kind.__doc__, kind
    missing = kinds - {kind for kind, _ in EXAMPLES}
    assert missing <= (set() if hasattr(_guards(), "assert_alignment") else {steps.CheckAlignment})


@native
@pytest.mark.parametrize(
    ("kind", "example"), EXAMPLES, ids=[f"{kind.__name__}-{i}" for i, (kind, _) in enumerate(EXAMPLES)]
)
def test_a_kind_does_the_same_both_ways(kind: type[Step], example: Callable[[], Example]) -> None:
    """Results, memory and errors; and the listing says which steps are calls of Python."""
    python, unit = example(), example()
    assert any(isinstance(step, kind) for step in unit.steps)
    assert _outcome(python.in_python) == _outcome(unit.natively)
    assert _plain(list(python.memory)) == _plain(list(unit.memory))
    assert all(tensor.any() for tensor in unit.memory)  # they have run
    assert sum(line.endswith(PYTHON) for line in unit.listing) == unit.lines, unit.listing


@native
def test_the_listing_of_a_loop() -> None:
    """Its steps stand below it."""
    (example,) = [make() for kind, make in EXAMPLES if kind is steps.Loop and "match" in _python(make())][-1:]
    assert example.natively() == 6
    assert "\n".join(example.listing) == textwrap.dedent(
        """\
        b = r[1]
        (count,) = (1,)
        passes = False
        while True:
            d = lt(count, b)
            if not d: break
            odd = mod(count, 2)
            match position_of(odd, 2, False):
                case 0:
                    e = add(count, 2)
                    (f,) = (e,); del e
                case 1:
                    e = add(count, 1)
                    (f,) = (e,); del e
            (count,) = (f,); del f
            passes = True
        (g,) = results_of_loop((count,), passes); del passes
        del count
        return g"""
    )


@native
def test_a_loop_frees_what_it_carries() -> None:
    """What an iteration made is gone when the next but one begins, and with the call."""
    seen, alive = list[StorageWeakRef](), list[int]()

    def more(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(sum(not one.expired() for one in seen))
        made = tensor + 1
        seen.append(StorageWeakRef(made.untyped_storage()))
        return made

    condition = Block((steps.CallPython(lambda: len(seen) < 5, results=(D,)),), (D,))
    body = Block((steps.CallPython(more, (A,), results=(B,)), steps.Drop((A,))), (B,))
    step = steps.Loop((R0,), (A,), Local("passes"), condition, body, False, results=(C,), unpacks=True)
    for run in (Example([step], C).in_python, Example([step], C).natively):
        seen.clear()
        alive.clear()
        result = run()
        assert torch.equal(result, torch.arange(6.0) + 5)
        assert alive == [0, 1, 1, 1, 1]
        del result
        assert all(one.expired() for one in seen)


@native
@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread")
@pytest.mark.parametrize("python", [False, True])
def test_an_interrupt_ends_a_long_loop(python: bool) -> None:
    """Also where no step of it calls Python."""
    add = torch.ops.aten.add_.Scalar
    counter = torch.zeros(1)
    body = Block((steps.CallOperator(add, (A, 1), overload=add, results=(B,)),), (B,))
    step = steps.Loop((Bound(counter),), (A,), Local("passes"), Block((), (True,)), body, False, results=(None,))
    example = Example([step], None)
    timer = threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        example.in_python() if python else example.natively()
    assert counter > 100


@native
def test_an_element_that_nobody_reads_is_freed_at_once() -> None:
    storages = list[StorageWeakRef]()

    def two() -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.ones(2), torch.ones(3)
        storages.append(StorageWeakRef(made[0].untyped_storage()))
        return made

    makes = steps.CallPython(two, results=(None, C), unpacks=True)
    asks = steps.CallPython(lambda: storages[-1].expired(), results=(B,))
    example = Example([makes, asks], (B, C))
    for gone, read in (example.in_python(), example.natively()):
        assert gone and torch.equal(read, torch.ones(3))


@native
@PROPERTY
@given(
    number=st.integers(-(2**63) - 2, 2**63 + 1) | st.integers(-9, 9) | st.floats(-9, 9) | st.booleans(),
    other=st.integers(-(2**63) - 2, 2**63 + 1) | st.integers(-9, 9) | st.booleans(),
)
def test_arithmetic_is_pythons(number: Any, other: Any) -> None:
    """Of integers that do not fit 64 bits, of other numbers, and where Python raises, too."""
    for function in _OPERATIONS:
        count = 1 if function in (operator.neg, abs) else 2
        if function in (max, min) and bool in (type(number), type(other)):
            continue  # the library returns an integer
        computes = steps.Arithmetic(function, (R0, R1)[:count], results=(A,))
        example = Example([computes], A, inputs=lambda: [number, other])
        assert _outcome(example.in_python) == _outcome(example.natively), (function, number, other)
        assert not any(line.endswith(PYTHON) for line in example.listing)


_OPERATIONS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg, abs, max, min]
_OPERATIONS += [operator.ge, operator.le, operator.gt, operator.lt, operator.eq, operator.ne]


@native
@pytest.mark.parametrize("function", sorted(ARITHMETIC.values(), key=repr))
def test_the_library_leaves_other_arithmetic_to_python(function: Callable[..., Any]) -> None:
    library = native_replay()
    assert not isinstance(library, str)
    for count in range(4):
        description = Description(3, False)
        computes = steps.Arithmetic(function, (R0, R1, Register(2))[:count], results=(A,))
        make_unit(library, [Part(lambda _: None, [computes], A)], 3, description)
        native_form = function in _OPERATIONS and count == (1 if function in (operator.neg, abs) else 2)
        assert native_form is not any(line.endswith(PYTHON) for line in description.listing)


@native
def test_a_step_belongs_to_one_unit() -> None:
    """Its handle is empty afterwards."""
    library: Any = native_replay()
    first = Description(1, False, result=library.library.slot(0))
    second = Description(1, False, result=library.library.slot(0), steps=first.steps)
    first.steps.append(library.library.drop(0))
    library.library.unit(first)
    with pytest.raises(RuntimeError, match="another unit has this step"):
        library.library.unit(second)


@native
@pytest.mark.parametrize("wrong", ["no such operator", "no call of Python", "no operand"])
def test_what_the_library_refuses(wrong: str) -> None:
    library: Any = native_replay().library  # type: ignore[union-attr]
    with pytest.raises((RuntimeError, TypeError)):
        if wrong == "no such operator":
            unknown = SimpleNamespace(_schema=SimpleNamespace(name="fxwrap_steps::none", overload_name=""))
            library.operator([], unknown, library.tuple([]), library.dict([], []))
        elif wrong == "no operand":
            library.set(0, 3)
        else:
            library.condition(library.tuple([library.slot(0)]), library.drop(0))


# -- a new kind ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Double(Step):
    """A kind that only Python has: one class."""

    tensor: Operand

    def call(self) -> Call:
        return Call(torch.mul, (self.tensor, 2))


def test_a_new_kind_is_one_class() -> None:
    """It replays in Python and in a unit, with other steps; what it reads is known from its fields."""
    sin = torch.ops.aten.sin.default
    made = [
        steps.Load(R0, True, results=(A,)),
        Double(A, results=(B,)),
        steps.Drop((A,)),
        steps.CallOperator(sin, (B,), overload=sin, results=(C,)),
    ]
    example = Example(made, C)
    expected = (torch.arange(6.0) * 2).sin()
    assert torch.equal(example.in_python(), expected)
    assert list(made[1].reads()) == [A]
    if os.environ.get("FXWRAP_NATIVE_REPLAY") != "0":
        assert torch.equal(example.natively(), expected)
        assert example.listing == [
            "a = r[0]; r[0] = None",
            "b = mul(a, 2)  # Python",
            "del a",
            "c = aten.sin.default(b)",
            "return c",
        ]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_step_that_may_run_again(order: tuple[int, ...]) -> None:
    """It does, after ``give_back``; the others raise what they raise."""
    asked, runs = list[str](), list[int]()

    def short(number: int) -> None:
        runs.append(number)
        if runs.count(number) == 1:
            raise torch.OutOfMemoryError

    made = [steps.CallPython(short, (number,), may_retry=True) for number in order]
    as_python(made, None, give_back=lambda: asked.append("asked"))[0]([])
    assert runs == [number for number in order for _ in range(2)] and len(asked) == 3
    runs.clear()
    with pytest.raises(torch.OutOfMemoryError):
        as_python(made, None)[0]([])


def test_what_a_failed_step_had_allocated_is_gone_before_it_runs_again() -> None:
    """The error's frames hold it as long as the error is handled."""
    buffers = list[weakref.ref[Any]]()

    def short() -> None:
        buffer = torch.empty(1)
        buffers.append(weakref.ref(buffer))
        if len(buffers) == 1:
            raise torch.OutOfMemoryError

    alive = list[bool]()
    step = steps.CallPython(short, (), may_retry=True)
    as_python([step], None, give_back=lambda: alive.append(buffers[0]() is not None))[0]([])
    assert alive == [False] and len(buffers) == 2
