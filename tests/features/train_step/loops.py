"""The ordinary training loop, behind the interface of ``fxwrap.train_step``, and what both are compared on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import fxwrap

# (model, loss, optimizer, **settings) -> step(*batch)
Maker = Callable[..., Callable[..., Any]]
# What a user does with a model, an optimizer and steps; returns what it sees, such as losses.
Habit = Callable[[Maker], Iterable[Any]]


class OrdinaryStep:
    """What ``fxwrap.train_step`` is said to mean, written out."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        optimizer: Optimizer,
        *,
        clip_norm: float | None = None,
        accumulate: int = 1,
        **_: Any,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.clip_norm, self.accumulate, self.calls = clip_norm, accumulate, 0

    def __call__(self, *batch: Any, **more: Any) -> Any:
        if self.calls % self.accumulate == 0:
            self.optimizer.zero_grad()
        outputs = self.loss(self.model, *batch, **more)
        value = outputs[0] if isinstance(outputs, tuple) else outputs
        (value / self.accumulate).backward()
        self.calls += 1
        if self.calls % self.accumulate == 0:
            if self.clip_norm is not None:
                parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
                nn.utils.clip_grad_norm_(parameters, self.clip_norm)
            self.optimizer.step()
        return tuple(o.detach() for o in outputs) if isinstance(outputs, tuple) else value.detach()


def assert_same(habit: Habit, tolerance: float = 1e-5) -> Any:
    """Run a habit with ordinary steps and with fxwrap's, and compare what it returns. Returns the last step made."""
    steps: list[Any] = []

    def make(*args: Any, **settings: Any) -> Any:
        steps.append(fxwrap.train_step(*args, **settings))
        return steps[-1]

    torch.manual_seed(0)
    expected = list(habit(OrdinaryStep))
    torch.manual_seed(0)
    got = list(habit(make))
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    return steps[-1]


def values(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all that a model holds."""
    return [value.detach().clone() for value in model.state_dict().values()]


class Net(nn.Module):
    """Two layers with a norm between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x) - y) ** 2).mean()


def batch(rows: int = 5, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 3, generator=generator)
