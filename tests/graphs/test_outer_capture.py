"""Compiled code that is called while somebody else captures: it runs eagerly, and becomes part of that graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled

import fxwrap
from fxwrap.graphs import program
from fxwrap.graphs.devices.cpu_graph import CPUGraph, issue
from fxwrap.graphs.devices.device_graph import DeviceGraph
from fxwrap.graphs.devices.runtime import runtime_for

REASON = "called while the caller captures"


def _user_graph(device: torch.device, stream: Any, call: Callable[[], Any]) -> tuple[DeviceGraph, Any]:
    """A graph such as ``torch.cuda.graph`` makes, and what ``call`` returned in it."""
    graph = runtime_for(device).new_graph(None)
    with torch.get_device_module(device).stream(stream):
        graph.capture_begin()
        try:
            result = call()
        finally:
            graph.capture_end()
    graph.instantiate()
    return graph, result


def _on(device: torch.device, stream: Any, call: Callable[[], Any], times: int) -> None:
    """As torch's documentation has it: warm up on the stream that will be captured."""
    module = torch.get_device_module(device)
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        for _ in range(times):
            call()
    module.current_stream(device).wait_stream(stream)
    torch.accelerator.synchronize()


@pytest.mark.launches_graphs
@pytest.mark.accelerator
@pytest.mark.parametrize("calls", [1, 2, 5], ids=["warm", "recorded", "replayed"])
def test_a_user_graph_holds_the_work_and_no_replay_of_ours(
    compiled: Any, device: torch.device, own_arenas: Any, calls: int
) -> None:
    """It is right whenever it is replayed, also after our recordings and their memory are gone."""
    weight = torch.randn(16, 16, device=device) / 4
    f: Compiled = compiled(lambda x: (torch.relu(x @ weight) @ weight).sin())
    x, stream = torch.randn(8, 16, device=device), torch.get_device_module(device).Stream(device)
    with torch.no_grad():
        _on(device, stream, lambda: f(x), calls)
        before = f.program.counters.to_dict()
        graph, result = _user_graph(device, stream, lambda: f(x))
        counters = f.program.counters
        assert counters.eager[REASON] == 1
        assert counters.replays == before["replays"] and counters.recordings == before["recordings"]
        for round in range(3):
            x.copy_(torch.randn(8, 16))
            graph.replay()
            torch.testing.assert_close(result, f.fn(x), rtol=1e-4, atol=1e-4)
            _on(device, stream, lambda: f(x + 1), 3)
            if round == 1:
                fxwrap.release()
        assert counters.eager[REASON] == 1 and counters.replays > before["replays"]


@pytest.mark.launches_graphs
@pytest.mark.accelerator
def test_a_user_graph_of_a_training_step(compiled: Any, device: torch.device) -> None:
    """Backward runs on autograd's thread, and on the stream that is captured."""
    weight = torch.randn(16, 16, device=device, requires_grad=True)
    f: Compiled = compiled(lambda x: (torch.relu(x @ weight) @ weight).square().mean())
    x, stream = torch.randn(8, 16, device=device), torch.get_device_module(device).Stream(device)

    def step() -> Any:
        weight.grad = None
        loss = f(x)
        loss.backward()
        return loss.detach(), weight.grad

    _on(device, stream, step, 4)
    weight.grad = None
    graph, (loss, gradient) = _user_graph(device, stream, step)
    assert [p.counters.eager.get(REASON) for p in f.programs] == [1, 1]
    for _ in range(2):
        x.copy_(torch.randn(8, 16))
        graph.replay()
        expected = f.fn(x)
        (right,) = torch.autograd.grad(expected, weight)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-4)


@pytest.mark.accelerator
def test_a_replay_in_a_user_graph_would_be_wrong(
    compiled: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: nobody asks. A graph cannot be part of another one there, and the user's is lost."""
    module = torch.get_device_module(device)
    if not hasattr(module, "relax"):
        pytest.skip("CUDA makes it a part of the user's graph, with our addresses")
    monkeypatch.setattr(program, "capture_check", lambda device: lambda: False)
    f: Compiled = compiled(lambda x: (x @ x).sin())
    x, stream = torch.randn(8, 8, device=device), torch.get_device_module(device).Stream(device)
    with torch.no_grad():
        _on(device, stream, lambda: f(x), 4)
        module.relax("failed_capture_holds_its_pool")  # the user's own, which is not known
        with pytest.raises(RuntimeError, match="a graph cannot be part of another one"):
            _user_graph(device, stream, lambda: f(x))
    module.enforce_all_rules()
    runtime_for(device).make_pool()  # what a failed capture leaves in generators


def test_a_program_called_while_another_is_recorded_is_recorded_later(
    compiled: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an operator of it. Two captures on one thread are an error, for which the program is not to blame."""
    if device.type != "cpu":
        pytest.skip("on accelerators the stream tells: the tests above")
    f: Compiled = compiled(lambda x: (x @ x).sin())
    x, graph, results = torch.randn(8, 8), CPUGraph(), list[torch.Tensor]()
    with torch.no_grad():
        f(x)
        graph.capture_begin()
        issue(lambda: results.append(f(x).clone()))
        graph.capture_end()
        assert f.program.counters.eager == {"warm-up": 1, REASON: 1}
        for _ in range(3):
            graph.replay()
    assert f.program.counters.replays == 2
    torch.testing.assert_close(results, [f.fn(x)] * 4)
