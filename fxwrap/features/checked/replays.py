"""Replays a recording on inputs of the checker's, and finds the step at which a replay goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...errors import CheckError
from ...graphs.copies import Copies, without_gradients
from ...graphs.memory.locks import LockOwner, after_fork, drop_other_threads, lock_of_process
from ...graphs.record.recording_builder import RecordingBuilder
from ...graphs.replay.operands import Register, Text
from ...graphs.replay.ranges import copies_of_inputs, copies_to_inputs, partition_range
from ...graphs.replay.recording import Recording, Replay
from ...graphs.replay.steps import Drop, Item, Load, Range, Step, Store
from ...host_graph.nodes import Kind, kind_of, operator_name
from ...host_graph.tensors import tensors_in
from ...plan import Cut, Partition, ProgramPlan
from .memory import WrongStorage, first_difference
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


def in_single_steps(plan: ProgramPlan) -> ProgramPlan:
    """The same schedule with a partition for each step."""
    partitions, compiled = list[Partition](), {}
    for partition in plan.partitions:
        groups: list[list[Node]] = []
        for node in plan.work_in(partition):
            if groups and (kind_of(node) is Kind.CHECK or partition.index in plan.compiled):
                groups[-1].append(node)
            else:
                groups.append([node])
        for group in groups:
            names, index = tuple(node.name for node in group), len(partitions)
            if partition.index in plan.compiled:
                compiled[index] = plan.compiled[partition.index]
            partitions.append(dataclasses.replace(partition, index=index, nodes=names))
    cut: Cut = dataclasses.replace(plan.cut, partitions=tuple(partitions))
    return dataclasses.replace(plan, cut=cut, compiled=compiled)


def check_steps(recording: Recording) -> None:
    """Compare what a replay consists of with the plan: graphs and eager work in its order, and copies of inputs.

    Raises:
        CheckError: something is missing, or in another order.
    """
    replay, request = recording._replay, recording.request
    assert replay is not None
    plan = request.sized.plan
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
    read = copied - plan.inputs.write_only
    for fault, forgotten in (
        ("input not copied in", read - _registers_in(replay, copies_of_inputs(request.name))),
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
    """A recording, whose steps are run one by one. What they make is kept until the end."""

    def __init__(self, recording: Recording, schedule: Sequence[Node], inputs: Sequence[Any]) -> None:
        assert recording._replay is not None and recording._resources is not None
        self._schedule, self._plan = schedule, recording.request.sized.plan
        self._fixed = recording._resources.kept
        self._values = dict(zip(self._plan.placeholders, inputs, strict=True))
        self._registers = recording._replay.registers
        self._registers[: len(inputs)] = inputs
        # Each with the node that it runs, if it runs one.
        self._left = deque[tuple[Node | None, Step, Text]]()
        nodes = {node for node in schedule if kind_of(node) is not Kind.CHECK}
        for part in recording._replay.parts:
            text = Text()
            text.namespace["r"] = self._registers
            for step in part.steps if part.name else ():  # others check inputs, and make outputs
                runs = step.node in nodes and not isinstance(step, (Load, Store, Item))
                self._left.append((step.node if runs else None, step, text))
        self._nodes = {node for node, *_ in self._left}
        self._run_until(None)

    def _run_until(self, node: Node | None) -> None:
        """Run what is left, up to the step of a node and to what follows it before the next node's."""
        reached = node is None
        while self._left and not (reached and self._left[0][0] is not None):
            at, step, text = self._left.popleft()
            reached = reached or at is node
            if isinstance(step, (Drop, Range)):
                continue
            exec(step.python(text), text.namespace)
            made = [None if local is None else text.namespace[local.name] for local in step.results]
            if isinstance(step, Store):
                made = [self._registers[step.register.number]]
            if step.node is not None and made:
                self._values[step.node] = tuple(made) if step.unpacks else made[0]

    def begin(self, step: int) -> None:
        """Does nothing: the recording holds its memory."""

    def run(self, step: int) -> None:
        if self._schedule[step] in self._nodes:
            self._run_until(self._schedule[step])

    def end(self, step: int) -> None:
        """Does nothing."""

    def tensors(self, index: int) -> list[torch.Tensor]:
        storage, maker = self._plan.facts.storages[index], self._plan.maker(index)
        value = storage.result_in(self._fixed.get(maker, self._values.get(maker)))
        return [tensor for tensor in tensors_in(value) if tensor.numel() and tensor.untyped_storage().nbytes()]


def locate(
    recording: Recording, statics: Collection[int], copies: Copies, changed: Collection[int]
) -> tuple[Walk, WrongStorage] | None:
    """Run the steps of a recording one by one, and compare what each leaves with eager work.

    Device graphs cannot be taken apart: in their place is a recording of single steps. None where all is as it should
    be.

    Args:
        statics: positions of inputs that are taken as they are.
        changed: positions of inputs that hold other numbers at the replay than when the steps are recorded; else it
            is the other way round.
    """
    request = recording.request
    inputs = copies.make(changed, statics)
    twins, stepped = Copies(inputs).make(), recording
    if request.runtime.frozen_addresses:
        sized = dataclasses.replace(request.sized, plan=in_single_steps(request.sized.plan))
        request = dataclasses.replace(request, sized=sized, guards=None)
        everything = [p for p in range(len(copies)) if p not in statics]
        stepped = RecordingBuilder(request).record(copies.make(() if changed else everything, statics)).recording
    try:
        if stepped.ended or (stepped is not recording and stepped.eager_reasons):
            return None
        with without_gradients():
            walk = Walk(request.sized.plan, request.sized.symbol_values, twins, OwnMemory())
            steps = _Stepwise(stepped, walk.schedule, inputs)
            difference = first_difference(walk, steps, walk.plan.device)
        return (walk, difference) if difference is not None else None
    finally:
        if stepped is not recording:
            stepped.end("it was made to find where a replay goes wrong")
        elif stepped._replay is not None and stepped._resources is not None:
            stepped._replay.registers[:] = stepped._blank
            stepped._resources.regions.empty()
