"""Native replay: threads, forks, and numbers and hooks that come between calls."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled
from native_calls import (
    COMPLEX,
    Odd,
    assert_clean,
    in_python,
    look,
    look_at_nothing,  # noqa: F401
    native,
    natively,
    positions,
    recorded,
    run,
    seen,
)
from random_graphs import GraphMaker, compile_request, kernel
from threads import in_threads

from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.graphs.memory.locks import LockOwner, TryLock, lock_of_process
from fxwrap.graphs.memory.shared_state import SHARED
from fxwrap.graphs.program_runs import RUNNERS
from fxwrap.graphs.replay.recording import Recording
from fxwrap.pipeline import compile_host_graph
from fxwrap.testing.simulated import SIMULATED

# -- threads -------------------------------------------------------------------------------------------------


@native
def test_a_call_while_another_thread_is_in_the_unit(compiled: Any) -> None:
    """
    ::

        thread   sin  look ............................ mm       in the unit
        other               replay or eager run, right           the unit misses
    """

    def g(x: torch.Tensor) -> torch.Tensor:
        return look(x.sin() @ x) @ x

    f: Compiled = compiled(g)
    recording = recorded(f, lambda: torch.randn(4, 4))
    inside, over, first = threading.Event(), threading.Event(), threading.get_ident
    main, results = first(), dict[str, torch.Tensor]()

    def wait(_: torch.Tensor) -> None:
        if first() != main and not inside.is_set():
            inside.set()
            assert over.wait(60)

    seen.append(wait)
    x, y = torch.randn(2, 4, 4)
    thread = threading.Thread(target=lambda: results.update(there=run(f.program, x)[0]))
    with natively(f.program):
        thread.start()
        assert inside.wait(60)
        used = recording.unit.used
        assert any(lock.locked() for lock in recording._locks)
        results["here"] = run(f.program, y)[0]
        assert recording.unit.used == used
        over.set()
        thread.join()
    seen.clear()
    torch.testing.assert_close(results["here"], g(y))
    torch.testing.assert_close(results["there"], g(x))
    assert_clean(recording)


@native
def test_two_threads_call_one_program(compiled: Any) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() @ x).cos() @ x

    f: Compiled = compiled(g)
    recorded(f, lambda: torch.randn(32, 32))

    def calls(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(300):
            x = torch.randn(32, 32, generator=generator)
            (y,) = run(f.program, x)
            torch.testing.assert_close(y, g(x), rtol=1e-4, atol=1e-4)

    with natively(f.program):
        in_threads([lambda: calls(1), lambda: calls(2)])


@native
def test_other_threads_run_while_a_unit_computes(compiled: Any) -> None:
    """Nobody is asked to let go of the interpreter's lock here: who has it gives it away, or nobody else runs."""
    f: Compiled = compiled(lambda x: x.sort(0).values.cumsum(0))
    recorded(f, lambda: torch.randn(8))
    torch._dynamo.reset()
    f = compiled(lambda x: x.sort(0).values.cumsum(0))
    x = torch.randn(2_000_000)
    recorded(f, lambda: x)
    inside, end, turns = [False], [False], [0]

    def count() -> None:
        while not end[0]:
            turns[0] += inside[0]
            time.sleep(0)  # gives the lock away

    before, thread = sys.getswitchinterval(), threading.Thread(target=count)
    thread.start()
    sys.setswitchinterval(1000)
    try:
        with natively(f.program):
            inside[0] = True
            f.program.run([x])
            inside[0] = False
    finally:
        end[0] = True
        sys.setswitchinterval(before)
        thread.join()
    assert turns[0] > 0


@native
def test_a_program_that_calls_itself(compiled: Any) -> None:
    """
    ::

        unit:  sin  look --> the same program --> look      the inner call finds the unit in use
    """

    def g(x: torch.Tensor) -> torch.Tensor:
        return look(x.sin() @ x) @ x

    f: Compiled = compiled(g)
    recording = recorded(f, lambda: torch.randn(4, 4))
    z, inner = torch.randn(4, 4), list[torch.Tensor]()

    def call_again(_: torch.Tensor) -> None:
        one = seen.pop()
        inner.extend(run(f.program, z))
        seen.append(one)

    x = torch.randn(4, 4)
    seen.append(call_again)
    with natively(f.program):
        (outer,) = run(f.program, x)
    seen.clear()
    torch.testing.assert_close(outer, g(x))
    torch.testing.assert_close(inner[0], g(z))
    assert_clean(recording)


def _in_a_child(check: Callable[[], bool]) -> int:
    """The exit code of a forked process: 0 if ``check`` returns true there, 1 if not, 2 if it raises."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = int(not check())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@native
@pytest.mark.parametrize("frozen", [False, True])
def test_a_process_that_is_forked_while_a_thread_is_in_a_unit(compiled: Any, frozen: bool, own_arenas: Any) -> None:
    """Nobody will end that call in the child: how far it was, nobody knows. In the parent it goes on.

    ::

        thread   sin mm look .............................. mm      slots and regions are full
        main              fork --> child: the unit is left as it is, and the program records again
    """

    def g(x: torch.Tensor) -> torch.Tensor:
        return look(x.sin() @ x) @ x

    with using_runtime(SIMULATED) if frozen else contextlib.nullcontext():
        _fork_inside_of_a_call(compiled(g), g)


def _fork_inside_of_a_call(f: Compiled, g: Callable[[torch.Tensor], torch.Tensor]) -> None:
    recording = recorded(f, lambda: torch.randn(4, 4))
    inside, over, results = threading.Event(), threading.Event(), list[torch.Tensor]()

    def wait(_: torch.Tensor) -> None:
        inside.set()
        assert over.wait(60)

    x, y = torch.randn(2, 4, 4)
    expected = g(x), g(y)
    seen.append(wait)
    thread = threading.Thread(target=lambda: results.extend(run(f.program, x)))
    thread.start()
    assert inside.wait(60)

    def check() -> bool:
        seen.clear()
        assert recording.unit.abandoned
        outputs = [run(f.program, y)[0].clone() for _ in range(3)]
        (again,) = f.program.specializations.recordings()
        assert again is not recording and again.unit is not None and again.unit.used
        return all(torch.allclose(output, expected[1]) for output in outputs)

    code = _in_a_child(check)
    over.set()
    thread.join()
    assert code == 0
    assert not recording.unit.abandoned
    torch.testing.assert_close(results[0], expected[0])
    assert_clean(recording)


@native
@pytest.mark.parametrize("how", [natively, in_python])
def test_a_process_that_is_forked_by_an_operator_goes_on_in_both(compiled: Any, how: Any, own_arenas: Any) -> None:
    """
    ::

        parent   mm  look: fork ............... + sin      the arena is the call's until it is over
        child              --> another program  + sin      here, too
    """
    with using_runtime(SIMULATED):
        f: Compiled = compiled(lambda x: look(x.sin() @ x) + x.sin())
        other: Compiled = compiled(lambda x: (x.cos() @ x).exp() @ x + 1)
        for one in (f, other, f):  # the arena has grown for the second
            recorded(one, lambda: torch.randn(16, 16))
        x, y = torch.randn(2, 16, 16)
        expected, children, nested = f.fn(x), list[int](), list[torch.Tensor]()

        def fork(_: torch.Tensor) -> None:
            seen.clear()
            children.append(os.fork())
            if not children[0]:
                nested.extend(run(other.program, y))

        def check() -> bool:
            seen.append(fork)
            with how(f.program):
                (output,) = run(f.program, x)
            right = torch.allclose(output, expected)
            if children[0]:
                return right and os.waitpid(children[0], 0)[1] == 0
            return right and torch.allclose(nested[0], other.fn(y))

        assert _in_a_child(check) == 0


def test_what_other_threads_held_is_free_in_a_forked_child() -> None:
    """Their locks, and what is kept by thread: a new thread may have the identifier of one that is not here."""
    lock, mine, thread_of = lock_of_process(), lock_of_process(), threading.get_ident()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            RUNNERS[threading.get_ident()] = print
            held.set()
            assert over.wait(60)
        RUNNERS.clear()

    def check() -> bool:
        return lock.acquire(timeout=0) and list(RUNNERS) == [thread_of] and mine._is_owned()

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    RUNNERS[thread_of] = print
    with mine:
        code = _in_a_child(check)
    over.set()
    thread.join()
    assert code == 0


# -- calls at one time, forks and odd numbers: each was wrong once -------------------------------------------


@native
def test_a_call_that_begins_before_python_hears_of_an_error(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    ::

        thread   unit: look raises | nobody is in the unit |  Python hears of it, and leaves memory alone
        other                        unit: ... look .......................... | kernels use a region at address 0

    The unit has emptied its regions when it raised. By the time that Python hears of it they are another call's.
    """
    f: Compiled = compiled(lambda x: look((x.sin() @ x).cos().sin() @ x) @ x.sin())
    recording = recorded(f, lambda: torch.randn(4, 4))
    assert recording._resources is not None
    storages = [storage for storage, _ in recording._resources.regions._sizes]
    main, sizes, real = threading.get_ident(), list[list[int]](), Recording.failed_natively
    inside, over = threading.Event(), threading.Event()

    def hook(_: torch.Tensor) -> None:
        if threading.get_ident() == main:
            raise Odd
        sizes.append([storage.nbytes() for storage in storages])
        inside.set()
        over.wait(60)
        sizes.append([storage.nbytes() for storage in storages])
        if sizes[0] != sizes[1]:
            raise Odd  # or the process ends here

    def other() -> None:
        with contextlib.suppress(Odd):
            f.program.run([torch.randn(4, 4)])

    def failed(self: Recording, error: BaseException) -> None:
        if threading.get_ident() == main:
            thread.start()
            assert inside.wait(60)
        real(self, error)
        over.set()

    thread = threading.Thread(target=other)
    monkeypatch.setattr(Recording, "failed_natively", failed)
    seen.append(hook)
    with pytest.raises(Odd):
        f.program.run([torch.randn(4, 4)])
    thread.join()
    assert any(sizes[0]) and sizes[0] == sizes[1]


@native
def test_a_unit_that_begins_while_python_takes_the_lock(compiled: Any) -> None:
    """
    ::

        TryLock._try   is a unit inside? no |                               | owners[0] = me: acquired
        other                                 unit: nobody owns it; go on ......................

    Both work in the same memory then.
    """
    f: Compiled = compiled(lambda x: look(x.sin() @ x) @ x)
    recording = recorded(f, lambda: torch.randn(4, 4))
    lock, owner = recording._locks[0], LockOwner()
    inside, over = threading.Event(), threading.Event()
    seen.append(lambda _: (inside.set(), over.wait(60)))
    thread = threading.Thread(target=lambda: run(f.program, torch.randn(4, 4)))

    def trace(frame: Any, event: str, _: Any) -> Any:
        """Start the other thread at the line of ``_try`` that takes the lock."""
        if frame.f_code is not TryLock._try.__code__:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and "setdefault" in line and not inside.is_set():
            thread.start()
            assert inside.wait(60)
        return trace

    sys.settrace(trace)
    try:
        acquired = lock.acquire(owner)
    finally:
        sys.settrace(None)
    both = acquired and lock.native.value == os.getpid()
    over.set()
    if inside.is_set():
        thread.join()
    lock.release(owner)
    assert not both


def _times_a_size(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return x * x.shape[0]


def _times_a_number(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return x * n.item()


@native
@pytest.mark.parametrize("runs", ["replayed", "eager"])
@pytest.mark.parametrize("g", [_times_a_size, _times_a_number])
def test_a_size_as_a_tensor(compiled: Any, g: Callable[..., Any], runs: str) -> None:
    """Complex kernels are ATen's: ``aten::mul.Tensor(x, u0)``, of which Python makes a wrapped number."""
    f: Compiled = compiled(g, dynamic=True)
    for call in range(6):
        x, n = torch.randn(5 if runs == "replayed" else 5 + call, dtype=COMPLEX), torch.tensor(2 + call)
        torch.testing.assert_close(f(x, n), g(x, n))


@native
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_number_from_data_as_a_tensor(kind: str) -> None:
    """The same in a graph by hand, for a whole number and for a float."""
    maker = GraphMaker()
    x, n = maker.input("x"), maker.input("n", (), torch.int64 if kind == "integer" else torch.float32)
    number = maker.integer(n) if kind == "integer" else maker.number(n)
    product = maker.extern(torch.ops.aten.mul.Tensor, x, number)
    program = compile_host_graph(maker.finish([product]), compile_request())
    for seed in range(5):
        given = maker.inputs(seed)
        assert torch.equal(program(*given)[0], given[0] * given[1].item())


@native
def test_a_process_that_is_forked_while_inputs_are_copied(compiled: Any, own_arenas: Any) -> None:
    """
    ::

        thread   fill static buffers with x, y ........     its list of sources is full
        main                 fork --> child: fill static buffers: the list has four entries for two buffers
    """
    with using_runtime(SIMULATED):
        f: Compiled = compiled(lambda x, y: x.sum(0) + y.sum(0))
        pairs = [
            (torch.ones(4096, 4096), torch.ones(64, 4096)) for _ in range(3)
        ]  # all there: none stays where it is
        first, second = ([pair[position] for pair in pairs] for position in (0, 1))
        recording = recorded(f, first.pop, second.pop)
        assert any(line.startswith("fill_buffers(") for line in recording.listing)
        x, y = pairs[0]
        given = [(x, y)[position] for position in positions(f, (x, y))]
        cell, errors = recording._locks[0].native, list[BaseException]()

        def in_thread() -> None:
            try:
                f.program.run(list(given))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=in_thread)
        thread.start()
        end = time.monotonic() + 60
        while cell.value != os.getpid() and time.monotonic() < end:
            pass
        code = _in_a_child(lambda: torch.equal(run(f.program, *given)[0], x.sum(0) + y.sum(0)))
        thread.join()
        assert not errors and code == 0


@native
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_input_that_is_a_float(value: float) -> None:
    """A program whose inputs are numbers may be given any float."""
    maker = GraphMaker()
    x, number = maker.input("x"), maker.graph.placeholder("number")
    number.meta["val"] = maker._fake.shape_env.create_unbacked_symfloat()
    product = maker.extern(torch.ops.aten.mul.Scalar, x, number)
    program = compile_host_graph(maker.finish([product]), compile_request())
    for seed in range(4):
        (given,) = maker.inputs(seed)
        torch.testing.assert_close(program(given, value)[0], given * value, equal_nan=True)


@native
def test_a_step_that_refers_to_its_program() -> None:
    """
    ::

        program --> recording --> unit --> step in Python --> function --> program

    The garbage collector sees through none of this unless units tell it what they hold.
    """

    class Copy:
        program: Any = None

        def __call__(self, a: torch.Tensor, into: torch.Tensor) -> None:
            into.copy_(a)

    def made() -> weakref.ref[Any]:
        maker, copy = GraphMaker(), Copy()
        x, out = maker.input("x"), maker.allocate()
        maker.launch(kernel("copy", copy, (1,)), x, out)
        copy.program = program = compile_host_graph(maker.finish([out]), compile_request())
        for seed in range(3):
            program(*maker.inputs(seed))
        assert any(line.endswith("# Python") for r in program.specializations.recordings() for line in r.listing)
        return weakref.ref(program)

    program = made()
    gc.collect()
    assert program() is None


@native
def test_after_hooks_have_packed_something_units_replay_again(compiled: Any) -> None:
    """What hooks got and keep is not overwritten; what others were given is nobody's business."""
    kept: list[Any] = []
    f: Compiled = compiled(lambda x: (x.sin() * x.cos()).exp().sum())

    def step() -> torch.Tensor:
        x = torch.randn(16, 16, requires_grad=True)
        f(x).backward()
        return x.grad  # type: ignore[return-value]

    for _ in range(4):
        step()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        step()
    assert kept and SHARED.packed_tensors.known
    recordings = [r for program in f.programs for r in program.specializations.recordings()]
    before = [recording.unit.used for recording in recordings]
    for _ in range(3):
        step()
    assert all(r.unit.used > used for r, used in zip(recordings, before, strict=True))
