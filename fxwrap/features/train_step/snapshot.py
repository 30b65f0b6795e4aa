"""What an optimizer had when a step was prepared: each call compares it with what the optimizer has now.

The comparison is by identity, in loops that Python runs in C: some 30 nanoseconds for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any

import torch
from torch.optim import Optimizer

from .optimizers import Numbers
from .refusals import PARAMETER_HOOKS, hooks_of_modules, hooks_of_steps

_requires_grad = attrgetter("requires_grad")
_hooks = tuple(map(attrgetter, PARAMETER_HOOKS))


class Snapshot:
    """The state tensors, parameters and settings of an optimizer, and the hooks of it and of a model.

    Attributes:
        hooks: the keys of all hooks of the model's modules, by table.

    Args:
        numbers: has the learning rates, as the tensors that the compiled step reads.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, numbers: Numbers) -> None:
        tables = [*hooks_of_modules(model), *hooks_of_steps(optimizer)]
        self._without_hooks = [table for table in tables if not table]
        self._with_hooks = [table for table in tables if table]
        self.hooks = list(map(list, self._with_hooks))
        self._state = optimizer.state
        self._states = list(optimizer.state.values())
        entries = [(state, key) for state in self._states for key in state]
        self._owners, self._keys = [owner for owner, _ in entries], [key for _, key in entries]
        self._values = list(map(getitem, self._owners, self._keys))
        self._groups = [_Group(group, numbers.rate(n)) for n, group in enumerate(optimizer.param_groups)]

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has the same tensors and settings. New learning rates go to their tensors."""
        state, groups = optimizer.state, optimizer.param_groups
        if state is not self._state or len(state) != len(self._states) or len(groups) != len(self._groups):
            return False
        for group, seen in zip(groups, self._groups, strict=True):
            if not seen.holds(group):
                return False
        if any(self._without_hooks) or list(map(list, self._with_hooks)) != self.hooks:
            return False
        try:
            return all(map(is_, state.values(), self._states)) and all(
                map(is_, map(getitem, self._owners, self._keys), self._values)
            )
        except KeyError:  # an entry was removed
            return False


class _Group:
    def __init__(self, group: Mapping[str, Any], rate: torch.Tensor | None) -> None:
        names = sorted(group.keys() - {"params", "lr"})
        self._settings_of: Callable[[Mapping[str, Any]], Any] = itemgetter(*names) if names else lambda _: ()
        self._settings = self._settings_of(group)
        self._parameters, self._trained = list(group["params"]), list(map(_requires_grad, group["params"]))
        self._group, self._given_rate, self._rate = group, group.get("lr"), rate

    def holds(self, group: Mapping[str, Any]) -> bool:
        parameters, rate = group["params"], group.get("lr")
        if rate is not self._given_rate:
            if self._rate is None or not isinstance(rate, float):
                return False
            self._rate.fill_(rate)
            self._given_rate = rate
        return (
            group is self._group
            and len(parameters) == len(self._parameters)
            and all(map(is_, parameters, self._parameters))
            and list(map(_requires_grad, parameters)) == self._trained
            and not any(any(map(hooks, parameters)) for hooks in _hooks)
            and bool(self._settings_of(group) == self._settings)
        )
