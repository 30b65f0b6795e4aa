"""Many calls, many shapes, many functions, many threads: memory stays flat, every object goes, and all is right.

A sample runs every time; ``-m sweep -s`` runs all and prints what it took.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor
from faults import bytes_in_use
from threads import in_threads
from torch.fx import GraphModule

from fxwrap.graphs.program import Program
from fxwrap.graphs.record.recording_builder import RecordingBuilder
from fxwrap.graphs.replay.recording import Recording

SIZES = range(4, 24)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x.sin() @ weight).relu()
    return y @ weight, y.sum(0)


@pytest.mark.parametrize("calls", [160, pytest.param(20_000, marks=pytest.mark.sweep)])
@torch.no_grad()
def test_calls_over_twenty_shapes(compiled: Any, device: torch.device, own_arenas: Any, calls: int) -> None:
    """Every now and then an output is kept for a while, and everything is released."""
    bytes_in_use(device)
    weight = torch.randn(8, 8, device=device)
    inputs = [torch.randn(size, 8, device=device) for size in SIZES]
    expected = [[t.clone() for t in function(x, weight)] for x in inputs]
    f: Compiled = compiled(function, dynamic=True, options={"max_recordings": 12})
    kept: list[Any] = []
    taken, held = list[int](), list[int]()
    for call in range(calls):
        # A few shapes are called often, and the others in turn.
        which = call % 3 if call % 5 else call // 5 % len(inputs)
        y, total = f(inputs[which].clone(), weight)
        torch.testing.assert_close(y, expected[which][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(total, expected[which][1], rtol=1e-4, atol=1e-4)
        if call % 50 < 3:
            kept.append((y, total))
        elif call % 50 == 10:
            kept.clear()
        if call % 1000 == 999:
            f.program.release()
        del y, total
        if call % (calls // 8) == calls // 8 - 1:  # with the same kept, and as many recordings as there may be
            kept.clear()
            f.program.release()
            own_arenas.give_back()
            gc.collect()
            taken.append(bytes_in_use(device))
            held.append(resident())
    print(f"{device.type}: {calls} calls, {f.program.counters.to_dict()}")
    print(f"tensors' bytes {taken}; resident MiB {[round(n / 2**20, 1) for n in held]}")
    assert len(set(taken[1:])) == 1, taken
    if calls > 1000:
        assert held[-1] - held[3] < 4 << 20, held


@pytest.mark.parametrize("functions", [3, pytest.param(100, marks=pytest.mark.sweep)])
def test_functions_that_are_compiled_and_deleted(
    device: torch.device, own_arenas: Any, functions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is called until it replays, forward and backward; then nothing of it is there."""
    Compiled(lambda x: x.sin() + 1)(torch.randn(3, device=device))  # Inductor keeps a graph of its first compilation
    watched: dict[str, list[weakref.ref[Any]]] = {}

    def watch(kind: type) -> None:
        make = kind.__init__

        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            watched.setdefault(kind.__name__, []).append(weakref.ref(self))
            make(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", made)

    for kind in (Program, Recording, RecordingBuilder, GraphModule):
        watch(kind)
    bytes_in_use(device)
    weight = torch.randn(8, 8, device=device, requires_grad=True)
    taken, held, units = list[int](), list[int](), list[int]()
    gc.collect()
    others = _units()  # of programs that some other test has left
    for number in range(functions):
        f = Compiled(lambda x, w: (x @ w).sin() * 2)
        for _ in range(5):
            weight.grad = None
            f(torch.randn(4 + number % 3, 8, device=device), weight).sum().backward()
        assert any(f.replays())
        del f
        weight.grad = None
        torch._dynamo.reset()
        gc.collect()
        taken.append(bytes_in_use(device))
        held.append(resident())
        units.append(_units() - others if number % 20 == 2 else 0)
    alive = {kind: sum(one() is not None for one in ones) for kind, ones in watched.items()}
    made = {kind: len(ones) for kind, ones in watched.items()}
    print(f"{device.type}: {functions} functions; made {made}; alive {alive}; units {set(units)}")
    print(f"tensors' bytes {taken[::10]}; resident MiB {[round(n / 2**20, 1) for n in held[::10]]}")
    assert set(made) == {"Program", "Recording", "RecordingBuilder", "GraphModule"}
    assert not any(alive.values()), alive
    assert max(units) <= 0 and len(set(taken[1:])) == 1


def _units() -> int:
    return sum(type(one).__name__ == "Unit" for one in gc.get_objects())


def _shares(device: torch.device, what: str, programs: list[Program]) -> None:
    eager, replays = Counter[str](), 0
    for program in programs:
        eager.update(program.counters.to_dict()["eager"])
        replays += program.counters.replays
    calls = eager.total() + replays + sum(sum(p.counters.recordings.values()) for p in programs)
    print(f"{device.type}: {what}: {eager.total() / calls:.2%} of {calls} calls ran eagerly: {dict(eager)}")


@pytest.mark.parametrize("calls", [30, pytest.param(1000, marks=pytest.mark.sweep)])
def test_eight_threads_and_one_program(compiled: Any, device: torch.device, own_arenas: Any, calls: int) -> None:
    _call_in_threads([function], 8, compiled, device, calls)


@pytest.mark.parametrize("calls", [30, pytest.param(1000, marks=pytest.mark.sweep)])
def test_four_threads_and_four_programs(compiled: Any, device: torch.device, own_arenas: Any, calls: int) -> None:
    """Each thread calls all of them in turn."""
    functions = [lambda x, w, n=n: function(x * n, w) for n in range(1, 5)]
    _call_in_threads(functions, 4, compiled, device, calls)


def _call_in_threads(
    functions: list[Callable[..., Any]], threads: int, compiled: Any, device: torch.device, calls: int
) -> None:
    """Three shapes, of which each is called ten times in a row; every seventh result is kept for a while."""
    weight = torch.randn(8, 8, device=device)
    inputs = [torch.randn(size, 8, device=device) for size in (4, 5, 6)]
    with torch.no_grad():
        reference = [inductor(one, dynamic=True) for one in functions]
        expected = [[[t.clone() for t in one(x.clone(), weight)] for x in inputs] for one in reference]
        fs: list[Compiled] = [compiled(one, dynamic=True) for one in functions]
        for f in fs:
            for x in inputs:
                f(x.clone(), weight)
    barrier = threading.Barrier(threads)

    def work(thread: int) -> None:
        kept: list[Any] = []
        barrier.wait(120)
        for call in range(calls):
            program, shape = (call + thread) % len(fs), call // 10 % len(inputs)
            results = fs[program](inputs[shape].clone(), weight)
            assert_same(results, expected[program][shape])
            if call % 7 == 0:
                for known, should in kept:
                    assert_same(known, should)
                kept = [(results, expected[program][shape])]

    in_threads([functools.partial(work, thread) for thread in range(threads)])
    eager, replays, recordings = Counter[str](), 0, 0
    for counters in (program.counters for f in fs for program in f.programs):
        eager.update(counters.eager)
        replays += counters.replays
        recordings += sum(counters.recordings.values())
    all_calls = threads * calls + len(fs) * len(inputs)
    print(f"{device.type}: {threads} threads, {len(fs)} program(s), {all_calls} calls: {replays} replayed,", end=" ")
    print(f"{recordings} recorded, {eager.total() / all_calls:.1%} eager: {dict(eager)}")
    assert replays + recordings + eager.total() == all_calls
