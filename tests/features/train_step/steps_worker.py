"""What one process does in ``test_distributed_steps``: a written step, beside one process that has all data."""

from __future__ import annotations

import copy
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from two_processes import take_part

import fxwrap

STEPS, ROWS, WIDTH = 6, 8, 64
_MMAP_THRESHOLD = -3  # of malloc.h


def mlp(layers: int = 3, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())))


def whole_batch(call: int, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(call)
    return torch.randn(ROWS, width, generator=generator), torch.randn(ROWS, width, generator=generator)


def own_part(call: int, width: int = WIDTH) -> tuple[Tensor, ...]:
    return tuple(part.chunk(dist.get_world_size())[dist.get_rank()] for part in whole_batch(call, width))


def step_of(model: nn.Module, **settings: Any) -> Callable[[Tensor, Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **settings)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    return step


def sgd_step(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def mean(loss: Tensor) -> float:
    if isinstance(loss, DTensor):
        loss = loss.full_tensor()
    loss = loss.clone()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def as_one_process(step: Any, batch: Callable[[int], Any], alone: Any = None) -> dict[str, Any]:
    """Losses are those of one process that has the whole batch. Returns the step's counts."""
    alone = alone or step_of(mlp())
    for call in range(STEPS):
        assert mean(step(*batch(call))) == pytest.approx(float(alone(*whole_batch(call))), rel=1e-4)
    stats = fxwrap.stats(step)
    assert stats["programs"] == 1 and stats["replays"] >= STEPS - 3 and not stats["fallbacks"], stats
    assert stats["ordinary"] == {"first call": 1}
    return stats


def peak(run: Callable[[], Any]) -> int:
    """The most bytes at one time beside those before. A profiler does not see what gloo's threads free."""
    run()
    dist.barrier()
    time.sleep(0.2)  # gloo's threads let go of what they have reduced a little later
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def assert_equal_everywhere(model: nn.Module) -> None:
    for parameter in model.parameters():
        everywhere = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, parameter.detach())
        assert all(torch.equal(parameter, other) for other in everywhere)


def replicated(rank: int) -> None:
    """Weights begin alike, gradients are averaged before they are clipped, by one communication."""
    model = mlp()
    with torch.no_grad():
        model[0].bias += rank
    step = fxwrap.train_step(step_of(model), group=dist.group.WORLD)
    as_one_process(step, own_part)
    assert_equal_everywhere(model)
    assert str(fxwrap.report(step)).count("all_reduce_(") == 1


def micro_batches(rank: int) -> None:
    """Gradients of the first are not averaged by themselves."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def written(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        (x, more_x), (y, more_y) = x.chunk(2), y.chunk(2)
        with fxwrap.no_sync():
            first = F.mse_loss(model(x), y) / 2
            first.backward()
        second = F.mse_loss(model(more_x), more_y) / 2
        second.backward()
        optimizer.step()
        return (first + second).detach()

    step = fxwrap.train_step(written, group=dist.group.WORLD)
    as_one_process(step, own_part, sgd_step(mlp()))
    assert_equal_everywhere(model)
    assert str(fxwrap.report(step)).count("all_reduce_(") == 1


def tensor_parallel(rank: int) -> None:
    """Columns of one layer and rows of the next; each process has the whole batch."""
    model = mlp(2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model[1] = nn.ReLU()
    alone = mlp(2)
    alone[1] = nn.ReLU()
    step = fxwrap.train_step(step_of(model))
    as_one_process(step, whole_batch, step_of(alone))
    weight: Any = model[0].weight
    assert weight.to_local().numel() * dist.get_world_size() == weight.numel()


def sharded(rank: int) -> None:
    """A process has its part of every parameter, gradient and state; gradients are scattered."""
    model = mlp()
    names = list(model.state_dict())
    fxwrap.shard_parameters(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    step = fxwrap.train_step(step_of(model))
    as_one_process(step, own_part)
    assert list(model.state_dict()) == names
    parameters: Any = model.parameters()
    assert all(p.to_local().numel() * dist.get_world_size() == p.numel() for p in parameters)


def within_a_limit(rank: int) -> None:
    """What is gathered is dropped, and gathered again: one layer at a time, beside its gradient and activations."""
    layers, width, mesh = 8, 512, init_device_mesh("cpu", (dist.get_world_size(),))
    layer = width * width * 4
    losses, peaks = [], []
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back at once
    for limit in (None, 3 * layer):
        model = mlp(layers, width)
        fxwrap.shard_parameters(model, mesh)
        step = fxwrap.train_step(sgd_step(model), memory_limit=limit)
        losses.append([mean(step(*own_part(call, width))) for call in range(STEPS)])
        batch = own_part(0, width)
        peaks.append(peak(lambda: step(*batch)))  # noqa: B023 (called at once)
    assert losses[0] == losses[1]
    assert peaks[0] > (layers - 1) * layer, "without a limit all gathered weights wait for the backward pass"
    # No plan knows what gloo takes: a copy in each reduction.
    assert peaks[1] <= 4 * layer, peaks
    assert str(fxwrap.report(step)).count(".all_gather_into_tensor(") > 2 * layers, "all weights but the last twice"


def its_own_collectives(rank: int) -> None:
    """A step that averages what it wants to: functional collectives."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def written(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.copy_(funcol.all_reduce(parameter.grad, "avg", dist.group.WORLD))  # type: ignore[arg-type]
        optimizer.step()
        return funcol.all_reduce(loss.detach(), "avg", dist.group.WORLD)  # type: ignore[arg-type]

    alone = sgd_step(copy.deepcopy(model))
    as_one_process(fxwrap.train_step(written), own_part, alone)
    assert_equal_everywhere(model)


def checked(rank: int) -> None:
    """Checked calls communicate at the same calls in all processes."""
    model = mlp()
    step = fxwrap.train_step(step_of(model), group=dist.group.WORLD, options={"checked": 2})
    as_one_process(step, own_part)


if __name__ == "__main__":
    take_part({
        scenario.__name__: scenario
        for scenario in (
            replicated, micro_batches, tensor_parallel, sharded, within_a_limit, its_own_collectives, checked,
        )
    })  # fmt: skip
