"""Finds the first step of a program at which the contents of a storage differ from those of a second run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ...graphs.copies import Generators, bytes_of, difference, without_gradients
from ...host_graph.nodes import operator_name
from ...host_graph.storages import Origin
from ...plan import Home, MemoryPlan, ProgramPlan
from .walk import NAN, ODD, OwnMemory, PlannedMemory, Run, Walk, fault_at


@dataclass(frozen=True)
class WrongStorage:
    """The first difference between two runs.

    Attributes:
        step: the step of the schedule.
        index: the storage that differs; -1 if the step raised an error instead.
        before: whether it differed before the step ran: an operand of the step was overwritten.
        got: the difference in words.
    """

    step: int
    index: int
    before: bool
    got: str


def first_difference(walk: Walk, other: Run) -> WrongStorage | None:
    """Run both step by step, with the same random numbers; None if there is no difference."""
    for step in range(walk.end_step):
        walk.begin(step)
        other.begin(step)
        for index in sorted(walk.reads(step)):
            if got := _differs(walk, other, index):
                return WrongStorage(step, index, True, got)
        generators = Generators(walk.plan.device)
        walk.run(step)
        generators.set()
        changes = sorted(walk.changes(step))
        try:
            other.run(step)
        except Exception as error:
            return WrongStorage(step, -1, False, f"{type(error).__name__}: {error}")
        for index in changes:
            if got := _differs(walk, other, index):
                return WrongStorage(step, index, False, got)
        walk.end(step)
        other.end(step)
    return None


def _differs(walk: Walk, other: Run, index: int) -> str:
    for expected, got_tensor in zip(walk.tensors(index), other.tensors(index), strict=False):
        a, b = bytes_of(expected), bytes_of(got_tensor)
        if a.numel() != b.numel():
            return f"{b.numel()} bytes, not {a.numel()}"
        wrong = a.ne(b) & ~(a.eq(NAN) & b.eq(ODD))  # bytes that neither run has written do not count
        if bool(wrong.any()) and (got := difference(got_tensor, expected)):
            return got
    return ""


def check_memory(
    plan: ProgramPlan, symbol_values: Mapping[Node, Any], memory: MemoryPlan, first: list[Any], second: list[Any]
) -> None:
    """Check a memory plan: compare a run with every storage in its own memory with one at the planned offsets.

    Args:
        first, second: copies of the same inputs; the lists are emptied.

    Raises:
        CheckError: the plan lets live storages overlap; or a step reads memory that no step has written.
    """
    with without_gradients():
        walk = Walk(plan, symbol_values, first, OwnMemory(NAN))
        planned = PlannedMemory(memory)
        other = Walk(plan, symbol_values, second, planned)
        planned.lay_out(other)
        first_diff = first_difference(walk, other)
        if first_diff is None:
            first_diff = _in_outputs(walk, other, memory)
        if first_diff is not None:
            _raise(walk, planned, first_diff)


def _in_outputs(walk: Walk, other: Walk, memory: MemoryPlan) -> WrongStorage | None:
    """A difference in the outputs after the last step.

    What the caller gets of an input lies in its own tensor: the place counts only if it is copied back.
    """
    for index, last in sorted(walk.last.items()):
        storage, home = walk.facts.storages[index], memory.places[index].home
        placed = storage.origin is Origin.INPUT and home is Home.REGION
        if last != walk.end_step or (placed and storage.node not in memory.copied_back):
            continue
        if got := _differs(walk, other, index):
            return WrongStorage(walk.end_step, index, True, got)
    return None


def _raise(walk: Walk, planned: PlannedMemory, diff: WrongStorage) -> None:
    if diff.index < 0:
        raise fault_at(walk.schedule[diff.step], "raises", "an operator raises where it did not", got=diff.got)
    storage = walk.facts.storages[diff.index]
    node = walk.schedule[min(diff.step, walk.end_step - 1)]
    if diff.before and planned.plan.places[diff.index].home is Home.REGION:
        by = _overwritten_by(walk, planned.plan, diff)
        raise fault_at(
            walk.schedule[by[1]] if by is not None else node,
            "storages overlap",
            f"{storage.name} is overwritten before {_reader(walk, diff)} reads it"
            + (f", by {walk.facts.storages[by[0]].name}, which lies over it" if by is not None else ""),
            expected="bytes that no other storage uses until then",
            got=diff.got,
            remedy="this is a bug of the memory plan: please report it, with fxwrap.explain's text",
        )
    raise fault_at(
        node,
        "reads uninitialised memory",
        f"{operator_name(node)} writes other numbers to {storage.name} when memory held something else before",
        expected="results that are made of what was written",
        got=diff.got,
        remedy="write all of what is read: torch.zeros in the place of torch.empty, or look at what the kernel reads",
    )


def _reader(walk: Walk, diff: WrongStorage) -> str:
    return operator_name(walk.schedule[diff.step]) if diff.step < walk.end_step else "the caller"


def _overwritten_by(walk: Walk, plan: MemoryPlan, diff: WrongStorage) -> tuple[int, int] | None:
    """The last storage that was written over the one that was overwritten, and the step that wrote it."""
    offsets = plan.inside(plan.regions[plan.places[diff.index].region])
    spans = {index: (low, low + plan.sizes.get(index, 0)) for index, low in offsets.items()}
    begin, end = spans.pop(diff.index)
    over = [index for index, (low, high) in spans.items() if low < end and begin < high]
    for step in reversed(range(min(diff.step + 1, walk.end_step))):
        for index in over:
            if index in walk.named(step):
                return index, step
    return None
