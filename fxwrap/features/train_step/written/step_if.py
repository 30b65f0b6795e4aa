"""Updates that data decide: the optimizer's step is computed, and taken back where it is not to be made.

::

    if torch.isfinite(norm):          norm = clip_grad_norm_(...)
        optimizer.step()       ->     p', m' = step(p, m)
                                      p = where(isfinite(norm), p', p);  m = where(isfinite(norm), m', m)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ....errors import TrainStepError
from ..codegen.tracing_state import is_fake


def step_if(condition: torch.Tensor | bool, optimizer: Optimizer) -> None:
    """Make an optimizer's step if a condition holds.

    In a step that is one program (``fxwrap.train_step``) nothing is read on the host: the update is computed, and
    parameters and states keep what they hold where the condition does not hold. Elsewhere it is an ``if``.

    Args:
        condition: a tensor of one element, such as ``torch.isfinite(norm)``, or a bool.

    Raises:
        TrainStepError: the condition has more elements.
    """
    if isinstance(condition, torch.Tensor) and condition.numel() != 1:
        raise TrainStepError(
            "condition of step_if",
            expected="a tensor of one element",
            got=f"a tensor of shape {list(condition.shape)}",
            remedy="make one of it, such as condition.all()",
        )
    if isinstance(condition, torch.Tensor) and is_fake(condition):
        predicated(condition, optimizer)
    elif condition:
        optimizer.step()


def predicated(condition: torch.Tensor, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Trace an optimizer's step whose results count only where a condition holds."""
    condition = condition.reshape(()).bool()
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    owners = [*optimizer.state.values(), *optimizer.param_groups]
    slots = [(state, key) for state in owners for key in state]
    held = [(state, key, state[key]) for state, key in slots if isinstance(state[key], torch.Tensor)]
    with torch.no_grad():
        before = [tensor.detach().clone() for tensor in (*parameters, *(value for _, _, value in held))]
        optimizer.step(*args, **kwargs)
        for parameter, old in zip(parameters, before, strict=False):
            parameter.copy_(torch.where(condition.to(old.device), parameter, old))
        for (state, key, value), old in zip(held, before[len(parameters) :], strict=True):
            new = torch.where(condition.to(old.device), state[key], old)
            if state[key] is value:
                value.copy_(new)
            else:
                state[key] = new
