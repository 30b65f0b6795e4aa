"""What a loss is: everything else is refused in a few words, by the call that traces it, and changes nothing."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from loops import Net, OrdinaryStep, assert_same, batch, squares, values
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import fxwrap
from fxwrap import TrainStepError

pytestmark = pytest.mark.compiler


@dataclass
class Outputs:
    loss: torch.Tensor


class Named(OrderedDict[str, Any]):
    """As the outputs of transformers: a dictionary with attributes."""


def _made(loss: Callable[..., Any], device: torch.device | str = "cpu", **settings: Any) -> tuple[Net, Any]:
    model = Net().to(device)
    return model, fxwrap.train_step(model, loss, optim.AdamW(model.parameters()), **settings)


def _refused(step: Callable[..., Any], *given: Any) -> str:
    """The message of the error, which stands by itself: without what torch raised."""
    with pytest.raises(TrainStepError) as caught:
        step(*given)
    assert caught.value.__cause__ is None
    return str(caught.value)


WRONG = {
    "a dictionary": (lambda m, x, y: {"loss": squares(m, x, y)}, "of type dict", 'return outputs["loss"]'),
    "a dictionary of a library's": (lambda m, x, y: Named(loss=squares(m, x, y)), "of type Named", 'outputs["loss"]'),
    "a dataclass": (lambda m, x, y: Outputs(squares(m, x, y)), "of type Outputs", "the tensor that is in it"),
    "an empty tuple": (lambda m, x, y: (), "of type tuple", "a tuple"),
    "a tuple of tuples": (lambda m, x, y: ((squares(m, x, y), x), y), "tuple, in front of a tuple", "tensor"),
    "None": (lambda m, x, y: None, "got: None", "return loss"),
    "a number": (lambda m, x, y: 1.0, "of type float", "without .item()"),
    "an item": (lambda m, x, y: squares(m, x, y).item(), "of type float", "without .item()"),
    "not one number": (lambda m, x, y: m(x) - y, "shape [5, 3], torch.float32", "loss.mean()"),
    "in the second place": (lambda m, x, y: (m(x), squares(m, x, y)), "[5, 3], torch.float32, in front", "in front"),
    "detached": (lambda m, x, y: squares(m, x, y).detach(), "without a gradient", ".detach()"),
    "of no parameter": (lambda m, x, y: x.sum(), "without a gradient", "parameters that require gradients"),
    "integers": (lambda m, x, y: m(x).argmax(-1).sum(), "shape [], torch.int64", "floating point"),
    "a comparison": (lambda m, x, y: (m(x) > y).all(), "torch.bool", "floating point"),
    "complex": (lambda m, x, y: m(x).sum() * 1j, "torch.complex64", "loss.abs()"),
}


@pytest.mark.parametrize("settings", [{}, {"dynamic": True}, {"accumulate": 2, "clip_norm": 1.0}], ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_loss(name: str, settings: dict[str, Any]) -> None:
    loss, got, remedy = WRONG[name]
    model, step = _made(loss, **settings)
    before = values(model)
    for _ in range(2):
        text = _refused(step, *batch())
        assert got in text and remedy in text.splitlines()[3] and len(text.splitlines()) == 4
    assert all(map(torch.equal, values(model), before)) and step.micro_batches == 0


def test_a_tensor_of_one_element_is_a_loss() -> None:
    """As for ``backward()``: a batch of one gives one, also where none of more rows does."""

    def rows(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) - y).square().mean(1)

    _, step = _made(rows)
    assert step(*batch(1)).shape == (1,)
    assert "shape [4]" in _refused(step, *batch(4))
    assert step(*batch(1)).shape == (1,)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients(off: Callable[[], AbstractContextManager[None]], device: torch.device) -> None:
    """The ordinary loop raises there, too. Nothing has changed, and the next step is as it would have been."""

    def habit(make: Any) -> Iterator[Any]:
        model = Net().to(device)
        given = [part.to(device) for part in batch()]
        step = make(model, squares, optim.AdamW(model.parameters()))
        for n in range(6):
            if n in (0, 4):
                before = values(model)
                with off(), pytest.raises((TrainStepError, RuntimeError)) as caught:
                    step(*given)
                if make is not OrdinaryStep:
                    assert "gradients are off" in str(caught.value) and "outside of it" in str(caught.value)
                assert all(map(torch.equal, values(model), before))
            yield step(*given)

    step = assert_same(habit)
    assert fxwrap.stats(step)["replays"] >= 3


def test_a_loss_that_switches_gradients_on() -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return squares(model, x, y)

    model = Net()
    twin = copy.deepcopy(model)
    step = fxwrap.train_step(model, loss, optim.AdamW(model.parameters()))
    of_twin = fxwrap.train_step(twin, squares, optim.AdamW(twin.parameters()))
    for _ in range(3):
        with torch.no_grad():
            got = step(*batch())
        assert torch.equal(got, of_twin(*batch()))


# What is not trained.


def test_a_model_with_nothing_to_train() -> None:
    """Parameters may be frozen when the step is made, and require gradients when it is called."""
    model, step = _made(squares)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    text = _refused(step, *batch())
    assert "no parameter of the optimizer requires a gradient" in text and len(text.splitlines()) == 4
    model.last.requires_grad_(True)
    before = values(model)
    step(*batch())
    changed = [not torch.equal(now, then) for now, then in zip(values(model), before, strict=True)]
    assert changed == [name.startswith("last") for name in model.state_dict()]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_of_another_model(accumulate: int, device: torch.device) -> None:
    """The optimizer has none of the model's parameters; or the loss calls another model than the optimizer trains."""
    model, other = Net().to(device), Net().to(device)
    given = [part.to(device) for part in batch()]
    of_other = optim.SGD(other.parameters(), 0.1, weight_decay=0.1)
    of_model = optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    steps = [
        fxwrap.train_step(model, squares, of_other, accumulate=accumulate),
        fxwrap.train_step(model, lambda _, x, y: squares(other, x, y), of_model, accumulate=accumulate),
    ]
    before = [values(model), values(other)]
    for step in steps:
        text = _refused(step, *given)
        assert "none of the optimizer's 6 parameters" in text and "make the optimizer of parameters" in text
    for now, then in zip((values(model), values(other)), before, strict=True):
        assert all(map(torch.equal, now, then))


def test_parameters_that_are_not_the_models_are_trained_where_the_loss_uses_them() -> None:
    def habit(make: Any) -> Iterator[Any]:
        model, head = Net(), nn.Linear(3, 3)
        model.requires_grad_(False)
        step = make(model, lambda m, x, y: (head(m(x)) - y).square().mean(), optim.SGD(head.parameters(), 0.1))
        for _ in range(4):
            yield step(*batch())
        yield values(head)

    assert_same(habit)


# What a loss calls.


def _raises(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such batch")


def _of_outputs(outputs: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ((outputs - target) * weight).mean()


@pytest.mark.parametrize(
    ("loss", "kind", "says"),
    [
        (_raises, ValueError, "no such batch"),
        (_of_outputs, TypeError, "unsupported operand type(s) for -: 'Net' and "),
        (lambda outputs, target: (outputs - target).mean(), TypeError, "takes 2 positional"),
    ],
)
def test_what_a_loss_raises_is_raised(loss: Callable[..., Any], kind: type[Exception], says: str) -> None:
    """As by the ordinary loop."""
    model, step = _made(loss)
    before = values(model)
    with pytest.raises(kind) as caught:
        step(*batch())
    assert says in str(caught.value)
    assert all(map(torch.equal, values(model), before)) and not step.optimizer.state


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(), nn.functional.mse_loss, functools.partial(nn.functional.cross_entropy, label_smoothing=0.1)],
)
def test_functions_of_outputs_and_a_target(loss: Callable[..., Any]) -> None:
    with pytest.raises(TrainStepError, match=r"compares outputs with a target.*lambda model, x, y: loss\(model"):
        _made(loss)


def test_statistics_in_a_checkpointed_section() -> None:
    """They are written at each run of the section, as by the loop."""

    class Section(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: self.norm(self.first(x)), x, use_reentrant=False)  # type: ignore[no-any-return]

    counted = []
    for make in (OrdinaryStep, fxwrap.train_step):
        model = Section()
        make(model, squares, optim.SGD(model.parameters(), 0.1))(*batch())  # type: ignore[operator]
        counted.append(int(model.norm.num_batches_tracked))
    assert counted == [2, 2]
