"""Threads, calls inside calls, interrupts: always right, counted where they run eagerly."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_nothing_captures, freezes, tensors_in
from faults import AtLine
from threads import in_threads

from fxwrap.graphs.memory.locks import LockOwner, TryLock
from fxwrap.graphs.memory.shared_state import SHARED
from fxwrap.graphs.program import Program
from fxwrap.graphs.record.recording_builder import RecordingBuilder


def _calls(
    f: Callable[[torch.Tensor], Any],
    expected: Callable[[torch.Tensor], Any],
    device: torch.device,
    barrier: threading.Barrier,
    seed: int,
) -> None:
    """200 calls in a plain loop, which has the result of the call before. After 20 everybody has come so far."""
    generator = torch.Generator().manual_seed(seed)
    for call in range(200):
        if call == 20:
            barrier.wait(60)
        x = torch.randn(32, 32, generator=generator).to(device)
        y = f(x)
        torch.testing.assert_close(y, expected(x), rtol=1e-4, atol=1e-4)


def test_four_threads_and_one_program(compiled: Any, device: torch.device, own_arenas: Any) -> None:
    """Calls that run at one time have a recording each, and an arena."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).to(device)
    f, before = compiled(model), list[int]()
    with torch.no_grad():
        f(torch.randn(32, 32, device=device))  # torch compiles once
    barrier = threading.Barrier(4, lambda: before.append(f.program.counters.replays))
    in_threads([functools.partial(_calls, f, model, device, barrier, seed) for seed in range(4)])
    counters = f.program.counters
    assert counters.replays - before[0] >= 0.9 * 4 * 180, counters.to_dict()
    assert sum(counters.recordings.values()) <= 4 * 4, counters.to_dict()


def test_three_threads_and_three_programs(compiled: Any, device: torch.device, own_arenas: Any) -> None:
    functions: list[Callable[[torch.Tensor], Any]] = [
        lambda x: (x.sin() @ x).cos(), lambda x: (x.cos() @ x).sin() @ x, lambda x: torch.relu(x @ x).sum(0)
    ]  # fmt: skip
    programs, before = [compiled(function) for function in functions], list[list[int]]()
    for f in programs:
        with torch.no_grad():
            f(torch.randn(32, 32, device=device))
    barrier = threading.Barrier(3, lambda: before.append([f.program.counters.replays for f in programs]))
    in_threads(
        [
            functools.partial(_calls, f, function, device, barrier, seed)
            for seed, (f, function) in enumerate(zip(programs, functions, strict=True))
        ]
    )
    for f, replays in zip(programs, before[0], strict=True):
        counters = f.program.counters
        assert counters.replays - replays >= 0.9 * 180, counters.to_dict()


def test_threads_that_train(compiled: Any, device: torch.device, own_arenas: Any) -> None:
    """Autograd runs a backward in the thread of its call on a CPU, and in one of its own on a device."""
    models = [torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)) for _ in range(3)]
    functions: list[Compiled] = [compiled(model.to(device)) for model in models]
    for f in functions:
        f(torch.randn(8, 16, device=device)).sum().backward()

    def steps(model: torch.nn.Module, f: Compiled, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(60):
            x = torch.randn(8, 16, generator=generator).to(device)
            found = []
            for call in (model, f):
                model.zero_grad()
                with torch.enable_grad():
                    call(x).square().sum().backward()
                found.append([p.grad for p in model.parameters()])
            for mine, theirs in zip(*found, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)

    in_threads(
        [functools.partial(steps, *both, seed) for seed, both in enumerate(zip(models, functions, strict=True))]
    )
    for program in (program for f in functions for program in f.programs):
        assert program.counters.replays >= 40, program.counters.to_dict()


def test_a_program_called_while_it_runs(compiled: Any) -> None:
    """A custom operator that calls compiled code: the inner call must not use the outer one's memory."""
    inner: Compiled = compiled(lambda x: (x.sin() @ x).cos())

    @torch.library.custom_op("fxwrap_test::calls_compiled", mutates_args=())
    def calls_compiled(x: torch.Tensor) -> torch.Tensor:
        return inner(x).clone()

    @calls_compiled.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def g(x: torch.Tensor) -> torch.Tensor:
        y = x.cos() @ x
        z = calls_compiled(y)
        return (y + z) @ x

    def expected(x: torch.Tensor) -> torch.Tensor:
        y = x.cos() @ x
        return (y + (y.sin() @ y).cos()) @ x

    for options in ({}, {"eager_ops": "fxwrap_test::calls_compiled"}):
        outer: Compiled = compiled(g, options=options)
        for _ in range(8):
            x = torch.randn(8, 8)
            torch.testing.assert_close(outer(x), expected(x), rtol=1e-4, atol=1e-4)
        assert outer.program.counters.replays
    assert any(inner.replays())


def test_interrupt_during_recording(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos())
    f(torch.randn(4, 4))
    real = RecordingBuilder._capture

    def interrupted(self: RecordingBuilder, *args: Any) -> None:
        real(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(RecordingBuilder, "_capture", interrupted)
    with pytest.raises(KeyboardInterrupt):
        f(torch.randn(4, 4))
    monkeypatch.undo()
    assert not any(specialization.recordings for specialization in f.program.specializations.values())
    for _ in range(3):
        x = torch.randn(4, 4)
        torch.testing.assert_close(f(x), (x.sin() @ x).cos())
    assert f.program.counters.replays == 2


# At the first time that a line is reached; and, in minutes, at every time of up to a hundred.
@pytest.mark.parametrize("times", [1, pytest.param(100, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("what", ["replay", "replay in Python", "recording"])
def test_an_interrupt_at_any_line_leaves_nothing_taken(
    compiled: Any, device: torch.device, what: str, times: int
) -> None:
    weight = torch.randn(8, 8, device=device)
    f: Compiled = compiled(lambda x: (x.sin() @ weight).cos() @ weight)
    x = torch.randn(8, 8, device=device)
    expected = (x.sin() @ weight).cos() @ weight
    f(x)
    program, calls = f.program, []
    program.run = lambda inputs: (calls.append(list(inputs)), Program.run(program, inputs))[1]
    f(x)
    del program.run
    run = functools.partial(program, *calls[0])
    interrupted, position = True, 0
    step = 3 if device.type == "cuda" and what == "recording" else 1  # a recording takes longer there
    while interrupted:
        if what == "recording":
            program.specializations.clear()
            run()
        if what == "replay in Python":
            program.specializations.units = ()
        interrupt = AtLine(position, times=times)
        try:
            with interrupt:
                run()
        except KeyboardInterrupt:  # which still holds the graph of a capture that it has cut short
            assert_nothing_captures(device)
        interrupted, position = interrupt.happened, position + step
        assert not any(lock.locked() for lock in SHARED.capturing.values())
        for recording in program.specializations.recordings():
            assert not any(lock.locked() for lock in recording._locks)
        (y,) = tensors_in(run())
        torch.testing.assert_close(y, expected)
        del y
    assert position > {"replay": 5, "replay in Python": 30, "recording": 200}[what]
    before = program.counters.replays
    for _ in range(3):
        run()
    assert program.counters.replays >= before + 2


def test_the_arena_is_shared_and_means_nothing_between_calls(compiled: Any, device: torch.device) -> None:
    """Two programs in one arena; a third party scribbles over it between the calls."""

    f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
    g: Compiled = compiled(lambda x: (x.cos() @ x).sin() @ x)
    arenas = set()
    for _ in range(5):
        for h, first, second in ((f, torch.sin, torch.cos), (g, torch.cos, torch.sin)):
            x = torch.randn(8, 8, device=device)
            torch.testing.assert_close(h(x), second(first(x) @ x) @ x)
            for recording in h.program.specializations.recordings():
                for arena in recording.request.arenas.values():
                    everything = torch.empty(0, dtype=torch.uint8, device=device)
                    everything.set_(arena.storage(0, arena.nbytes)).fill_(0xFF)
                    arenas.add(id(arena))
    assert len(arenas) == freezes(device)
    assert f.program.counters.replays == 3


def test_dropping_the_function_frees_its_memory(compiled: Any, device: torch.device, own_arenas: Any) -> None:
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
    for _ in range(4):
        f(torch.randn(8, 8, device=device))
    program = weakref.ref(f.program)
    (recording,) = f.program.specializations.recordings()
    arenas = [weakref.ref(arena) for arena in recording.request.arenas.values()]
    assert len(arenas) == freezes(device)
    del f, recording
    torch._dynamo.reset()
    gc.collect()
    assert program() is None and not any(arena() for arena in arenas)


def test_locks() -> None:
    lock, mine, other = TryLock(), LockOwner(), LockOwner()
    assert lock.acquire(mine) and lock.acquire(mine) and not lock.acquire(other)
    lock.release(other)
    assert lock.locked()
    lock.release(mine)
    assert lock.acquire(other)
    del other  # the call is over, however it ended
    assert not lock.locked()
    lost = LockOwner()
    lost.process = -1  # in a child process, a call of the thread that has forked: it goes on there
    assert lock.acquire(lost) and not lock.acquire(mine)
    lost.thread = -1  # a call of the parent's that no thread here will end
    assert lock.acquire(mine)


def test_locks_that_are_waited_for() -> None:
    """Another thread's turn ends; this thread's would not while it waits."""
    lock, mine, other = TryLock(), LockOwner(), LockOwner()
    assert lock.acquire(mine)
    begin = time.monotonic()
    assert not lock.acquire(other, 30.0) and time.monotonic() - begin < 10
    waited = list[bool]()
    thread = threading.Thread(
        target=lambda: waited.extend(
            lock.acquire(call, wait) for call, wait in ((LockOwner(), 0.01), (LockOwner(), 30.0))
        )
    )
    thread.start()
    time.sleep(0.1)
    lock.release(mine)
    thread.join()
    assert waited == [False, True] and not lock.locked()


def test_outputs_sent_by_a_worker_process_arrive_whole(compiled: Any) -> None:
    """Pickling for a queue moves an output's memory into shared memory: the next call must not write there."""
    from torch.utils.data import DataLoader

    weight = torch.randn(8, 8)
    f: Compiled = compiled(lambda x: x @ weight)
    with torch.no_grad():
        f(torch.randn(3, 8))  # compiled once, before the fork

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(0.02)  # the sender lets go of the batch before
        return f(torch.stack(rows))

    data = [torch.full((8,), float(i)) for i in range(24)]
    batches = list(DataLoader(data, batch_size=3, num_workers=1, collate_fn=collate))
    for start, batch in zip(range(0, 24, 3), batches, strict=True):
        torch.testing.assert_close(batch, torch.stack(data[start : start + 3]) @ weight)
