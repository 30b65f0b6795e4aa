"""The table of kinds of steps: what each is in Python, and in the helper library.

A new kind is a dataclass in ``steps.py``, a row here, and, if it has a native form, a class in ``codegen/native/``.
What a step reads are its fields (``operands_in``), what it makes are its ``results``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.profiler import record_function

from ..memory.static_buffers import fill_buffers
from .lowering import Lowering, are_sizes, is_number, known
from .python_text import Call, Text
from .steps import (
    Allocate,
    Arithmetic,
    Bound,
    CallOperator,
    CallPython,
    CheckAlignment,
    CheckCondition,
    CheckLayout,
    Copy,
    Drop,
    Fill,
    Item,
    Launch,
    Load,
    Local,
    Moved,
    Operand,
    PostProcess,
    Range,
    ReplayGraph,
    Resize,
    Step,
    Store,
    View,
)

S = TypeVar("S", bound=Step)


def _not_natively(step: Step, unit: Lowering) -> bool:
    return False


@dataclass(frozen=True)
class Row(Generic[S]):
    """One kind of step.

    Attributes:
        call: what Python calls; None for what is no call.
        native: appends the step and its line of the listing to a unit. False where the library cannot do it: then it
            calls what Python calls.
        statement: the Python of what is no call.
    """

    call: Callable[[S], Call] | None = None
    native: Callable[[S, Lowering], bool] = _not_natively
    statement: Callable[[S, Text], str] | None = None

    def text(self, step: S, text: Text) -> str:
        """The step as Python."""
        if self.call is not None:
            return text.assigned(step.results, self.call(step))
        assert self.statement is not None, f"{type(step).__name__} has no Python"
        return self.statement(step, text)

    def lower(self, step: S, unit: Lowering) -> None:
        """Append the step to a unit."""
        if not self.native(step, unit):
            assert self.call is not None, f"{type(step).__name__} has neither a native form nor a call"
            unit.call_python(self.call(step), step.results)


# -- memory -----------------------------------------------------------------------------------------------------


def _allocate(step: Allocate) -> Call:
    if step.on_cpu is not None:
        return Call(step.on_cpu, (step.size, step.stride, Bound(step.dtype)))
    options: dict[str, Operand] = {"dtype": Bound(step.dtype), "device": Bound(step.device)}
    if step.pin_memory:
        options["pin_memory"] = True
    return Call(torch.empty_strided, (step.size, step.stride), options)


def _allocate_natively(step: Allocate, unit: Lowering) -> bool:
    if step.device.type != "cpu" or step.pin_memory or not are_sizes(step.size, step.stride):
        return False
    size, stride, text = unit.numbers(step.size), unit.numbers(step.stride), unit.text(step.size)
    slot = unit.new(*step.results)
    return unit.add(unit.library.empty(slot, size, stride, step.dtype), f"slot {slot} = empty {text}, {step.dtype}")


def _view(step: View) -> Call:
    return Call(step.function, (step.base, step.size, step.stride, step.offset))


def _view_natively(step: View, unit: Lowering) -> bool:
    if not are_sizes(step.size, step.stride) or not is_number(step.offset):
        return False
    operands = unit.value(step.base), unit.numbers(step.size), unit.numbers(step.stride), unit.value(step.offset)
    base, size, stride, offset = map(unit.text, (step.base, step.size, step.stride, step.offset))
    slot = unit.new(*step.results)
    text = f"slot {slot} = {base} as {size}, strides {stride}, offset {offset}"
    return unit.add(unit.library.view(slot, *operands), text)


def _fill(step: Fill) -> Call:
    return Call(fill_buffers, (Bound(list(step.buffers)), *step.inputs))


def _fill_natively(step: Fill, unit: Lowering) -> bool:
    native = unit.library.fill(step.buffers, unit.values(step.inputs))
    return unit.add(native, f"fill static buffers with {unit.texts(step.inputs)}")


def _resize_natively(step: Resize, unit: Lowering) -> bool:
    return unit.add(unit.library.resize(step.storage, step.nbytes), f"resize a region to {step.nbytes} bytes")


def _copy(step: Copy) -> Call:
    return Call(_COPY, (step.target, step.source))


_COPY = torch.ops.aten.copy_.default

# -- checks: where one does not hold, Python says so --------------------------------------------------------------


def _if_there(name: Operand) -> tuple[Operand, ...]:
    return () if name is None else (name,)


def _check_layout(step: CheckLayout) -> Call:
    return Call(step.function, (step.tensor, step.size, step.stride, *_if_there(step.name)))


def _check_layout_natively(step: CheckLayout, unit: Lowering) -> bool:
    if not are_sizes(step.size, step.stride):
        return False
    python = unit.python(_check_layout(step), step.results)
    look = unit.value(step.tensor), unit.numbers(step.size), unit.numbers(step.stride)
    tensor, size, stride = map(unit.text, (step.tensor, step.size, step.stride))
    return unit.add(unit.library.layout(*look, python), f"assert {tensor} is {size}, strides {stride}")


def _check_alignment(step: CheckAlignment) -> Call:
    return Call(step.function, (step.tensor, step.nbytes, *_if_there(step.name)))


def _check_alignment_natively(step: CheckAlignment, unit: Lowering) -> bool:
    python = unit.python(_check_alignment(step), step.results)
    native = unit.library.alignment(unit.value(step.tensor), step.nbytes, python)
    return unit.add(native, f"assert {unit.text(step.tensor)} is at a multiple of {step.nbytes}")


def _check_condition(step: CheckCondition) -> Call:
    return Call(step.function, (step.condition, step.message))


def _check_condition_natively(step: CheckCondition, unit: Lowering) -> bool:
    if not isinstance(step.condition, Local):
        return False
    python = unit.python(_check_condition(step), step.results)
    text = f"assert {unit.text(step.condition)}: {known(step.message)}"
    return unit.add(unit.library.condition(unit.value(step.condition), python), text)


# -- calls --------------------------------------------------------------------------------------------------------


def _arithmetic_natively(step: Arithmetic, unit: Lowering) -> bool:
    number, count = unit.native.operations.get(step.function, (-1, -1))
    if count != len(step.args) or step.kwargs or not step.results or not all(map(is_number, step.args)):
        return False
    first, second = unit.values((step.args * 2)[:2])  # of one operand: the second is ignored
    given = unit.texts(step.args)
    python = unit.python(_call(step), step.results)
    slot = unit.slot(*step.results)
    native = unit.library.arithmetic(slot, number, first, second, python)
    return unit.add(native, f"slot {slot} = {step.function.__name__}({given})")


def _call(step: CallOperator | Arithmetic) -> Call:
    return Call(step.function, step.args, step.kwargs)


def _launch_natively(step: Launch, unit: Lowering) -> bool:
    call = Call(step.kernel.call, step.args)
    return unit.kernel(step.kernel, step.args) or unit.call_python(call, step.results, step.kernel.name)


def _process(step: PostProcess) -> Call:
    call = KINDS[type(step.step)].call
    assert call is not None, f"{type(step.step).__name__} returns nothing to process"
    return Call(step.function, ([call(step.step)],))


def _process_natively(step: PostProcess, unit: Lowering) -> bool:
    result = unit.temporary()
    made = dataclasses.replace(step.step, results=(result,))
    KINDS[type(made)].lower(made, unit)
    given: list[Operand] = [Moved(result)]
    return unit.call_python(Call(step.function, (given,)), step.results)


# -- locals and registers -----------------------------------------------------------------------------------------


def _range_natively(step: Range, unit: Lowering) -> bool:
    unit.description.ranges.append((len(unit.description.steps), step.name))
    return True


KINDS: dict[type[Step], Row[Any]] = {
    # kind: what Python calls, its native form, what it is in Python if that is no call
    Allocate: Row(_allocate, _allocate_natively),
    View: Row(_view, _view_natively),
    Launch: Row(lambda step: Call(step.kernel.call, step.args), _launch_natively),
    CallOperator: Row(
        _call, lambda step, unit: unit.operator(step.overload, step.args, dict(step.kwargs), step.results)
    ),
    CallPython: Row(lambda step: Call(step.function, step.args, step.kwargs, step.unpacks)),
    Arithmetic: Row(_call, _arithmetic_natively),
    CheckLayout: Row(_check_layout, _check_layout_natively),
    CheckAlignment: Row(_check_alignment, _check_alignment_natively),
    CheckCondition: Row(_check_condition, _check_condition_natively),
    Fill: Row(_fill, _fill_natively),
    Copy: Row(_copy, lambda step, unit: unit.operator(_COPY, (step.target, step.source), {}, ())),
    Resize: Row(lambda step: Call(step.storage.resize_, (step.nbytes,)), _resize_natively),
    ReplayGraph: Row(lambda step: Call(step.graph.replay)),
    PostProcess: Row(_process, _process_natively),
    Load: Row(
        native=lambda step, unit: unit.load(step),
        statement=lambda step, text: f"{text.of(step.results[0])} = {text.of(step.register)}",
    ),
    Store: Row(
        native=lambda step, unit: unit.store(step),
        statement=lambda step, text: f"{text.of(step.register)} = {text.of(step.value)}",
    ),
    Item: Row(
        native=lambda step, unit: unit.item(step),
        statement=lambda step, text: f"{text.of(step.results[0])} = {text.of(step.whole)}[{step.position}]",
    ),
    Drop: Row(
        native=lambda step, unit: unit.drop(step.locals),
        statement=lambda step, text: f"del {', '.join(map(text.of, step.locals))}",
    ),
    Range: Row(
        native=_range_natively,
        statement=lambda step, text: f"with {text.bound(record_function)}({step.name!r}):",
    ),
}
