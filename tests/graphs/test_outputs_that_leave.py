"""Outputs that leave: to another stream, to another process. docs/outputs.md says what a caller has to know."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import HOSTCUDA, Compiled, freezes
from torch import multiprocessing


@pytest.fixture
def asynchronous(device: torch.device) -> Any:
    """The device's module; streams run behind the host."""
    module = torch.get_device_module(device)
    if not hasattr(module, "set_asynchronous"):
        yield module
        return
    module.set_asynchronous(True)
    yield module
    module.set_asynchronous(False)


def _busy(module: Any, stream: Any) -> None:
    """Some milliseconds of work."""
    if hasattr(module, "delay"):
        module.delay(stream, 0.02)
        return
    with module.stream(stream):
        torch.cuda._sleep(20_000_000)


def _read_on_a_side_stream(
    f: Callable[[torch.Tensor], torch.Tensor], device: torch.device, module: Any, leave: Callable[..., None]
) -> int:
    """Of twenty outputs, each dropped while a side stream has still to read it, how many were read wrongly."""
    side, inputs = module.Stream(device), [torch.full((256,), float(n), device=device) for n in range(20)]
    read = [torch.zeros(256, device=device) for _ in inputs]
    with torch.no_grad():
        for x in inputs[:4]:
            f(x)
        module.synchronize()
        for x, target in zip(inputs, read, strict=True):
            y = f(x)
            side.wait_stream(module.current_stream(device))
            _busy(module, side)
            with module.stream(side):
                target.copy_(y)
            leave(y, side)
            del y
        module.synchronize()
    return sum(not torch.allclose(target, torch.relu(x) * 2 + 1) for x, target in zip(inputs, read, strict=True))


def _record(y: torch.Tensor, side: Any) -> None:
    y.record_stream(side)


def _wait(y: torch.Tensor, side: Any) -> None:
    torch.accelerator.current_stream().wait_stream(side)


@pytest.mark.accelerator
def test_a_copied_output_may_be_dropped_while_another_stream_reads_it(
    compiled: Any, device: torch.device, asynchronous: Any
) -> None:
    """``record_stream`` tells the allocator, whose memory a copy is, and nothing else."""
    f: Compiled = compiled(lambda x: torch.relu(x) * 2 + 1, options={"copy_outputs": True})
    assert _read_on_a_side_stream(f, device, asynchronous, _record) == 0
    assert f.program.counters.replays == 22 and not f.program.counters.events


@pytest.mark.accelerator
def test_an_output_may_be_dropped_when_its_stream_waits_for_the_reader(
    compiled: Any, device: torch.device, asynchronous: Any
) -> None:
    """Nothing is copied: the replay that overwrites it comes after the reader."""
    f: Compiled = compiled(lambda x: torch.relu(x) * 2 + 1)
    assert _read_on_a_side_stream(f, device, asynchronous, _wait) == 0
    assert f.program.counters.replays == 22 and not f.program.counters.events


@pytest.mark.accelerator
def test_without_either_the_reader_sees_later_outputs(compiled: Any, device: torch.device, asynchronous: Any) -> None:
    """What docs/outputs.md warns of. If this is right one day, neither is needed any more."""
    if HOSTCUDA and not os.environ.get("HOSTCUDA_LAZY"):
        pytest.skip("work runs as soon as it is issued: HOSTCUDA_LAZY=1")
    f: Compiled = compiled(lambda x: torch.relu(x) * 2 + 1)
    assert _read_on_a_side_stream(f, device, asynchronous, _record) > 0


@pytest.mark.parametrize("copies", [False, True])
def test_in_training_outputs_are_copied_and_saved_activations_are_not(
    compiled: Any, device: torch.device, copies: bool
) -> None:
    if not freezes(device):
        pytest.skip("every output is new at every call")
    weight = torch.randn(16, 16, device=device, requires_grad=True)
    f: Compiled = compiled(lambda x: torch.tanh(x @ weight) @ weight, options={"copy_outputs": copies})
    for _ in range(5):
        x, weight.grad = torch.randn(4, 16, device=device), None
        y = f(x)
        y.square().sum().backward()
        expected = f.fn(x)
        (right,) = torch.autograd.grad(expected.square().sum(), weight)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(weight.grad, right, rtol=1e-4, atol=1e-4)
        del y
    weight.grad = None
    forward, backward = (program.specializations.recordings()[0] for program in f.programs)
    assert len(forward.watched_outputs) == (1 if copies else 2)
    assert len(backward.watched_outputs) == (0 if copies else 1)
    # Nothing that forward computes is copied to a place of backward: only what comes in, x and the gradient.
    assert len(backward.request.sized.input_buffers) == 2
    assert f.replays() == [3, 3]


def test_a_copied_output_is_a_tensor_like_any_other(compiled: Any, device: torch.device) -> None:
    """It keeps no arena, and its storage can be resized."""
    f: Compiled = compiled(lambda x: torch.relu(x) * 2 + 1, options={"copy_outputs": True})
    x, kept = torch.randn(64, device=device), list[torch.Tensor]()
    with torch.no_grad():
        for _ in range(6):
            kept.append(f(x))
            assert kept[-1].untyped_storage().nbytes() == 256
        kept[-1].resize_(1000)
        torch.testing.assert_close(kept[-1][:64], f.fn(x))
    assert f.program.counters.replays == 4 and not f.program.counters.events


@pytest.mark.accelerator
@pytest.mark.parametrize("part", [0, 1])
def test_what_is_shared_by_the_driver_is_a_copy(
    compiled: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """Of a slice the allocator says "invalid device pointer"; the first one it would share, until a replay."""
    shared = list[Any]()

    def share(storage: torch.UntypedStorage) -> tuple[int]:
        shared.append(storage.clone())
        return (storage.data_ptr(),)

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", share)
    f: Compiled = compiled(lambda x: (torch.relu(x) * 2 + 1, torch.sin(x @ x)))
    x = torch.randn(16, 16, device=device)
    with torch.no_grad():
        for _ in range(4):
            f(x)
        y = f(x)[part]
        (address,) = y[2:]._typed_storage()._share_cuda_()
    assert not f.program.counters.events  # y is a slice of the arena
    assert not y.data_ptr() <= address < y.data_ptr() + 1024
    assert torch.equal(torch.empty(0, device=device).set_(shared[0], 0, y.shape, y.stride()), y)


def _send(outputs: Any, results: Any) -> None:
    while (output := outputs.get()) is not None:
        results.put(output.double().sum().item())
        del output


def test_on_the_cpu_an_output_is_shared_like_any_tensor(compiled: Any) -> None:
    f: Compiled = compiled(lambda x: torch.relu(x) * 2 + 1)
    with torch.no_grad():
        y = f(torch.ones(8))
        assert y.share_memory_().is_shared() and torch.equal(y, torch.full((8,), 3.0))
        for n in range(4):
            assert torch.equal(f(torch.full((8,), float(n))), torch.full((8,), 2.0 * n + 1))
        assert torch.equal(y, torch.full((8,), 3.0))
    context = multiprocessing.get_context("fork")
    outputs, results = context.Queue(), context.Queue()
    process = context.Process(target=_send, args=(outputs, results), daemon=True)
    process.start()
    try:
        with torch.no_grad():
            for n in range(8):
                outputs.put(f(torch.full((8,), float(n))))
        outputs.put(None)
        assert [results.get(timeout=60) for _ in range(8)] == [8 * (2.0 * n + 1) for n in range(8)]
    finally:
        process.kill()
        process.join()
    assert f.program.counters.replays >= 10
