"""Numbers of optimizers that change between steps: tensors stand for them in a trace, and at calls."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..numbers import Numbers, ReadingNumbers

# Choices of an optimizer that a trace makes: see ``optimizers.py``.
_FORCED = {"capturable": True, "fused": False}


class Settings:
    """The settings of some optimizers' groups.

    Args:
        optimizers: by name.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self._numbers = {name: Numbers() for name in optimizers}
        self._stand_in: dict[str, list[dict[str, Any]]] = {}
        # The settings that the last trace has changed.
        self.changed: list[str] = []
        self._given: dict[str, list[dict[str, Any]]] = {}

    def look(self) -> None:
        """Take what the optimizers have now; tensors get the numbers that they stand for."""
        for name, optimizer in self.optimizers.items():
            groups = optimizer.param_groups
            self._given[name] = [_settings_of(group) for group in groups]
            self._stand_in[name] = [self._tensors(name, number, group) for number, group in enumerate(groups)]

    def hold(self) -> bool:
        """Whether all settings are those of the last look, but for numbers that tensors stand for, which follow."""
        for name, optimizer in self.optimizers.items():
            given = self._given[name]
            if len(optimizer.param_groups) != len(given):
                return False
            for number, (group, before) in enumerate(zip(optimizer.param_groups, given, strict=True)):
                if group.keys() - before.keys() != {"params"}:
                    return False
                for key, seen in before.items():
                    if (value := group[key]) is not seen and not self._follows(name, number, key, value):
                        return False
        return True

    def _follows(self, name: str, number: int, key: str, value: Any) -> bool:
        before, tensor = self._given[name][number][key], self._stand_in[name][number].get(key)
        if type(value) is type(before) and not isinstance(value, torch.Tensor) and value == before:
            return True
        if not (isinstance(tensor, torch.Tensor) and type(value) is float and (key == "lr" or value > 0)):
            return False
        tensor.fill_(value)
        self._given[name][number][key] = value
        return True

    def facts(self) -> list[tuple[str, object]]:
        """The settings that a program is made for, by name."""
        return [
            (f"{name}.param_groups[{number}]['{key}']", "a tensor" if _has_tensor(value) else _plain(value))
            for name, groups in self._stand_in.items()
            for number, group in enumerate(groups)
            for key, value in {**self._given[name][number], **group}.items()
        ]

    def tensors(self) -> dict[torch.Tensor, str]:
        """The tensors that stand for numbers, and those that the user gave, with names."""
        return {
            tensor: f"{key} of {name}"
            for name, groups in self._stand_in.items()
            for number, group in enumerate(groups)
            for key, value in {**self._given[name][number], **group}.items()
            for tensor in (value if isinstance(value, tuple) else (value,))
            if isinstance(tensor, torch.Tensor)
        }

    @contextlib.contextmanager
    def standing_in(self) -> Iterator[None]:
        """Inside the context, optimizers have the tensors, and settings with which their code can be traced."""
        before = [(group, dict(group)) for o in self.optimizers.values() for group in o.param_groups]
        scales = [o for o in self.optimizers.values() if getattr(o, "_step_supports_amp_scaling", False)]
        read = [list(numbers.values()) for n in self._numbers.values() for numbers in n.read.values()]
        self.changed = []
        try:
            for optimizer in scales:
                optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
            for name, optimizer in self.optimizers.items():
                for number, group in enumerate(optimizer.param_groups):
                    group.update({**self._forced(name, number, group), **self._stand_in[name][number]})
            during = [(group, dict(group)) for group, _ in before]
            with ReadingNumbers(list(itertools.chain.from_iterable(read))):
                yield
            self.changed = [
                str(key) for group, had in during for key in group if key not in had or group[key] is not had[key]
            ]
        finally:
            for optimizer in scales:
                optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
            for group, settings in before:
                for key in [key for key in group if key not in settings]:
                    del group[key]
                group.update(settings)

    def _forced(self, name: str, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
        reads = bool(self._numbers[name].read.get(number))
        foreach = not reads if group.get("foreach") is None or reads else group["foreach"]
        return {key: value for key, value in {**_FORCED, "foreach": foreach}.items() if key in group}

    def _tensors(self, name: str, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """What stands in a group in place of its numbers."""
        if not group["params"]:
            return {}
        optimizer, numbers, stand_in = self.optimizers[name], self._numbers[name], {}
        adam = isinstance(optimizer, torch.optim.Adam)
        for key, value in _settings_of(group).items():
            taken = key == "lr" or (adam and key == "betas")
            if isinstance(value, tuple):
                parts = [
                    numbers.of(number, f"{key}[{place}]", part, group["params"], taken)
                    for place, part in enumerate(value)
                ]
                new: Any = tuple(parts)
            else:
                new = numbers.of(number, key, value, group["params"], taken)
            if _has_tensor(new) and not _has_tensor(value):
                stand_in[key] = new
        return stand_in


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _plain(value: object) -> object:
    try:
        hash(value)
    except TypeError:  # a list
        return type(value), repr(value)
    return type(value), value


def _has_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple) and any(map(_has_tensor, value)))
