"""What is no call of a step changes nothing: ``record``, a dry run, ``explain``, in the middle of a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import batch
from torch import nn, optim

import fxwrap

pytestmark = [pytest.mark.compiler, pytest.mark.every(3)]


class Noisy(nn.Module):
    """It draws random numbers, and counts what it saw in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _all(model: nn.Module, optimizer: optim.Optimizer) -> list[Any]:
    """Everything that training changes."""
    states = [value.clone() for state in optimizer.state.values() for value in state.values()]
    grads = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [[v.clone() for v in model.state_dict().values()], states, grads, torch.get_rng_state()]


_LOOKS: dict[str, Callable[..., object]] = {
    "record": lambda step: fxwrap.record(step, (batch()[0],), (batch(rows=7)[0],)),
    "dry run": lambda step: fxwrap.record(step, (batch(rows=9)[0],), dry_run=True),
    "explain": lambda step: fxwrap.explain(step, batch()[0]),
    "explain, some calls": lambda step: fxwrap.explain(step, batch()[0], calls=3),
    "explain, measured": lambda step: fxwrap.explain(step, batch()[0], measure=True),
}


@pytest.mark.parametrize("look", _LOOKS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_look_changes_nothing(device: torch.device, look: str, accumulate: int) -> None:
    model = Noisy()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    step = fxwrap.train_step(model, _loss, optimizer, accumulate=accumulate)
    for made in range(4):  # before the first call, in an update, after it
        before, micro_batches = _all(model, optimizer), step.micro_batches
        _LOOKS[look](step)
        after = _all(model, optimizer)
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        assert step.micro_batches == micro_batches
        step(batch(seed=made)[0])


def test_losses_are_those_of_a_run_without_looks() -> None:
    def losses(looks: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Noisy()
        step = fxwrap.train_step(model, _loss, optim.SGD(model.parameters(), lr=0.1, momentum=0.9), accumulate=2)
        values = []
        for n in range(6):
            if looks:
                fxwrap.record(step, (batch()[0],))
            values.append(step(batch(seed=n)[0]))
        return values

    torch.testing.assert_close(losses(True), losses(False), rtol=0, atol=0)


def test_an_error_in_a_look_leaves_everything_as_it_was() -> None:
    model = Noisy()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = fxwrap.train_step(model, _loss, optimizer)
    step(batch()[0])
    fitting, wrong = (batch()[0],), (torch.randn(5, 3),)
    before = _all(model, optimizer)
    with pytest.raises((RuntimeError, fxwrap.TrainStepError)):
        fxwrap.record(step, fitting, wrong)
    torch.testing.assert_close(_all(model, optimizer), before, rtol=0, atol=0)


def test_explain_shows_the_step() -> None:
    model = Noisy()
    step = fxwrap.train_step(model, _loss, optim.SGD(model.parameters(), lr=0.1))
    explanation = fxwrap.explain(step, batch()[0], fxwrap_options={"capture": "always"})
    assert len(explanation.graphs) == 1 and "model.layers.0.weight" in str(explanation)
    step(batch()[0])
    assert fxwrap.stats(step)["programs"] == 1  # what was explained was a step of its own
