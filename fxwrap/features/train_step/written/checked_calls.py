"""Checked mode of a written step: at some calls the step also runs as it is written, and what both leave is compared.

::

    call 10    step(*batch), as written        losses, parameters, states, p.grad: put aside; everything is put back
               the program, a rounding away    how much of a difference roundings make here
               the program                     compared with the first

It finds what a replay does not see: a number that the step reads where the search does not look (docs/training.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ....errors import CheckError
from ..codegen.wrapped_tensors import flat, parts_of
from .found import PLAIN, Found
from .put_back import Everything, put_back

# With ``checked=True``, every tenth call is checked.
_EVERY = 10
# A difference counts if it is so many times what a rounding of the parameters makes, and more than these parts of
# what the step has changed: optimizers compute corrections of their averages in float32.
_TIMES_NOISE, _OF_CHANGE = 10, 1e-2
_FAULT = "not the step as written"


class Checks:
    """Which calls are checked: the first of each program, and every so many.

    Args:
        checked: the value of the option.

    Attributes:
        every: 0 if none is checked.
    """

    def __init__(self, checked: object) -> None:
        self.every = _EVERY if checked is True else int(checked) if isinstance(checked, int) else 0
        self._calls = 0
        # The programs that a check has seen, by identity.
        self._seen: list[object] = []

    def due(self, program: object) -> bool:
        """Whether the call that begins is checked."""
        if not self.every:
            return False
        self._calls += 1
        if all(program is not one for one in self._seen):
            self._seen.append(program)
            return True
        return self._calls % self.every == 0


def checked(
    as_written: Callable[[], Any],
    as_program: Callable[[], Any],
    look: Callable[[], Found],
    given: Sequence[torch.Tensor],
    dropped: Sequence[torch.Tensor],
    eps: float,
    name: str,
) -> Any:
    """Make a call as a program, and compare it with the step as it is written.

    Args:
        as_written, as_program: make the call.
        look: finds what the step reaches.
        given: the arguments that are tensors.
        dropped: parameters whose p.grad a replay does not leave, though the step as written does.
        eps: the relative rounding of the least precise numbers in the step.
        name: of the step, for errors.

    Raises:
        CheckError: they differ. The call has changed nothing then.
    """
    found = look()
    before = Left.of(None, found, given, dropped)
    try:
        with put_back(found, given) as faults:
            loop = Left.of(as_written(), look(), given, dropped)
    except Exception as error:
        raise _fault(name, f"nothing is raised, and {type(error).__name__} as the step is written") from error
    if faults:
        raise _fault(name, "; ".join(faults))
    with put_back(found, given):
        _move_by_a_rounding([one for one in found.leaves() if one.requires_grad], eps)
        rounded = Left.of(as_program(), look(), given, dropped)
    everything = Everything(found, given)
    result = as_program()
    if text := _first_fault(before, loop, rounded, Left.of(result, look(), given, dropped), eps):
        everything.put_back()
        raise _fault(name, text)
    return result


@dataclass(frozen=True)
class Left:
    """What a call leaves: what it returned, tensors that the step reaches, gradients, arguments; by names."""

    values: Mapping[str, Any]

    @classmethod
    def of(cls, result: Any, found: Found, given: Sequence[torch.Tensor], dropped: Sequence[torch.Tensor]) -> Left:
        """What a call has left; for the arguments see ``checked``."""
        values = {f"value {place} that it returns": leaf for place, leaf in enumerate(tree_leaves(result))}
        named = dict(found.tensors)
        named |= {tensor: f"argument {place}" for place, tensor in enumerate(given) if tensor not in named}
        left_out = set(map(id, dropped))
        for tensor, given_name in named.items():
            # Two functions may have variables of one name.
            name = given_name if given_name not in values else f"{given_name} ({len(values)})"
            values[name] = tensor
            if tensor.is_leaf and id(tensor) not in left_out:
                values[f"{name}.grad"] = tensor.grad
        parts = {name: _parts(value) for name, value in values.items()}
        return cls(
            {
                f"{name}, part {place}" if place else name: part
                for name, inside in parts.items()
                for place, part in enumerate(inside)
            }
        )


def _first_fault(before: Left, loop: Left, rounded: Left, now: Left, eps: float) -> str:
    """What of a call is not what the step as written leaves; empty if nothing.

    Args:
        before: what there was before the call.
        loop: what the step as written left.
        rounded: what the program left when parameters were a rounding away.
        now: what the program left.
        eps: the relative rounding of the least precise numbers in the step.
    """
    worst, text = 1.0, ""
    for name in dict.fromkeys([*loop.values, *now.values]):
        expected, got = loop.values.get(name), now.values.get(name)
        if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
            noise = _TIMES_NOISE * _distance(got, rounded.values.get(name))
            difference = _distance(expected, got)
            allowed = noise + _rounding(before.values.get(name), expected, eps)
            if difference > worst * allowed:
                worst = difference / allowed if allowed else math.inf
                text = f"{name} differs by {difference:.1e}, where roundings make up to {allowed:.1e}"
        elif type(expected) is not type(got) or (isinstance(expected, PLAIN) and expected != got):
            return f"{name} is {_shown(got)}, and {_shown(expected)} as the step is written"
    return text


def _rounding(before: Any, expected: torch.Tensor, eps: float) -> float:
    if not expected.is_floating_point() and not expected.is_complex():
        return 0.0
    changed = _distance(before, expected) if _alike(before, expected) else _largest(expected)
    own = eps if torch.finfo(expected.dtype).eps <= eps else torch.finfo(expected.dtype).eps
    return max(_OF_CHANGE, 4 * own) * changed + 4 * torch.finfo(expected.dtype).eps * _largest(expected)


def _parts(value: Any) -> list[Any]:
    return [part.detach().clone() for part in parts_of(value)] if isinstance(value, torch.Tensor) else [value]


def _alike(one: Any, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return tensor.to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def _distance(one: torch.Tensor, other: Any) -> float:
    """The largest difference of two elements; infinite if the tensors are not alike."""
    if not _alike(other, one):
        return math.inf
    a, b = _numbers(one), _numbers(other)
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf).max()) if a.numel() else 0.0


def _largest(tensor: torch.Tensor) -> float:
    numbers = _numbers(tensor).abs()
    return float(torch.where(numbers.isfinite(), numbers, 0.0).max()) if numbers.numel() else 0.0


def _shown(value: Any) -> str:
    return (
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, torch.Tensor)
        else repr(value)
    )


def _move_by_a_rounding(parameters: Sequence[torch.Tensor], eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in flat(parameters):
            if parameter.is_floating_point() and parameter.layout is torch.strided:
                moved = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device)
                own = max(eps, torch.finfo(parameter.dtype).eps)
                parameter.mul_((1.0 - own * moved).to(parameter.dtype))


def _fault(name: str, text: str) -> CheckError:
    return CheckError(
        f"a call of {name}, which has changed nothing,",
        fault=_FAULT,
        expected="what the step leaves as it is written",
        got=text,
        remedy=(
            "give what it reads as an argument, or where the search finds it (docs/training.md has the list); from "
            "now on the step runs as it is written"
        ),
    )
