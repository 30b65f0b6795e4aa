"""Replays a recording on inputs of the checker's, and finds the step at which a replay goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch.fx import Node

from ...graphs.copies import Copies, without_gradients
from ...graphs.memory.locks import LockOwner, after_fork, drop_other_threads, lock_of_process
from ...graphs.record.recording_builder import RecordingBuilder
from ...graphs.record.registers import Registers
from ...graphs.replay.flat_python import Part
from ...graphs.replay.operands import Register
from ...graphs.replay.ranges import copies_of_inputs, copies_to_inputs, partition_range
from ...graphs.replay.recording import Recording, Replay
from ...plan import ProgramPlan
from .memory import WrongStorage, first_difference
from .walk import OwnMemory, Run, Walk, fault_at, in_single_steps

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
        raise fault_at(
            plan.work_in(plan.partitions[at])[0],
            "partition not replayed" if missing else "partitions in the wrong order",
            f"{request.name}: a replay {'leaves out' if missing else 'does not keep to the order of'} its partitions",
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
            raise fault_at(
                first_user(plan, node),
                fault,
                f"{request.name}: a replay leaves out the copy of input {position} ({node.name})",
                expected="a copy at every call",
                got="none",
                remedy=remedy,
            )


def first_user(plan: ProgramPlan, node: Node) -> Node | None:
    """The first operator that reads or writes the memory of a node's value."""
    return next((other for other in plan.schedule if plan.facts.touched(other) & plan.facts.of(node)), None)


def _registers_in(replay: Replay, name: str) -> set[int]:
    """The registers that parts of this name read."""
    steps = (step for part in replay.parts if part.name == name for step in part.steps)
    return {operand.number for step in steps for operand in step.reads() if isinstance(operand, Register)}


class _Recorded(Run):
    """A replay of a recording of single steps, part by part. What a part makes is kept until the end."""

    def __init__(self, recording: Recording, inputs: Sequence[Any]) -> None:
        request, replay, resources = recording.request, recording._replay, recording._resources
        assert replay is not None and resources is not None
        plan = request.sized.plan
        registers = Registers.of(plan, request.memory, request.runtime.frozen_addresses).by_node
        super().__init__(plan, registers, list(replay.registers), resources.kept)
        self._registers = replay.registers
        self._registers[: len(inputs)] = self.values[: len(inputs)] = inputs
        steps = {partition_range(request.name, partition.index): partition.index for partition in plan.partitions}
        self._left, step = deque[tuple[int, Part]](), -1  # each with the last step before it, or its own
        for part in replay.parts:
            step = steps.get(part.name, step)
            if part.name:  # others check inputs, and make outputs
                self._left.append((step, part))
        self.run(-1)

    def run(self, step: int) -> None:
        while any(of == step for of, _ in self._left):
            self._left.popleft()[1].run(self._registers)
            made = zip(self.values, self._registers, strict=True)
            self.values = [old if new is None else new for old, new in made]  # the last reader empties a register


def locate(
    recording: Recording, statics: Collection[int], copies: Copies, changed: Collection[int]
) -> tuple[Walk, WrongStorage] | None:
    """Record a program again in single steps, and compare what each leaves with eager work.

    None where all is as it should be.

    Args:
        statics: positions of inputs that are taken as they are.
        changed: positions of inputs that hold other numbers at the replay than when the steps are recorded; else it
            is the other way round.
    """
    sized = dataclasses.replace(recording.request.sized, plan=in_single_steps(recording.request.sized.plan))
    request = dataclasses.replace(recording.request, sized=sized, guards=None)
    inputs = copies.make(changed, statics)
    twins = Copies(inputs).make()
    everything = [p for p in range(len(copies)) if p not in statics]
    stepped = RecordingBuilder(request).record(copies.make(() if changed else everything, statics)).recording
    try:
        if stepped.ended or stepped.eager_reasons:
            return None
        with without_gradients():
            walk = Walk(sized.plan, sized.symbol_values, twins, OwnMemory())
            difference = first_difference(walk, _Recorded(stepped, inputs))
        return (walk, difference) if difference is not None else None
    finally:
        if stepped._resources is not None:
            stepped._resources.regions.empty()
        stepped.end("it was made to find where a replay goes wrong")
