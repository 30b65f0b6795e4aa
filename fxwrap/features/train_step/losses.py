"""What a loss must be: looked at while a step is traced, so that a replay pays nothing for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...errors import TrainStepError

_EXPECTED = "a tensor of one element that has a gradient, or a tuple with it in front"
_on_this_thread = threading.local()


class _Stop(Exception):
    """Ends tracing. What was found stands in the list of ``raising_what_is_wrong``: Dynamo hands on no message."""


@contextlib.contextmanager
def raising_what_is_wrong() -> Iterator[None]:
    """Inside the context, what tracing finds against a loss is raised by itself, without Dynamo's account of it.

    Raises:
        TrainStepError: says what the loss is, and what it should be.
    """
    before = getattr(_on_this_thread, "found", None)
    found: list[TrainStepError] = []
    _on_this_thread.found = found
    try:
        yield
    except Exception:
        if found:
            raise found[0] from None
        raise
    finally:
        _on_this_thread.found = before


def loss_among(outputs: Any, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """What gradients of ``parameters`` are computed of, among what the user's function returned. It is traced."""
    if not parameters:
        _found_nothing_to_train(0)
        raise _Stop
    in_front = isinstance(outputs, (tuple, list)) and len(outputs) > 0
    value = outputs[0] if in_front else outputs
    if not isinstance(value, torch.Tensor):
        _found_object(in_front, type(value).__name__, isinstance(value, dict))
        raise _Stop
    if not value.requires_grad and not torch.is_grad_enabled():
        _found_no_gradients()
        raise _Stop
    if value.numel() != 1 or value.is_complex() or not value.requires_grad:
        # A length is a number, also where a size is a symbol.
        shape = [len(range(size)) for size in value.shape]
        _found_tensor(in_front, str(value.dtype), shape, value.is_floating_point() or value.is_complex())
        raise _Stop
    return value


def must_train(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuse a loss of which no parameter has a gradient: nothing would be trained. It is traced."""
    if all([gradient is None for gradient in gradients]):
        _found_nothing_to_train(len(parameters))
        raise _Stop


# Dynamo calls these while it traces, and leaves them out of the program.


@torch.compiler.assume_constant_result
def _found_object(in_front: bool, kind: str, is_dictionary: bool) -> None:
    remedies = {
        "NoneType": "end the function with return loss",
        **dict.fromkeys(("int", "float", "bool"), "return the tensor, without .item() or float()"),
    }
    remedy = remedies.get(kind, "return the tensor that is in it, or a tuple with that in front")
    if is_dictionary:
        remedy = 'return outputs["loss"], or (outputs["loss"], outputs) for all of it'
    _note(_in_front(in_front, "None" if kind == "NoneType" else f"an object of type {kind}"), remedy)


@torch.compiler.assume_constant_result
def _found_tensor(in_front: bool, dtype: str, shape: list[int], is_number: bool) -> None:
    got = f"a tensor of shape {shape}, {dtype}"
    if not is_number:
        remedy = "compute the loss of floating point numbers: argmax, comparisons and integers have no gradients"
    elif dtype.startswith("torch.complex"):
        remedy = "return a real number, such as loss.abs()"
    elif any(size != 1 for size in shape):
        remedy = "put the loss in front" if in_front else "make one number of it, such as loss.mean()"
    else:
        got += ", without a gradient"
        remedy = (
            "leave out .detach(), .data and no_grad in model and loss, and compute the loss of parameters that "
            "require gradients"
        )
    _note(_in_front(in_front, got), remedy)


@torch.compiler.assume_constant_result
def _found_no_gradients() -> None:
    _note(
        "a call for which gradients are off, as in torch.no_grad() or torch.inference_mode()",
        "call the step outside of it; the ordinary loop's backward() raises there, too",
        expected="a call with gradients",
    )


@torch.compiler.assume_constant_result
def _found_nothing_to_train(parameters: int) -> None:
    got = f"none of the optimizer's {parameters} parameters that require gradients is used by the loss"
    if not parameters:
        got = "no parameter of the optimizer requires a gradient"
    _note(
        got,
        "make the optimizer of parameters that the loss uses and that require gradients, such as model.parameters()",
        expected="a loss that depends on a parameter of the optimizer",
    )


def _in_front(in_front: bool, got: str) -> str:
    return f"{got}, in front of a tuple" if in_front else got


def _note(got: str, remedy: str, expected: str = _EXPECTED) -> None:
    found = getattr(_on_this_thread, "found", None)
    if found is not None:
        found.append(TrainStepError("the loss of a training step", expected=expected, got=got, remedy=remedy))
