"""State that an optimizer makes of the learning rate: it is made when a parameter gets its first gradient.

::

    loop          rate 0.1: update head a           rate 0.05: update head b, whose eta begins as 0.05
    train_step    rate 0.1: eta of a and b is 0.1   rate 0.05: eta of b is set to 0.05 before its first update

A step makes the state of all parameters before its first call. Until a parameter is updated, such state follows the
rate. The count of updates is read when the rate has changed, and only of parameters that were not seen updated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

_MADE_OF_RATE = {torch.optim.ASGD: "eta", torch.optim.Rprop: "step_size"}


class FirstRates:
    """The states of parameters that were not updated yet, for each the count of its updates and its group."""

    def __init__(self, waiting: list[tuple[torch.Tensor, torch.Tensor, Mapping[str, Any]]]) -> None:
        self._waiting = waiting
        self._rates = self._present()

    @classmethod
    def of(cls, optimizer: Optimizer) -> FirstRates | None:
        """None for an optimizer that makes no state of the rate, as most."""
        key = next((key for kind, key in _MADE_OF_RATE.items() if isinstance(optimizer, kind)), None)
        if key is None:
            return None
        having = ((group, optimizer.state.get(p)) for group in optimizer.param_groups for p in group["params"])
        return cls([(state["step"], state[key], group) for group, state in having if state])

    def _present(self) -> list[float]:
        return [float(group["lr"]) for _, _, group in self._waiting]

    def follow(self) -> None:
        """Set what follows a rate that has changed. To read a count waits for the device: only then is one read."""
        if self._present() == self._rates:
            return
        self._waiting = [one for one in self._waiting if not one[0]]
        self._rates = self._present()
        for (_, value, _), rate in zip(self._waiting, self._rates, strict=True):
            value.fill_(complex(rate, rate) if value.is_complex() else rate)
