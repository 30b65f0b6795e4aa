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
    """

    function: Callable[..., Any]
    params: Sequence[torch.Tensor]
    states: Sequence[Sequence[torch.Tensor | None]]
    settings: Mapping[str, Any]


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


class Numbers:
    """The settings of an optimizer that change, as compiled code reads them: numbers would be compiled in.

    Learning rates are tensors, and so are betas once they have changed. Another float that has changed stays one:
    Dynamo makes a tensor of it, if it is used as the single-tensor forms use it (``vary``).

    Attributes:
        vary: groups in which such a float has changed.
    """

    def __init__(self) -> None:
        self.vary: set[int] = set()
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        self._before: dict[tuple[int, str], Any] = {}

    def of(self, group: int, name: str, value: Any, device: torch.device) -> Any:
        """The tensor that stands for a group's setting; the value itself where none does."""
        key = group, name
        if not isinstance(value, float):
            return value
        changed = self._before.setdefault(key, value) != value
        if not (name == "lr" or key in self._tensors or (changed and name.startswith("beta"))):
            self.vary.update({group} if changed else ())
            return value
        if key not in self._tensors or self._tensors[key].device != device:
            self._tensors[key] = torch.empty((), device=device)
        return self._tensors[key].fill_(value)

    def rate(self, group: int) -> torch.Tensor | None:
        """The learning rate of a group; None where the user gives a tensor."""
        return self._tensors.get((group, "lr"))


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
        if _move_to_parameters(optimizer):
            noted.clear()
            collect(optimizer)
    updates = []
    for group, (args, settings) in enumerate(noted):
        params, _, *states = args
        if not params:
            continue
        if isinstance(optimizer, torch.optim.SGD) and states[0]:
            states = [[_momentum(optimizer, p, buffer) for p, buffer in zip(params, states[0], strict=True)]]
        given = {name: numbers.of(group, name, value, params[0].device) for name, value in settings.items()}
        updates.append(Update(function, params, states, _traceable(given, group in numbers.vary)))
    return updates


def _move_to_parameters(optimizer: Optimizer) -> bool:
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


def _traceable(settings: Mapping[str, Any], vary: bool) -> dict[str, Any]:
    """The settings with which Dynamo traces the functional form into one graph.

    ``capturable`` is the form that does not read numbers from tensors; ``foreach`` the one whose kernels Inductor
    combines. Dynamo does not trace ``fused``: Inductor fuses the update by itself. A choice of ``foreach`` stays.
    """
    foreach = not vary if settings.get("foreach") is None else settings["foreach"]
    forced = {"capturable": True, "fused": False, "foreach": foreach}
    return {**settings, **{name: value for name, value in forced.items() if name in settings}}
