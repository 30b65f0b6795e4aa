"""``memory_limit``: what a step takes beside parameters, state and batch, measured by the allocator's events."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import Net, squares, values
from torch import nn, optim

import fxwrap
from fxwrap.backend import parsed
from fxwrap.errors import MemoryLimitError, OptionError, TrainStepError
from fxwrap.torch_private.functions import allocations


class Deep(nn.Module):
    """Layers whose activations are most of the memory."""

    def __init__(self, layers: int = 8, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * x.sigmoid()
        return x


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def peak(run: Callable[[], Any]) -> int:
    changes = allocations(run)
    assert changes is not None
    return max(itertools.accumulate(changes), default=0)


def _made(model: nn.Module, **settings: Any) -> Any:
    return fxwrap.train_step(model, loss, optim.AdamW(model.parameters(), lr=1e-3), **settings)


def test_a_limit_holds_at_every_call_and_changes_no_bit() -> None:
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(256, 16)
    free = _made(reference := copy.deepcopy(model))
    expected = [free(x) for _ in range(4)]
    whole = fxwrap.report(free).graphs[0].program.newest_plan.peak
    for share in (0.7, 0.5, 0.4):
        limit = int(whole * share)
        step = _made(limited := copy.deepcopy(model), memory_limit=limit)
        got = [step(x)]  # compiles
        peaks = [peak(lambda: got.append(step(x))) for _ in range(3)]  # noqa: B023 (called at once)
        assert max(peaks) <= limit, f"{share}: {peaks}"
        assert all(map(torch.equal, got, expected))
        assert all(map(torch.equal, values(limited), values(reference)))
        assert "_again" in str(fxwrap.report(step).graphs[0].graph.code)


def test_what_cannot_fit_is_an_error_before_anything_runs() -> None:
    model = Deep()
    step, before = _made(model, memory_limit="1kB"), values(model)
    with pytest.raises(MemoryLimitError, match=r"at least \d+ bytes \([1-9][\d.]* KiB\)") as caught:
        step(torch.randn(256, 16))
    assert caught.value.got == "1000 bytes"
    assert all(map(torch.equal, values(model), before)) and not step.optimizer.state
    step = _made(model, memory_limit=caught.value.least)
    step(torch.randn(256, 16))
    assert not step.ordinary_calls  # the first call is a program, too


def test_a_trace_takes_no_memory() -> None:
    """It has a p.grad for each parameter, to find out whether the step reads it."""
    model, x = nn.Linear(256, 256), torch.randn(2, 256)
    optimizer = optim.SGD(model.parameters())

    def update(x: torch.Tensor) -> None:
        if loss(model, x) > 0:  # such a step has no program, whose making would take memory
            loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step = fxwrap.train_step(update)
    step(x)

    def refused() -> None:
        with pytest.raises(TrainStepError, match="reads a number"):
            step(x)

    assert peak(refused) < model.weight.nbytes


def test_another_size_is_within_the_limit_or_an_error() -> None:
    """A program that fits as it is at one size is planned again at another."""
    model, limit = Deep(), 110_000
    step, free = _made(model, memory_limit=limit, dynamic=True), _made(copy.deepcopy(model), dynamic=True)
    for size in (64, 32):
        x = torch.randn(size, 16)
        assert torch.equal(step(x), free(x))
    (graph,) = fxwrap.report(step).graphs  # the limit has added no guards on sizes
    fits = graph.program.stages.get("fit", (0, 0.0))[0]  # none, if it came from a cache
    x = torch.randn(200, 16)
    expected = [free(x) for _ in range(3)]
    assert fxwrap.report(free).graphs[0].program.newest_plan.peak > limit
    got, peaks = [], []
    for _ in range(3):
        peaks.append(peak(lambda: got.append(step(x))))
    assert max(peaks) <= limit and graph.program.stages["fit"][0] == fits + 1
    assert all(map(torch.equal, got, expected))
    before = values(model)
    with pytest.raises(MemoryLimitError):
        step(torch.randn(4096, 16))
    assert all(map(torch.equal, values(model), before))
    step(torch.randn(64, 16))


@pytest.mark.parametrize("given", ["6 gigabytes", "1.5", "-1", "", -1, 1.5, True])
def test_what_is_no_size(given: Any) -> None:
    model = Net()
    with pytest.raises(OptionError, match=r"bytes, or a size such as '6GiB' .*KiB, MiB, GiB, TiB"):
        fxwrap.train_step(model, squares, optim.SGD(model.parameters(), 0.1), memory_limit=given)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("2048", 2048), ("2kB", 2000), ("2 kb", 2000), ("2 mb", 2_000_000), ("2MIB", 2 << 20), ("1.5 KiB", 1536),
        ("6GiB", 6 << 30), ("6gib", 6 << 30), ("12 B", 12), ("0", 0), (7, 7),
    ],
)  # fmt: skip
def test_what_is_a_size(given: Any, meant: int) -> None:
    assert parsed({"memory_limit": given})[0].memory_limit == meant


def test_a_limit_for_any_program() -> None:
    model = Deep()
    x = torch.randn(256, 16)
    with torch.no_grad():
        expected = torch.compile(copy.deepcopy(model), backend="inductor")(x)
        limited = torch.compile(model, backend="fxwrap", options={"memory_limit": "1MiB"})
        for _ in range(3):
            assert torch.equal(limited(x), expected)


@pytest.mark.gpu
def test_a_limit_holds_where_addresses_are_frozen() -> None:
    """There it is the arena, the pool of the graphs, and what is allocated beside them, by torch's allocator.

    The workspace of cuBLAS is known when a step is captured. If it is too much, the next call plans again.
    """
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator()
    assert device is not None
    module = torch.get_device_module(device)
    model, x = Deep(width=64).to(device), torch.randn(16384, 64, device=device)

    def pools() -> list[tuple[Any, int]]:
        return [(tuple(s["segment_pool_id"]), s["total_size"]) for s in module.memory_snapshot()]

    gc.collect()
    fxwrap.release()
    torch.accelerator.empty_cache()
    of_others = {(0, 0), *(pool for pool, _ in pools())}  # what tests before this one have left in this process

    def trained(**settings: Any) -> tuple[list[float], int, Any]:
        step = _made(copy.deepcopy(model), **settings)
        losses = [float(step(x)) for _ in range(6)]
        before = module.memory_allocated() - fxwrap.report(step).graphs[0].program.newest_plan.size
        module.reset_peak_memory_stats()
        losses.append(float(step(x)))
        taken = module.max_memory_allocated() - before + sum(size for pool, size in pools() if pool not in of_others)
        assert fxwrap.stats(step)["replays"] >= 3
        fxwrap.release(step)
        return losses, taken, step

    losses, free, _ = trained()
    limit = int(0.8 * free)
    limited, taken, step = trained(memory_limit=limit)
    assert taken <= limit + (2 << 20)  # a segment
    assert limited == losses
    assert "_again" in str(fxwrap.report(step).graphs[0].graph.code)
