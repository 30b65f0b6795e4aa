"""What CUDA does, and a line that lives with it: pools that die, captures that fail and leave traces.

The rules are those of the simulated device (``fxwrap.testing.simulated.Rules``) and of hostsim
(``torch.hostsim.rules()``), which say where they stand in torch. Both devices count their graph launches themselves:
counters have to agree.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compiled, freezes, launches, launches_compared, on_simulated

import fxwrap
from fxwrap.errors import CaptureError
from fxwrap.graphs.devices.cpu_graph import issue
from fxwrap.graphs.devices.runtime import DeviceRuntime, runtime_for, using_runtime
from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.graphs.memory.arenas import Arena
from fxwrap.graphs.memory.locks import LockOwner
from fxwrap.graphs.program import Program
from fxwrap.graphs.record.placed_results import ResultCopy
from fxwrap.host_graph.tensors import tensor_over
from fxwrap.testing.simulated import SIMULATED, Rules, SimulatedGraph, SimulatedRuntime, simulated
from fxwrap.torch_private import functions as torch_runtime

pytestmark = pytest.mark.hardware


@torch.library.custom_op("fxwrap_test::waits_for_the_device", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    return x + (1 if x.sum().item() < 1e9 else 2)


@waits.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxwrap_test::allocates", mutates_args=())
def allocates(x: torch.Tensor) -> torch.Tensor:
    return (x.repeat(9, 1) + 1)[: len(x)] * 2


@allocates.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@dataclass
class Hardware:
    """A device with rules, and a count of its own."""

    device: torch.device

    @property
    def _module(self) -> Any:
        return SIMULATED.simulator if self.device.type == "cpu" else torch.get_device_module(self.device)

    def launches(self) -> int:
        return launches(self.device.type)

    def empty_cache(self) -> None:
        self._module.empty_cache()

    def draw(self) -> None:
        """A random number, outside of captures."""
        if self.device.type == "cpu":
            SIMULATED.simulator.draw()
        else:
            torch.rand(4, device=self.device)

    def recover(self, pool: Any) -> None:
        self._module.recover(self.device, pool)


@pytest.fixture
def hardware(device: torch.device) -> Iterator[Hardware]:
    """Rules are a matter of devices with pools and a count of their own."""
    if not freezes(device) or (device.type != "cpu" and not hasattr(torch.get_device_module(device), "rules")):
        pytest.skip("no rules to live with")
    gc.collect()
    yield Hardware(device)


class Programs:
    """Programs in one arena, and what happens to it."""

    def __init__(self, compiled: Any, hardware: Hardware) -> None:
        self.hardware = hardware
        how: Any = {"dynamic": True, "options": {"max_memory": 200 << 10}}
        self.small: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x, **how)
        self.large: Compiled = compiled(lambda x: (x.cos() @ x).sin() @ x, **how)
        self.huge: Compiled = compiled(lambda x: (x.exp() @ x).sin() @ x, **how)
        self.refused: Compiled = compiled(lambda x: waits(x.sin()).cos() * 2, **how)
        self.used = [self.small]

    def begin_again(self) -> None:
        """As after compiling: nothing is recorded, and nothing known of what cannot be captured."""
        fxwrap.release()
        for f in (self.small, self.large, self.huge, self.refused):
            for program in f.programs:
                plan = program.planner.partition(program.plan.inputs, {})
                program.__init__(plan, program.planner, program.options)
        self.used = [self.small]

    def run(self, f: Compiled, n: int, calls: int = 4) -> None:
        if f not in self.used:
            self.used.append(f)
        for _ in range(calls):
            x = torch.randn(n, n) / n
            with torch.no_grad():
                got = f(x.to(self.hardware.device)).cpu()
                torch.testing.assert_close(got, f.fn(x), rtol=1e-4, atol=1e-4)

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
        self.hardware.empty_cache()


EVENTS = ["a_larger_second_program", "release", "eviction", "shrinking", "a_refused_operator", "empty_cache"]


@pytest.mark.parametrize("first", EVENTS)
def test_in_every_order_of_two_all_programs_replay_in_the_end(
    compiled: Any, hardware: Hardware, own_arenas: ArenaPool, first: str
) -> None:
    programs = Programs(compiled, hardware)
    for second in EVENTS:
        programs.begin_again()
        programs.run(programs.small, 16)
        getattr(programs, first)()
        getattr(programs, second)()
        for f in programs.used:
            programs.run(f, 16, 6)
        for f in programs.used:
            before, launched = f.program.counters.to_dict(), hardware.launches()
            programs.run(f, 16, 3)
            now = f.program.counters
            assert now.replays == before["replays"] + 3, (second, before, now.to_dict())
            graphs = {len(r.graphs) for r in f.program.specializations.recordings() if not r.ended}
            assert 0 not in graphs and hardware.launches() - launched in {3 * n for n in graphs}, second
            assert not any("capture failed" in reason for reason in now.eager), second
        hardware.draw()
        hardware.empty_cache()


def test_a_program_without_a_single_graph_is_not_counted_as_replayed(
    compiled: Any, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    f: Compiled = compiled(lambda x: x.sin() @ x)
    x, before = torch.randn(8, 8, device=hardware.device), hardware.launches()

    def refuse(*args: Any) -> None:
        raise RuntimeError("no graphs today")

    graph = SimulatedGraph if hardware.device.type == "cpu" else torch.accelerator.Graph
    monkeypatch.setattr(graph, "instantiate", refuse)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(f(x).cpu(), x.cpu().sin() @ x.cpu(), rtol=1e-4, atol=1e-4)
    assert f.program.counters.replays == 0 and hardware.launches() == before
    assert sum(n for reason, n in f.program.counters.eager.items() if "no graphs today" in reason) == 2


def test_strict_raises_where_what_is_to_be_captured_cannot_be(compiled: Any, hardware: Hardware) -> None:
    """... and what the failed capture has left is put right all the same."""
    f: Compiled = compiled(lambda x: waits(x.sin()).cos() * 2, options={"strict": True})
    x = torch.randn(8, 8, device=hardware.device)
    with torch.no_grad():
        f(x)
        with pytest.raises(CaptureError, match="could not be captured") as raised:
            f(x)
        assert "eager_ops" in str(raised.value)
        hardware.draw()
        hardware.empty_cache()
        g: Compiled = compiled(f.fn, options={"strict": True, "eager_ops": ["fxwrap_test::waits_for_the_device"]})
        for _ in range(3):
            g(x)
    assert g.program.counters.replays == 1


def test_a_pool_that_is_not_held_takes_no_other_graph(
    compiled: Any, hardware: Hardware, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: no graph of its own holds it, and the arena keeps the id."""
    monkeypatch.setattr(DeviceRuntime, "_capture_little", lambda self, pool: None)
    monkeypatch.setattr(Arena, "drop_pool", lambda self: None)
    f: Compiled = compiled(lambda x: allocates(x.sin()) @ x)
    x = torch.randn(16, 16, device=hardware.device)
    with torch.no_grad():
        for _ in range(3):
            f(x)
        arenas = own_arenas.alive(hardware.device)
        for _ in range(2):
            fxwrap.release()
            f(x)
    assert len(arenas) == 1
    assert any("the last graph of this memory pool is gone" in event for event in f.program.counters.events)


def _refused_beside_innocent(compiled: Any, hardware: Hardware) -> Compiled:
    """Run a program, one with an operator that cannot be captured, and one without any fault; returns this one."""
    first, refused, innocent = (
        compiled(fn) for fn in (lambda x: x.sin() @ x, lambda x: waits(x.sin()) * 2, lambda x: x.cos() @ x)
    )
    x = torch.randn(16, 16, device=hardware.device)
    with torch.no_grad():
        for f in (first, refused, innocent):
            for _ in range(3):
                f(x)
    assert isinstance(innocent, Compiled)
    return innocent


def test_a_failed_capture_that_is_left_as_it_is_spoils_the_next(
    compiled: Any, hardware: Hardware, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: nobody puts right what it leaves. An innocent program in the arena pays, and so do random numbers."""
    monkeypatch.setattr(DeviceRuntime, "_recover", lambda self, pool: None)
    try:
        innocent = _refused_beside_innocent(compiled, hardware)
        assert any("another capture records to this" in event for event in innocent.program.counters.events)
        with pytest.raises((RuntimeError, CaptureError), match="a random number outside of captures"):
            hardware.draw()
        with pytest.raises((RuntimeError, CaptureError), match="emptying the cache"):
            hardware.empty_cache()
    finally:
        for pool in own_arenas.pools():
            hardware.recover(pool)
        runtime_for(hardware.device).make_pool()


def test_an_arena_that_keeps_a_pool_in_which_a_capture_has_failed_captures_nothing_more(
    compiled: Any, hardware: Hardware, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the pool is put right and used again. Without that, the innocent program replays."""
    assert _refused_beside_innocent(compiled, hardware).program.counters.replays == 1
    take = Arena.pool

    def keep(self: Arena, *how: Any) -> Any:
        if self._pool is not None:
            self._pool.spoiled = False
        return take(self, *how)

    monkeypatch.setattr(Arena, "pool", keep)
    fxwrap.release()
    innocent = _refused_beside_innocent(compiled, hardware)
    assert any("a capture has failed in this memory pool" in event for event in innocent.program.counters.events)
    assert not innocent.program.counters.replays


def test_a_pool_is_let_go_of_once_where_torch_ends_failed_captures_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from 2.15 on: nothing records to the pool any more, and the graph will let go of it."""

    def end(*args: Any) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    released = list[Any]()
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: released.append(args), raising=False)
    with pytest.raises(RuntimeError, match="not currently recording"):
        torch_runtime.after_failed_capture(torch.device("cuda", 0), (0, 1))
    assert not released


# -- counters that cannot lie ---------------------------------------------------------------------------------


@pytest.mark.launches_graphs
def test_a_replay_that_launches_nothing_is_found_out(
    compiled: Any, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a recording that runs its first graph only, and a program that counts replays of nothing."""
    waiting = {"eager_ops": ["fxwrap_test::waits_for_the_device"]}
    f: Compiled = compiled(lambda x: waits(x.sin()).cos() * 2, options=waiting)
    x = torch.randn(8, 8, device=hardware.device)
    with torch.no_grad():
        for _ in range(2):
            f(x)
        (recording,) = f.program.specializations.recordings()
        assert len(recording.graphs) == 2
        f.program.specializations.units = ()  # in Python, whose steps can be taken out
        with launches_compared():
            f(x)
        without = [part for part in recording._replay.parts if not part.name.endswith("partition 2")]
        recording._replay = dataclasses.replace(recording._replay, parts=without)
        lie = "has launched 1 graphs, and recordings say that it was 2"
        with pytest.raises(AssertionError, match=lie), launches_compared():
            f(x)
        monkeypatch.setattr(Program, "_run_eagerly", lambda self, cut, inputs, *_: _counted(self, cut, inputs))
        fxwrap.release()
        f.program.recorder.never_recorded = "planted"
        with pytest.raises(AssertionError, match="1 replays were counted, and there were 0"), launches_compared():
            f(x)


def _counted(program: Program, cut: Any, inputs: list[Any]) -> Any:
    program.counters.count("replays")
    return cut.eager(inputs)


# -- the simulated device -------------------------------------------------------------------------------------


def _capture(runtime: SimulatedRuntime, call: Callable[[], Any], pool: Any = None) -> Any:
    graph = runtime.new_graph(pool)
    graph.capture_begin()
    try:
        issue(call)
    finally:
        graph.capture_end()
    return graph


@pytest.fixture
def here() -> SimulatedRuntime:
    """A simulated device of this test's own."""
    return simulated()


def test_captured_work_waits_for_a_replay(here: SimulatedRuntime) -> None:
    x, out = torch.ones(3), torch.zeros(3)
    graph = _capture(here, lambda: out.add_(x))
    assert not out.any()
    graph.replay()
    graph.replay()
    assert out.eq(2).all() and here.simulator.replays == 2
    kinder = simulated(Rules(captured_work_waits=False))
    _capture(kinder, lambda: out.add_(x))
    assert out.eq(3).all() and kinder.runs_while_capturing and not here.runs_while_capturing


#   arena   | a collective fills it meanwhile | a place of the work's result | other values, 7 |
#           0                                64                            128
def test_captured_work_leaves_an_arena_as_others_have_it(here: SimulatedRuntime, own_arenas: ArenaPool) -> None:
    """The place of a result has other values until the first replay. What another thread writes meanwhile stays."""
    call = LockOwner()
    arena = own_arenas.acquire(torch.device("cpu"), None, call, [])
    arena.resize(256)
    assert arena.block is not None
    arena.block.copy_(torch.full((256,), 7, dtype=torch.uint8).untyped_storage())
    of_others = tensor_over(arena.storage(0, 64), (64,), (1,), torch.uint8)
    place = arena.storage(64, 64)
    to_place = ResultCopy({None: place}, {place.data_ptr()}, set())
    arrives = [functools.partial(of_others.fill_, 3)]  # during the capture alone

    def work() -> None:
        to_place([torch.ones(16)])
        while arrives:
            arrives.pop()()

    graph = _capture(here, work)
    assert arena.block.tolist() == [3] * 64 + [7] * 192
    graph.replay()
    assert tensor_over(place, (16,), (1,), torch.float32).eq(1).all()
    assert arena.block.tolist()[:64] + arena.block.tolist()[128:] == [3] * 64 + [7] * 128


def test_what_is_drawn_in_a_capture_is_drawn_at_replays(here: SimulatedRuntime) -> None:
    out = torch.zeros(3)
    graph = _capture(here, lambda: out.uniform_())
    torch.manual_seed(5)
    graph.replay()
    first = out.clone()
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3))


@pytest.mark.parametrize("read", [lambda x: x.item(), lambda x: x.tolist(), bool, float, lambda x: x.nonzero()])
def test_a_capture_that_reads_on_the_host_is_lost(here: SimulatedRuntime, read: Callable[..., Any]) -> None:
    """Also where whoever reads does not mind the error; and what ran before is undone."""
    x, out = torch.ones(()), torch.zeros(3)

    def reads() -> None:
        out.add_(1)
        with pytest.raises(CaptureError, match="not possible while a graph is captured"):
            read(x)

    with pytest.raises(CaptureError, match="has failed and the graph is empty"):
        _capture(here, reads)
    assert not out.any() and not here.simulator.is_clean()
    read(x)  # outside of captures, and ...
    kinder = simulated(Rules(capture_refuses_waits=False))
    _capture(kinder, lambda: read(x)).replay()


def test_a_device_captures_one_graph_at_a_time(here: SimulatedRuntime) -> None:
    for runtime, refused in ((here, True), (simulated(Rules(one_capture_at_a_time=False)), False)):
        graph, errors = runtime.new_graph(None), list[str]()

        def capture(runtime: SimulatedRuntime = runtime, errors: list[str] = errors) -> None:
            try:
                _capture(runtime, lambda: None)
            except CaptureError as error:
                errors.append(str(error))

        graph.capture_begin()
        thread = threading.Thread(target=capture)
        thread.start()
        thread.join()
        graph.capture_end()
        assert errors == (["simulated graph: another capture is under way on this device"] if refused else [])


def test_no_graph_is_replayed_in_a_capture(here: SimulatedRuntime) -> None:
    graph = _capture(here, lambda: None)

    def replays() -> None:
        with pytest.raises(CaptureError, match="cannot be part of another one"):
            graph.replay()

    with pytest.raises(CaptureError, match="the capture has failed"):
        _capture(here, replays)
    assert not here.simulator.replays
    kinder = simulated(Rules(no_replay_in_a_capture=False))
    _capture(kinder, _capture(kinder, lambda: None).replay)


def test_a_graph_that_was_reset_is_empty(here: SimulatedRuntime) -> None:
    graph = _capture(here, lambda: None)
    graph.reset()
    with pytest.raises(CaptureError, match="nothing was captured"):
        graph.replay()
    assert not here.simulator.replays


def test_a_simulated_pool_dies_with_its_last_graph(here: SimulatedRuntime) -> None:
    pool = here.new_pool()
    first = _capture(here, lambda: None, pool)
    second = _capture(here, lambda: None, pool)
    del first
    third = _capture(here, lambda: None, pool)
    del second, third
    with pytest.raises(CaptureError, match="the last graph of this memory pool is gone"):
        _capture(here, lambda: None, pool)
    here.simulator.empty_cache()
    graph = _capture(here, lambda: None, pool)
    assert graph.pool() == pool


def test_a_pool_is_recorded_to_until_the_capture_ends(here: SimulatedRuntime) -> None:
    """Whatever becomes of other graphs in it meanwhile."""
    pool = here.new_pool()
    other, graph = _capture(here, lambda: None, pool), here.new_graph(pool)
    graph.capture_begin()
    del other
    with pytest.raises(CaptureError, match="emptying the cache"):
        here.simulator.empty_cache()
    graph.capture_end()
    here.simulator.empty_cache()


def test_a_capture_that_is_cut_short_ends_with_its_graph(here: SimulatedRuntime) -> None:
    graph = here.new_graph(None)
    graph.capture_begin()
    del graph
    _capture(here, lambda: None)
    assert here.simulator.is_clean()


TRACES = [field.name for field in dataclasses.fields(Rules) if field.name.startswith("failed_capture")]


@pytest.mark.parametrize("rule", [None, *TRACES])
def test_a_failed_capture_leaves_traces(rule: str | None) -> None:
    """Each of its rules can be lifted; older and newer versions of torch differ in them."""
    runtime = simulated(Rules(**({rule: False} if rule else {})))
    simulator, pool = runtime.simulator, runtime.new_pool()
    keeper = _capture(runtime, lambda: None, pool)
    with pytest.raises(CaptureError):
        _capture(runtime, lambda: torch.ones(()).item(), pool)

    if rule != "failed_capture_holds_its_pool":
        with pytest.raises(CaptureError, match="emptying the cache"):
            simulator.empty_cache()
        with pytest.raises(CaptureError, match="another capture records to this memory pool"):
            _capture(runtime, lambda: None, pool)
        simulator.recover(runtime.device, pool)
    simulator.empty_cache()

    if rule != "failed_capture_spoils_its_pool":
        with pytest.raises(CaptureError, match="a capture has failed in this memory pool"):
            _capture(runtime, lambda: None, pool)
    else:
        _capture(runtime, lambda: None, pool)

    if rule != "failed_capture_holds_generators":
        if rule != "failed_capture_spoils_its_pool":
            with pytest.raises(CaptureError, match="a random number outside of captures"):
                simulator.draw()
        _capture(runtime, lambda: None)
    simulator.draw()
    assert simulator.is_clean()
    del keeper


def test_a_simulated_device_in_use(compiled: Any) -> None:
    """A program on a device of its own: what is lifted there is lifted there only."""
    runtime = simulated(Rules(capture_refuses_waits=False))
    with using_runtime(runtime), torch.no_grad():
        f: Compiled = compiled(lambda x: waits(x.sin()) * 2)
        for _ in range(4):
            x = torch.randn(4, 4)
            torch.testing.assert_close(f(x), f.fn(x))
    assert f.program.counters.replays == 2 and runtime.simulator.replays == 3
    with on_simulated(), torch.no_grad():
        g: Compiled = compiled(lambda x: x.sin() @ x)  # in an arena of its own, though it would fit into that one
        for _ in range(3):
            g(torch.randn(4, 4))
    assert g.program.counters.replays == 1 and runtime.simulator.replays == 3


def test_rules_are_documented() -> None:
    """docs/devices.md says of every rule whether a device has to have it."""
    text = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    names = [field.name for field in dataclasses.fields(Rules)]
    module = getattr(torch, "hostsim", None)
    names += module.rules() if module is not None else []
    assert [name for name in names if f"`{name}`" not in text] == []
    assert [name for name in names if f"{name}: " not in str(Rules.__doc__) and name in Rules.__annotations__] == []
