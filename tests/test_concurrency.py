"""Threads, calls inside calls, interrupts: always right, counted where they run eagerly."""

from __future__ import annotations

import functools
import linecache
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled, tensors_in

from fxwrap.graphs.program import Program
from fxwrap.graphs.recording import Recording


def test_second_thread_gets_right_numbers(compiled: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    f: Compiled = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            f(torch.randn(4, 32))
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            with torch.no_grad():
                for _ in range(200):
                    x = torch.randn(4, 32, generator=generator)
                    torch.testing.assert_close(f(x), model(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    counters = f.program.counters
    assert counters.replays > 0


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
    real = Recording._capture

    def interrupted(self: Recording, *args: Any) -> None:
        real(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Recording, "_capture", interrupted)
    with pytest.raises(KeyboardInterrupt):
        f(torch.randn(4, 4))
    monkeypatch.undo()
    assert not any(family.recordings for family in f.program.families.values())
    for _ in range(3):
        x = torch.randn(4, 4)
        torch.testing.assert_close(f(x), (x.sin() @ x).cos())
    assert f.program.counters.replays == 2


def interrupted_at(position: int, call: Callable[[], Any]) -> Any:
    """Run ``call`` with an interrupt at its ``position``-th line of fxwrap.graphs; INTERRUPTED if it came so far.

    No interrupt comes between the end of a ``with`` block and the exit of its context: Python looks for signals
    before and after, while a tracer could raise there, too.
    """
    left = position

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if "fxwrap/graphs/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if not line.lstrip().startswith("with "):
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        return call()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        sys.settrace(None)


INTERRUPTED = object()


@pytest.mark.parametrize("what", ["replay", "recording"])
def test_an_interrupt_at_any_line_leaves_nothing_taken(compiled: Any, device: torch.device, what: str) -> None:
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
    outcome, position = INTERRUPTED, 0
    while outcome is INTERRUPTED:
        if what == "recording":
            program.families.clear()
            run()
        outcome = interrupted_at(position, run)
        position += 1
        assert not program._recording.taken()
        for family in program.families.values():
            for recording in family.recordings:
                assert not any(turn.taken() for turn in recording._turns)
        (y,) = tensors_in(run())
        torch.testing.assert_close(y, expected)
    assert position > (30 if what == "replay" else 200)
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
            for family in h.program.families.values():
                for recording in family.recordings:
                    for arena in recording.request.arenas.values():
                        torch.empty(0, dtype=torch.uint8, device=device).set_(arena.storage(0, arena.nbytes)).fill_(
                            0xFF
                        )
                        arenas.add(id(arena))
    assert len(arenas) == 1
    assert f.program.counters.replays == 3


def test_dropping_the_function_frees_its_memory(compiled: Any, own_arenas: Any) -> None:
    import gc
    import weakref

    f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
    for _ in range(4):
        f(torch.randn(8, 8))
    program = weakref.ref(f.program)
    (arena,) = map(weakref.ref, f.program.families[None].recordings[0].request.arenas.values())
    del f
    torch._dynamo.reset()
    gc.collect()
    assert program() is None and arena() is None


def test_turns() -> None:
    from fxwrap.graphs.turn import Call, Turn

    turn, mine, other = Turn(), Call(), Call()
    assert turn.take(mine) and turn.take(mine) and not turn.take(other)
    turn.give(other)
    assert turn.taken()
    turn.give(mine)
    assert turn.take(other)
    del other  # the call is over, however it ended
    assert not turn.taken()
    lost = Call()
    lost.process = -1  # in a child process, a call of the parent's that no thread here will end
    assert turn.take(lost) and turn.take(mine)


def test_outputs_sent_by_a_worker_process_arrive_whole(compiled: Any) -> None:
    """Pickling for a queue moves an output's memory into shared memory, where no use count of ours reaches."""
    import time

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
