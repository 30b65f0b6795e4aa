"""Libraries' workspaces: what cuBLAS keeps for each thread and stream, 32 MiB on sm_90.

::

    stream 0            warm-up: takes 32 MiB, keeps it
    the pool's stream            free --> a call's capture: 32 MiB of the arena --> free --> ...
                                 other captures: takes 32 MiB from the pool --> free      the pool has it back
"""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from conftest import Compiled, on_gpu

from fxwrap.errors import MemoryLimitError
from fxwrap.graphs.devices.runtime import runtime_for
from fxwrap.graphs.memory import operator_memory
from fxwrap.graphs.record.capture import free_workspaces_of_warm_ups
from fxwrap.torch_private import functions as torch_runtime

MIB = 1 << 20


def _wait(wake: threading.Event) -> None:
    wake.wait()


def _read(work: queue.Queue[None]) -> None:
    work.get()


def _compute(end: list[bool]) -> None:
    while not end:
        time.sleep(1e-4)  # stands for one of torch's functions, which does not show in Python either


def test_a_thread_that_waits_runs_nothing() -> None:
    wake, work = threading.Event(), queue.Queue[None]()
    threads = [threading.Thread(target=_wait, args=(wake,)), threading.Thread(target=_read, args=(work,))]
    before = torch_runtime.other_threads_wait()
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    try:
        assert torch_runtime.other_threads_wait() == before
    finally:
        wake.set()
        work.put(None)
        for thread in threads:
            thread.join()


def test_a_thread_that_computes_is_seen() -> None:
    end: list[bool] = []
    thread = threading.Thread(target=_compute, args=(end,))
    thread.start()
    try:
        assert not torch_runtime.other_threads_wait()
    finally:
        end.append(True)
        thread.join()


def test_looking_at_threads_leaves_no_cycle() -> None:
    """Outputs that the caller has dropped would be live until garbage is collected."""

    def look() -> weakref.ref[torch.Tensor]:
        output = torch.zeros(1)
        torch_runtime.other_threads_wait()
        return weakref.ref(output)

    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


class _Stream:
    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id


@pytest.mark.parametrize(("alone", "stream_id", "freed"), [(True, 0, 1), (False, 0, 0), (True, 3, 0)])
def test_warm_ups_workspaces_stay_while_they_may_be_used(
    monkeypatch: pytest.MonkeyPatch, alone: bool, stream_id: int, freed: int
) -> None:
    """A thread that is about to launch has the address already; another stream than the default may be captured."""
    streams: list[Any] = []
    monkeypatch.setattr("fxwrap.graphs.record.capture.free_workspaces", streams.append)
    monkeypatch.setattr("fxwrap.graphs.record.capture.other_threads_wait", lambda: alone)
    free_workspaces_of_warm_ups(_Stream(stream_id))
    assert len(streams) == freed


def test_a_torch_that_cannot_free_those_of_one_stream_frees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_runtime, "_free_cublas_workspaces", lambda: None)
    torch_runtime.free_workspaces(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch_runtime.frees_workspaces(), reason="this torch frees all workspaces or none")
def test_a_program_keeps_one_workspace_for_all_threads(compiled: Any) -> None:
    """Warm-up and capture, forward and backward, each on a thread of its own: four workspaces without this."""
    with on_gpu() as device:
        weight = torch.randn(64, 64, device=device, requires_grad=True)
        x = torch.randn(8, 64, device=device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        f: Compiled = compiled(lambda x: (x @ weight).relu() @ weight)
        for _ in range(5):
            f(x).sum().backward()
            weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        workspace = torch._C._cuda_getCublasWorkspaceSize()
        assert workspace >= 8 * MIB
        # It lies in the arena where calls are placed, else in the pool of the graphs, which counts as free.
        held = 2 if runtime_for(device).placements is not None else 1
        assert torch.cuda.memory_allocated() - allocated < held * workspace
        assert torch.cuda.memory_reserved() - reserved < 2 * workspace
        assert f.replays() == [3, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch_runtime.frees_workspaces(), reason="this torch frees all workspaces or none")
def test_a_warm_up_within_a_limit_keeps_no_workspace_beside_what_comes_later(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What calls take is found out before the first of them runs.

    ::

        plan        |workspace|large   |        a limit counts them at one place
        warm-up     |workspace.........|        what cuBLAS keeps would lie beside them
                              |large   |
    """
    with on_gpu() as device, torch.no_grad():
        x = torch.randn(64, 64, device=device)

        def program(x: torch.Tensor) -> torch.Tensor:
            row = (x @ x).sum(0)
            return row.repeat(1 << 16).cumsum(0).sin().sum()

        monkeypatch.setattr(operator_memory, "_known", {})
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        with pytest.raises(MemoryLimitError) as caught:
            compiled(program, options={"memory_limit": 1})(x)
        limit = caught.value.least
        workspace = torch._C._cuda_getCublasWorkspaceSize()
        assert workspace < limit < workspace + 16 * MIB
        f: Compiled = compiled(program, options={"memory_limit": limit})
        torch.cuda.reset_peak_memory_stats()
        f(x)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= limit
