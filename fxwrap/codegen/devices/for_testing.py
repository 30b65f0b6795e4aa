"""Private parts of torch that the contract tests for devices use."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._dynamo.device_interface import get_interface_for_device
from torch._inductor.codegen.common import get_device_op_overrides, get_scheduling_for_device
from torch._subclasses import FakeTensorMode


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors have no memory."""
    return FakeTensorMode()


def numbers_in_graphs() -> contextlib.AbstractContextManager[Any]:
    """A context in which reading a number from a tensor does not break the graph."""
    return torch._dynamo.config.patch(capture_scalar_outputs=True)


def known_to_inductor(device_type: str) -> tuple[Any, Any, Any]:
    """Dynamo's device interface, Inductor's op overrides and its scheduling. It raises where one is missing."""
    return (
        get_interface_for_device(device_type),
        get_device_op_overrides(device_type),
        get_scheduling_for_device(device_type),
    )
