"""The steps of a program with clocks among them: two steps around each that is work, which read the time.

::

    t0 = perf_counter_ns(); r[7] = t0
    c13(c9, v1, c10)                          # the kernel
    t1 = perf_counter_ns(); r[8] = t1

So a step is timed in its place in a replay, with the caches as its predecessors leave them. Where device graphs
freeze addresses, the steps of a graph cannot be told apart: those of an eager run are timed, each alone on the
device.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from ...errors import FxwrapError
from ...graphs.devices.runtime import freezes_addresses
from ...graphs.memory.locks import LockOwner
from ...graphs.program import Program
from ...graphs.replay.flat_python import Part
from ...graphs.replay.guards import Description
from ...graphs.replay.operands import Local, Register
from ...graphs.replay.recording import Recording
from ...graphs.replay.steps import CallPython, Launch, Step, Store
from ...graphs.replay.units import make_unit
from ...host_graph.nodes import Kernel
from ...torch_private import native_library
from ...torch_private.functions import below_autograd


def synchronized(device: torch.device) -> Callable[[], int]:
    """The clock, in nanoseconds; it waits for the device's work before it reads the time."""
    if device.type == "cpu":
        return time.perf_counter_ns

    def clock() -> int:
        torch.accelerator.synchronize()
        return time.perf_counter_ns()

    return clock


@dataclass(frozen=True)
class ClockedSteps:
    """A program's steps with clocks.

    Attributes:
        nodes: what each step that is timed runs.
        apart: whether they are the steps of an eager run, because graphs replay them otherwise.
        run: runs all steps on a list of inputs, and returns the nanoseconds of each that is timed, and at the end
            those of all others together.
    """

    nodes: Sequence[Node]
    apart: bool
    run: Callable[[list[Any]], list[float]]

    @classmethod
    def of(cls, program: Program, recording: Recording) -> ClockedSteps:
        """The steps of a program.

        Args:
            recording: the one that replays it.
        """
        apart, replay = freezes_addresses(program.plan.device), recording.replay
        assert replay is not None
        if apart:
            inputs = len(program.plan.placeholders)
            clocks = _Clocks(program.plan.device, inputs)
            parts, frees = clocks.among([program.recorder.prepared.eager.part]), True
        else:
            inputs, frees = replay.inputs_end, replay.frees_inputs
            clocks = _Clocks(program.plan.device, len(replay.registers))
            parts = clocks.among(replay.parts)
        native = native_library.native_replay()
        if isinstance(native, str) or recording.unit is None:
            steps = _in_python(program, parts, clocks)
        else:
            steps = make_unit(native, parts, clocks.registers, Description(inputs, frees))

        def run(given: list[Any]) -> list[float]:
            with contextlib.nullcontext() if apart else _held(recording):
                ticks = steps(given)
            return _without_clocks(ticks)

        return cls(clocks.nodes, apart, run)


def _without_clocks(ticks: Sequence[int]) -> list[float]:
    """The times of steps, and that of what lies between them, without what the clocks take.

    Args:
        ticks: the clock before and after ``_NOTHING``, several times; before and after each step; at the end.
    """
    steps = [after - before for before, after in zip(ticks[:-1:2], ticks[1::2], strict=True)]
    between = [before - after for after, before in zip(ticks[1::2], ticks[2::2], strict=True)]
    of_step, of_nothing = statistics.median(steps[:_TIMES]), statistics.median(between[: _TIMES - 1])
    others = sum(max(0.0, time - of_nothing) for time in between[_TIMES - 1 :])
    return [*(max(0.0, time - of_step) for time in steps[_TIMES:]), others]


class _Nothing:
    """A kernel that does nothing. What is measured of it is what the clocks take, and is subtracted.

    Attributes:
        address: of machine code, as a kernel's: a function without arguments, and without effects.
    """

    address = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value

    def call(self) -> None:
        pass


_NOTHING = Launch(Kernel("nothing", "cpp", "", torch.device("cpu"), _Nothing().call, (), arg_types=()), ())
_TIMES = 7  # that it runs


class _Clocks:
    """Puts clocks among steps. Each keeps the time in a register of its own, behind the others.

    Attributes:
        registers: the number of all registers.
        nodes: what is timed, in order.
    """

    def __init__(self, device: torch.device, registers: int) -> None:
        self._clock, self._first = synchronized(device), registers
        self.registers, self.nodes = registers, list[Node]()

    def among(self, parts: Sequence[Part]) -> list[Part]:
        """The parts with clocks. The last one returns the times, as ``_without_clocks`` takes them."""
        nothing = [step for _ in range(_TIMES) for step in (*self._read(), _NOTHING, *self._read())]
        clocked = [list(self._around(part.steps)) for part in parts]
        clocked[0][:0] = nothing
        clocked[-1] += self._read()
        times = tuple(map(Register, range(self._first, self.registers)))
        results = [*[None] * (len(parts) - 1), times]
        return [
            replace(Part.of(steps, result, part.name), below_autograd=part.below_autograd)
            for part, steps, result in zip(parts, clocked, results, strict=True)
        ]

    def _around(self, steps: Sequence[Step]) -> Iterator[Step]:
        for step in steps:
            if step.range and step.node is not None:
                self.nodes.append(step.node)
                yield from (*self._read(), step, *self._read())
            else:
                yield step

    def _read(self) -> tuple[Step, Step]:
        local, register = Local(f"clock{self.registers}"), Register(self.registers)
        self.registers += 1
        return CallPython(self._clock, results=(local,)), Store(register, local)


def _in_python(program: Program, parts: Sequence[Part], clocks: _Clocks) -> Callable[[list[Any]], Sequence[int]]:
    def run(inputs: list[Any]) -> Sequence[int]:
        registers = [*inputs, *[None] * (clocks.registers - len(inputs))]
        inputs.clear()
        times: Any = ()
        for part in parts:
            with below_autograd() if part.below_autograd else contextlib.nullcontext():
                times = part.run(registers)
        return times  # type: ignore[no-any-return]

    return run


@contextlib.contextmanager
def _held(recording: Recording) -> Iterator[None]:
    """No other call uses the recording's memory."""
    owner = LockOwner()
    if not recording.acquire(owner):
        raise FxwrapError("a program is called by another thread while it is measured", remedy="explain it alone")
    try:
        yield
    finally:
        recording.release(owner)
