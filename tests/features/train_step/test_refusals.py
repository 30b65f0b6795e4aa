"""What cannot be part of one program is said at once, all of it, and leaves everything as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import Net, batch, squares, values
from torch import nn, optim

import fxwrap
from fxwrap import TrainStepError
from fxwrap.features.train_step.codegen.tracing import why_not_traced


def _refused(model: nn.Module, optimizer: optim.Optimizer, loss: object = squares) -> str:
    with pytest.raises(TrainStepError) as caught:
        fxwrap.train_step(model, loss, optimizer)  # type: ignore[arg-type]
    return str(caught.value)


def test_all_reasons_are_in_one_error() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), Net())
    model[1].first.weight.register_hook(lambda gradient: gradient)
    model[1].last.register_full_backward_hook(lambda *_: None)
    optimizer = optim.LBFGS(model.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    text = _refused(model, optimizer)
    for part in ("Embedding (0) has sparse", "1.first.weight has hooks", "Linear (1.last) has backward hooks"):
        assert part in text
    assert "LBFGS evaluates the loss several times" in text and "LBFGS has step hooks" in text


def test_wrappers_that_communicate() -> None:
    model = nn.DataParallel(Net())
    assert "give the module inside of it" in _refused(model, optim.SGD(model.parameters(), 0.1))


def test_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def scaled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return scaler.scale(squares(model, x, y))

    model = Net()
    assert "GradScaler (scaler)" in _refused(model, optim.SGD(model.parameters(), 0.1), scaled)


def test_an_optimizer_of_the_users() -> None:
    class Own(optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(p.grad)

    model = Net()
    assert "Own has no functional form" in _refused(model, Own(model.parameters(), 0.1))


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


def test_graph_breaks_have_their_lines_and_nothing_has_run() -> None:
    class Breaks(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            x = self.norm(x)
            torch._dynamo.graph_break()
            return self.last(x)

    model = Breaks()
    optimizer = optim.AdamW(model.parameters())
    step, before = fxwrap.train_step(model, squares, optimizer), values(model)
    with pytest.raises(TrainStepError) as caught:
        step(*batch())
    assert str(caught.value).count("graph break at") == 2 and "test_refusals.py, line" in str(caught.value)
    for value, kept in zip(values(model), before, strict=True):
        assert torch.equal(value, kept)
    squares(model, *batch()).backward()  # the ordinary loop works as before
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def test_hooks_that_come_later() -> None:
    """A hook that is registered between two steps would not be called: the next step refuses."""
    model = Net()
    step = fxwrap.train_step(model, squares, optim.SGD(model.parameters(), 0.1))
    step(*batch())
    hook = model.first.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(TrainStepError, match=r"first\.weight has hooks"):
        step(*batch())
    hook.remove()
    step(*batch())


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda step: copy.deepcopy({"step": step})], ids=range(4)
)
def test_a_step_is_not_copied(copied: Callable[[object], object]) -> None:
    """A copy would train the model of the original. What the error says to do is done here."""
    model = Net()
    optimizer = optim.AdamW(model.parameters())
    step = fxwrap.train_step(model, squares, optimizer)
    step(*batch())
    with pytest.raises(TrainStepError, match=r"copy.deepcopy\(\(model, optimizer\)\)"):
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


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_an_lstm_is_refused_or_trained_but_ends_no_process() -> None:
    """oneDNN's backward reads addresses from a workspace: what measures operators must not run it on zeros."""
    settings: Any = torch._dynamo.config
    with settings.patch(allow_rnn=True):
        model = torch.nn.LSTM(3, 4, batch_first=True)
        optimizer = torch.optim.Adam(model.parameters())
        step = fxwrap.train_step(model, lambda model, x: model(x)[0].square().mean(), optimizer)
        x = torch.randn(2, 3, 3)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(fxwrap.TrainStepError, match=r"LSTM: .* torch.backends.mkldnn.set_flags"):
            step(x)
        assert all(map(torch.equal, before, model.parameters()))
        with torch.backends.mkldnn.flags(enabled=False):
            step = fxwrap.train_step(model, lambda model, x: model(x)[0].square().mean(), optimizer)
            loss = model(x)[0].square().mean()
            torch.testing.assert_close(step(x), loss.detach())
            assert step(x) < loss


def test_what_torch_says_against_a_checkpoint_is_a_reason() -> None:
    """Torch repeats sections at one place of a backward only. Which models have several is up to its partitioner."""
    reason = "Detected 2 disjoint backward regions that require recomputation, and more."
    assert why_not_traced(RuntimeError(f"backend raised:\n{reason}\nDetails")) == reason
    assert not why_not_traced(RuntimeError("out of memory"))
