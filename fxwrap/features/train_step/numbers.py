"""Settings of an optimizer that change between steps, as compiled code reads them.

A number that compiled code is made for is part of that code: each new value would be compiled anew. So a number that
changes becomes a tensor, and ``ReadingNumbers`` lets torch's functional forms take one where they ask for a number::

    if weight_decay != 0:                        # decided when the step is traced: such a tensor is above zero
        grad = grad.add(param, alpha=weight_decay)      ->      grad.add(param * weight_decay)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_Tensor = torch.Tensor
# What compares a setting with zero.
_NOT_ZERO = frozenset([_Tensor.ne, _Tensor.__ne__, operator.ne, _Tensor.gt, _Tensor.__gt__, operator.gt])
# Keyword arguments of operators that are numbers by their schema, with the position of an operand that may be
# multiplied in their place: (a + alpha * b), (a + value * b * c), (a + value * b / c).
_FACTORS = {"alpha": 1, "value": 1}
# What takes two bounds that are numbers, or two that are tensors.
_BOUNDED = frozenset([torch.clamp, _Tensor.clamp, _Tensor.clamp_])


class Numbers:
    """The tensors that stand for an optimizer's numbers.

    Learning rates are tensors from the beginning. Another number becomes one when it has changed, if it is above
    zero: functional forms do other work where it is zero. A number of zero or less is compiled in, and so is a
    setting that is no float.

    Attributes:
        read: by group, the tensors that its functional form takes only inside of ``ReadingNumbers``, by name.
    """

    def __init__(self) -> None:
        self.read: dict[int, dict[str, torch.Tensor]] = {}
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        self._before: dict[tuple[int, str], float] = {}

    def of(self, group: int, name: str, value: Any, params: Sequence[torch.Tensor], takes_tensor: bool) -> Any:
        """The tensor that stands for a group's setting; the value itself where none does.

        Args:
            params: those of the group: a tensor has the precision of the most precise.
            takes_tensor: the functional form computes with a tensor as with a number.
        """
        key = group, name
        self.read.setdefault(group, {}).pop(name, None)
        if not isinstance(value, float):
            return value
        changed = self._before.setdefault(key, value) != value
        if name != "lr" and not (0 < value < math.inf and (changed or key in self._tensors)):
            return value
        tensor = self._tensors.get(key)
        device, dtype = params[0].device, _precision(params)
        if tensor is None or (tensor.device, tensor.dtype) != (device, dtype):
            with torch.inference_mode(False):  # it is written outside, too
                tensor = self._tensors[key] = torch.empty((), device=device, dtype=dtype)
        if not takes_tensor:
            self.read[group][name] = tensor
        return tensor.fill_(value)


def _precision(params: Sequence[torch.Tensor]) -> torch.dtype:
    wide = any(param.dtype in (torch.float64, torch.complex128) for param in params)
    return torch.float64 if wide else torch.float32


class ReadingNumbers(TorchFunctionMode):
    """Inside of this mode, operators take tensors where they ask for numbers.

    Args:
        numbers: the tensors; each is above zero.
    """

    def __init__(self, numbers: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in _NOT_ZERO and any(args[0] is number for number in self._numbers):
            return True
        # Lists of tensors are weighted, and a number is raised to lists of exponents, by numbers only.
        if func is torch._foreach_lerp_ and isinstance(args[-1], torch.Tensor):
            moved = torch._foreach_sub(args[1], args[0])
            torch._foreach_mul_(moved, args[-1])
            return torch._foreach_add_(args[0], moved)
        if func is torch._foreach_pow and isinstance(args[0], torch.Tensor):
            return torch._foreach_pow([args[0]] * len(args[1]), args[1])
        for name, place in _FACTORS.items():
            if isinstance(named.get(name), torch.Tensor):
                factor = named.pop(name)
                args = (*args[:place], args[place] * factor, *args[place + 1 :])
        if func in _BOUNDED:
            bound = next((one for one in args[1:] if isinstance(one, torch.Tensor)), None)
            if bound is not None:
                number = int, float
                args = (args[0], *(bound.new_full((), one) if isinstance(one, number) else one for one in args[1:]))
        return func(*args, **named)
