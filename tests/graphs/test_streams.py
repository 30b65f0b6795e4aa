"""Streams and threads of a device: who may work in one memory, and who has his own (``--device hostsim``)."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Compiled
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager

from fxwrap.graphs.devices import runtime as device_graph
from fxwrap.graphs.memory.arena_pool import AT_ONE_TIME, ArenaPool
from fxwrap.graphs.memory.locks import LockOwner

STREAMS = 12


@pytest.fixture(autouse=True)
def asynchronous(device: torch.device) -> Iterator[Any]:
    module = torch.get_device_module(device)
    if not hasattr(module, "set_asynchronous"):
        pytest.skip("no streams to work on: python -m pytest --device hostsim")
    module.set_asynchronous(True)
    yield module
    module.synchronize()
    module.set_asynchronous(False)


@pytest.fixture
def product(compiled: Any, device: torch.device) -> Callable[[], Compiled]:
    def make() -> Compiled:
        weight = torch.randn(32, 32) / 6
        on_device = weight.to(device)
        f: Compiled = compiled(lambda x: ((x.sin() @ on_device).cos() @ on_device) * 2)
        f.expected = lambda x: ((x.sin() @ weight).cos() @ weight) * 2  # type: ignore[attr-defined]
        return f

    return make


def _check(f: Any, results: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for x, got in results:
        torch.testing.assert_close(got.cpu(), f.expected(x), rtol=1e-4, atol=1e-4)


def test_a_stream_for_each_request_needs_one_recording(
    product: Any, device: torch.device, asynchronous: Any, own_arenas: ArenaPool
) -> None:
    """Whoever waits for an answer before the next request leaves nothing for a stream to wait for."""
    f = product()
    with torch.no_grad():
        for _ in range(3 * STREAMS):
            with asynchronous.stream(asynchronous.Stream(device)):
                x = torch.randn(16, 32)
                _check(f, [(x, f(x.to(device)))])
    counters = f.program.counters
    assert sum(counters.recordings.values()) == 1 and counters.replays >= 3 * STREAMS - 2, counters.to_dict()
    assert len(own_arenas.alive()) == 1


def test_streams_that_work_at_one_time_have_a_recording_each_up_to_a_few(
    product: Any, device: torch.device, asynchronous: Any, own_arenas: ArenaPool
) -> None:
    """
    ::

        stream 1   |--a--|        |--e--|       (waits for d: no more than ``AT_ONE_TIME`` have memory of their own)
        stream 2     |--b--|
        ...            |--c--|
        stream 5         |--d--|
    """
    f = product()
    inputs = [torch.randn(16, 32) for _ in range(STREAMS)]
    placed, streams = [x.to(device) for x in inputs], [asynchronous.Stream(device) for _ in inputs]
    asynchronous.synchronize()
    with torch.no_grad():
        for x in placed[:2]:
            f(x)
        asynchronous.synchronize()
        for _ in range(4):
            results = []
            for stream, x, on_device in zip(streams, inputs, placed, strict=True):
                with asynchronous.stream(stream):
                    asynchronous.delay(stream, 0.01)
                    results.append((x, f(on_device).clone()))
            asynchronous.synchronize()
            _check(f, results)
    counters = f.program.counters
    assert 1 < sum(counters.recordings.values()) <= AT_ONE_TIME, counters.to_dict()
    assert sum(counters.eager.values()) == 1, counters.to_dict()  # the warm-up
    assert len(own_arenas.alive()) <= AT_ONE_TIME


def test_another_stream_gets_the_arena_while_python_is_asked_who_captures(
    product: Any, device: torch.device, asynchronous: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    ::

        first thread    f(a) on stream 1: does the caller capture?                        no: is the arena still free?
        second thread                         f(b) on stream 2: works in the arena for long
    """
    between, asks = list[Callable[[], None]](), asynchronous.is_current_stream_capturing

    def asked() -> bool:
        answer = bool(asks())
        if between and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=between.pop())
            thread.start()
            thread.join()
        return answer

    monkeypatch.setattr(asynchronous, "is_current_stream_capturing", asked)
    f, (one, two) = product(), [asynchronous.Stream(device) for _ in range(2)]
    inputs, results = [torch.randn(16, 32) for _ in range(2)], list[tuple[torch.Tensor, torch.Tensor]]()
    placed = [x.to(device) for x in inputs]
    asynchronous.synchronize()

    def on_the_other_stream() -> None:
        with torch.no_grad(), asynchronous.stream(two):
            asynchronous.delay(two, 0.2)
            results.append((inputs[1], f(placed[1]).clone()))

    with torch.no_grad(), asynchronous.stream(one):
        for x in placed * 2:
            f(x)
            one.synchronize()
        between.append(on_the_other_stream)
        results.append((inputs[0], f(placed[0])))
        assert not between
    asynchronous.synchronize()
    _check(f, results)


def _overlapping(f: Any, g: Any, device: torch.device, asynchronous: Any) -> None:
    """Two programs on a stream each, again and again: they share no memory, but perhaps a library's workspace."""
    streams, inputs = [asynchronous.Stream(device) for _ in range(2)], [torch.randn(512, 32) for _ in range(2)]
    placed = [x.to(device) for x in inputs]
    asynchronous.synchronize()
    with torch.no_grad():
        for _ in range(4):
            results: list[list[Any]] = [[], []]
            for which, function in enumerate((f, g)):
                with asynchronous.stream(streams[which]):
                    asynchronous.delay(streams[which], 0.01)
                    for _ in range(4):
                        results[which].append((inputs[which], function(placed[which]).clone()))
            asynchronous.synchronize()
            _check(f, results[0])
            _check(g, results[1])


def test_streams_do_not_share_a_workspace(
    product: Any, device: torch.device, asynchronous: Any, own_arenas: ArenaPool
) -> None:
    _overlapping(product(), product(), device, asynchronous)
    assert len(own_arenas.alive()) == 2


def test_captured_on_one_side_stream_they_would(
    product: Any, device: torch.device, asynchronous: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: all graphs are captured on the same stream, as long as the device keeps the rule."""
    side = asynchronous.Stream(device)
    monkeypatch.setattr(device_graph, "_side_stream", lambda device: side)
    with pytest.raises(AssertionError, match="not close"):
        _overlapping(product(), product(), device, asynchronous)


@pytest.mark.parametrize("told", [True, False], ids=["told", "planted"])
def test_memory_is_kept_until_the_last_stream_is_done(
    device: torch.device, asynchronous: Any, own_arenas: ArenaPool, told: bool
) -> None:
    """An arena was allocated on one stream, and is freed while another works in it. Planted: nobody says so.

    ::

        first stream    |-allocated-|         (freed)  |-somebody else's, if it is used again-|
        second stream                 |-works in it-------|
    """
    first, second = asynchronous.current_stream(device), asynchronous.Stream(device)
    arena = own_arenas.acquire(device, first, LockOwner(), [])
    asynchronous.empty_cache()
    arena.resize(3 << 20)
    assert arena.block is not None
    address = arena.block.data_ptr()
    asynchronous.delay(second, 0.2)
    arena.move_to(second)
    if told:
        arena.keep_until_done([])  # as whoever ends in it does
    arena.clear("")
    other = torch.empty(3 << 20, dtype=torch.uint8, device=device)
    assert (other.data_ptr() != address) is told


def test_memory_of_a_conjugated_tensor_is_kept_until_then(
    device: torch.device, asynchronous: Any, own_arenas: ArenaPool
) -> None:
    """The same for what a recording keeps outside of its arena. Torch is told of the memory, not of the tensor."""
    first, second = asynchronous.current_stream(device), asynchronous.Stream(device)
    arena = own_arenas.acquire(device, first, LockOwner(), [])
    arena.resize(512)
    asynchronous.empty_cache()
    kept = [torch.empty(3 << 17, dtype=torch.complex64, device=device).conj()]
    address = kept[0].data_ptr()
    asynchronous.delay(second, 0.2)
    arena.move_to(second)
    arena.keep_until_done(kept)
    kept.clear()
    other = torch.empty(3 << 20, dtype=torch.uint8, device=device)
    assert other.data_ptr() != address


def _in_another_thread(run: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


def _warm_in_one_thread(f: Any, device: torch.device) -> dict[str, Any]:
    """The first call is this thread's, all others are another's."""

    def call() -> None:
        x = torch.randn(16, 32)
        with torch.no_grad():
            _check(f, [(x, f(x.to(device)))])

    call()
    _in_another_thread(lambda: [call() for _ in range(4)])  # type: ignore[func-returns-value]
    counters: dict[str, Any] = f.program.counters.to_dict()
    return counters


def test_a_thread_warms_up_before_it_captures(
    product: Any, device: torch.device, asynchronous: Any, own_arenas: ArenaPool
) -> None:
    """Libraries have a handle for each thread, and cannot make it while a graph is captured."""
    counters = _warm_in_one_thread(product(), device)
    assert counters["eager"] == {"warm-up": 2} and counters["replays"] == 2, counters


def test_if_one_thread_had_warmed_up_for_all_a_capture_would_fail(
    product: Any, device: torch.device, asynchronous: Any, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "local", SimpleNamespace)  # what one knows all know
    counters = _warm_in_one_thread(product(), device)
    assert any("making a library's handle" in event for event in counters["events"]), counters


@contextlib.contextmanager
def _in_a_kernel_of_the_meta_device() -> Iterator[None]:
    with FakeTensorMode() as mode, in_kernel_invocation_manager(mode):
        yield


@contextlib.contextmanager
def _functionalizing() -> Iterator[None]:
    torch._enable_functionalization(reapply_views=False)
    try:
        yield
    finally:
        torch._disable_functionalization()


@pytest.mark.parametrize("tracing", [FakeTensorMode, _in_a_kernel_of_the_meta_device, _functionalizing])
def test_a_recording_that_is_collected_while_another_program_is_traced(
    compiled: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, tracing: Any
) -> None:
    """Its memory is kept until the device is done with it; tracing is none of its business."""
    f: Compiled = compiled(lambda x: x.sin() + 1)
    x = torch.randn(8, device=device)
    for _ in range(3):
        f(x)
    (recording,) = f.program.specializations.recordings()
    gone, raised = weakref.ref(recording), list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    monkeypatch.setattr(sys, "excepthook", lambda *error: raised.append(error))
    del recording
    with tracing():
        f.program.specializations.clear()
        gc.collect()
    assert gone() is None and not raised
