"""What one of two processes does in ``test_group``: it trains with DistributedDataParallel, and with ``group=``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loops import Net, OrdinaryStep, batch, squares, values
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from two_processes import WORLD, take_part

import fxwrap
from fxwrap import TrainStepError
from fxwrap.features.train_step.codegen import averaging

STEPS = 10


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=1e-2)


def step_of(model: nn.Module, **settings: Any) -> Any:
    return fxwrap.train_step(model, squares, adamw(model), group=dist.group.WORLD, **settings)


def as_ddp(rank: int, make: Callable[[], nn.Module] = Net, accumulate: int = 1, **settings: Any) -> Any:
    """Ten calls, with weights and batches that differ between the processes. Returns DDP's model, ours, and the step.

    Losses are DDP's, parameters stay equal in both processes, and a call is one replay.
    """
    torch.manual_seed(rank)
    ours = make()
    theirs = DistributedDataParallel(copy.deepcopy(ours))
    step = step_of(ours, accumulate=accumulate, **settings)
    ordinary = OrdinaryStep(theirs, squares, adamw(theirs), accumulate=accumulate, **settings)
    for call in range(STEPS):
        data = batch(seed=WORLD * call + rank)
        torch.testing.assert_close(step(*data), ordinary(*data), rtol=1e-4, atol=1e-4)
    assert_equal_everywhere(ours.parameters())
    before = fxwrap.stats(step)
    for _ in range(accumulate):
        for made in (step, ordinary):
            made(*batch(seed=rank))
    after = fxwrap.stats(step)
    assert after["replays"] == before["replays"] + accumulate and not after["fallbacks"], after
    # What adds gradients, and what updates.
    assert after["programs"] == (2 if accumulate > 1 else 1)
    return theirs.module, ours, step


def assert_equal_everywhere(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        everywhere = [torch.empty_like(tensor) for _ in range(WORLD)]
        dist.all_gather(everywhere, tensor.detach())
        assert all(torch.equal(tensor, other) for other in everywhere)


def communications(step: Any) -> int:
    return str(fxwrap.report(step)).count("all_reduce_(")


def plain(rank: int) -> None:
    """Gradients of six parameters are averaged by one communication."""
    _, _, step = as_ddp(rank)
    assert communications(step) == 1


def buckets(rank: int) -> None:
    """A bucket has gradients of one kind, and at most so many bytes, or a single one."""

    class Mixed(nn.Module):
        """A convolution whose weight does not lie in memory in order, a parameter of another dtype, an unused one."""

        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Conv2d(2, 8, 2).to(memory_format=torch.channels_last)
            self.scale, self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64)), nn.Parameter(torch.ones(2))
            self.last = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.mix(x.view(-1, 1, 2, 2).expand(-1, 2, -1, -1)).flatten(1).relu()
            return self.last(x) * self.scale.float()

    torch.manual_seed(rank)
    ours = Mixed()
    theirs = DistributedDataParallel(copy.deepcopy(ours), find_unused_parameters=True)
    with mock.patch.object(averaging, "_BUCKET_BYTES", 128):
        step, ordinary = step_of(ours), OrdinaryStep(theirs, squares, adamw(theirs))
        for call in range(STEPS):
            data = batch(seed=WORLD * call + rank)
            torch.testing.assert_close(step(*data), ordinary(*data), rtol=1e-4, atol=1e-4)
    assert_equal_everywhere(ours.parameters())
    # From the last: bias and weight of "last" (12 and 96 bytes), "scale", bias of "mix" (32), its weight (256).
    assert communications(step) == 4
    assert ours.mix.weight.is_contiguous(memory_format=torch.channels_last)


def clipped(rank: int) -> None:
    """The norm is that of the averages, so that it is the same in both processes."""
    as_ddp(rank, clip_norm=0.1)


def accumulated(rank: int) -> None:
    """A micro-batch that is not the last waits for nobody."""
    _, _, step = as_ddp(rank, accumulate=2, clip_norm=0.5)
    for turn in range(WORLD):
        if turn == rank:
            step(*batch(seed=rank))
        dist.barrier()
    step(*batch(seed=rank))
    assert step.micro_batches == 0


def normalized(rank: int) -> None:
    """Each process keeps statistics of its own batches. Those of the first are DDP's, which gives them to all."""
    # A bias before a norm has gradients of rounding errors, of which AdamW makes steps.
    layers = lambda: nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))
    theirs, ours, _ = as_ddp(rank, layers)
    if rank == 0:
        torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()), rtol=1e-4, atol=1e-4)
    statistics = [torch.empty(8) for _ in range(WORLD)]
    dist.all_gather(statistics, ours[1].running_mean)
    assert not torch.equal(*statistics)


def begins_alike(rank: int) -> None:
    """Parameters and buffers of the first process are written into the tensors of the others."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[1].running_mean.fill_(rank)
    model.register_buffer("mask", torch.tensor([rank == 0]))
    tensors = [*model.parameters(), *model.buffers()]
    step_of(model)
    assert model[1].running_mean.eq(0).all() and model.mask.all()
    for tensor, now in zip(tensors, [*model.parameters(), *model.buffers()], strict=True):
        assert tensor is now
    assert_equal_everywhere(model.parameters())


def same_data(rank: int) -> None:
    """Two processes with one batch compute what one process computes, bit for bit: (g / 2) + (g / 2) is g."""
    torch.manual_seed(0)
    together, alone = Net(), Net()
    alone.load_state_dict(together.state_dict())
    steps = [step_of(together), fxwrap.train_step(alone, squares, adamw(alone))]
    for call in range(STEPS):
        ours, expected = (step(*batch(seed=call)) for step in steps)
        assert torch.equal(ours, expected)
    for value, expected in zip(values(together), values(alone), strict=True):
        assert torch.equal(value, expected)


def refused(rank: int) -> None:
    """What differs between processes is said by all of them, where they would wait for each other."""
    model = Net()
    other = dist.new_group([0])
    if rank == 0:
        fxwrap.train_step(model, squares, adamw(model), group=other)
    else:
        with pytest.raises(TrainStepError, match="a group that process 1 is not in"):
            fxwrap.train_step(model, squares, adamw(model), group=other)
    with pytest.raises(TrainStepError, match="got: str 'gloo'"):
        fxwrap.train_step(model, squares, adamw(model), group="gloo")  # type: ignore[arg-type]
    with pytest.raises(TrainStepError, match="accumulate=1 in process 0 of the group, accumulate=2 in process 1"):
        step_of(model, accumulate=1 + rank)
    with pytest.raises(TrainStepError, match=r"first\.weight: float32\[8, 4\], trained in .*\[9, 4\], trained in"):
        step_of(Net(8 + rank))
    with pytest.raises(TrainStepError, match="give the module inside of it, and group="):
        step_of(DistributedDataParallel(model))
    model.norm.bias.requires_grad_(rank == 0)
    with pytest.raises(TrainStepError, match=r"norm\.bias: float32\[8\], trained in .*, norm\.bias: float32\[8\] in"):
        step_of(model)


if __name__ == "__main__":
    scenarios = (plain, buckets, clipped, accumulated, normalized, begins_alike, same_data, refused)
    take_part({scenario.__name__: scenario for scenario in scenarios})
