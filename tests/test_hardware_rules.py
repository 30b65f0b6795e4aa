"""What CUDA does, and a line that lives with it: pools that die, captures that fail and leave traces.

Each rule is one of hostsim's (``hostsim.rules()`` says where it stands in torch). The device counts its graph
launches itself: the counters of programs have to agree.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, freezes

import fxwrap
from fxwrap.graphs.device_graph import DeviceRuntime, runtime_for
from fxwrap.graphs.memory import Arena, ArenaPool

Step = Callable[[], None]


@torch.library.custom_op("fxwrap_test::waits_for_the_device", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    torch.accelerator.synchronize()
    return x + 1


@waits.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxwrap_test::allocates", mutates_args=())
def allocates(x: torch.Tensor) -> torch.Tensor:
    return (x.repeat(9, 1) + 1)[: len(x)] * 2


@allocates.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def hardware(device: torch.device) -> Iterator[None]:
    """Rules are a matter of devices with pools and a count of their own."""
    if not hasattr(torch.get_device_module(device), "rules"):
        pytest.skip("no rules to live with: python -m pytest --device hostsim")
    gc.collect()
    yield


def _launches(device: torch.device) -> int:
    return int(torch.get_device_module(device).graph_counters()["replays"])


class Programs:
    """Programs in one arena, and what happens to it."""

    def __init__(self, compiled: Any, device: torch.device) -> None:
        self.device = device
        how: Any = {"dynamic": True, "options": {"max_memory": 200 << 10}}
        self.small: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x, **how)
        self.large: Compiled = compiled(lambda x: (x.cos() @ x).sin() @ x, **how)
        self.huge: Compiled = compiled(lambda x: (x.exp() @ x).sin() @ x, **how)
        self.refused: Compiled = compiled(lambda x: waits(x.sin()).cos() * 2, **how)
        self.used = [self.small]

    def run(self, f: Compiled, n: int, calls: int = 4) -> None:
        if f not in self.used:
            self.used.append(f)
        for _ in range(calls):
            x = torch.randn(n, n) / n
            with torch.no_grad():
                torch.testing.assert_close(f(x.to(self.device)).cpu(), f.fn(x), rtol=1e-4, atol=1e-4)

    def a_larger_second_program(self) -> None:
        self.run(self.large, 64)

    def release(self) -> None:
        fxwrap.release()

    def eviction(self) -> None:
        self.run(self.huge, 100)

    def shrinking(self) -> None:
        self.run(self.large, 96)
        fxwrap.release()
        self.run(self.small, 8)

    def a_refused_operator(self) -> None:
        self.run(self.refused, 16)

    def empty_cache(self) -> None:
        torch.get_device_module(self.device).empty_cache()


EVENTS = ["a_larger_second_program", "release", "eviction", "shrinking", "a_refused_operator", "empty_cache"]


@pytest.mark.parametrize(("first", "second"), itertools.product(EVENTS, EVENTS))
def test_in_every_order_all_programs_replay_in_the_end(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, first: str, second: str
) -> None:
    programs = Programs(compiled, device)
    programs.run(programs.small, 16)
    getattr(programs, first)()
    getattr(programs, second)()
    for f in programs.used:
        programs.run(f, 16, 6)
    for f in programs.used:
        before, launched = f.program.counters.to_dict(), _launches(device)
        programs.run(f, 16, 3)
        now = f.program.counters
        assert now.replays == before["replays"] + 3, (before, now.to_dict())
        graphs = {len(r._graphs) for r in f.program.specializations.recordings() if not r.ended}
        assert 0 not in graphs and _launches(device) - launched in {3 * n for n in graphs}
        assert not any("capture failed" in reason for reason in now.eager)
    torch.rand(4, device=device)
    torch.get_device_module(device).empty_cache()


def test_a_program_without_a_single_graph_is_not_counted_as_replayed(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(lambda x: x.sin() @ x)
    x, before = torch.randn(8, 8, device=device), _launches(device)

    def refuse(*args: Any) -> None:
        raise RuntimeError("no graphs today")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator.Graph, "instantiate", refuse)
        with torch.no_grad():
            for _ in range(4):
                torch.testing.assert_close(f(x).cpu(), x.cpu().sin() @ x.cpu(), rtol=1e-4, atol=1e-4)
    assert freezes(device) and f.program.counters.replays == 0 and _launches(device) == before
    assert sum(n for reason, n in f.program.counters.eager.items() if "no graphs today" in reason) == 2


def test_a_pool_that_is_not_held_takes_no_other_graph(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: no graph of its own holds it, and the arena keeps the id."""
    monkeypatch.setattr(DeviceRuntime, "_capture_little", lambda self, pool, stream: None)
    monkeypatch.setattr(Arena, "leave_pool", lambda self: None)
    f: Compiled = compiled(lambda x: allocates(x.sin()) @ x)
    x = torch.randn(16, 16, device=device)
    with torch.no_grad():
        for _ in range(3):
            f(x)
        arenas = own_arenas._on(device)
        for _ in range(2):
            fxwrap.release()
            f(x)
    assert len(arenas) == 1
    assert any("the last graph of this memory pool is gone" in event for event in f.program.counters.events)


def test_a_failed_capture_that_is_left_as_it_is_spoils_the_next(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: nobody puts right what it leaves. An innocent program in the arena pays, and so do random numbers."""
    module = torch.get_device_module(device)
    monkeypatch.setattr(DeviceRuntime, "end_capture", lambda self, graph, pool, put_right: graph.capture_end())
    first, refused, innocent = (
        compiled(fn) for fn in (lambda x: x.sin() @ x, lambda x: waits(x.sin()) * 2, lambda x: x.cos() @ x)
    )
    x = torch.randn(16, 16, device=device)
    try:
        with torch.no_grad():
            for f in (first, refused, innocent):
                for _ in range(3):
                    f(x)
        assert any("another capture records to this" in event for event in innocent.program.counters.events)
        with pytest.raises(RuntimeError, match="a random number outside of captures"):
            torch.rand(4, device=device)
        with pytest.raises(RuntimeError, match="emptying the cache"):
            module.empty_cache()
    finally:
        for pool in own_arenas.pools():
            module.put_right(device, pool)
        runtime_for(device).make_pool()
