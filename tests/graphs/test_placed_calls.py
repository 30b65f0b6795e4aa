"""What captured operators allocate lies in the arena: results, temporaries, workspaces of libraries.

::

    before     arena   | buffers of kernels |          graphs' pool   | conv's result | its workspace |
    now        arena   | buffers of kernels, conv's result, its workspace, each while it is used |
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, on_gpu
from torch import Tensor, nn

from fxwrap.graphs.devices.runtime import runtime_for
from fxwrap.graphs.memory import operator_memory
from fxwrap.graphs.record import placed_calls
from fxwrap.plan import OperatorMemory
from fxwrap.torch_private import placed_allocations

pytestmark = [pytest.mark.gpu]


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    with on_gpu() as device:
        if runtime_for(device).placements is None:
            pytest.skip("this torch's allocator takes no addresses")
        yield device


def _network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.Flatten(),
        nn.Linear(4096, 8),
    ]
    return nn.Sequential(*layers).to(device)


def _in_the_pools() -> set[int]:
    """The addresses of the segments in graphs' pools."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    return {s["address"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0)}


def test_nothing_lies_in_the_pool_of_the_graphs(compiled: Any, gpu: torch.device) -> None:
    model, x = _network(gpu), torch.randn(4, 3, 16, 16, device=gpu)
    of_others = _in_the_pools()
    f: Compiled = compiled(model)
    expected = torch.compile(model, backend="inductor")(x)
    for _ in range(4):
        assert torch.equal(f(x), expected)
    assert f.program.counters.replays == 2 and not f.program.counters.events
    # A small graph keeps each pool usable (``GraphPool.keeper``); it allocates nothing.
    assert _in_the_pools() <= of_others


def test_training_is_that_of_inductor(compiled: Any, gpu: torch.device) -> None:
    def trained(function: Any) -> list[Tensor]:
        model, x = _network(gpu), torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(gpu)
        optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), function(lambda x: model(x).pow(2).mean())
        for _ in range(6):
            optimizer.zero_grad()
            loss(x).backward()
            optimizer.step()
        return list(model.parameters())

    of_others = _in_the_pools()
    ours = trained(compiled)
    assert _in_the_pools() <= of_others
    theirs = trained(lambda function: torch.compile(function, backend="inductor"))
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_results_that_the_caller_keeps(compiled: Any, gpu: torch.device) -> None:
    """An operator's result is an output: it is alive in the arena as any other, and later calls leave it alone."""
    f: Compiled = compiled(lambda x: torch.topk(x * 2, 3))
    kept = []
    for i in range(6):
        x = torch.arange(40.0, device=gpu).view(4, 10) * (i + 1)
        kept.append((f(x), torch.topk(x * 2, 3)))
    for (values, positions), (expected, at) in kept:
        assert torch.equal(values, expected) and torch.equal(positions, at)


# -- faults: what does not go as it was planned is counted, and right -------------------------------------------


def _events_of_training(compiled: Any, gpu: torch.device) -> list[str]:
    """The events of calls that do not allocate as it was planned. Gradients are right."""
    model, x = _network(gpu), torch.randn(4, 3, 16, 16, device=gpu, requires_grad=True)
    f: Compiled = compiled(lambda x: model(x).pow(2).mean())
    (expected,) = torch.autograd.grad(model(x).pow(2).mean(), x)
    for _ in range(4):
        gc.collect()  # what compiling and failed captures leave may hold the gradient of the call before
        assert torch.allclose(torch.autograd.grad(f(x), x)[0], expected, atol=1e-5)
    assert all(f.replays())
    return [event for one in f.programs for event in one.counters.events if "outside of the plan" in event]


@pytest.fixture
def forgotten() -> Iterator[None]:
    """A process that has rehearsed nothing."""
    before = dict(operator_memory._known)
    operator_memory._known.clear()
    yield
    operator_memory._known.clear()
    operator_memory._known.update(before)


@pytest.fixture
def rehearsed_wrongly(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> Any:
    """``change`` is applied to what each rehearsal has found."""

    def plant(change: Any) -> None:
        note = operator_memory.note_memory

        def changed(kind: Any, memory: Any) -> None:
            note(kind, change(memory) if isinstance(memory, OperatorMemory) and memory.allocations else memory)

        monkeypatch.setattr("fxwrap.graphs.record.rehearsal.note_memory", changed)

    return plant


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("one allocation less", "more than"),
        ("one allocation more", "allocations in place of"),
        ("other bytes", "not those of its rehearsal"),
    ],
)
def test_an_operator_that_allocates_otherwise_is_captured_again(
    compiled: Any, gpu: torch.device, rehearsed_wrongly: Any, fault: str, why: str
) -> None:
    def change(memory: OperatorMemory) -> OperatorMemory:
        *others, (block, nbytes) = memory.allocations
        if fault == "one allocation more":
            return OperatorMemory((*memory.allocations, (len(memory.blocks), 512)), memory.results)
        if fault == "other bytes":
            return OperatorMemory((*others, (block, nbytes + 512)), memory.results)
        results = {b: at for b, at in memory.results.items() if b < len(memory.blocks) - 1}
        return OperatorMemory(tuple(others), results) if others else memory

    rehearsed_wrongly(change)
    events = _events_of_training(compiled, gpu)
    assert events and all(why in event for event in events), events
    torch._dynamo.reset()
    assert not _events_of_training(compiled, gpu)  # the next program takes it from the pool at once


def test_an_error_in_a_placed_call_leaves_the_device_usable(
    compiled: Any, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = _network(gpu), torch.randn(4, 3, 16, 16, device=gpu)
    f: Compiled = compiled(model)
    f(x)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(placed_calls, "tensor_like", interrupt)
    with pytest.raises(KeyboardInterrupt):
        f(x)
    monkeypatch.undo()
    for _ in range(3):
        assert torch.allclose(f(x), model(x), atol=1e-5)
    assert not torch._C._cuda_isHistoryEnabled()  # the context of the capture has ended


def test_a_history_of_the_users_goes_on(compiled: Any, gpu: torch.device) -> None:
    torch.cuda.memory._record_memory_history(context=None)
    try:
        model, x = _network(gpu), torch.randn(4, 3, 16, 16, device=gpu)
        f: Compiled = compiled(model)
        for _ in range(3):
            f(x)
        assert torch._C._cuda_isHistoryEnabled()
        del f
    finally:
        torch.cuda.memory._record_memory_history(None)
    with placed_allocations.cuda_placements(gpu):
        assert torch._C._cuda_isHistoryEnabled()
    assert not torch._C._cuda_isHistoryEnabled()


def test_random_numbers_are_those_of_inductor(compiled: Any, gpu: torch.device) -> None:
    """The first operator in a capture that draws some has the generator allocate what the graph keeps."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        noise = torch.rand_like(x[0])
        y = torch.addmm(noise, x @ x, x)
        return y.exp(), torch.bernoulli(y.sigmoid()), torch.nn.functional.conv2d(x[None, None], x[None, None, :3, :3])

    x = torch.randn(16, 16, device=gpu) / 8
    with torch.random.fork_rng(devices=[gpu]):
        f: Compiled = compiled(function)
        g = torch.compile(function, backend="inductor")
        for _ in range(5):
            torch.manual_seed(0)
            ours = f(x)
            torch.manual_seed(0)
            assert all(torch.equal(a, b) for a, b in zip(ours, g(x), strict=True))
    assert f.replays() == [3]
    del f, ours
    gc.collect()
    torch.cuda.synchronize()


@pytest.mark.launches_graphs
def test_another_thread_captures_by_hand_meanwhile(compiled: Any, gpu: torch.device) -> None:
    """The allocator refuses some work while a capture is open, in which the pools of placed calls begin and end."""
    model, x = _network(gpu), torch.randn(4, 3, 16, 16, device=gpu)
    f: Compiled = compiled(model)
    expected = torch.compile(model, backend="inductor")(x)
    f(x)  # compiling waits for the device
    begun, called, product = threading.Event(), threading.Event(), list[Tensor]()

    def capture_by_hand() -> None:
        y = torch.ones(8, 8, device=gpu)
        y @ y  # the library's handle is made
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            z = y @ y
            begun.set()
            called.wait(60)
            product.append(z + 1)
            graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()

    thread = threading.Thread(target=capture_by_hand)
    thread.start()
    assert begun.wait(60)
    try:
        results = [f(x).clone() for _ in range(4)]
    finally:
        called.set()
        thread.join()
    assert all(torch.equal(result, expected) for result in results)
    assert f.program.counters.replays and product[0].eq(9).all()
