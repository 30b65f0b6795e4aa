"""State that an optimizer makes of the learning rate: it is made when a parameter gets its first gradient.

::

    loop          rate 0.1: update head a           rate 0.05: update head b, whose eta begins as 0.05
    train_step    rate 0.1: eta of a and b is 0.1   rate 0.05: eta of b is set to 0.05 before its first update

A step makes the state of all parameters before its first call. Until a parameter is updated, such state follows the
rate. The count of updates is read when the rate has changed, and only of parameters that were not seen updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

_MADE_OF_RATE = {torch.optim.ASGD: "eta", torch.optim.Rprop: "step_size"}


class _Waiting(NamedTuple):
    """State of a parameter that was not seen updated: how often it was, and the rate that the state has followed."""

    steps: torch.Tensor
    value: torch.Tensor
    group: Mapping[str, Any]
    rate: float


@dataclass(frozen=True)
class FirstRates:
    """The states of an optimizer that follow the rate.

    Attributes:
        groups: the optimizer's groups that have states in ``waiting``, each with the object that was its ``lr`` when
            these were last set from it.
    """

    waiting: Sequence[_Waiting]
    groups: Sequence[tuple[Mapping[str, Any], Any]]

    @classmethod
    def of(cls, optimizer: Optimizer, before: FirstRates | None) -> FirstRates | None:
        """None for an optimizer that makes no state of the rate, as most.

        Args:
            before: has the rates that present states have followed; others were made with the present rate.
        """
        key = next((key for kind, key in _MADE_OF_RATE.items() if isinstance(optimizer, kind)), None)
        if key is None:
            return None
        followed = {id(one.value): one.rate for one in before.waiting} if before is not None else {}
        having = ((group, optimizer.state.get(p)) for group in optimizer.param_groups for p in group["params"])
        states = ((state["step"], state[key], group) for group, state in having if state)
        return cls([_Waiting(n, v, group, followed.get(id(v), float(group["lr"]))) for n, v, group in states], ())

    def follow(self) -> FirstRates:
        """Have the states follow rates that have changed. Returns those that still wait."""
        # A rate that is a tensor may have another value.
        if self.groups and all(type(seen) is float and group["lr"] is seen for group, seen in self.groups):
            return self
        waiting = self.waiting
        if any(float(one.group["lr"]) != one.rate for one in waiting):
            waiting = [one._replace(rate=float(one.group["lr"])) for one in waiting if not one.steps]
            for _, value, _, rate in waiting:
                value.fill_(complex(rate, rate) if value.is_complex() else rate)
        groups = {id(one.group): (one.group, one.group["lr"]) for one in waiting}
        return FirstRates(waiting, tuple(groups.values()))
