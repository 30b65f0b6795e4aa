"""Devices without a kernel compiler (``scheduling="none"``): every operation is a call, with eager's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same
from torch.nn import functional as F

import fxwrap
from fxwrap.codegen.emit.library_calls import LIBRARY_CALLS

w = torch.randn(8, 8)


def views(x: torch.Tensor) -> Any:
    y = (x @ w).relu()
    a, b = y.view(2, -1, 8).transpose(0, 1).split(4, -1)
    return a.reshape(-1), b.t() if b.dim() == 2 else b.permute(2, 0, 1), y[1:, ::2].unsqueeze(0).expand(3, -1, -1)


def updates(x: torch.Tensor) -> Any:
    y = x.clone()
    y[1:3].mul_(2)
    y.index_put_((torch.tensor([0, 2]),), torch.tensor(3.0), accumulate=True)
    x.add_(1)
    return y, x.sum()


def random_numbers(x: torch.Tensor) -> Any:
    return F.dropout(x, 0.5) + torch.rand_like(x), torch.randn(4), torch.bernoulli(x.sigmoid())


def numbers(x: torch.Tensor) -> Any:
    return (x.to(torch.int64) // 2).float().mean(0), x.double() * 0.1, (x > 0).sum(), x.half() + 1, x * x.shape[0]


def constants(x: torch.Tensor) -> Any:
    return x + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8]), x * torch.tensor(2.0), torch.arange(x.shape[0])


@pytest.fixture
def no_kernels() -> Iterator[None]:
    with fxwrap.register_device("cpu", config=LIBRARY_CALLS):
        yield


def launches(ours: Compiled) -> int:
    return sum(partition.launches for program in ours.programs for partition in program.plan.partitions)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [views, updates, random_numbers, numbers, constants])
def test_what_eager_computes(
    fn: Callable[..., Any], dynamic: bool, device: torch.device, compiled: Any, no_kernels: None
) -> None:
    ours = compiled(fn, dynamic=dynamic)
    for call in range(6):
        x = torch.randn(4 + 2 * (call % 2) * dynamic, 8)
        mine, state = x.clone(), torch.get_rng_state()
        theirs = fn(x)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        assert_same(ours(mine), theirs)
        assert torch.equal(mine, x) and torch.equal(torch.get_rng_state(), after)
    assert launches(ours) == 0 and not ours.compilation.fallbacks
    assert sum(ours.replays()) >= 2 - dynamic


def test_training(device: torch.device, compiled: Any, no_kernels: None) -> None:
    train(compiled, torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.GELU(), torch.nn.GroupNorm(2, 4)))


def test_training_with_batch_normalisation(device: torch.device, compiled: Any, no_kernels: None) -> None:
    train(compiled, torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.GELU()))


def train(compiled: Any, model: torch.nn.Module) -> None:
    ours = compiled(model)
    for _ in range(4):
        x = torch.randn(2, 2, 5, 5)
        gradients = []
        for call in (model, ours):
            model.zero_grad()
            call(x).square().mean().backward()
            gradients.append([p.grad for p in model.parameters()])
        torch.testing.assert_close(*gradients)
    assert launches(ours) == 0 and sum(ours.replays()) >= 2


def test_views_stay_views_and_results_are_planned(compiled: Any, no_kernels: None) -> None:
    ours = compiled(views)
    ours(torch.randn(4, 8))
    work = [str(node.target) for node in ours.program.plan.schedule]
    assert work == ["aten.mm.out", "aten.relu.default", "aten.clone.default"]


def test_what_needs_a_kernel_is_named(compiled: Any) -> None:
    """On the device itself; a higher-order operator has no call that would compute it."""
    from fxwrap.codegen.emit.library_calls import LibraryCalls

    class Node:
        def get_nodes(self) -> list[Any]:
            return []

        def get_device(self) -> torch.device:
            return torch.device("mtia", 0)

    with pytest.raises(fxwrap.DeviceError, match="mtia:0 has no kernels"):
        LibraryCalls(None).codegen_node(Node())
