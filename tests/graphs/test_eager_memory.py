"""An eager run that is out of memory gets what idle recordings keep, and its step runs again, if that is safe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled, freezes
from torch.utils._python_dispatch import TorchDispatchMode

from fxwrap.graphs.eager import EagerRuns
from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.graphs.memory.arenas import NEEDED_ELSEWHERE
from fxwrap.graphs.memory.locks import LockOwner
from fxwrap.graphs.memory.shared_state import SHARED
from fxwrap.graphs.policy.eager_memory import EVENT
from fxwrap.graphs.policy.shortage import ASKED_AGAIN


@torch.library.custom_op("fxwrap_test::does_anything", mutates_args=())
def does_anything(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@does_anything.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Short(TorchDispatchMode):
    """An operator is out of memory as long as something holds."""

    def __init__(self, name: str, holds: Callable[[], bool]) -> None:
        super().__init__()
        self._name, self._holds, self.failures = name, holds, 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator._schema.name.partition("::")[2] == self._name and self._holds():
            self.failures += 1
            raise torch.OutOfMemoryError("planted")
        return operator(*args, **kwargs or {})


class Memory:
    """A program with a recording, which keeps memory, and one that only runs eagerly, and needs that."""

    def __init__(self, compiled: Any, device: torch.device, arenas: ArenaPool, needs: Callable[..., Any]) -> None:
        if not freezes(device):
            pytest.skip("recordings keep no memory")
        self.x, self.state, self.expected = (torch.rand(8, 8, device=device) for _ in range(3))
        self.expected.copy_(self.state)
        self.arenas, self.recorded = arenas, compiled(lambda x: (x.sin() @ x).cos() @ x)
        self.eager: Compiled = compiled(needs, options={"warmup": 1000})
        self.keep(3)
        self.need()

    @torch.no_grad()
    def keep(self, calls: int = 1) -> None:
        for _ in range(calls):
            torch.testing.assert_close(self.recorded(self.x), self.recorded.fn(self.x), rtol=1e-4, atol=1e-4)

    @torch.no_grad()
    def need(self, calls: int = 1) -> None:
        """What it writes before its step runs again is written once."""
        for _ in range(calls):
            result = self.eager(self.x, self.state)
            expected = self.eager.fn(self.x, self.expected)
            if expected.is_floating_point():  # no random positions
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(self.state, self.expected, rtol=1e-4, atol=1e-4)

    def kept(self) -> bool:
        return self.arenas.kept() > 0


@pytest.fixture
def short_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], bool]], Short]:
    """Eager runs of programs that have an operator are under a mode."""

    def make(name: str, holds: Callable[[], bool]) -> Short:
        mode, run = Short(name, holds), EagerRuns.__call__

        def under_mode(self: EagerRuns, inputs: list[Any]) -> Any:
            with mode:
                return run(self, inputs)

        monkeypatch.setattr(EagerRuns, "__call__", under_mode)
        return mode

    return make


def selects(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state.add_(x)
    return (state @ x).kthvalue(3, -1, True)[0] * x


@pytest.mark.parametrize("native", [False, True], ids=["Python", "native"])
def test_a_step_runs_again_with_the_memory_of_idle_recordings(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, short_of: Any, native: bool
) -> None:
    memory = Memory(compiled, device, own_arenas, selects)
    memory.need(3 if native else 0)
    assert (memory.eager.program.recorder.prepared.eager._unit is not None) >= native
    mode = short_of("kthvalue", memory.kept)
    memory.need(3)
    assert mode.failures == 1 and not memory.kept()
    assert memory.eager.program.counters.events == {EVENT: 1}
    (recording,) = memory.recorded.program.specializations.values()[0].recordings
    assert recording.ended == NEEDED_ELSEWHERE


def test_what_was_needed_elsewhere_is_not_recorded_at_every_call(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, short_of: Any
) -> None:
    """Two programs that do not fit together, called in turn: the recorded one waits longer each time."""
    memory = Memory(compiled, device, own_arenas, selects)
    mode, calls = short_of("kthvalue", memory.kept), 4 * ASKED_AGAIN
    for _ in range(calls):
        memory.need()
        memory.keep()
    counters = memory.recorded.program.counters
    assert sum(counters.recordings.values()) == 1 + 2 and mode.failures == 3
    assert counters.eager["out of memory"] == calls - 2


@pytest.mark.parametrize("held", ["arena", "capture"])
def test_what_another_call_uses_is_left_alone(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, short_of: Any, held: str
) -> None:
    """A recording that runs; a capture somewhere, during which the cache is not emptied."""
    memory, held_now, done = Memory(compiled, device, own_arenas, selects), threading.Event(), threading.Event()
    (arena,) = own_arenas.alive(memory.x.device)

    def other_thread() -> None:
        owner = LockOwner()
        lock = arena.lock if held == "arena" else SHARED.capturing[memory.x.device]
        assert lock.acquire(owner)
        held_now.set()
        done.wait()
        lock.release(owner)

    thread = threading.Thread(target=other_thread)
    thread.start()
    held_now.wait()
    try:
        mode = short_of("kthvalue", memory.kept)
        if held == "arena":
            with pytest.raises(torch.OutOfMemoryError):
                memory.need()
            assert mode.failures == 2 and memory.kept() and EVENT not in memory.eager.program.counters.events
        else:
            memory.need()
            assert mode.failures == 1 and not memory.kept()
    finally:
        done.set()
        thread.join()
    memory.expected.copy_(memory.state)
    replays = memory.recorded.program.counters.replays
    memory.keep()
    assert memory.recorded.program.counters.replays == replays + (held == "arena")
    memory.need()


def unknown(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return does_anything(x.sin()) @ x


def in_place(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return state.scatter_reduce_(0, torch.zeros_like(x, dtype=torch.int64), x, "prod") @ x


def random(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(x + state, 2)


@pytest.mark.parametrize(
    "needs, name", [(unknown, "does_anything"), (in_place, "scatter_reduce_"), (random, "multinomial")]
)
def test_a_step_that_may_not_run_again_fails_once(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, short_of: Any, needs: Any, name: str
) -> None:
    memory = Memory(compiled, device, own_arenas, needs)
    mode = short_of(name, memory.kept)
    with pytest.raises(torch.OutOfMemoryError):
        memory.need()
    assert mode.failures == 1 and not memory.kept()
    memory.need(2)
    assert mode.failures == 1 and memory.eager.program.counters.events[EVENT] == 1


def test_allocations_run_again(compiled: Any, device: torch.device, own_arenas: ArenaPool) -> None:
    """Nothing is planted: the allocator's memory has an end."""
    module = torch.get_device_module(device)
    if not hasattr(module, "set_per_process_memory_fraction"):
        pytest.skip("memory has no end")
    w, mb = torch.randn(256, 256, device=device) / 16, 1 << 20
    x, y = torch.randn(8192, 256, device=device), torch.randn(12288, 256, device=device)
    recorded: Compiled = compiled(lambda x: ((x @ w).sin() @ w).cos() @ w)
    eager: Compiled = compiled(lambda x: ((x @ w).cos() @ w).sin() @ w, options={"warmup": 2})
    with torch.no_grad():
        expected = eager(y)  # is tuned now
        for _ in range(3):
            recorded(x)
        assert own_arenas.kept(device) >= 16 * mb
        module.synchronize()
        module.empty_cache()
        allowed = module.memory_reserved(device) + 20 * mb + 0.5  # two matrices of 12 are there at one time
        module.set_per_process_memory_fraction(allowed / module.mem_get_info(device)[1], device)
        try:
            result = eager(y)
        finally:
            module.set_per_process_memory_fraction(1.0, device)
    assert torch.equal(result, expected) and eager.program.counters.events == {EVENT: 1}
