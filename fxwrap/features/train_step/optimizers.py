"""The update of a ``torch.optim`` optimizer, as calls of torch's own functional code.

An optimizer's ``step`` collects tensors of each parameter group, and calls a function of its module with them::

    def step(self):                                             # torch.optim.Adam, in short
        for group in self.param_groups:
            params, grads, exp_avgs, ... = [], [], [], ...
            self._init_group(group, params, grads, exp_avgs, ...)    # makes missing state
            adam(params, grads, exp_avgs, ..., lr=group["lr"], ...)  # computes the update

``updates_of`` runs this code with another ``adam``, which notes its arguments and computes nothing. A step that is
compiled makes the noted calls, with the gradients that it has computed. Dynamo refuses ``step`` itself where
gradients are computed in the same graph.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from .numbers import Numbers

# The first parameter of the functional form of each of torch's optimizers.
_PARAMS = "params"


@dataclass(frozen=True)
class Update:
    """The functional call for one parameter group.

    Attributes:
        function: such as ``torch.optim.adam.adam``.
        params: the parameters that the group's update may change.
        states: lists beside ``params`` and gradients, in the order of the function's parameters: one tensor (or
            None) for each parameter, or empty where the optimizer keeps no such state.
        settings: keyword arguments; see ``Numbers``.
        numbers: those settings that are read inside of ``ReadingNumbers``.
    """

    function: Callable[..., Any]
    params: Sequence[torch.Tensor]
    states: Sequence[Sequence[torch.Tensor | None]]
    settings: Mapping[str, Any]
    numbers: Sequence[torch.Tensor]


def functional_form(optimizer: Optimizer) -> tuple[types.FunctionType, str] | None:
    """The code of ``step`` without its wrappers, and the name of the function that it calls to compute the update.

    None if there is no such function, or ``step`` has variables of its own besides globals.
    """
    step = inspect.unwrap(type(optimizer).step)
    if not isinstance(step, types.FunctionType) or step.__closure__:
        return None
    called = {name: step.__globals__.get(name) for name in step.__code__.co_names}
    found = [name for name, function in called.items() if _first_parameter(function) == _PARAMS]
    return (step, found[0]) if len(found) == 1 else None


def _first_parameter(function: object) -> str:
    return next(iter(inspect.signature(function).parameters), "") if inspect.isfunction(function) else ""


def updates_of(optimizer: Optimizer, numbers: Numbers) -> list[Update]:
    """Make the optimizer's missing state, and return the calls that compute its update: one for each group.

    Args:
        optimizer: one that ``functional_form`` knows.
    """
    form = functional_form(optimizer)
    assert form is not None
    step, name = form
    function = step.__globals__[name]
    noted: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(*args: Any, **kwargs: Any) -> None:
        noted.append((args, kwargs))

    collect = types.FunctionType(step.__code__, {**step.__globals__, name: note}, step.__name__, step.__defaults__)
    with torch.no_grad(), _every_gradient(optimizer):
        collect(optimizer)
        if move_to_parameters(optimizer):
            noted.clear()
            collect(optimizer)
    updates = []
    for group, (args, settings) in enumerate(noted):
        params, _, *states = args
        if not params:
            continue
        if isinstance(optimizer, torch.optim.SGD) and states[0]:
            states = [[_momentum(optimizer, p, buffer) for p, buffer in zip(params, states[0], strict=True)]]
        takes = {"lr", "beta1", "beta2"} if isinstance(optimizer, torch.optim.Adam) else {"lr"}
        given = {name: numbers.of(group, name, value, params, name in takes) for name, value in settings.items()}
        read = tuple(numbers.read[group].values())
        updates.append(Update(function, params, states, _traceable(given, bool(read)), read))
    return updates


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


def _momentum(optimizer: Optimizer, parameter: torch.Tensor, buffer: torch.Tensor | None) -> torch.Tensor:
    """SGD makes its buffers of the first gradients. Without dampening, buffers of zeros give the same numbers."""
    if buffer is None:
        buffer = optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return buffer


@contextmanager
def _every_gradient(optimizer: Optimizer) -> Iterator[None]:
    """Inside the context, each parameter that requires a gradient has one: ``_init_group`` leaves out others.

    The gradient is the parameter's own memory, whose values ``_init_group`` does not read.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in params]
    try:
        for p in params:
            p.grad = p.detach() if p.requires_grad else None
        yield
    finally:
        for p, grad in zip(params, before, strict=True):
            p.grad = grad


def _traceable(settings: Mapping[str, Any], reads_numbers: bool) -> dict[str, Any]:
    """The settings with which Dynamo traces the functional form into one graph.

    ``capturable`` is the form that does not read numbers from tensors; ``foreach`` the one whose kernels Inductor
    combines, which ``ReadingNumbers`` does not know. Dynamo does not trace ``fused``: Inductor fuses the update by
    itself. A choice of ``foreach`` stays, unless numbers have to be read.
    """
    foreach = not reads_numbers if settings.get("foreach") is None or reads_numbers else settings["foreach"]
    forced = {"capturable": True, "fused": False, "foreach": foreach}
    return {**settings, **{name: value for name, value in forced.items() if name in settings}}
