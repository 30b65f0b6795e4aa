"""Memory that is short while a program is recorded: the cache is emptied, then it is eager's, and nobody is blamed.

On CUDA the allocator gives back what it caches before memory is short, but not while a graph is captured; and the
eager runs before have left about as much there as they took. hostsim does the same, with a limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, freezes
from torch.multiprocessing.reductions import StorageWeakRef

import fxwrap
from fxwrap.graphs.devices.runtime import DeviceRuntime, GraphPool, runtime_for, using_runtime
from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.graphs.memory.arenas import OUT_OF_MEMORY, TOO_LARGE, Arena
from fxwrap.graphs.memory.live_outputs import WatchedOutputs
from fxwrap.graphs.memory.locks import LockOwner
from fxwrap.graphs.memory.static_buffers import StaticBuffers
from fxwrap.graphs.policy.shortage import ASKED_AGAIN
from fxwrap.graphs.record import recording_builder
from fxwrap.graphs.record.recording_builder import RecordingBuilder
from fxwrap.testing.simulated import Rules, SimulatedGraph, SimulatedRuntime, simulated

CPU = torch.device("cpu")


@torch.library.custom_op("fxwrap_test::takes_more_and_more", mutates_args=())
def takes_more_and_more(x: torch.Tensor) -> torch.Tensor:
    """While captured it takes 33 times its input: nothing that is freed is large enough for what comes next."""
    total = x
    for times in (4, 9, 20):
        total = total + x.repeat(times, 1)[: len(x)]
    return total


@takes_more_and_more.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxwrap_test::short_once", mutates_args=())
def short_once(x: torch.Tensor) -> torch.Tensor:
    """It is out of memory once, where that is planted."""
    if planted_shortages:
        raise planted_shortages.pop()
    return x.clone()


short_once.register_fake(torch.empty_like)
planted_shortages: list[torch.OutOfMemoryError] = []
of_notes: list[StorageWeakRef] = []


@torch.library.custom_op("fxwrap_test::notes", mutates_args=())
def notes(x: torch.Tensor) -> torch.Tensor:
    made = x + 1
    of_notes.append(StorageWeakRef(made.untyped_storage()))
    return made


@notes.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


own_memory_is_short = False


@torch.library.custom_op("fxwrap_test::by_the_host", mutates_args=())
def by_the_host(x: torch.Tensor) -> torch.Tensor:
    if own_memory_is_short:
        raise torch.OutOfMemoryError("the operator's own")
    return x * 2


@by_the_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def one_graph(x: torch.Tensor) -> torch.Tensor:
    return takes_more_and_more(x.sin()).cos() * 2


def two_graphs(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The second one needs the memory; the first one has counted by then."""
    state.add_(1)
    return takes_more_and_more(by_the_host(x.sin() + state)).cos() * 2


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    """What somebody needs has to be free at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def hardware(device: torch.device) -> Any:
    module = torch.get_device_module(device)
    if not hasattr(module, "set_per_process_memory_fraction"):
        pytest.skip("memory has no end: python -m pytest --device hostsim")
    if device.type == "cuda":
        # test_eager_memory.py has limits that count there.
        pytest.skip("limits are of kilobytes: CUDA's allocator takes segments of 2 and 20 MiB from the driver")
    return module


@contextlib.contextmanager
def limited(module: Any, device: torch.device, more: int) -> Iterator[None]:
    """So many bytes more than are in use now, and nothing is cached."""
    module.synchronize()
    module.empty_cache()
    total = module.mem_get_info(device)[1]
    module.set_per_process_memory_fraction((module.memory_reserved(device) + more + 0.5) / total, device)
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(1.0, device)


def peak(module: Any, call: Callable[[], Any]) -> int:
    """Bytes that a call takes at one time."""
    gc.collect()
    module.synchronize()
    module.empty_cache()
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    call()
    return int(module.max_memory_allocated() - before)


class Short:
    """A compiled function, warm, and what it takes."""

    def __init__(self, module: Any, device: torch.device, f: Compiled, *others: torch.Tensor) -> None:
        self.module, self.device, self.f = module, device, f
        self.x = torch.randn(64, 64, device=device)
        self.bytes = self.x.untyped_storage().nbytes()
        self.others = others
        self.eager_peak = peak(module, lambda: f.fn(self.x, *(other.clone() for other in others)))
        self.call()  # warm

    @torch.no_grad()
    def call(self, calls: int = 1) -> None:
        for _ in range(calls):
            expected = self.f.fn(self.x.cpu(), *(other.cpu() for other in self.others))
            result = self.f(self.x, *self.others).cpu()
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)

    def fill_the_cache(self) -> None:
        """As an eager run does."""
        self.f.fn(self.x, *(other.clone() for other in self.others))

    @property
    def failures(self) -> int:
        return int(self.module.memory_stats(self.device)["num_ooms"])

    @property
    def captures(self) -> int:
        return int(self.module.graph_counters()["captures"])

    def demand_that_it_replays(self) -> None:
        replays, launches = self.f.program.counters.replays, self.module.graph_counters()["replays"]
        self.call(4)
        assert self.f.program.counters.replays == replays + 4, self.f.program.counters.to_dict()
        (kept,) = [r for r in self.f.program.specializations.recordings() if not r.ended]
        assert self.module.graph_counters()["replays"] == launches + 4 * len(kept.graphs)
        assert not self.f.program.recorder.capture_errors and not kept.eager_reasons


# -- a capture ----------------------------------------------------------------------------------------------------


def _with_the_cache_full(
    module: Any, device: torch.device, compiled: Any, plant: Callable[[], object] = lambda: None
) -> Short:
    """
    ::

        allowed   what the arena and a capture take, and half of that
        cache     what an eager run took | emptied
        capture   out of memory          | again
    """
    short = Short(module, device, compiled(one_graph))
    with limited(module, device, 60 * short.bytes):
        short.fill_the_cache()
        plant()
        failures = short.failures
        short.call(3)
        assert short.failures > failures
    return short


def test_a_capture_with_the_cache_full_is_tried_again(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool
) -> None:
    short = _with_the_cache_full(hardware, device, compiled)
    assert short.f.program.counters.to_dict() == {
        "replays": 2, "recordings": {"first": 1}, "eager": {"warm-up": 1}, "events": {}
    }  # fmt: skip
    short.demand_that_it_replays()


def test_the_second_try_finds_nothing_of_the_first(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No value of an operator that had run when another failed."""
    make_pool, left = RecordingBuilder._pool, list[int]()

    def begin(self: RecordingBuilder) -> Any:
        left.append(sum(not storage.expired() for storage in of_notes))
        return make_pool(self)

    def noted(x: torch.Tensor) -> torch.Tensor:
        y = notes(x.sin())
        return by_the_host(short_once(y)) + y

    monkeypatch.setattr(RecordingBuilder, "_pool", begin)
    f, x = compiled(noted, options={"eager_ops": "fxwrap_test::by_the_host"}), torch.randn(64, 64, device=device)
    f(x)
    of_notes.clear()
    planted_shortages.append(torch.OutOfMemoryError("planted"))
    result = f(x).cpu()
    assert left[:2] == [0, 0] and not planted_shortages
    assert f.program.counters.recordings == {"first": 1} and len(of_notes) == 2
    torch.testing.assert_close(result, noted(x.cpu()), rtol=1e-4, atol=1e-4)


def test_random_numbers_are_those_of_a_capture_that_is_not_tried_again(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool
) -> None:
    def draws(x: torch.Tensor) -> torch.Tensor:
        return takes_more_and_more(x.sin()) + torch.rand_like(x)

    def drawn(limit: int) -> list[torch.Tensor]:
        torch._dynamo.reset()
        f, x = compiled(draws), torch.ones(64, 64, device=device)
        f(x)
        torch.manual_seed(3)
        with limited(hardware, device, limit * x.untyped_storage().nbytes()):
            draws(x)
            torch.manual_seed(3)
            results = [f(x).cpu() for _ in range(4)]
        assert f.program.counters.replays == 3
        fxwrap.release()  # and with it the pool
        return results

    failures = hardware.memory_stats(device)["num_ooms"]
    expected = drawn(1000)
    assert hardware.memory_stats(device)["num_ooms"] == failures
    for mine, theirs in zip(drawn(60), expected, strict=True):
        assert torch.equal(mine, theirs)
    assert hardware.memory_stats(device)["num_ooms"] > failures


def test_a_cache_that_is_not_emptied_is_in_the_way(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: nobody empties it."""

    def plant() -> None:
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)

    short = _with_the_cache_full(hardware, device, compiled, plant)
    assert short.f.program.counters.replays == 0 and short.f.program.counters.eager[OUT_OF_MEMORY] == 3


def test_who_fails_for_want_of_memory_would_be_blamed(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: it is a failure like any other."""
    monkeypatch.setattr(recording_builder, "take_memory", lambda device, take, let_go: take())
    short = _with_the_cache_full(hardware, device, compiled)
    assert short.f.program.recorder.capture_errors.keys() == {"fxwrap_test::takes_more_and_more"}


def _never_enough(module: Any, device: torch.device, compiled: Any, **options: Any) -> tuple[Short, Any]:
    """What eager runs take is there, but not what a capture takes; and somebody has the rest."""
    short = Short(module, device, compiled(one_graph, options=options))
    rest = torch.empty(40 * short.bytes, dtype=torch.uint8, device=device)
    return short, rest


@pytest.mark.parametrize("then", ["somebody lets go", "more is allowed"])
def test_twice_out_of_memory_is_eager_until_there_is_more(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool, then: str
) -> None:
    """
    ::

        somebody    has the rest                                      | lets go
        calls       capture: out of memory, twice;  eager  eager  ... | recorded  replay
        tried       once                                              | once
    """
    short, rest = _never_enough(hardware, device, compiled)
    innocent: Compiled = compiled(lambda x: x.cos() + 1)
    for _ in range(3):
        innocent(short.x[:8])
    with limited(hardware, device, short.eager_peak + 2 * short.bytes):
        failures, allocated = short.failures, hardware.memory_allocated(device)
        short.call()
        tried = short.failures
        assert tried > failures and hardware.memory_allocated(device) <= allocated
        short.call(5)
        assert short.failures == tried
        assert short.f.program.counters.to_dict() == {
            "replays": 0, "recordings": {}, "eager": {"warm-up": 1, OUT_OF_MEMORY: 6}, "events": {}
        }  # fmt: skip
        assert not short.f.program.recorder.capture_errors and not own_arenas.kept(device)
        assert own_arenas.largest_announced(device) < short.bytes
        for _ in range(3):
            innocent(short.x[:8])
        assert innocent.program.counters.to_dict() == {
            "replays": 3, "recordings": {"first": 1, OUT_OF_MEMORY: 1}, "eager": {"warm-up": 1}, "events": {}
        }  # fmt: skip
        if then == "somebody lets go":
            del rest
        else:
            hardware.set_per_process_memory_fraction(1.0, device)
        short.call()
        assert short.f.program.counters.recordings == {"first": 1}
        short.demand_that_it_replays()


def test_only_who_looks_at_the_device_sees_that_there_is_memory_again(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: nobody but recordings has memory."""
    pressure = ArenaPool.pressure
    monkeypatch.setattr(ArenaPool, "pressure", lambda self, _, device: pressure(self, TOO_LARGE, device))
    short, rest = _never_enough(hardware, device, compiled)
    with limited(hardware, device, short.eager_peak + 2 * short.bytes):
        short.call(2)
        del rest
        short.call(4)
    assert short.f.program.counters.eager[OUT_OF_MEMORY] == 6


def test_what_was_made_for_a_recording_is_free_when_the_call_runs_eagerly(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: arenas and their pools stay."""
    stay = list[Arena]()
    monkeypatch.setattr(Arena, "clear", lambda self, why: stay.append(self))
    short, rest = _never_enough(hardware, device, compiled)
    with (
        limited(hardware, device, short.eager_peak + 2 * short.bytes),
        pytest.raises(torch.OutOfMemoryError, match="are in use"),
    ):
        short.call()
    del rest


def test_strict(compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool) -> None:
    short, rest = _never_enough(hardware, device, compiled, strict=True)
    with limited(hardware, device, short.eager_peak + 2 * short.bytes):
        with pytest.raises(fxwrap.MemoryLimitError, match="hostsim:0 is out of memory") as raised:
            short.call()
        assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
        del raised, rest
        short.call()
        short.demand_that_it_replays()


# -- after something has run --------------------------------------------------------------------------------------


def _in_the_second_graph(module: Any, device: torch.device, compiled: Any) -> tuple[Short, Any]:
    state = torch.zeros(64, 64, device=device)
    short = Short(module, device, compiled(two_graphs, options={"eager_ops": "fxwrap_test::by_the_host"}), state)
    assert len(short.f.program.plan.partitions) == 3
    return short, torch.empty(40 * short.bytes, dtype=torch.uint8, device=device)


def test_what_has_run_is_not_run_again(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool
) -> None:
    """
    ::

        captured: state += 1 | eager | captured: out of memory, twice
                                       ... eager: the call goes on, and nothing of the recording is kept
    """
    short, rest = _in_the_second_graph(hardware, device, compiled)
    (state,) = short.others
    with limited(hardware, device, short.eager_peak + 6 * short.bytes):
        failures = short.failures
        for count in range(2, 5):
            short.call()
            assert torch.equal(state.cpu(), torch.full((64, 64), float(count)))
        assert short.failures == failures + 2
        assert short.f.program.counters.to_dict() == {
            "replays": 0, "recordings": {}, "eager": {"warm-up": 1, OUT_OF_MEMORY: 3}, "events": {}
        }  # fmt: skip
        assert not short.f.program.recorder.capture_errors and not own_arenas.kept(device)
        del rest
        short.call()
        short.demand_that_it_replays()
    assert torch.equal(state.cpu(), torch.full((64, 64), 9.0))


def test_a_call_that_begins_again_updates_twice(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: whatever has run, all of it runs eagerly."""

    def begin_again(self: RecordingBuilder, partition: Any) -> None:
        raise fxwrap.MemoryLimitError("planted") from torch.OutOfMemoryError()

    monkeypatch.setattr(RecordingBuilder, "_give_up", begin_again)
    short, rest = _in_the_second_graph(hardware, device, compiled)
    (state,) = short.others
    with limited(hardware, device, short.eager_peak + 6 * short.bytes), torch.no_grad():
        short.f(short.x, state)
    assert torch.equal(state.cpu(), torch.full((64, 64), 3.0))
    del rest


def test_the_rest_of_a_call_needs_what_graphs_and_pools_have(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: they keep it."""
    monkeypatch.setattr(RecordingBuilder, "_clear_arenas", lambda self: None)
    short, rest = _in_the_second_graph(hardware, device, compiled)
    with limited(hardware, device, short.eager_peak + 6 * short.bytes), pytest.raises(torch.OutOfMemoryError):
        short.call()
    del rest


@pytest.mark.parametrize("failures", [1, 2])
def test_memory_for_what_eager_work_allocates(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Captured work reads it at a place that stays. It is wanted after an eager operator has run."""
    if not freezes(device):
        pytest.skip("nothing stays")
    left, put = [failures], StaticBuffers.buffer_of

    def short(self: StaticBuffers, value: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("planted")
        return put(self, value)

    monkeypatch.setattr(StaticBuffers, "buffer_of", short)
    f: Compiled = compiled(two_graphs, options={"eager_ops": "fxwrap_test::by_the_host"})
    x, state = torch.randn(64, 64, device=device), torch.zeros(64, 64, device=device)
    expected = state.cpu().clone()
    for _ in range(3):
        result = f(x, state)
        torch.testing.assert_close(result.cpu(), two_graphs(x.cpu(), expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.cpu(), expected)
    eager = {"warm-up": 1} | ({OUT_OF_MEMORY: 2} if failures == 2 else {})
    assert f.program.counters.eager == eager and f.program.counters.replays == 2 - failures and not left[0]


@pytest.mark.parametrize("call", ["first", "recorded", "replayed"])
def test_an_eager_operator_that_is_out_of_memory_says_so_to_the_caller(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As in Inductor's wrapper. Nothing is learnt from it."""
    f: Compiled = compiled(lambda x: by_the_host(x.sin()) + 1, options={"eager_ops": "fxwrap_test::by_the_host"})
    x = torch.randn(8, 8, device=device)
    for _ in range(["first", "recorded", "replayed"].index(call)):
        f(x)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "own_memory_is_short", True)
        with pytest.raises(torch.OutOfMemoryError, match="the operator's own"):
            f(x)
    for _ in range(3):
        torch.testing.assert_close(f(x), f.fn(x))
    counters = f.program.counters
    assert OUT_OF_MEMORY not in counters.eager and counters.replays >= 1
    assert counters.events == {"a call raised OutOfMemoryError": 1} and not f.program.recorder.capture_errors


# -- where there is no hardware -----------------------------------------------------------------------------------


class ShortGraph(SimulatedGraph):
    """Can be captured when so many others have failed."""

    failures = 0

    def instantiate(self) -> None:
        if type(self).failures:
            type(self).failures -= 1
            raise torch.OutOfMemoryError("planted")


def _short(runtime: SimulatedRuntime) -> DeviceRuntime:
    return dataclasses.replace(runtime, new_graph=functools.partial(ShortGraph, runtime.simulator))


@torch.no_grad()
@pytest.mark.parametrize("failures", [1, 2])
def test_a_simulated_capture(
    compiled: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """A device that does not tell how much is used: what recordings have tells when to try again."""
    monkeypatch.setattr(ShortGraph, "failures", failures)
    busy, x = LockOwner(), torch.randn(16, 16)
    other = own_arenas.acquire(CPU, None, busy, [])
    other.resize(1000)
    with using_runtime(_short(simulated())):
        f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
        for _ in range(4):
            torch.testing.assert_close(f(x), f.fn(x))
        waiting = {OUT_OF_MEMORY: 3} if failures == 2 else {}
        assert f.program.counters.eager == {"warm-up": 1, **waiting} and not ShortGraph.failures
        other.lock.release(busy)
        for _ in range(3):
            torch.testing.assert_close(f(x), f.fn(x))
    assert f.program.counters.replays >= 2 and f.program.counters.recordings == {"first": 1}
    assert f.program.counters.eager == {"warm-up": 1, **waiting} and not f.program.recorder.capture_errors


@torch.no_grad()
def test_a_shortage_that_left_no_trace_is_over_after_some_calls(
    compiled: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, or a driver, was in the way: nothing tells when it is gone, so the device is asked again.

    ::

        captures    fails twice                    fails twice                    holds
        calls       eager, 32 of them, the last of which tries;  64 the next time;       replays
    """
    monkeypatch.setattr(ShortGraph, "failures", 4)
    x = torch.randn(16, 16)
    with using_runtime(_short(simulated())):
        f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
        for call in range(1 + ASKED_AGAIN + 1 + 2 * ASKED_AGAIN + 4):
            torch.testing.assert_close(f(x), f.fn(x))
            if call == ASKED_AGAIN:
                assert ShortGraph.failures == 2
        assert not ShortGraph.failures
    counters = f.program.counters
    assert counters.eager == {"warm-up": 1, OUT_OF_MEMORY: 3 * ASKED_AGAIN} and counters.recordings == {"first": 1}
    assert counters.replays == 4


@torch.no_grad()
def test_who_runs_while_capturing_is_not_tried_again(
    compiled: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work has run: it was out of memory itself."""
    monkeypatch.setattr(ShortGraph, "failures", 1)
    x = torch.randn(16, 16)
    with using_runtime(_short(simulated(Rules(captured_work_waits=False)))):
        f: Compiled = compiled(lambda x: x.add_(1).sin() @ x)
        f(x)
        with pytest.raises(torch.OutOfMemoryError, match="planted"):
            f(x)
        f(x)
    assert f.program.counters.recordings


# -- an arena -----------------------------------------------------------------------------------------------------


def _a_larger_program(module: Any, device: torch.device, compiled: Any) -> Compiled:
    """What is missing for its arena lies in the pool of a program that ends when the arena grows."""
    short = Short(module, device, compiled(one_graph))
    short.call(3)
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
    x = torch.randn(256, 256, device=device)
    f(x)
    with limited(module, device, f.program.newest_plan.size - 28 * short.bytes):
        for _ in range(3):
            torch.testing.assert_close(f(x).cpu(), f.fn(x.cpu()), rtol=1e-4, atol=1e-4)
    return f


@torch.no_grad()
def test_an_arena_that_grows_takes_the_place_of_its_pool(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool
) -> None:
    f = _a_larger_program(hardware, device, compiled)
    assert f.program.counters.eager == {"warm-up": 1} and f.program.counters.replays == 2


@torch.no_grad()
def test_a_pool_that_stays_is_in_the_way_of_its_arena(
    compiled: Any, device: torch.device, hardware: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted. As of eager runs, the caller hears of it: there is not as much memory as they take."""
    monkeypatch.setattr(Arena, "drop_pool", lambda self: None)
    with pytest.raises(torch.OutOfMemoryError):
        _a_larger_program(hardware, device, compiled)


@pytest.fixture
def no_more_than(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Blocks of arenas that are larger are not to be had."""
    real = torch.empty

    def set_limit(nbytes: int) -> None:
        def empty(*size: Any, **options: Any) -> torch.Tensor:
            if options.get("dtype") is torch.uint8 and size[0] > nbytes:
                raise torch.OutOfMemoryError(f"{size[0]} bytes")
            return real(*size, **options)

        monkeypatch.setattr(torch, "empty", empty)

    return set_limit


@dataclasses.dataclass
class User:
    """Something recorded."""

    ended: str = ""
    used: int = 1
    own_bytes: int = 0

    def end(self, why: str) -> None:
        self.ended = why


def test_an_arena_that_cannot_grow_has_nothing_and_can_be_used(no_more_than: Callable[[int], None]) -> None:
    arena, ended = Arena(CPU), User()
    arena.resize(1000)
    arena.enter(ended, WatchedOutputs(), 1000)
    no_more_than(2000)
    with pytest.raises(fxwrap.MemoryLimitError, match="cpu is out of memory"):
        arena.resize(3000)
    assert (arena.block, arena.nbytes, arena.users(), arena.watched_outputs) == (None, 0, [], []) and ended.ended
    arena.resize(1500)
    assert arena.nbytes == 1500 and arena.storage(500, 1000).nbytes() == 1000


def test_the_pool_of_graphs_that_are_gone_goes_before_an_arena_cannot_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeper:
        pass

    keeper, real, arena = Keeper(), torch.empty, Arena(CPU)
    pool = weakref.ref(keeper)
    arena._pool = GraphPool(runtime_for(CPU), 1, None, keeper)
    del keeper

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        if pool() is not None:
            raise torch.OutOfMemoryError("the pool has it")
        return real(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    arena.resize(1000)
    assert arena.nbytes == 1000 and pool() is None


def test_an_arena_is_not_as_large_as_others_will_need_if_there_is_no_memory_for_it(
    own_arenas: ArenaPool, no_more_than: Callable[[int], None]
) -> None:
    other = User()
    arena = own_arenas.acquire(CPU, None, LockOwner(), [])
    own_arenas.announce(CPU, other, 3000)
    no_more_than(2000)
    assert own_arenas.fit(arena, 1000, 0) and arena.nbytes == 1000
    with pytest.raises(fxwrap.MemoryLimitError, match="cpu is out of memory"):
        own_arenas.fit(arena, 2500, 0)
