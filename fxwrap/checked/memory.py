"""Compares, step by step, what lies in storages with what should: who is the first to make a difference?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import Node

from ..host_graph.nodes import operator_name
from ..plan import Home, MemoryPlan, ProgramPlan
from .copies import Generators, bytes_of, difference, without_gradients
from .walk import NAN, ODD, OwnMemory, PlannedMemory, Walk


class Run(Protocol):
    """A run that is compared with a walk."""

    def begin(self, step: int) -> None: ...

    def run(self, step: int) -> None: ...

    def end(self, step: int) -> None: ...

    def tensors(self, index: int) -> list[torch.Tensor]:
        """What stands for a storage now; nothing if nobody knows."""


@dataclass(frozen=True)
class Difference:
    """
    Attributes:
        step: of the schedule.
        index: the storage in which the difference is; -1 if there is none: the step has raised an error.
        before: whether it was there before the step ran: somebody has overwritten what the step reads.
        got: in words.
    """

    step: int
    index: int
    before: bool
    got: str


def first_difference(walk: Walk, other: Run, device: torch.device) -> Difference | None:
    """Run both side by side; both draw the same random numbers."""
    for step, node in enumerate(walk.schedule):
        walk.begin(step)
        other.begin(step)
        for index in sorted(walk.reads(node)):
            if got := _differs(walk, other, index):
                return Difference(step, index, True, got)
        generators = Generators(device)
        walk.run(step)
        generators.set()
        changes = sorted(walk.changes(node))
        try:
            other.run(step)
        except Exception as error:
            return Difference(step, -1, False, f"{type(error).__name__}: {error}")
        for index in changes:
            if got := _differs(walk, other, index):
                return Difference(step, index, False, got)
        walk.end(step)
        other.end(step)
    return None


def _differs(walk: Walk, other: Run, index: int) -> str:
    for mine, theirs in zip(walk.tensors(index), other.tensors(index), strict=False):
        a, b = bytes_of(mine), bytes_of(theirs)
        if a.numel() != b.numel():
            return f"{b.numel()} bytes, not {a.numel()}"
        wrong = a.ne(b) & ~(a.eq(NAN) & b.eq(ODD))  # neither was written
        if bool(wrong.any()) and (got := difference(theirs, mine)):
            return got
    return ""


def check_memory(
    plan: ProgramPlan, symbol_values: Mapping[Node, Any], memory: MemoryPlan, first: list[Any], second: list[Any]
) -> None:
    """Run a program twice, side by side: each storage in memory of its own, and all where the plan has them.

    Args:
        first, second: copies of the same inputs; the lists are emptied.

    Raises:
        CheckError: by the plan, storages get into each other's way; or somebody reads what nobody has written.
    """
    with without_gradients():
        walk = Walk(plan, symbol_values, first, OwnMemory(NAN))
        planned = PlannedMemory(memory)
        other = Walk(plan, symbol_values, second, planned)
        planned.lay_out(other)
        found = first_difference(walk, other, plan.device)
        if found is None:
            found = _in_the_end(walk, other)
        if found is not None:
            _raise(walk, planned, found)


def _in_the_end(walk: Walk, other: Walk) -> Difference | None:
    """What the caller gets is still there."""
    for index, last in sorted(walk.last.items()):
        if last == walk.end_step and (got := _differs(walk, other, index)):
            return Difference(walk.end_step, index, True, got)
    return None


def _raise(walk: Walk, planned: PlannedMemory, found: Difference) -> None:
    if found.index < 0:
        raise walk.fault(walk.schedule[found.step], "raises", "an operator raises where it did not", got=found.got)
    storage = walk.facts.storages[found.index]
    node = walk.schedule[min(found.step, walk.end_step - 1)]
    if found.before and planned.plan.places[found.index].home is Home.REGION:
        by = _overwritten_by(walk, planned, found)
        raise walk.fault(
            walk.schedule[by[1]] if by is not None else node,
            "storages overlap",
            f"{storage.name} is overwritten before {_reader(walk, found)} reads it"
            + (f", by {walk.facts.storages[by[0]].name}, which lies over it" if by is not None else ""),
            expected="bytes that nobody else has until then",
            got=found.got,
            remedy="this is a bug of the memory plan: please report it, with fxwrap.explain's text",
        )
    raise walk.fault(
        node,
        "reads what nobody wrote",
        f"{operator_name(node)} writes other numbers to {storage.name} when memory held something else before",
        expected="results that are made of what was written",
        got=found.got,
        remedy="write all of what is read: torch.zeros in the place of torch.empty, or look at what the kernel reads",
    )


def _reader(walk: Walk, found: Difference) -> str:
    return operator_name(walk.schedule[found.step]) if found.step < walk.end_step else "the caller"


def _overwritten_by(walk: Walk, planned: PlannedMemory, found: Difference) -> tuple[int, int] | None:
    """The storage over the one that was overwritten, and the step, that came last."""
    over = planned.over(found.index)
    for step in reversed(range(min(found.step + 1, walk.end_step))):
        for index in over:
            if index in walk.named(walk.schedule[step]):
                return index, step
    return None
