"""Reports on an optimizer's step that is compiled, and compiled anew whenever a scheduler changes a number.

The loop of a report is written once, over a maker of steps: eager, with ``torch.compile(optimizer.step)``, and as
``fxwrap.train_step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from reports import Steps, reported_training
from torch.optim import Adam, AdamW, Optimizer, lr_scheduler

_STEPS = 10


def _losses(
    steps: Steps, rate: float | torch.Tensor, make_schedule: Callable[[Optimizer], lr_scheduler.LRScheduler]
) -> Iterator[torch.Tensor]:
    """The losses of steps with AdamW, after each of which the scheduler takes one, too."""
    step, optimizer = steps.make(lambda parameters: AdamW(parameters, lr=rate))
    schedule = make_schedule(optimizer)
    for _ in range(_STEPS):
        yield step(torch.randn(8, 4))
        schedule.step()


@reported_training(
    107076,
    symptom="a learning rate is a number, and AdamW's step is compiled again at each change that a scheduler makes",
    graphs=2,
    inductor="compiled twice, since a number that has changed becomes an input: not seen",
    ours="one program reads the rate at every step",
)
def test_a_rate_that_is_a_number(steps: Steps) -> Iterator[torch.Tensor]:
    return _losses(steps, 1e-2, lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=2 * _STEPS))


@reported_training(
    130467,
    symptom="a scheduler over a rate that is a tensor: the second step is compiled again",
    graphs=1,
    inductor="compiled once: not seen",
    ours="one program reads the tensor at every step",
)
def test_a_rate_that_is_a_tensor(steps: Steps) -> Iterator[torch.Tensor]:
    rate = torch.tensor(1e-2)
    return _losses(steps, rate, lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=2 * _STEPS))


@reported_training(
    133898,
    symptom="OneCycleLR changes beta1 with the rate, and AdamW's step is compiled again at each of its steps",
    graphs=8,
    inductor="compiled eight times, and then run eagerly, as reported",
    ours="one program and, from the first change of beta1 on, a second one that reads it",
    programs=2,
)
def test_a_beta_that_a_scheduler_changes(steps: Steps) -> Iterator[torch.Tensor]:
    rate = torch.tensor(1e-2)
    return _losses(steps, rate, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2 * _STEPS))


@reported_training(
    163093,
    symptom="ReduceLROnPlateau puts a number in the place of a rate that was a tensor: Adam's step is compiled again",
    graphs=1,
    inductor="compiled once; the rate stays a tensor: not seen",
    ours="one program, and the rate is what the scheduler says",
)
def test_a_rate_on_a_plateau(steps: Steps) -> Iterator[torch.Tensor]:
    step, optimizer = steps.make(lambda parameters: Adam(parameters, lr=torch.tensor(1e-2)))
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0)
    for _ in range(_STEPS):
        loss = step(torch.randn(8, 4))
        yield loss
        schedule.step(loss)
        yield torch.as_tensor(optimizer.param_groups[0]["lr"])
