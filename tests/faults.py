"""Faults at chosen points of calls, and what has to be so afterwards: the next calls are right, and nothing is left.

A point is the k-th of something that happens while programs run: a line, an operator, an allocation.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import gc
import linecache
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from conftest import Compiled, assert_same, inductor, tensors_in
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.graphs.memory.shared_state import SHARED
from fxwrap.graphs.program import Program
from fxwrap.native_build import built_library
from fxwrap.torch_private import native_library

# Where generated functions say that they are.
FLAT = "<fxwrap flat function>"
GRAPHS = "fxwrap/graphs/"


# -- faults -------------------------------------------------------------------------------------------------------


class Fault:
    """Happens at its ``at``-th point; a context in which points are counted.

    Attributes:
        at: from 0; -1 to count alone.
        reached: so many points there were.
        happened: whether it has.
    """

    def __init__(self, at: int = -1) -> None:
        self.at, self.reached, self.happened = at, 0, False

    def point(self) -> bool:
        """One more point; whether the fault happens here."""
        self.reached += 1
        here = self.reached == self.at + 1
        self.happened |= here
        return here

    def __enter__(self) -> None:
        """Count, in this thread."""

    def __exit__(self, *error: object) -> None:
        """Count no more."""


class AtLine(Fault):
    """An error at a line of some files.

    A line that is reached again and again counts so many ``times``.

    No error comes between the end of a ``with`` block and the exit of its context: Python looks for signals before
    and after, while a tracer could raise there, too.
    """

    def __init__(
        self, at: int = -1, *, files: str = GRAPHS, error: type[BaseException] = KeyboardInterrupt, times: int = 1
    ) -> None:
        super().__init__(at)
        self._files, self._error, self._times = files, error, times
        self._seen = Counter[tuple[str, int]]()

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if self._files not in code.co_filename:
            return None
        if event == "line" and not self.happened:
            here = (code.co_filename, frame.f_lineno)
            self._seen[here] += 1
            again = code.co_filename != FLAT and self._seen[here] > self._times  # all of those have one name
            if not again and not linecache.getline(*here).lstrip().startswith("with ") and self.point():
                raise self._error("planted")
        return self._trace

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)


class _Mode(TorchDispatchMode):
    def __init__(self, point: Callable[[], object]) -> None:
        super().__init__()
        self._point = point

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _by_the_simulator():
            self._point()
        return operator(*args, **(kwargs or {}))


def _by_the_simulator() -> bool:
    """Whether a simulated device calls this operator for purposes of its own."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == FLAT or GRAPHS in frame.f_code.co_filename:
            return False
        if frame.f_code.co_filename.endswith("testing/simulated.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class AtOperator(Fault):
    """An operator of torch does something instead of its work: raises, or is interrupted by a signal."""

    def __init__(self, at: int = -1, *, error: type[BaseException] | None = RuntimeError) -> None:
        super().__init__(at)
        self._error, self._mode = error, contextlib.ExitStack()

    def _fail(self) -> None:
        if self.point():
            if self._error is None:
                signal.raise_signal(signal.SIGINT)
            else:
                raise self._error("planted")

    def __enter__(self) -> None:
        self._mode.enter_context(_Mode(self._fail))

    def __exit__(self, *error: object) -> None:
        self._mode.close()


class AtTime(Fault):
    """A signal, so many microseconds after one of the programs' runs has begun: wherever Python looks for it next."""

    RUNS, STEP_S = 10, 20e-6

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self._run, self._delay_s = at % self.RUNS, (at // self.RUNS + 1) * self.STEP_S
        signal.signal(signal.SIGALRM, self._interrupt)  # in the main thread: backwards may run in another one

    def _interrupt(self, *_: object) -> None:
        self.happened = True
        raise KeyboardInterrupt

    def __enter__(self) -> None:
        if self.reached == self._run:
            signal.setitimer(signal.ITIMER_REAL, self._delay_s)
        self.reached += 1

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


class AtAllocation(Fault):
    """An allocation of the device finds no memory; with ``all_after`` no other that follows in the same call does."""

    def __init__(self, device: torch.device, at: int = -1, *, all_after: bool = False) -> None:
        super().__init__(at)
        self._all_after, self._module = all_after, None if device.type == "cpu" else torch.get_device_module(device)
        if self._module is not None and not hasattr(self._module, "fail_allocations"):
            pytest.skip(f"nobody can have an allocation of {device} fail")

    def __enter__(self) -> None:
        at = self.at - self.reached if self.at >= self.reached else -1
        if self._module is None:
            _allocator().arm(at, self._all_after)
        else:
            self._module.fail_allocations(at, self._all_after)

    def __exit__(self, *error: object) -> None:
        if self._module is None:
            self.reached += _allocator().allocations()
            _allocator().disarm()
        else:
            self.reached += self._module.allocations_wanted()
            self._module.fail_allocations(-1)
        self.happened = 0 <= self.at < self.reached


@functools.cache
def _allocator() -> Any:
    """The CPU's allocator from now on."""
    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ("-std=c++20", "-O1", abi, f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10")
    source = Path(__file__).with_name("failing_allocator.cpp")
    path = built_library("failing_allocator", source, flags, key=[torch.__version__], patience_s=100)
    library = ctypes.CDLL(str(path))
    library.arm.argtypes = [ctypes.c_int64, ctypes.c_bool]
    library.allocations.restype = library.bytes_in_use.restype = ctypes.c_int64
    library.install()
    return library


def bytes_in_use(device: torch.device) -> int:
    """Bytes of tensors and storages on a device; on the CPU those since this was asked first.

    Without cuBLAS's workspaces, which eager runs leave: no test has captured one that lies outside of a pool.
    """
    if device.type == "cpu":
        return int(_allocator().bytes_in_use())
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
    torch.get_device_module(device).synchronize()
    return int(torch.get_device_module(device).memory_allocated(device))


def _run_finalizers_that_were_cut_short() -> None:
    """Python drops an interrupt that comes as a ``weakref.finalize`` begins, and runs that again at exit."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if finalizer.alive and finalizer.peek() is None:
            finalizer()


def within_a_second(holds: Callable[[], bool]) -> bool:
    """Whether something is so by now, or is soon."""
    end = time.monotonic() + 1
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)
    return holds()


# -- what they happen to ------------------------------------------------------------------------------------------


@torch.library.custom_op("fxwrap_faults::captured", mutates_args=())
def captured(x: torch.Tensor) -> torch.Tensor:
    """Allocates twice, in Python."""
    return (x * 2).relu()


@torch.library.custom_op("fxwrap_faults::by_the_host", mutates_args=())
def by_the_host(x: torch.Tensor) -> torch.Tensor:
    return x.cos() + 1


@captured.register_fake
@by_the_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Inference:
    """Two partitions to capture and one to run eagerly; an input that is written, and random numbers."""

    options: ClassVar[dict[str, Any]] = {"eager_ops": "fxwrap_faults::by_the_host"}

    def __init__(self, device: torch.device) -> None:
        self.weight, self.state = torch.randn(8, 8, device=device), torch.zeros(8, device=device)
        self.inputs = [torch.randn(size, 8, device=device) for size in (6, 9)]

    @staticmethod
    def function(x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state.add_(1)
        y = by_the_host(captured(x.sin() @ weight) + state)
        z = torch.addmm(torch.rand_like(state), y, weight)
        return z.exp(), y.t(), z.sum(0)

    @torch.no_grad()
    def call(self, f: Callable[..., Any], shape: int) -> list[torch.Tensor]:
        """What is called, and all that comes out of it."""
        self.state.zero_()
        torch.manual_seed(shape)
        x = self.inputs[shape].clone()
        return [*f(x, self.weight, self.state), self.state.clone()]

    def forget(self) -> None:
        """Nothing is kept between calls."""


class Training:
    """A forward and a backward program; the activations between them lie where the plan wants them."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, device: torch.device) -> None:
        self.weights = [torch.randn(n, m, device=device, requires_grad=True) for n, m in ((8, 16), (16, 4))]
        self.inputs = [torch.randn(size, 8, device=device) for size in (6, 9)]

    @staticmethod
    def function(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return captured_with_gradient((x @ first).tanh()) @ second

    def call(self, f: Callable[..., Any], shape: int) -> list[torch.Tensor]:
        self.forget()
        y = f(self.inputs[shape].clone(), *self.weights)
        y.square().sum().backward()
        return [y.detach(), *(weight.grad for weight in self.weights if weight.grad is not None)]

    def forget(self) -> None:
        for weight in self.weights:
            weight.grad = None


def captured_with_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x


class Faulty:
    """A function compiled with fxwrap and with Inductor alone, and a fault that happens while fxwrap's programs run.

    Attributes:
        fault: what happens; None for nothing.
        after: counts what the calls after faults did.
    """

    def __init__(self, what: Any, device: torch.device, native: bool = True) -> None:
        self.device, self.case, self._native = device, what(device), native
        self._patches = contextlib.ExitStack()
        if not native:
            self._patches.enter_context(mock.patch.object(native_library, "native_replay", lambda: ""))
        self.fault: Fault | None = None
        self.after = Counter[str]()
        self._given: list[StorageWeakRef] = []  # inputs of the last run, but for those that the case keeps
        self._lasting = {tensor.untyped_storage()._cdata for tensor in tensors_in(vars(self.case))}
        reference = inductor(self.case.function, dynamic=True)
        self.expected = [[t.clone() for t in self.case.call(reference, shape)] for shape in (0, 1)]
        self._compiled = Compiled(self.case.function, compile_options={"dynamic": True, "options": what.options})
        for shape in (0, 1):
            self.case.call(self._compiled, shape)
        self.programs: list[Program] = self._compiled.programs
        for program in self.programs:
            program.run = functools.partial(self._run, weakref.proxy(program))  # type: ignore[method-assign]
        # An interrupt in a finalizer is told to a hook, and pytest's keeps what it hears, with all frames.
        self._hook, sys.unraisablehook = sys.unraisablehook, self._note_ignored
        gc.collect()
        gc.freeze()
        self.scenario([])  # what is loaded once
        self.reset()
        self._baseline = bytes_in_use(device)

    def close(self) -> None:
        self._patches.close()
        gc.unfreeze()
        sys.unraisablehook = self._hook

    def _note_ignored(self, told: Any) -> None:
        self.after[f"ignored {told.exc_type.__name__}"] += 1

    def _run(self, program: Program, inputs: list[Any]) -> Any:
        if self.fault is None:
            return Program.run(program, inputs)
        given = [tensor for tensor in inputs if isinstance(tensor, torch.Tensor)]
        others = [t.untyped_storage() for t in given if not SHARED.arenas.owns(t.data_ptr())]
        self._given = [StorageWeakRef(one) for one in others if one._cdata not in self._lasting]
        del given, others
        with self.fault:
            return Program.run(program, inputs)

    def _let_go(self) -> bool:
        """Whether nobody has what the call was given. A thread of autograd drops an error a little later."""
        return all(one.expired() for one in self._given)

    def reset(self) -> None:
        """As after compiling."""
        self.case.forget()
        for program in self.programs:
            forward = program.recorder._forward, program.recorder._saved_tensors
            plan = program.planner.partition(program.plan.inputs, {})
            program.__init__(plan, program.planner, program.options)  # type: ignore[misc]
            program.recorder._forward, program.recorder._saved_tensors = forward
            program.counters.eager.clear()
        SHARED.arenas = ArenaPool()
        gc.collect()

    def call(self, shape: int) -> list[torch.Tensor]:
        """A call, compared bit for bit with Inductor's wrapper."""
        self.shape = shape
        outputs = self.case.call(self._compiled, shape)
        assert_same(outputs, self.expected[shape])
        return outputs

    def release(self) -> None:
        with self.fault or contextlib.nullcontext():
            for program in self.programs:
                program.release()
            SHARED.arenas.give_back()

    def scenario(self, kept: list[list[torch.Tensor]]) -> None:
        """
        ::

            shape 0   warm-up  recording  replay  replay (kept)  live output  ...  released, recording, replay
            shape 1                                        warm-up  recording  replay
        """
        for _ in range(3):
            self.call(0)
        kept.append(self.call(0))
        self.call(0)
        for _ in range(3):
            self.call(1)
        self.release()
        kept.clear()
        for _ in range(2):
            self.call(0)

    def happens(self, fault: Fault) -> None:
        """A fault happens in the scenario; then everything is right, and nothing is left."""
        kept: list[list[torch.Tensor]] = []
        raised = False
        ignored = self.after["ignored KeyboardInterrupt"]
        self.reset()
        self.fault = fault
        try:
            self.scenario(kept)
            self.after["went unnoticed"] += fault.happened
        except (KeyboardInterrupt, torch.OutOfMemoryError, RuntimeError) as error:
            # A device that does the work later says what has happened to it.
            told = "planted" in str(error) or "KeyboardInterrupt" in repr(error)
            assert fault.happened and told, repr(error)
            self.after[f"raised {type(error).__name__}"] += 1
            raised = True
        finally:
            self.fault = None
            torch.set_grad_enabled(True)  # an interrupt may come when torch.no_grad() is about to do that
        gc.collect()
        _run_finalizers_that_were_cut_short()
        if raised:
            bytes_in_use(self.device)  # waits for the device
            assert within_a_second(self._let_go), "somebody keeps what the call was given"
        self._compare(kept)
        before = self._replays()
        for _ in range(3):
            self.call(self.shape)
        self._call_in_another_thread()
        self._demand_that_nothing_is_locked()
        self.after["replayed within three calls"] += self._replays() > before
        self._compare(kept)
        kept.clear()
        self.release()
        assert not SHARED.arenas.kept()
        self.reset()
        left = bytes_in_use(self.device) - self._baseline
        if self.after["ignored KeyboardInterrupt"] > ignored:
            # Python has dropped the interrupt, and with it what a finalizer was about to release.
            self._baseline, left = self._baseline + left, 0
        assert not left, f"{left} bytes are left"

    def _compare(self, kept: list[list[torch.Tensor]]) -> None:
        for outputs in kept:
            assert_same(outputs, self.expected[0])

    def _replays(self) -> int:
        return sum(program.counters.replays for program in self.programs)

    def _call_in_another_thread(self) -> None:
        errors = list[BaseException]()

        def run() -> None:
            try:
                self.call(self.shape)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "a call in another thread waits for ever"
        if errors:
            raise errors[0]

    def _demand_that_nothing_is_locked(self) -> None:
        assert not any(lock.locked() for lock in SHARED.capturing.values())
        assert not any(arena.lock.locked() for arena in SHARED.arenas.alive())
        for program in self.programs:
            for recording in program.specializations.recordings():
                assert not any(lock.locked() for lock in recording._locks)

    def points(self, make: Callable[[int], Fault]) -> int:
        """How many points the scenario has without a fault."""
        self.reset()
        self.fault = make(-1)
        try:
            self.scenario([])
            return self.fault.reached
        finally:
            self.fault = None

    def sweep(self, make: Callable[[int], Fault], sample: int = 0, points: int | None = None) -> int:
        """Faults at every point, or at ``sample`` of them; how many there were.

        Raises:
            AssertionError: after one of them something was wrong; it says which.
        """
        points = self.points(make) if points is None else points
        tried = sorted({i * points // sample for i in range(sample)}) if sample else range(points)
        for at in tried:
            try:
                self.happens(make(at))
            except Exception as error:
                raise AssertionError(f"after a fault at point {at} of {points}") from error
        return len(tried)
