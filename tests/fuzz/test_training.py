"""Training programs, drawn: a step does what the ordinary loop does, in float64, and holds its limits.

``training_sweep.py`` beside this runs any number of them.
"""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from training import HABITS, OurSide, Step, Training, differs, random_training, run, shrunk
from training_grammar import LOSSES, OPTIMIZERS, PARTS, Optimizer, Part, Recipe, made_from, source_of
from within_limit import DifferenceError

from fxwrap.errors import causes
from fxwrap.features.train_step.written.settings import Settings
from fxwrap.features.train_step.written.watched import Watched

# Of every run: compiling takes nearly all of its time.
DRAWN = (18, 20, 25, 27)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def made(
    *habits: str, parts: tuple[str, ...] = ("linear",), pick: int = 1, setting: int = 1, **more: Any
) -> Training:
    """A program of few parts, whose tasks take turns, with these habits before its calls; one ends in its size."""
    recipe = Recipe(tuple(Part(kind, pick) for kind in parts), "squares")
    optimizer = more.pop("optimizer", Optimizer("SGD", ()))
    given = [habit.partition("@") for habit in habits]
    calls = tuple(Step(int(size or 0), n % 2, habit, setting) for n, (habit, _, size) in enumerate(given))
    return Training(recipe, optimizer, calls, **more)


def _with(name: str, **settings: Any) -> Optimizer:
    return Optimizer(name, tuple(settings.items()))


TWICE = {"accumulate": 2}
# What has once been found, in a few calls each.
PROGRAMS = {
    "heads that take turns": made("", "", "", "", parts=("linear", "heads"), **TWICE),
    "a layer that is used now and then": made("", "", "", "", parts=("linear", "sometimes"), pick=0, **TWICE),
    "an ordinary step before": made("ordinary step", "", "ordinary step", "", **TWICE),
    "a backward between": made("", "", "backward", "", "zero_grad to zeros", "", "gradients given", "", **TWICE),
    "gradients dropped": made("", "", "zero_grad", "", "gradients dropped", "", **TWICE),
    "dampening": made("", "", "", "", optimizer=_with("SGD", momentum=0.9, dampening=0.5), **TWICE),
    "an inverse of data": made("", "", "", parts=("linear", "solved"), pick=0),
    "an inverse of a weight": made("", "", "", parts=("linear", "solved"), pick=1),
    "an operator with an effect": made("", "", "", parts=("linear", "tells")),
    "a limit with an effect": made("", "limit", "", parts=("linear", "solved"), pick=0),
    "attention at other sizes": made("@1", "@2", "limit@3", "@3", "@3", parts=("linear", "attention")),
    "a convolution at other sizes": made("@1", "@2", "limit@3", "@3", "@3", parts=("linear", "convolution")),
    "an operator with memory of its own": made(
        "@3", "@3", "limit@3", "@3", "@3", "@3", parts=("linear", "takes_memory")
    ),
    "a rate that is no float32": made("", "rate", optimizer=_with("RMSprop"), float64=False),
    "an optimizer's hook that comes later": made("", "", "optimizer hook", ""),
    "a module's hook that comes later": made("", "", "module hook", ""),
    "a parameter's hook that comes later": made("", "", "parameter hook", ""),
    "recording": made("", "record", "", parts=("linear", "batch_norm"), optimizer=_with("AdamW")),
    "recording within an update": made("", "record", "", "", "record", "", **TWICE),
    "a dry run": made("", "dry run", "", optimizer=_with("AdamW")),
    "explaining": made("", "explain", "", optimizer=_with("AdamW")),
}
_IN_TURN = ["", *["settings in turn"] * 4]
for _name, _settings, _of in (
    ("SGD", {}, "weight_decay"),
    ("SGD", {"momentum": 0.9, "nesterov": True}, "momentum"),
    ("Adam", {}, "weight_decay"),
    ("RMSprop", {}, "alpha"),
    ("Adadelta", {}, "rho"),
):
    _optimizer = _with(_name, **_settings)
    PROGRAMS[f"{_of} of {_name} that changes"] = made(
        *_IN_TURN,
        optimizer=_optimizer,
        setting=_optimizer.changeable.index(_of),
        dynamic=None,
        float64=_name == "Adam",
    )


@pytest.mark.compiler
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_was_found(name: str) -> None:
    run(PROGRAMS[name], torch.device("cpu"))


@pytest.mark.compiler
def test_sizes_that_data_decide_are_refused_within_a_limit() -> None:
    training = made("@3", "@3", "limit@3", "@3", "@3", "@3", parts=("linear", "some_rows"), pick=0)
    try:
        run(training, torch.device("cpu"))
    except Exception as error:
        reasons = [str(cause) for cause in causes(error)]
    assert any("data decide on the size of" in reason for reason in reasons)


@pytest.mark.compiler
@pytest.mark.every(2)
@pytest.mark.parametrize("number", DRAWN)
def test_a_sample(device: torch.device, number: int) -> None:
    training = random_training(random.Random(number))
    run(dataclasses.replace(training, steps=training.steps[:6]), device)


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, 300, 25))
def test_many(device: torch.device, first: int) -> None:
    for number in range(first, first + 25):
        try:
            run(random_training(random.Random(number)), device)
        except DifferenceError as error:
            raise DifferenceError(f"program {number}: {error}") from None


# -- the grammar -----------------------------------------------------------------------------------------------------


def test_every_part_of_a_model_is_a_model() -> None:
    for part in PARTS:
        for pick in range(6):
            space = made_from(source_of(Recipe((Part("linear", 1), Part(part, pick)), list(LOSSES)[pick % 3])))
            x, y = torch.randn(2, 5, 16).unbind()
            loss = space["loss"](space["Model"](), x, y, torch.arange(5), pick)
            (loss[0] if isinstance(loss, tuple) else loss).backward()


def test_every_habit_and_optimizer_is_drawn() -> None:
    drawn = [random_training(random.Random(number)) for number in range(300)]
    assert {step.habit for training in drawn for step in training.steps} == {"", *HABITS}
    assert {training.optimizer.name for training in drawn} == set(OPTIMIZERS)
    assert set.union(*(training.recipe.kinds for training in drawn)) == set(PARTS)


# -- faults that it has to find --------------------------------------------------------------------------------------


def _loses_an_update(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OurSide, "_call", lambda self, batch: self.seen.append(self.loss(self.model, *batch).detach()))


def _overlooks_settings(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Settings, "hold", lambda _: True)


def _overlooks_hooks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Watched, "holds", lambda _: True)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("plant", "training"),
    [
        (_loses_an_update, made("", "")),
        (_overlooks_settings, PROGRAMS["weight_decay of SGD that changes"]),
        (_overlooks_hooks, PROGRAMS["a parameter's hook that comes later"]),
    ],
)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, plant: Any, training: Training) -> None:
    plant(monkeypatch)
    with pytest.raises(DifferenceError):
        run(training, torch.device("cpu"))


@pytest.mark.compiler
def test_what_differs_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the calls, the habits and the parts that it takes."""
    monkeypatch.setattr("training.run", _fails_at_a_hook)
    training = made("", "seed", "optimizer hook", "keep", parts=("linear", "block"), clip_norm=0.5, schedule="StepLR")
    small = shrunk(training, torch.device("cpu"), differs)
    assert [step.habit for step in small.steps] == ["optimizer hook"]
    assert (len(small.recipe.parts), small.clip_norm, small.schedule) == (1, None, "")


def _fails_at_a_hook(training: Training, device: torch.device, side: type[OurSide]) -> int:
    if any(step.habit == "optimizer hook" for step in training.steps):
        raise DifferenceError
    return 0
