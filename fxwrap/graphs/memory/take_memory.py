"""Taking memory of a device: if there is none, caches are emptied, and it is tried once more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

from ...devices import SuspendableMemory
from ...errors import MemoryLimitError

Value = TypeVar("Value")
# The newest suspendable memory of each device that has had any: it reclaims that of arenas that are gone, too.
SUSPENDABLE: dict[torch.device, SuspendableMemory] = {}


def reclaim_memory() -> None:
    """Return freed memory of arenas that is not the allocator's to its devices."""
    for memory in list(SUSPENDABLE.values()):
        with contextlib.suppress(Exception):  # as emptying a cache does
            memory.reclaim()


def empty_cache() -> None:
    """Return the cached memory of the accelerator's allocator to the driver. Waits for the device."""
    with contextlib.suppress(Exception):  # it raises during another capture, and without an accelerator
        torch.accelerator.empty_cache()
    reclaim_memory()


def take_memory(device: torch.device, take: Callable[[], Value], release: Callable[[], object]) -> Value:
    """Return ``take()``. If the device is out of memory, empty the allocator's cache and try once more.

    Allocators do not empty their caches themselves while a graph is captured.

    Args:
        release: frees what a failed ``take`` has left; called before the second attempt.

    Raises:
        MemoryLimitError: the device is out of memory.
    """
    with contextlib.suppress(torch.OutOfMemoryError):
        return take()
    release()
    empty_cache()
    try:
        return take()
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"{device} is out of memory",
            got=str(error),
            remedy="set max_memory, so that less is kept for recordings, or free what is kept elsewhere",
        ) from error
