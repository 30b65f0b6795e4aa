"""Every number that an optimizer is set with, changed between steps: the next step computes with the new one.

In float64, beside the ordinary loop. Where torch's ``capturable`` form counts steps in float32, numbers agree to
1e-6.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from loops import Maker, OrdinaryStep, assert_same, batch, squares, values
from torch import optim
from torch.optim import lr_scheduler

import fxwrap

pytestmark = [pytest.mark.compiler, pytest.mark.every(3)]

# What an optimizer is made with, and what each of its settings is at step n.
_At = Callable[[int], Any]
_DECAY: Mapping[str, _At] = {"weight_decay": lambda n: 0.1 + 0.05 * n}
_BETAS: Mapping[str, _At] = {"betas": lambda n: (0.9 - 0.02 * n, 0.99 - 0.01 * n), "eps": lambda n: 1e-3 * (1 + n)}
_RATE: Mapping[str, _At] = {"lr": lambda n: 0.02 / (1 + n)}
_EPS: Mapping[str, _At] = {"eps": lambda n: 1e-3 * (1 + n)}
_TABLE: dict[str, tuple[Callable[..., optim.Optimizer], Mapping[str, _At]]] = {
    "Adadelta": (optim.Adadelta, {**_RATE, **_DECAY, **_EPS, "rho": lambda n: 0.9 - 0.05 * n}),
    "Adagrad": (optim.Adagrad, {**_RATE, **_DECAY, **_EPS, "lr_decay": lambda n: 0.1 * (1 + n)}),
    "Adam": (optim.Adam, {**_RATE, **_DECAY, **_BETAS}),
    "Adam with amsgrad": (functools.partial(optim.Adam, amsgrad=True), {**_RATE, **_DECAY, **_BETAS}),
    "AdamW": (optim.AdamW, {**_RATE, **_DECAY, **_BETAS}),
    "Adamax": (optim.Adamax, {**_RATE, **_DECAY, **_BETAS}),
    "ASGD": (
        functools.partial(optim.ASGD, t0=1.0),
        {
            **_RATE,
            **_DECAY,
            "lambd": lambda n: 0.01 * (1 + n),
            "alpha": lambda n: 0.7 + 0.01 * n,
            "t0": lambda n: 1.0 + n,
        },
    ),
    "NAdam": (optim.NAdam, {**_RATE, **_DECAY, **_BETAS, "momentum_decay": lambda n: 0.004 * (1 + n)}),
    "NAdam, decoupled": (functools.partial(optim.NAdam, decoupled_weight_decay=True), {**_RATE, **_DECAY}),
    "RAdam": (optim.RAdam, {**_RATE, **_DECAY, **_BETAS}),
    "RMSprop": (
        functools.partial(optim.RMSprop, centered=True),
        {**_RATE, **_DECAY, **_EPS, "alpha": lambda n: 0.9 - 0.05 * n, "momentum": lambda n: 0.5 + 0.05 * n},
    ),
    "Rprop": (
        functools.partial(optim.Rprop, lr=1e-3),
        {"etas": lambda n: (0.5 - 0.02 * n, 1.2 + 0.02 * n), "step_sizes": lambda n: (1e-6 * (1 + n), 50.0 - n)},
    ),
    "SGD": (functools.partial(optim.SGD, lr=0.1), {**_RATE, **_DECAY}),
    "SGD with momentum": (
        functools.partial(optim.SGD, lr=0.1, nesterov=True, momentum=0.9),
        {**_RATE, **_DECAY, "momentum": lambda n: 0.9 - 0.05 * n},
    ),
}

_COUNTS_IN_FLOAT32 = ("Adam", "ASGD", "NAdam", "RAdam")


def _model() -> torch.nn.Module:
    return torch.nn.Linear(4, 3).double()


def _wide_batch(seed: int) -> tuple[torch.Tensor, ...]:
    return tuple(one.double() for one in batch(seed=seed))


@pytest.mark.parametrize("name", _TABLE)
def test_settings_that_change_at_every_step_are_read(name: str) -> None:
    make_optimizer, settings = _TABLE[name]

    def habit(make: Maker) -> Iterator[Any]:
        model = _model()
        optimizer = make_optimizer(model.parameters(), **{key: at(0) for key, at in settings.items()})
        step = make(model, squares, optimizer)
        for n in range(6):
            optimizer.param_groups[0].update({key: at(n) for key, at in settings.items()})
            yield step(*_wide_batch(n))
        yield values(model)

    step = assert_same(habit, 2e-6 if name.startswith(_COUNTS_IN_FLOAT32) else 1e-12)
    counters = fxwrap.stats(step)
    assert counters["programs"] == 2 and not counters["fallbacks"]  # one more at the first change
    assert counters["replays"] >= 2


class _Heads(torch.nn.Module):
    """Two heads, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        return self.heads[task](x)


@pytest.mark.parametrize(
    ("name", "rate", "accumulate"),
    [("ASGD", "number", 1), ("ASGD", "tensor", 2), ("Rprop", "number", 2), ("Rprop", "tensor", 1)],
)
def test_state_that_is_made_of_the_rate(device: torch.device, name: str, rate: str, accumulate: int) -> None:
    """The loop makes it of the rate at a parameter's first gradient; a step makes all states at once."""

    def habit(make: Maker) -> Iterator[Any]:
        model = _Heads().double().to(device)
        optimizer = getattr(optim, name)(model.parameters(), lr=torch.tensor(0.1) if rate == "tensor" else 0.1)
        step = make(
            model, lambda model, x, y, task: (model(x, task) - y).square().mean(), optimizer, accumulate=accumulate
        )
        for n, task in enumerate((0, 0, 0, 0, 1, 1, 0, 1)):
            if n % accumulate == 0:
                new = 0.1 / (1 + n)
                if rate == "tensor":
                    optimizer.param_groups[0]["lr"].fill_(new)
                else:
                    optimizer.param_groups[0]["lr"] = new
            if not isinstance(step, OrdinaryStep) and n in (2, 5):  # which changes nothing
                fxwrap.record(step, (*(one.to(device) for one in _wide_batch(9)), 1), dry_run=True)
            yield step(*(one.to(device) for one in _wide_batch(n)), task)
        yield values(model)

    assert_same(habit, 2e-6)


@pytest.mark.parametrize("bounds", [lambda n: (1e-6 * (1 + n), 50), lambda n: (0, 50.0 - n)], ids=["low", "high"])
def test_one_of_two_bounds_changes(device: torch.device, bounds: Callable[[int], Any]) -> None:
    """The other is no float, or zero, and stays a number."""

    def habit(make: Maker) -> Iterator[Any]:
        model = _model().to(device)
        optimizer = optim.Rprop(model.parameters(), lr=1e-3, foreach=False)
        step = make(model, squares, optimizer)
        for n in range(4):
            optimizer.param_groups[0]["step_sizes"] = bounds(n)
            yield step(*(one.to(device) for one in _wide_batch(n)))
        yield values(model)

    assert not fxwrap.stats(assert_same(habit, 1e-12))["fallbacks"]


def test_muon() -> None:
    if not hasattr(optim, "Muon"):
        pytest.skip("torch has no Muon")

    def habit(make: Maker) -> Iterator[Any]:
        model = _model()
        optimizer = optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-3)
        step = make(model, squares, optimizer)
        for n in range(4):
            optimizer.param_groups[0].update(lr=1e-3 / (1 + n), weight_decay=0.1 + 0.1 * n, momentum=0.9 - 0.1 * n)
            yield step(*_wide_batch(n))

    assert_same(habit, 5e-3)  # torch orthogonalises in bfloat16


def _schedulers() -> dict[str, Callable[[optim.Optimizer], Any]]:
    return {
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
        "a warm-up, then another": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
    }


@pytest.mark.parametrize("name", _schedulers())
@pytest.mark.parametrize("adam", [False, True], ids=["SGD", "AdamW"])
def test_schedulers(name: str, adam: bool) -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = _model()
        if adam:
            optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        else:
            optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
        step, scheduler = make(model, squares, optimizer), _schedulers()[name](optimizer)
        for n in range(10):
            yield step(*_wide_batch(n))
            scheduler.step()
            yield [group["lr"] for group in optimizer.param_groups]

    step = assert_same(habit, 2e-6 if adam else 1e-12)
    assert fxwrap.stats(step)["programs"] <= 2


def test_a_number_that_becomes_zero_and_comes_back() -> None:
    """Where a number is zero, functional forms do other work: another program, of which there are two in the end."""

    def habit(make: Maker) -> Iterator[Any]:
        model = _model()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        step = make(model, squares, optimizer)
        for n, decay in enumerate([0.1, 0.2, 0.0, 0.0, 0.3, 0.0, 0.4]):
            optimizer.param_groups[0]["weight_decay"] = decay
            yield step(*_wide_batch(n))
        yield values(model)

    step = assert_same(habit, 1e-12)
    assert fxwrap.stats(step)["programs"] == 3


def test_other_ways_to_change_a_setting() -> None:
    """Another group of parameters changes, a checkpoint with other settings is loaded, a flag is switched."""

    def habit(make: Maker) -> Iterator[Any]:
        model = _model()
        groups = [{"params": model.weight}, {"params": model.bias, "weight_decay": 0.3}]
        optimizer = optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1)
        step = make(model, squares, optimizer)
        for n in range(3):
            optimizer.param_groups[1]["weight_decay"] = 0.3 + 0.1 * n
            yield step(*_wide_batch(n))
        state = optimizer.state_dict()
        state["param_groups"][0]["weight_decay"] = 0.5
        state["param_groups"][1]["momentum"] = 0.7
        optimizer.load_state_dict(state)
        yield step(*_wide_batch(3))
        optimizer.param_groups[0]["nesterov"] = True
        yield step(*_wide_batch(4))
        yield values(model)

    assert_same(habit, 1e-12)


def test_a_rate_has_the_precision_of_the_parameters() -> None:
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    fxwrap.train_step(model, lambda m: m.weight.sum(), optim.SGD(model.parameters(), lr=0.1))()
    assert model.weight.item() == -0.1


@pytest.mark.parametrize("name", ["Adadelta", "ASGD", "RMSprop", "Rprop"])
@pytest.mark.parametrize("loaded", [False, True], ids=["made in float64", "loaded into float64"])
def test_counts_in_float64_are_written(name: str, loaded: bool) -> None:
    """Torch loses writes to such tensors where it analyses a function twice, as it does for a rate that changes."""

    def habit(make: Maker) -> Iterator[Any]:
        model = _model()
        optimizer = getattr(optim, name)(model.parameters(), foreach=False)
        step = make(model, squares, optimizer)
        for n in range(6):
            if loaded and n == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + n)
            yield step(*_wide_batch(n))
            yield [*values(model), *(v.double() for state in optimizer.state.values() for v in state.values())]

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if not loaded else before)
    try:
        assert_same(habit, 2e-6 if name.startswith(_COUNTS_IN_FLOAT32) else 1e-12)
    finally:
        torch.set_default_dtype(before)
