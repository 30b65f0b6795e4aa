"""Every optimizer of torch's: a step that is a program makes the update that ``optimizer.step()`` makes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import Maker, Net, assert_same, batch, squares, values
from torch import optim

import fxwrap
from fxwrap.features.train_step.optimizers import make_states

Make = Callable[..., optim.Optimizer]
_OPTIMIZERS: dict[str, Make] = {
    "Adadelta": optim.Adadelta,
    "Adagrad": functools.partial(optim.Adagrad, lr_decay=0.1),
    "Adam": functools.partial(optim.Adam, amsgrad=True, weight_decay=0.1),
    "Adamax": optim.Adamax,
    "AdamW": optim.AdamW,
    "AdamW fused": functools.partial(optim.AdamW, fused=True),
    "AdamW of single tensors": functools.partial(optim.AdamW, foreach=False, maximize=True, lr=1e-4),
    "ASGD": optim.ASGD,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": functools.partial(optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "Rprop": functools.partial(optim.Rprop, lr=1e-3),
    "SGD": functools.partial(optim.SGD, lr=1e-2),
    "SGD with momentum": functools.partial(optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": functools.partial(optim.SGD, lr=1e-2, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_an_update_is_the_optimizers(name: str) -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        optimizer = _OPTIMIZERS[name](model.parameters())
        step = make(model, squares, optimizer)
        for _ in range(12):
            yield step(*batch())
        yield values(model)
        yield [state.get("step", 0) for state in optimizer.state.values()]

    step = assert_same(habit, 1e-4)
    counters = fxwrap.stats(step)
    assert counters["programs"] == 1 and not counters["fallbacks"]


def test_muon_trains_matrices_beside_another_optimizer() -> None:
    """Muon takes matrices only, so that a model has two optimizers: the rest stays with the ordinary loop."""
    if not hasattr(optim, "Muon"):
        pytest.skip("torch has no Muon")

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        step = make(model, squares, optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-4))
        for _ in range(6):
            yield step(*batch())

    assert_same(habit, 1e-3)


def test_the_first_update_with_dampening_runs_as_the_loop_does() -> None:
    """SGD makes its momentum of the first gradients, without dampening. Later updates are like others."""

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        step = make(model, squares, optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, dampening=0.5))
        for _ in range(5):
            yield step(*batch())

    step = assert_same(habit)
    assert sum(step.ordinary_calls.values()) == 1 and fxwrap.stats(step)["replays"] >= 2


def test_the_first_call_of_every_optimizer_is_a_program() -> None:
    """But for SGD with dampening, whose first update is another, and what evaluates the loss several times."""
    classes = {value for value in vars(optim).values() if isinstance(value, type)}
    classes = {one for one in classes if issubclass(one, optim.Optimizer) and one is not optim.Optimizer}
    for kind in classes - {optim.LBFGS, optim.SparseAdam}:
        model = torch.nn.Linear(4, 3, bias=False)
        optimizer = kind(model.parameters(), lr=1e-3)
        model(batch()[0]).square().mean().backward()
        made = make_states(optimizer, list(model.parameters()))
        assert made or kind in (optim.SGD, optim.Adagrad, optim.Adafactor), kind


def test_parameters_and_state_are_static_inputs() -> None:
    """All but the batch: an accelerator's graphs read them where they are, and the cost of copies is not counted."""
    model = Net()
    step = fxwrap.train_step(model, squares, optim.AdamW(model.parameters(), lr=1e-3))
    step(*batch())
    plan = fxwrap.report(step).graphs[0].program.plan
    parameters = len(list(model.parameters()))
    learning_rate = 1
    assert len(plan.inputs.static) == 4 * parameters + learning_rate  # two averages, and a count of steps
    assert len(plan.placeholders) - len(plan.inputs.static) == 2
