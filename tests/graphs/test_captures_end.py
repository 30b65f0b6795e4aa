"""A capture ends, whatever is raised in it: while one is open, nothing on its thread can wait for the device."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_nothing_captures

from fxwrap.errors import CaptureError
from fxwrap.graphs.devices.cpu_graph import issue
from fxwrap.graphs.devices.runtime import DeviceRuntime, runtime_for, using_runtime
from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.testing.simulated import SimulatedRuntime, simulated

STEPS = ("before it begins", "when it has begun", "before it ends", "when it has ended")


class Interrupted:
    """A device graph; an error comes at a step of its first capture, as a signal does while a step runs."""

    step = ""
    error: type[BaseException] = KeyboardInterrupt

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)

    def _at(self, step: str) -> None:
        if Interrupted.step == step:
            Interrupted.step = ""
            raise Interrupted.error("planted")

    def capture_begin(self) -> None:
        self._at("before it begins")
        self._graph.capture_begin()
        self._at("when it has begun")

    def capture_end(self) -> None:
        self._at("before it ends")
        self._graph.capture_end()
        self._at("when it has ended")


@pytest.fixture
def runtime(device: torch.device) -> Iterator[DeviceRuntime]:
    """That of the device; its graphs are interrupted."""
    real = runtime_for(device)
    if isinstance(real, SimulatedRuntime):
        real = simulated()
    with using_runtime(dataclasses.replace(real, new_graph=lambda pool: Interrupted(real.new_graph(pool)))):
        yield runtime_for(device)
    Interrupted.step, Interrupted.error = "", KeyboardInterrupt


def _assert_clean(runtime: DeviceRuntime) -> None:
    assert_nothing_captures(runtime.device)
    if isinstance(runtime, SimulatedRuntime):
        assert runtime.simulator.is_clean()


@pytest.mark.launches_graphs
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("step", STEPS)
def test_a_capture_ends_whatever_is_raised(runtime: DeviceRuntime, step: str, error: type[BaseException]) -> None:
    """``raised`` holds the graph, which would end its capture when it goes."""
    pool, out = runtime.make_pool(), torch.zeros(3, device=runtime.device)
    Interrupted.step, Interrupted.error = step, error
    with pytest.raises(error, match="planted") as raised:
        runtime.capture(runtime.new_graph(pool.id), lambda: issue(lambda: out.add_(1)), pool)
    _assert_clean(runtime)
    assert pool.spoiled == (step in ("before it begins", "when it has ended"))  # nobody knows where it stood
    pool = runtime.make_pool()
    graph, out = runtime.new_graph(pool.id), torch.zeros(3, device=runtime.device)
    runtime.capture(graph, lambda: issue(lambda: out.add_(1)), pool)
    graph.replay()
    assert out.cpu().any()
    del raised


@pytest.mark.parametrize("step", STEPS)
def test_a_pool_that_cannot_be_made_leaves_no_capture(runtime: DeviceRuntime, step: str) -> None:
    """Its first graph is captured at once."""
    if runtime.new_pool() is None:
        pytest.skip("no pools")
    Interrupted.step = step
    with pytest.raises(KeyboardInterrupt) as raised:
        runtime.make_pool()
    _assert_clean(runtime)
    assert not runtime.make_pool().spoiled
    del raised


@pytest.mark.parametrize("step", STEPS)
def test_a_program_records_at_the_call_after_an_interrupt(
    compiled: Any, runtime: DeviceRuntime, own_arenas: ArenaPool, step: str
) -> None:
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
    x = torch.randn(8, 8, device=runtime.device)
    with torch.no_grad():
        f(x)
        Interrupted.step = step
        with pytest.raises(KeyboardInterrupt) as raised:
            f(x)
        _assert_clean(runtime)
        for _ in range(3):
            torch.testing.assert_close(f(x).cpu(), f.fn(x.cpu()), rtol=1e-4, atol=1e-4)
    assert f.program.counters.replays == 2
    del raised


def test_the_error_of_the_end_is_not_hidden() -> None:
    """... by that of the work, which comes first."""
    here = simulated()
    pool = here.make_pool()
    with pytest.raises(CaptureError, match=r"Tensor\.item reads a value") as raised:
        here.capture(here.new_graph(pool.id), lambda: issue(lambda: torch.ones(()).item()), pool)
    assert pool.spoiled and here.simulator.is_clean()
    if hasattr(raised.value, "add_note"):
        (note,) = raised.value.__notes__
        assert note.startswith("fxwrap: ending the capture has failed, too: ") and "the graph is empty" in note


@torch.library.custom_op("fxwrap_test::another_thread_waits", mutates_args=())
def another_thread_waits(x: torch.Tensor) -> torch.Tensor:
    """In a capture only: where CUDA refuses it, the capture is lost."""
    if torch.get_device_module(x.device).is_current_stream_capturing():
        _wait_elsewhere()
    return x * 2


@another_thread_waits.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _wait_elsewhere() -> None:
    def wait() -> None:
        try:
            torch.accelerator.synchronize()
        except RuntimeError:
            refused.append(True)

    refused = list[bool]()
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()


@pytest.mark.accelerator
def test_another_thread_waits_while_one_captures(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and once more while the device is put right, whose little graph is lost, too.

    Torch 2.11's generators stay in a capture that fails until another one succeeds.
    """
    if device.type not in ("cuda", "xpu"):
        pytest.skip("whether that is refused is the driver's own matter")
    zero, putting_right = torch.Tensor.zero_, list[bool]()

    def zero_late(x: torch.Tensor) -> torch.Tensor:
        if putting_right and torch.get_device_module(device).is_current_stream_capturing():
            putting_right.pop()
            _wait_elsewhere()
        return zero(x)

    monkeypatch.setattr(torch.Tensor, "zero_", zero_late)
    f: Compiled = compiled(lambda x: another_thread_waits(x.relu()) + 1)
    x = torch.randn(4, 4, device=device)
    with torch.no_grad():
        f(x)
        putting_right.append(True)
        for _ in range(3):
            torch.testing.assert_close(f(x), f.fn(x))
            assert_nothing_captures(device)
    assert not putting_right and torch.randn(3, device=device).isfinite().all()
