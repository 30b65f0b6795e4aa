"""Gradients of several micro-batches: what is in ``p.grad``, when it is read, written and cleared.

A step with ``accumulate=2`` beside the ordinary loop::

    call 1    optimizer.zero_grad()         p.grad is not read: the sum begins
              (loss(...) / 2).backward()    p.grad is the sum so far
    call 2    (loss(...) / 2).backward()
              optimizer.step()              p.grad is what the update was made of
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loops import Maker, Net, assert_same, batch, squares, values
from torch import nn, optim

import fxwrap

pytestmark = [pytest.mark.compiler, pytest.mark.every(3)]


class Heads(nn.Module):
    """A layer with two heads, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 2) for _ in range(2))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.heads[task](torch.tanh(self.body(x)))


def _loss_of_head(model: nn.Module, x: torch.Tensor, task: int) -> torch.Tensor:
    return model(x, task).square().mean()


def _grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("tasks", [[0, 1], [1, 0, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}], ids=["", "clipped"])
def test_heads_that_take_turns(device: torch.device, tasks: list[int], settings: dict[str, Any]) -> None:
    """A parameter with a gradient in any micro-batch is updated; one without is not, and its ``p.grad`` is None."""

    def habit(make: Maker) -> Iterator[Any]:
        model = Heads()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        step = make(model, _loss_of_head, optimizer, accumulate=len(tasks), **settings)
        for n in range(4):
            for task in tasks:
                yield step(batch(seed=n)[0], task)
                yield _grads(model)
            yield values(model)

    assert_same(habit)


def _stale(what: str, model: nn.Module, optimizer: optim.Optimizer) -> None:
    x, y = batch(seed=9)
    if what == "an ordinary step":
        optimizer.zero_grad()
        squares(model, x, y).backward()
        optimizer.step()
    elif what == "a backward":
        squares(model, x, y).backward()
    elif what == "other tensors":
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    elif what == "values in place":
        for p in model.parameters():
            if p.grad is not None:
                p.grad.fill_(3)
    elif what == "zeros":
        optimizer.zero_grad(set_to_none=False)
    else:
        optimizer.zero_grad()


_STALE = ["an ordinary step", "a backward", "other tensors", "values in place", "zeros", "None"]


@pytest.mark.parametrize("what", _STALE)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_a_gradient_holds_between_updates_is_not_read(device: torch.device, what: str, accumulate: int) -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        _stale(what, model, optimizer)
        step = make(model, squares, optimizer, accumulate=accumulate)
        for n in range(12):
            if n % accumulate == 0 and n % 2:
                _stale(what, model, optimizer)
            yield step(*batch(seed=n))
        yield values(model)

    assert_same(habit)


@pytest.mark.parametrize("what", [what for what in _STALE if what != "an ordinary step"])
def test_what_the_caller_does_to_gradients_within_an_update_counts(device: torch.device, what: str) -> None:
    """As in the ordinary loop, whose ``optimizer.step()`` takes what is in ``p.grad``."""

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = make(model, squares, optimizer, accumulate=3)
        for n in range(12):
            yield step(*batch(seed=n))
            if n % 3 != 2 and n > 3:
                _stale(what, model, optimizer)
            yield _grads(model)
        yield values(model)

    assert_same(habit)


def test_a_step_for_each_batch_leaves_no_gradients() -> None:
    """As after ``zero_grad()``, with which it begins: what p.grad held before counts for nothing."""
    model = Net()
    step = fxwrap.train_step(model, squares, optim.SGD(model.parameters(), lr=0.1))
    step(*batch())
    assert _grads(model) == [None] * 6
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    step(*batch())
    assert _grads(model) == [None] * 6


def test_parameters_that_are_added_between_updates() -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        optimizer = optim.SGD(model.first.parameters(), lr=0.1)
        step = make(model, squares, optimizer, accumulate=2)
        for n in range(4):
            yield step(*batch(seed=n))
        optimizer.add_param_group({"params": model.norm.parameters(), "lr": 0.05})
        for n in range(4):
            yield step(*batch(seed=n))
        yield values(model)

    assert_same(habit)


def test_replays_copy_no_gradients() -> None:
    """Steady state: two programs for micro-batches and one for the update, each replayed."""
    model = Net()
    step = fxwrap.train_step(model, squares, optim.SGD(model.parameters(), lr=0.1), accumulate=3)
    for n in range(9):
        step(*batch(seed=n))
    before = fxwrap.stats(step)
    sums = [p.grad for p in model.parameters()]
    for n in range(6):
        step(*batch(seed=n))
    after = fxwrap.stats(step)
    assert after["programs"] == 3 and after["replays"] == before["replays"] + 6
    assert all(p.grad is total for p, total in zip(model.parameters(), sums, strict=True))


def test_each_program_of_an_update_is_compiled_once() -> None:
    """State is made before the first of them, which does not use it: otherwise that one would be compiled again."""
    model = Net()
    step = fxwrap.train_step(model, squares, optim.AdamW(model.parameters()), accumulate=2)
    for n in range(6):
        step(*batch(seed=n))
        assert len(step.optimizer.state) == len(list(model.parameters()))
    assert sum(step.traced.values()) == 2 and not step.ordinary_calls


def test_frozen_between_updates() -> None:
    """What a frozen parameter has had in an earlier update is cleared, and does not come back when it thaws."""

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step, last = make(model, squares, optimizer, accumulate=2), list(model.parameters())[-1]
        for n, trained in enumerate((True, False, False, True)):
            last.requires_grad_(trained)
            for seed in (2 * n, 2 * n + 1):
                yield step(*batch(seed=seed))
                yield _grads(model)
            yield values(model)

    assert_same(habit)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}], ids=["", "clipped"])
def test_frozen_within_an_update(settings: dict[str, Any]) -> None:
    """Its gradient of the first micro-batch is there, and is taken; so it counts in the norm."""

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        step = make(model, squares, optim.SGD(model.parameters(), lr=0.1), accumulate=2, **settings)
        last = list(model.parameters())[-1]
        for n in range(3):
            yield step(*batch(seed=n))
            last.requires_grad_(False)
            yield step(*batch(seed=n)), values(model)
            last.requires_grad_(True)

    assert_same(habit)
