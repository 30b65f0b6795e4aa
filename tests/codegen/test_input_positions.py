"""Positions that AOTAutograd and Inductor give name, in the graph that is emitted, what they are meant to name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor
from torch import nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import fxwrap
from fxwrap.codegen import torch_versions
from fxwrap.errors import EmissionError

pytestmark = pytest.mark.compiler


@torch.library.custom_op("fxwrap_positions::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    return x * 2


noted.register_fake(torch.empty_like)
noted.register_autograd(lambda ctx, grad: grad * 2)
_register_effectful_op(torch.ops.fxwrap_positions.noted.default, _EffectType.ORDERED)


def well_conditioned(y: torch.Tensor) -> torch.Tensor:
    return y.t() @ y + 9 * torch.eye(8, device=y.device)


def printed(y: torch.Tensor) -> torch.Tensor:
    torch.ops.aten._print("an effect")
    return y.sin()


# Each has an effect whose order AOTAutograd keeps by a token, but the first.
WORK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda y: y.cos(),
    "inv": lambda y: y @ torch.linalg.inv(well_conditioned(y)),
    "solve": lambda y: torch.linalg.solve(well_conditioned(y), y, left=False),
    "cholesky": lambda y: torch.linalg.cholesky(well_conditioned(y)),
    "print": printed,
    "operator": lambda y: noted(y) + 1,
    "two": lambda y: noted(torch.linalg.inv(well_conditioned(y))),
}


class Model(nn.Module):
    """With a parameter that is used before the batch, and one that is used last."""

    def __init__(self, work: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(8, 8), nn.Parameter(torch.eye(8) + 0.1)
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.work = WORK[work]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.work(self.first(x) * self.scale) @ self.last).sin()


SETTINGS: dict[str, Any] = {"options": {"capture": "always"}}
OF_MODEL = {"first.weight", "first.bias", "last", "scale"}


def static_names(program: Any) -> set[str]:
    placeholders = program.plan.placeholders
    return {placeholders[position].meta["user_name"].split("self.", 1)[-1] for position in program.plan.inputs.static}


@pytest.mark.parametrize("work", WORK)
def test_parameters_are_the_static_inputs_of_inference(work: str, device: torch.device) -> None:
    model = Model(work).to(device)
    f, theirs, x = Compiled(model), inductor(model), torch.randn(8, 8, device=device)
    with torch.no_grad():
        for _ in range(4):
            assert_same(f(x.clone()), theirs(x))
    assert not f.compilation.fallbacks and f.program.counters.replays
    assert static_names(f.program) == OF_MODEL


@pytest.mark.parametrize("work", WORK)
def test_parameters_are_the_static_inputs_of_a_forward_graph(work: str, device: torch.device) -> None:
    model = Model(work).to(device)
    f, x = Compiled(model), torch.randn(8, 8, device=device)
    theirs, results = inductor(model), []
    for call in (f, theirs):
        for _ in range(3):
            y = call(x)
            y.sum().backward()
        results.append(y)
    assert_same(*results)
    assert not f.compilation.fallbacks
    forward, backward = f.programs
    assert static_names(forward) == OF_MODEL
    plan = backward.plan
    names = [plan.inputs.names[position] for position in plan.inputs.donated]
    assert names and not [name for name in names if name.startswith(("primals", "tangents"))]
    assert set(names) <= set(forward.plan.inputs.saved.values())


@pytest.mark.parametrize("work", WORK)
def test_parameters_are_the_static_inputs_of_a_training_step(work: str, device: torch.device) -> None:
    models = [Model(work).to(device) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    step = fxwrap.train_step(models[0], lambda m, x: m(x).square().mean(), optimizers[0], **SETTINGS)
    x = torch.randn(8, 8, device=device)
    for _ in range(4):
        loss = step(x)
        expected = models[1](x).square().mean()
        expected.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(loss, expected.detach())
    (graph,) = fxwrap.report(step).graphs
    plan = graph.program.plan
    # What a step updates stays where it is: all tensors of the model, and not the batch. So does the learning rate.
    static = [plan.placeholders[position].meta["val"] for position in plan.inputs.static]
    moving = [p.meta["val"] for n, p in enumerate(plan.placeholders) if n not in plan.inputs.static]
    assert sorted(tuple(val.shape) for val in static if val.dim()) == [(8,), (8,), (8, 8), (8, 8)]
    assert (8, 8) in [tuple(val.shape) for val in moving if isinstance(val, torch.Tensor)]
    assert not fxwrap.stats(step)["fallbacks"]


def test_sizes_are_no_static_inputs_of_a_backward_graph(device: torch.device) -> None:
    model = Model("inv").to(device)
    f, theirs = Compiled(model, compile_options={"dynamic": True}), inductor(model, dynamic=True)
    for rows in (8, 8, 5, 5, 8):
        x = torch.randn(rows, 8, device=device)
        results = [call(x) for call in (f, theirs)]
        assert_same(*results)
        results[0].sum().backward()
    assert not f.compilation.fallbacks
    plan = f.programs[1].plan
    named = [plan.placeholders[position].meta["val"] for position in plan.inputs.static]
    assert named and all(isinstance(val, torch.Tensor) for val in named)


def views_of_a_saved_value(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = (x @ x).sin()
    return y.t(), y[0]


def test_what_the_user_gets_views_of_is_not_for_backward_alone(device: torch.device) -> None:
    """AOTAutograd returns their base beside them."""
    f = Compiled(views_of_a_saved_value)
    f(torch.randn(4, 4, device=device, requires_grad=True))
    saved = f.program.plan.inputs.saved
    assert saved and not [name for name in saved.values() if name.startswith("sin")]


@pytest.mark.parametrize("strict", [False, True])
def test_positions_that_name_nothing_are_a_fallback(
    strict: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(8, 8, device=device)
    named = torch_versions.static_inputs
    monkeypatch.setattr(torch_versions, "static_inputs", lambda gm, phase, _: named(gm, phase, [0, 99]))
    f = Compiled(torch.sin, compile_options={"options": {"strict": strict}})
    if strict:
        with pytest.raises(Exception, match="positions of static inputs") as caught:
            f(x)
        assert isinstance(getattr(caught.value, "inner_exception", caught.value), EmissionError)
        return
    with warnings.catch_warnings(action="ignore"):
        assert_same(f(x), inductor(torch.sin)(x))
    (reason,) = f.compilation.fallbacks
    assert "99 is none" in reason and not f.programs
