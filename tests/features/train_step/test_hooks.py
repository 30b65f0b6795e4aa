"""Hooks that are registered after the first call are called, and those that are removed are not."""

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


def _halve(optimizer: optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].mul_(0.5)


def _double(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


_LATE: dict[str, Callable[[Net, optim.Optimizer], Any]] = {
    "post-hook of the optimizer": lambda m, o: o.register_step_post_hook(_halve),
    "pre-hook of the optimizer": lambda m, o: o.register_step_pre_hook(_halve),
    "hook of all optimizers": lambda m, o: _OPTIMIZERS.register_optimizer_step_post_hook(_halve),
    "backward hook": lambda m, o: m.norm.register_full_backward_hook(lambda module, grads, _: (grads[0] * 2,)),
    "backward pre-hook": lambda m, o: m.norm.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,)),
    "backward hook of all modules": lambda m, o: nn.modules.module.register_module_full_backward_hook(
        lambda module, grads, _: (None if grads[0] is None else grads[0] * 2,)
    ),
    "hook of a parameter": lambda m, o: m.first.weight.register_hook(lambda grad: grad * 2),
    "hook after accumulation": lambda m, o: m.first.weight.register_post_accumulate_grad_hook(_double),
}


@pytest.mark.parametrize("kind", _LATE)
def test_a_hook_is_called_whenever_it_comes(kind: str) -> None:
    def habit(make: Maker) -> Iterator[Any]:
        model = Net()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        step = make(model, squares, optimizer)
        for _ in range(2):
            yield step(*batch())
        handle = _LATE[kind](model, optimizer)
        try:
            for _ in range(2):
                yield step(*batch()), values(model)
        finally:
            handle.remove()
        yield step(*batch()), values(model)

    assert not fxwrap.stats(assert_same(habit))["fallbacks"]


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
