"""Torch's own state around a trace: whether values are fake, and autocast."""

from __future__ import annotations

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .wrapped_tensors import is_wrapped, parts_of


def is_fake(value: object) -> bool:
    """Whether a value is one of a trace's."""
    if isinstance(value, torch.Tensor) and is_wrapped(value):
        return any(map(is_fake, parts_of(value)))
    return isinstance(value, (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def autocast_is_on() -> bool:
    """Whether autocast is on for any device."""
    return torch._C._is_any_autocast_enabled()


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """A context for what was traced with autocast, which has its casts in it."""
    return torch._C._DisableAutocast()


def modes() -> object:
    """What of torch's state a trace depends on."""
    autocast: object = None
    if autocast_is_on():
        kinds = ("cpu", torch._C._get_accelerator().type)
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        autocast,
    )
