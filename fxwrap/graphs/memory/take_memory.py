"""Taking memory of a device: if there is none, caches are emptied, and it is tried once more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

from ...errors import MemoryLimitError

Value = TypeVar("Value")
# A feature's memory: each returns what is free to its device, when caches are emptied.
RECLAIMING: list[Callable[[], object]] = []


def reclaim_memory() -> None:
    """Return free memory that is not the allocator's to its devices."""
    for reclaim in RECLAIMING:
        reclaim()


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
