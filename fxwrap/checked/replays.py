"""Replays a recording on inputs of the checker's, and finds the step at which a replay goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..errors import CheckError
from ..graphs.memory.locks import LockOwner, after_fork, drop_other_threads, lock_of_process
from ..graphs.record.recording_builder import RecordingBuilder
from ..graphs.replay.flat_python import Part
from ..graphs.replay.operands import Register
from ..graphs.replay.ranges import copies_after, copies_of_inputs, copies_to_inputs, partition_range
from ..graphs.replay.recording import Recording, Replay
from ..host_graph.nodes import Kind, kind_of, operator_name
from ..host_graph.tensors import tensors_in
from ..plan import Cut, Origin, Partition, ProgramPlan
from .copies import Copies, without_gradients
from .memory import Difference, first_difference
from .walk import OwnMemory, Walk

# Seconds to wait for another call that uses the recording.
_WAIT_S = 5.0


@contextlib.contextmanager
def alone_with(recording: Recording, stream: Any, statics: Copies) -> Iterator[LockOwner | None]:
    """Have a recording, its memory and static inputs for oneself; in the end they hold what they held before.

    Its memory is arenas, static buffers, and what operators have allocated in captures: outputs may lie in all three.

    Yields the owner of its locks; None where another call has one of them.

    Args:
        statics: what inputs hold now.
    """
    owner = LockOwner(stream)
    try:
        if not all(lock.acquire(owner, _WAIT_S) for lock in recording._locks) or recording.ended:
            yield None
            return
        blocks = [arena.block for arena in recording.request.arenas.values() if arena.block is not None]
        before = [(memory, memory.clone()) for memory in (*blocks, *recording.own_storages)]
        try:
            yield owner
        finally:
            for memory, held in before:
                memory.copy_(held)
            statics.restore(recording.request.static_inputs)
    finally:
        recording.release(owner)


class Gate:
    """Where calls of checked programs pass; closed while inputs hold other numbers for a moment.

    It closes only if no other thread is in a call: then these inputs keep their numbers.
    """

    def __init__(self) -> None:
        self._changed, self._inside = threading.Condition(lock_of_process()), Counter[int]()
        self._closed_by = self._passes = 0
        after_fork(self._forget_other_threads)

    def _forget_other_threads(self) -> None:
        drop_other_threads(self._inside)
        self._closed_by = self._closed_by if self.is_closed() else 0

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._closed_by in (0, me), _WAIT_S)
            self._inside[me] += 1
            self._passes += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[me] -= 1

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        me = threading.get_ident()
        with self._changed:
            free = not self._others_inside() and not self._closed_by
            self._closed_by = me if free else self._closed_by
        try:
            yield
        finally:
            with self._changed:
                self._closed_by = 0 if self._closed_by == me else self._closed_by
                self._changed.notify_all()

    def alone_since(self) -> Callable[[], bool]:
        """Makes a function that tells whether no other thread has been in a call from now on."""
        with self._changed:
            # A call that is inside now may be gone when it is asked.
            passes, alone_now = self._passes, not self._others_inside()

        def alone() -> bool:
            with self._changed:
                return alone_now and self._passes == passes and not self._others_inside()

        return alone

    def _others_inside(self) -> bool:
        me = threading.get_ident()
        return any(count for thread, count in self._inside.items() if thread != me)

    def is_closed(self) -> bool:
        """Whether this thread has closed it."""
        return self._closed_by == threading.get_ident()


GATE = Gate()


def in_single_steps(plan: ProgramPlan) -> tuple[ProgramPlan, dict[Node, int]]:
    """The same schedule with a partition for each step; and the partition of each step, by the node that tells it."""
    partitions, where, compiled = list[Partition](), dict[Node, int](), {}
    for partition in plan.partitions:
        groups: list[list[Node]] = []
        for node in plan.work_in(partition):
            if groups and (kind_of(node) is Kind.CHECK or partition.index in plan.compiled):
                groups[-1].append(node)
            else:
                groups.append([node])
        for group in groups:
            names, index = tuple(node.name for node in group), len(partitions)
            where[group[-1] if partition.index in plan.compiled else group[0]] = index
            if partition.index in plan.compiled:
                compiled[index] = plan.compiled[partition.index]
            partitions.append(dataclasses.replace(partition, index=index, nodes=names))
    cut: Cut = dataclasses.replace(plan.cut, partitions=tuple(partitions))
    return dataclasses.replace(plan, cut=cut, compiled=compiled), where


def check_steps(recording: Recording) -> None:
    """Compare what a replay consists of with the plan: graphs and eager work in its order, and copies of inputs.

    Raises:
        CheckError: something is missing, or in another order.
    """
    replay, request = recording._replay, recording.request
    assert replay is not None
    plan = request.sized.program
    expected = [partition_range(request.name, partition.index) for partition in plan.partitions]
    steps = [part.name for part in replay.parts if part.name in expected]
    remedy = "this is a bug of fxwrap, or of who changes its recordings: please report it"
    if steps != expected:
        missing = [name for name in expected if name not in steps]
        at = expected.index(missing[0]) if missing else next(i for i, name in enumerate(expected) if steps[i] != name)
        raise CheckError(
            f"{request.name}: a replay {'leaves out' if missing else 'does not keep to the order of'} its partitions",
            fault="partition not replayed" if missing else "partitions in the wrong order",
            operator=operator_name(plan.work_in(plan.partitions[at])[0]),
            expected=", ".join(expected),
            got=", ".join(steps),
            remedy=remedy,
        )
    copied = {p for p, node in enumerate(plan.placeholders) if node.name in request.sized.input_buffers}
    mutated = {p for p in copied if plan.placeholders[p].name in request.memory.copied_back}
    for fault, forgotten in (
        ("input not copied in", copied - plan.write_only - _registers_in(replay, copies_of_inputs(request.name))),
        ("input not copied back", mutated - _registers_in(replay, copies_to_inputs(request.name))),
    ):
        for position in sorted(forgotten):
            node = plan.placeholders[position]
            raise CheckError(
                f"{request.name}: a replay leaves out the copy of input {position} ({node.name})",
                fault=fault,
                operator=first_user(plan, node),
                expected="a copy at every call",
                got="none",
                remedy=remedy,
            )


def first_user(plan: ProgramPlan, node: Node) -> str:
    """The name of the first operator that reads or writes the memory of a node's value; empty if there is none."""
    facts = plan.facts
    return next((operator_name(other) for other in plan.schedule if facts.touched(other) & facts.of(node)), "")


def _registers_in(replay: Replay, name: str) -> set[int]:
    """The registers that parts of this name read."""
    steps = (step for part in replay.parts if part.name == name for step in part.steps)
    return {operand.number for step in steps for operand in step.reads() if isinstance(operand, Register)}


class _Stepwise:
    """A recording of single steps, replayed step by step."""

    def __init__(
        self, builder: RecordingBuilder, recording: Recording, where: dict[Node, int], inputs: list[Any]
    ) -> None:
        assert recording._replay is not None
        self._builder, self._replay, self._where = builder, recording._replay, where
        self._facts, self.plan = builder.plan.facts, builder.plan
        name = builder.request.name
        self._parts = {
            index: self._named(partition_range(name, index), copies_after(name, index)) for index in where.values()
        }
        self._inputs = inputs
        self._schedule: Sequence[Node] = ()

    def _named(self, *names: str) -> list[Part]:
        return [part for part in self._replay.parts if part.name in names]

    def start(self, walk: Walk) -> None:
        self._schedule, replay = walk.schedule, self._replay
        replay.registers[: replay.inputs_end] = self._inputs
        for part in self._named(copies_of_inputs(self._builder.request.name)):
            part.run(replay.registers)

    def begin(self, step: int) -> None:
        """Does nothing: the recording holds its memory."""

    def run(self, step: int) -> None:
        index = self._where.get(self._schedule[step])
        for part in self._parts[index] if index is not None else ():
            part.run(self._replay.registers)

    def end(self, step: int) -> None:
        """Does nothing."""

    def tensors(self, index: int) -> list[torch.Tensor]:
        storage, maker = self._facts.storages[index], self.plan.maker(index)
        for known in (self._builder.fixed_values, self._builder.layout.input_buffers, self._builder.layout.tensors):
            value: Any = known.get(maker)
            if value is not None:
                break
        if value is None and storage.origin is Origin.INPUT:
            value = self._inputs[self.plan.placeholders.index(maker)]
        if value is None and maker in self._builder.registers.by_node:
            value = self._replay.registers[self._builder.registers.by_node[maker]]
        return [t for t in tensors_in(storage.result_in(value)) if t.numel() and t.untyped_storage().nbytes()]


def locate(
    recording: Recording, statics: Collection[int], copies: Copies, changed: Collection[int]
) -> tuple[Walk, Difference] | None:
    """Record single steps, and compare what each leaves with eager work. None where all is as it should be.

    Args:
        statics: positions of inputs that are taken as they are.
        changed: positions of inputs that hold other numbers at the replay than when the steps are recorded; else it
            is the other way round.
    """
    request = recording.request
    plan, where = in_single_steps(request.sized.program)
    sized = dataclasses.replace(request.sized, program=plan)
    request = dataclasses.replace(request, sized=sized, guards=None)
    everything = [p for p in range(len(copies)) if p not in statics]
    first = copies.make(() if changed else everything, statics)
    inputs = copies.make(changed, statics)
    twins = Copies(inputs).make()
    builder = RecordingBuilder(request)
    made = builder.record(first).recording
    try:
        if made.ended or made.eager_reasons:
            return None
        with without_gradients():
            walk = Walk(plan, sized.symbol_values, twins, OwnMemory())
            steps = _Stepwise(builder, made, where, inputs)
            steps.start(walk)
            difference = first_difference(walk, steps, plan.device)
        return (walk, difference) if difference is not None else None
    finally:
        made.end("it was made to find where a replay goes wrong")
