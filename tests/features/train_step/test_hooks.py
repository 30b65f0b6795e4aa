"""Hooks that are registered after the first call: what Dynamo traces is compiled in, the others are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import Maker, Net, assert_same, batch, squares, values
from torch import nn, optim

import fxwrap

pytestmark = pytest.mark.compiler

_OPTIMIZERS: Any = sys.modules[optim.Optimizer.__module__]
_REFUSED: dict[str, Callable[[Net, optim.Optimizer], Any]] = {
    "post-hook of the optimizer": lambda m, o: o.register_step_post_hook(lambda *_: None),
    "pre-hook of the optimizer": lambda m, o: o.register_step_pre_hook(lambda *_: None),
    "hook of all optimizers": lambda m, o: _OPTIMIZERS.register_optimizer_step_post_hook(lambda *_: None),
    "backward hook": lambda m, o: m.first.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m, o: m.norm.register_full_backward_pre_hook(lambda *_: None),
    "backward hook of all modules": lambda m, o: nn.modules.module.register_module_full_backward_hook(
        lambda *_: None
    ),
    "hook of a parameter": lambda m, o: m.first.weight.register_hook(lambda grad: grad),
    "hook after accumulation": lambda m, o: m.first.weight.register_post_accumulate_grad_hook(lambda _: None),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_a_hook_that_a_program_cannot_call_is_refused_whenever_it_comes(kind: str) -> None:
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = fxwrap.train_step(model, squares, optimizer)
    step(*batch())
    step(*batch())
    before = values(model)
    handle = _REFUSED[kind](model, optimizer)
    try:
        with pytest.raises(fxwrap.TrainStepError, match="hooks"):
            step(*batch())
        torch.testing.assert_close(values(model), before, rtol=0, atol=0)
    finally:
        handle.remove()
    step(*batch())  # usable again
    assert not torch.equal(values(model)[0], before[0])


@pytest.mark.parametrize("of_all", [False, True], ids=["of a module", "of all modules"])
def test_forward_hooks_that_come_and_go(of_all: bool) -> None:
    def register(model: Net) -> Iterator[Any]:
        if of_all:
            yield nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
        else:
            yield model.first.register_forward_hook(lambda module, args, out: out * 3)
            yield model.first.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
            yield model.first.register_forward_hook(lambda module, args, out: out - 1)

    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        step = make(model, squares, optim.SGD(model.parameters(), lr=0.01))
        yield step(*batch())
        handles = []
        for handle in register(model):
            handles.append(handle)
            yield step(*batch())
        for handle in handles:
            handle.remove()
            yield step(*batch())

    assert_same(habit)
