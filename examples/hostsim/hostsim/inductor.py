"""What Inductor and fxwrap have to know about the device: all of it is said in one call."""

from collections.abc import Callable, Iterator

import torch

import fxwrap

from . import device
from .name import NAME
from .placements import placements


def _branch(predicate: torch.Tensor) -> Iterator[None]:
    with device.branch(predicate):
        yield


def _loop(predicate: torch.Tensor) -> Iterator[Callable[[torch.Tensor], object]]:
    with device.loop(predicate) as decide:
        yield decide


def register() -> fxwrap.DeviceRegistration:
    """Have `torch.compile(model, backend="fxwrap")` compile for the device; the handle takes it back.

    The device reaches host memory, so that Inductor's C++ kernels run on it as they are; they are launched through
    the device's streams, which is what makes them part of its graphs.
    """
    return fxwrap.register_device(
        NAME,
        scheduling="cpp",
        kernels=[fxwrap.cpp_kernels(device.launch)],
        after_failed_capture=device.recover,
        conditional_nodes=fxwrap.ConditionalNodes(_branch, _loop),
        placements=placements,
        # No driver stands between: a replay, and a copy, cost little beside a call out of Python.
        cost=fxwrap.CaptureCost(launch=2, extern=5, replay=1, copy=1),
    )
