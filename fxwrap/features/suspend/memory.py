"""The memory of suspendable arenas, of the device that they are on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...devices import SuspendableMemory
from ...errors import DeviceError
from ...graphs.devices.runtime import runtime_for
from .cuda_memory import CudaMemory


def memory_class(device: torch.device) -> Callable[[torch.device], SuspendableMemory] | None:
    """What makes suspendable memory of a device; None if nothing does."""
    make = runtime_for(device).suspendable_memory
    return CudaMemory if make is None and device.type == "cuda" and torch.version.hip is None else make


def suspendable_memory(device: torch.device) -> SuspendableMemory:
    """New suspendable memory for an arena on a device.

    Raises:
        DeviceError: the device has none, or it cannot be had in this process.
        CaptureError: no device graph exists for the device.
    """
    make = memory_class(device)
    if make is None:
        raise DeviceError(
            f"memory of recordings on {device} cannot be suspended",
            expected="a device whose memory can be unmapped while its addresses stay (CUDA), or suspendable_memory= "
            "of fxwrap.register_device",
            got="none was registered",
            remedy="fxwrap.release() gives the memory back, too; the next call records again",
        )
    return make(device)
