"""Checked mode of steps as they are written: it finds what a replay does not see, and nothing else."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_written_steps import named, run, state_of
from torch import nn
from written_habits import HABITS, mlp, xy

import fxwrap

pytestmark = [pytest.mark.compiler, pytest.mark.launches_graphs]  # checks replay, too


@pytest.mark.parametrize("name", named)
def test_a_step_that_is_right_passes_at_every_call(name: str) -> None:
    """Also where Adam turns gradients that are roundings into steps of the whole rate."""
    if name == "checkpoint_reentrant":  # it leaves a gradient in its argument, which a replay does not
        with pytest.raises(fxwrap.CheckError, match=r"argument 0.grad is None, and float32\[5, 6\]"):
            run(HABITS[name], lambda step: fxwrap.train_step(step, options={"checked": 1}))
        return
    _, _, step = run(HABITS[name], lambda step: fxwrap.train_step(step, options={"checked": 1}))
    assert not any("checked" in reason for reason in fxwrap.stats(step)["ordinary"])


class Settings:
    def __init__(self) -> None:
        self.scale, self.hidden = 1.0, {"scale": 1.0}

    @property
    def computed(self) -> float:
        return float(self.__dict__["hid" + "den"]["scale"])


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


# A module of an installed package, as far as the search can tell.
library = types.ModuleType("library_of_others")
library.__file__ = np.__file__
library.scale = 1.0  # type: ignore[attr-defined]
sys.modules[library.__name__] = library


def _by_a_text(changes: list[Callable[[], None]]) -> Callable[[], float]:
    settings = Settings()
    changes.append(lambda: setattr(settings, "scale", 1.05))
    return lambda: float(getattr(settings, "sca" + "le"))


def _in_slots(changes: list[Callable[[], None]]) -> Callable[[], float]:
    slotted = Slotted()
    changes.append(lambda: setattr(slotted, "scale", 1.05))
    return lambda: slotted.scale


def _of_a_property(changes: list[Callable[[], None]]) -> Callable[[], float]:
    settings = Settings()
    changes.append(lambda: settings.hidden.update(scale=1.05))
    return lambda: settings.computed


def _in_a_queue(changes: list[Callable[[], None]]) -> Callable[[], float]:
    queue = deque([1.0])
    changes.append(lambda: queue.append(1.05))
    return lambda: queue[-1]


def _in_a_long_list(changes: list[Callable[[], None]]) -> Callable[[], float]:
    many = [1.0] * 2000
    changes.append(lambda: many.__setitem__(7, 1.05))
    return lambda: many[7]


def _of_a_library(changes: list[Callable[[], None]]) -> Callable[[], float]:
    library.scale = 1.0  # type: ignore[attr-defined]
    changes.append(lambda: setattr(library, "scale", 1.05))
    return lambda: float(library.scale)  # type: ignore[attr-defined]


def _drawn_by_numpy(changes: list[Callable[[], None]]) -> Callable[[], float]:
    generator = np.random.default_rng(0)
    changes.append(lambda: None)
    return lambda: float(generator.random())


UNSEEN = [_by_a_text, _in_slots, _of_a_property, _in_a_queue, _in_a_long_list, _of_a_library, _drawn_by_numpy]


@pytest.mark.parametrize("unseen", UNSEEN, ids=lambda one: one.__name__.strip("_"))
def test_a_number_that_a_replay_does_not_see_is_found(unseen: Any) -> None:
    changes: list[Callable[[], None]] = []
    scale, model = unseen(changes), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = scale() * F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step = fxwrap.train_step(written, options={"checked": 1})
    with pytest.raises(fxwrap.CheckError, match="where roundings make") as found:
        for number in range(8):
            before = {name: tensor.clone() for name, tensor in state_of(written).items()}
            if number == 5:
                changes[0]()
            step(*xy())
    assert found.value.fault == "not the step as written"
    # The call has changed nothing; from now on the step runs as it is written, and says so.
    torch.testing.assert_close(state_of(written), before, rtol=0, atol=0)
    step(*xy())
    assert fxwrap.stats(step)["ordinary"]["checked mode has found: not the step as written"] == 1


class Batch:
    """An argument that is no tensor, tuple, list or dictionary."""

    def __init__(self) -> None:
        self.scale = 1.0


def test_what_changes_in_an_argument_of_another_kind_is_found() -> None:
    model, batch = mlp(), Batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def written(given: Batch, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = given.scale * F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step = fxwrap.train_step(written, options={"checked": 2})
    for _ in range(5):
        step(batch, *xy())
    batch.scale = 3.0
    with pytest.raises(fxwrap.CheckError):
        step(batch, *xy())
        step(batch, *xy())


def test_an_argument_that_a_distribution_refuses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process in which nothing was compiled yet: Dynamo switches these checks off for good.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def written(scale: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = -torch.distributions.Normal(model(x), scale).log_prob(y).mean()
        loss.backward()
        optimizer.step()
        return loss

    step = fxwrap.train_step(written, options={"checked": 1})
    for _ in range(4):
        step(torch.ones(3), *xy())
    with pytest.raises(fxwrap.CheckError, match="ValueError as the step is written"):
        step(torch.tensor([1.0, -1.0, 1.0]), *xy())


def test_a_gradient_that_is_asked_for_before_it_is_cleared_is_found() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if next(model.parameters()).grad is None else 2.0
        optimizer.zero_grad()
        loss = scale * F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step = fxwrap.train_step(written, options={"checked": 1})
    with pytest.raises(fxwrap.CheckError):
        for _ in range(4):
            step(*xy())


def test_random_numbers_are_those_of_the_step_as_written() -> None:
    model = nn.Sequential(mlp(), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x) + torch.randn(3) + torch.rand_like(y) + torch.bernoulli(torch.rand(3)), y)
        loss.backward()
        optimizer.step()
        return loss

    losses = []
    for wrap in (lambda step: step, lambda step: fxwrap.train_step(step, options={"checked": 1})):
        torch.manual_seed(0)
        step, x, y = wrap(written), *xy()
        nn.init.ones_(model[0][0].weight)  # type: ignore[index, arg-type]
        nn.init.ones_(model[0][2].weight)  # type: ignore[index, arg-type]
        losses.append([float(step(x, y)) for _ in range(6)])
    assert len(set(losses[1])) == 6
