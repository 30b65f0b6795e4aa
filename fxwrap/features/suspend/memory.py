"""The memory of suspendable arenas, of the device that they are on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from ...devices import SuspendableMemory
from ...errors import DeviceError
from ...graphs.devices.runtime import runtime_for
from ...graphs.memory.take_memory import RECLAIMING
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
    memory = _reclaiming[device] = make(device)
    return memory


def _reclaim() -> None:
    """Return freed suspendable memory to its devices. Waits for the streams that worked in it."""
    for memory in list(_reclaiming.values()):
        with contextlib.suppress(Exception):  # as emptying a cache does
            memory.reclaim()


# One for each device that has had any, to reclaim memory of arenas that are gone.
_reclaiming: dict[torch.device, SuspendableMemory] = {}
RECLAIMING.append(_reclaim)
