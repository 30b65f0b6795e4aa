"""State of ``torch.optim`` optimizers, made before the step that makes it, so that this step can be a program.

An optimizer's ``step`` collects tensors of each parameter group, and calls a function of its module with them::

    def step(self):                                             # torch.optim.Adam, in short
        for group in self.param_groups:
            params, grads, exp_avgs, ... = [], [], [], ...
            self._init_group(group, params, grads, exp_avgs, ...)    # makes missing state
            adam(params, grads, exp_avgs, ..., lr=group["lr"], ...)  # computes the update

``make_states`` runs this code with another ``adam``, which computes nothing.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

# The first parameter of the functional form of each of torch's optimizers.
_PARAMS = "params"


def make_states(optimizer: Optimizer, updated: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """Make the state that the optimizer's next step will make.

    Args:
        updated: the parameters that have a gradient in that step.

    Returns:
        The parameters that had no state, and have some now. None of an optimizer that is not torch's own, and of
        SGD with dampening, whose first update is another than the later ones.
    """
    form = _functional_form(optimizer)
    if form is None:
        return []
    without = [parameter for parameter in updated if not optimizer.state.get(parameter)]
    if form[1].__name__ == "sgd":
        _make_momentum(optimizer, updated)
    elif without:
        step, function = form
        scope = {**step.__globals__, function.__name__: lambda *_, **__: None}
        collect = types.FunctionType(step.__code__, scope, step.__name__, step.__defaults__)
        with torch.no_grad(), _with_gradients(optimizer, updated):
            collect(optimizer)
    return [parameter for parameter in without if optimizer.state.get(parameter)]


def _functional_form(optimizer: Optimizer) -> tuple[types.FunctionType, types.FunctionType] | None:
    """The code of ``step`` without its wrappers, and the function that it calls to compute the update.

    None if the code is not torch's.
    """
    step = inspect.unwrap(type(optimizer).step)
    if not isinstance(step, types.FunctionType) or step.__closure__ or not step.__module__.startswith("torch.optim"):
        return None
    called = (step.__globals__.get(name) for name in step.__code__.co_names)
    found = [one for one in called if inspect.isfunction(one) and _first_parameter(one) == _PARAMS]
    return (step, found[0]) if len(found) == 1 else None


def _first_parameter(function: Callable[..., Any]) -> str:
    return next(iter(inspect.signature(function).parameters), "")


def _make_momentum(optimizer: Optimizer, updated: Collection[torch.Tensor]) -> None:
    """SGD makes its buffers of the first gradients. Without dampening, buffers of zeros give the same numbers."""
    known = set(updated)
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                if parameter in known and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@contextmanager
def _with_gradients(optimizer: Optimizer, updated: Collection[torch.Tensor]) -> Iterator[None]:
    """Inside the context, these parameters have a gradient, and no others: ``_init_group`` leaves those out.

    The gradient is the parameter's own memory, whose values ``_init_group`` does not read.
    """
    params, known = [p for group in optimizer.param_groups for p in group["params"]], set(updated)
    before = [p.grad for p in params]
    try:
        for p in params:
            p.grad = p.detach() if p in known else None
        yield
    finally:
        for p, grad in zip(params, before, strict=True):
            p.grad = grad


def move_to_parameters(optimizer: Optimizer) -> bool:
    """Move state that optimizers keep on the host, such as counts of steps, which no device graph can read there."""
    on_host = [
        (parameter, state, key)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" != parameter.device.type
    ]
    for parameter, state, key in on_host:
        state[key] = state[key].to(parameter.device)
    return bool(on_host)
