"""What cannot be part of one program is said at once, all of it, and leaves everything as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import Maker, Net, assert_same, batch, squares, values
from torch import nn, optim

import fxwrap
from fxwrap import TrainStepError


def _refused(model: nn.Module, optimizer: optim.Optimizer, loss: object = squares) -> str:
    with pytest.raises(TrainStepError) as caught:
        fxwrap.train_step(model, loss, optimizer)  # type: ignore[arg-type]
    return str(caught.value)


def test_all_reasons_are_in_one_error() -> None:
    model = nn.DataParallel(Net())
    text = _refused(model, optim.LBFGS(model.parameters()), nn.MSELoss())
    for part in (
        "DataParallel communicates by itself: give the module inside of it",
        "LBFGS evaluates the loss several times",
        "MSELoss, which compares outputs with a target",
    ):
        assert part in text


def test_sparse_gradients() -> None:
    model = nn.Embedding(5, 4, sparse=True)
    assert "Embedding has sparse gradients" in _refused(model, optim.SGD(model.parameters(), 0.1))


def test_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def scaled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return scaler.scale(squares(model, x, y))

    model = Net()
    assert "GradScaler (scaler)" in _refused(model, optim.SGD(model.parameters(), 0.1), scaled)


def test_an_optimizer_of_the_users_is_trained_with() -> None:
    class Own(optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(p.grad)

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        step = make(model, squares, Own(model.parameters(), 0.1))
        for _ in range(4):
            yield step(*batch()), values(model)

    assert_same(habit)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"accumulate": 0}, "at least 1"),
        ({"accumulate": True}, "int"),
        ({"clip_norm": 0}, "above 0"),
        ({"clip_norm": "1"}, "a number above 0"),
        ({"clip_norm": True}, "a number above 0"),
        ({"clip_norm": float("nan")}, "a number above 0"),
    ],
)
def test_wrong_settings(given: dict[str, object], says: str) -> None:
    model = Net()
    with pytest.raises(TrainStepError, match=says):
        fxwrap.train_step(model, squares, optim.SGD(model.parameters(), 0.1), **given)  # type: ignore[arg-type]


def test_what_is_no_model() -> None:
    model = Net()
    assert "got: function, function, SGD" in _refused(squares, optim.SGD(model.parameters(), 0.1))  # type: ignore[arg-type]


def test_a_decision_on_data_has_its_line_and_nothing_has_run() -> None:
    class Decides(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            if x.sum() > 0:
                x = self.norm(x)
            return self.last(x)

    model = Decides()
    optimizer = optim.AdamW(model.parameters())
    step, before = fxwrap.train_step(model, squares, optimizer), values(model)
    with pytest.raises(TrainStepError, match=r"test_refusals.py, line \d+: if x.sum\(\) > 0"):
        step(*batch())
    for value, kept in zip(values(model), before, strict=True):
        assert torch.equal(value, kept)
    squares(model, *batch()).backward()  # the ordinary loop works as before
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda step: copy.deepcopy({"step": step})], ids=range(4)
)
def test_a_step_is_not_copied(copied: Callable[[object], object]) -> None:
    """A copy would train the model of the original. What the error says to do is done here."""
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    step = fxwrap.train_step(model, squares, optimizer)
    step(*batch())
    with pytest.raises(TrainStepError, match="copy modules and optimizers together"):
        copied(step)
    twin, own = copy.deepcopy((model, optimizer))
    step_of_twin, before = fxwrap.train_step(twin, squares, own), values(model)
    losses = [step_of_twin(*batch()) for _ in range(3)]
    assert all(map(torch.equal, values(model), before))
    assert losses == [step(*batch()) for _ in range(3)]


def test_an_argument_that_is_not_there() -> None:
    model = Net()
    for given, meant in (
        ("memory_limt", "did you mean 'memory_limit'"),
        ("scaler", "it has modules, optimizers, clip_norm"),
    ):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{given}'; {meant}"):
            fxwrap.train_step(model, squares, optim.SGD(model.parameters(), 0.1), **{given: "1MiB"})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: Any) -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = kind(3, 4, batch_first=True)
        step = make(model, lambda model, x: model(x)[0].square().mean(), optim.Adam(model.parameters()))
        for _ in range(4):
            yield step(torch.ones(2, 3, 3))
        yield values(model)

    assert_same(habit)
