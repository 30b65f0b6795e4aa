"""Device graphs: the host graph, the adapters, and which one a device gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fxwrap.errors import CaptureError
from fxwrap.graphs.devices import runtime as device_graph
from fxwrap.graphs.devices.cpu_graph import CPUGraph, issue
from fxwrap.graphs.devices.runtime import runtime_for

METHODS = (
    "capture_begin", "capture_end", "instantiate", "replay", "reset", "pool", "enable_debug_mode", "debug_dump",
)  # fmt: skip


def _captured(graph: CPUGraph, call: Any) -> CPUGraph:
    graph.capture_begin()
    issue(call)
    graph.capture_end()
    return graph


def test_capture_runs_and_replay_runs_again() -> None:
    x, out = torch.ones(3), torch.zeros(3)
    graph = _captured(CPUGraph(), lambda: torch.add(x, 1, out=out))
    assert torch.equal(out, torch.full((3,), 2.0))
    x.fill_(5)
    graph.replay()
    assert torch.equal(out, torch.full((3,), 6.0))


def test_outside_of_a_capture_a_call_only_runs() -> None:
    calls: list[int] = []
    graph = _captured(CPUGraph(), lambda: calls.append(1))
    issue(lambda: calls.append(2))
    graph.replay()
    assert calls == [1, 2, 1]


def test_misuse_is_refused() -> None:
    graph = CPUGraph()
    with pytest.raises(CaptureError, match="nothing was captured"):
        graph.replay()
    with pytest.raises(CaptureError, match="without capture_begin"):
        graph.capture_end()
    graph.capture_begin()
    with pytest.raises(CaptureError, match="under way"):
        CPUGraph().capture_begin()
    graph.capture_end()
    with pytest.raises(CaptureError, match="already captured"):
        graph.capture_begin()
    graph.reset()
    graph.capture_begin()
    graph.capture_end()


def test_debug_dump_lists_the_calls(tmp_path: Path, compiled: Any) -> None:
    f = compiled(lambda x: x.sin() @ x)
    for _ in range(2):
        f(torch.randn(4, 4))
    (recording,) = f.program.specializations.values()[0].recordings
    recording.graphs[0].debug_dump(str(tmp_path / "calls"))
    text = (tmp_path / "calls").read_text()
    assert text.startswith("def flat(r):") and text.count("\n") >= 4


@pytest.mark.parametrize("kind", [CPUGraph, device_graph.CUDAGraphAdapter, device_graph.XPUGraphAdapter])
def test_every_graph_has_the_methods_of_the_unified_one(kind: type) -> None:
    assert all(callable(getattr(kind, method)) for method in METHODS)
    unified = getattr(torch.accelerator, "Graph", None)
    if unified is not None:
        assert all(hasattr(unified, method) for method in METHODS)


def test_the_unified_graph_is_preferred_and_the_adapter_is_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unified(CPUGraph):
        def __init__(self, pool: Any = None, capture_error_mode: str = "") -> None:
            super().__init__()

    class Refusing(Unified):
        def __init__(self, **_: Any) -> None:
            raise RuntimeError("Graph is not supported on device type: cuda")

    class Adapter(CPUGraph):
        def __init__(self, pool: Any = None) -> None:
            super().__init__()

    monkeypatch.setattr(device_graph, "CUDAGraphAdapter", Adapter)
    for unified, expected in ((Unified, "torch.accelerator.Graph"), (Refusing, "torch.cuda.CUDAGraph")):
        device_graph._accelerator_runtime.cache_clear()
        monkeypatch.setattr(torch.accelerator, "Graph", unified, raising=False)
        runtime = runtime_for(torch.device("cuda", 0))
        assert runtime.implementation == expected and runtime.frozen_addresses
    device_graph._accelerator_runtime.cache_clear()


def test_a_device_without_any_graph_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    device_graph._accelerator_runtime.cache_clear()
    monkeypatch.setattr(torch.accelerator, "Graph", None, raising=False)
    with pytest.raises(CaptureError, match="no device graph for mps"):
        runtime_for(torch.device("mps", 0))


@pytest.mark.gpu
@pytest.mark.launches_graphs
def test_gpu_capture_and_replay() -> None:
    device = torch.device(getattr(torch.accelerator.current_accelerator(), "type", "cuda"), 0)
    runtime = runtime_for(device)
    x, out = torch.ones(3, device=device), torch.zeros(3, device=device)
    torch.add(x, 1, out=out)
    pool = runtime.make_pool()
    graph = runtime.new_graph(pool.id)
    runtime.capture(graph, lambda: issue(lambda: torch.add(x, 1, out=out)), pool)
    graph.instantiate()
    x.fill_(5)
    graph.replay()
    assert torch.equal(out.cpu(), torch.full((3,), 6.0))
