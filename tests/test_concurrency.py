"""Threads, calls inside calls, interrupts: always right, counted where they run eagerly."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from conftest import Compiled

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


def test_scratch_is_shared_and_means_nothing_between_calls(compiled: Any, device: torch.device) -> None:
    """Two programs on one block; a third party scribbles over it between the calls."""
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
    g: Compiled = compiled(lambda x: (x.cos() @ x).sin() @ x)
    blocks = set()
    for _ in range(5):
        for h, first, second in ((f, torch.sin, torch.cos), (g, torch.cos, torch.sin)):
            x = torch.randn(8, 8, device=device)
            torch.testing.assert_close(h(x), second(first(x) @ x) @ x)
            for family in h.program.families.values():
                for recording in family.recordings:
                    for scratch in recording._scratch:
                        scratch.block.fill_(0xFF)
                        blocks.add(id(scratch))
    assert len(blocks) == 1
    assert f.program.counters.replays == 3


def test_dropping_the_function_frees_its_memory(compiled: Any) -> None:
    import gc
    import weakref

    f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
    for _ in range(4):
        f(torch.randn(300, 300))  # more than any other test needs, so that the block is its own
    program = weakref.ref(f.program)
    scratch = weakref.ref(f.program.families[None].recordings[0]._scratch[0])
    del f
    torch._dynamo.reset()
    gc.collect()
    assert program() is None and scratch() is None


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
