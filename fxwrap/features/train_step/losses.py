"""What a loss must be: looked at when a step is traced, so that a replay pays nothing for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import TrainStepError

_EXPECTED = "a tensor of one element that has a gradient, or a tuple with it in front"
# In a trace, what ``item()`` returns.
_KINDS: dict[type, type] = {torch.SymFloat: float, torch.SymInt: int, torch.SymBool: bool}
_REMEDIES = {
    "NoneType": "end the function with return loss",
    **dict.fromkeys(("int", "float", "bool"), "return the tensor, without .item() or float()"),
}


def loss_among(outputs: Any, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """What gradients of ``parameters`` are computed of, among what the user's function returned.

    Raises:
        TrainStepError: says what the loss is, and what it should be.
    """
    if not parameters:
        raise _nothing_to_train("no parameter of the optimizer requires a gradient")
    in_front = isinstance(outputs, (tuple, list)) and len(outputs) > 0
    value = outputs[0] if in_front else outputs
    if not isinstance(value, torch.Tensor):
        kind = _KINDS.get(type(value), type(value)).__name__
        remedy = _REMEDIES.get(kind, "return the tensor that is in it, or a tuple with that in front")
        if isinstance(value, dict):
            remedy = 'return outputs["loss"], or (outputs["loss"], outputs) for all of it'
        raise _wrong("None" if value is None else f"an object of type {kind}", in_front, remedy)
    if not value.requires_grad and not torch.is_grad_enabled():
        raise _wrong(
            "a call for which gradients are off, as in torch.no_grad() or torch.inference_mode()",
            False,
            "call the step outside of it; the ordinary loop's backward() raises there, too",
            expected="a call with gradients",
        )
    if value.numel() != 1 or value.is_complex() or not value.requires_grad:
        raise _wrong_tensor(value, in_front)
    return value


def must_train(parameters: Sequence[torch.Tensor]) -> None:
    """Refuse a loss of which no parameter has a gradient: nothing would be trained."""
    if all(parameter.grad is None for parameter in parameters):
        raise _nothing_to_train(
            f"none of the optimizer's {len(parameters)} parameters that require gradients is used by the loss"
        )


def _wrong_tensor(value: torch.Tensor, in_front: bool) -> TrainStepError:
    got = f"a tensor of shape {list(map(int, value.shape))}, {value.dtype}"
    if not value.is_floating_point() and not value.is_complex():
        remedy = "compute the loss of floating point numbers: argmax, comparisons and integers have no gradients"
    elif value.is_complex():
        remedy = "return a real number, such as loss.abs()"
    elif value.numel() != 1:
        remedy = "put the loss in front" if in_front else "make one number of it, such as loss.mean()"
    else:
        got += ", without a gradient"
        remedy = (
            "leave out .detach(), .data and no_grad in model and loss, and compute the loss of parameters that "
            "require gradients"
        )
    return _wrong(got, in_front, remedy)


def _nothing_to_train(got: str) -> TrainStepError:
    return _wrong(
        got,
        False,
        "make the optimizer of parameters that the loss uses and that require gradients, such as model.parameters()",
        expected="a loss that depends on a parameter of the optimizer",
    )


def _wrong(got: str, in_front: bool, remedy: str, expected: str = _EXPECTED) -> TrainStepError:
    got = f"{got}, in front of a tuple" if in_front else got
    return TrainStepError("the loss of a training step", expected=expected, got=got, remedy=remedy)
