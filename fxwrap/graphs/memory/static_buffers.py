"""StaticBuffers: memory that stays, for captured work that reads fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ...host_graph.tensors import tensor_like, unexpanded


def fill_buffers(buffers: list[torch.Tensor], *inputs: torch.Tensor) -> None:
    """Copy inputs to their static buffers, which have one element along repeated dimensions."""
    torch._foreach_copy_(buffers, list(map(unexpanded, inputs)))


def _allocate(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


class StaticBuffers:
    """Memory that stays, for values that eager work allocates at every call.

    Values that share a storage get buffers that share one.

    Args:
        stable: addresses of storages that stay where they are.
        allocate: allocates so many bytes on a device.
    """

    def __init__(
        self, stable: set[int], allocate: Callable[[int, torch.device], torch.UntypedStorage] = _allocate
    ) -> None:
        self._stable, self._allocate = stable, allocate
        self._storages: dict[int, torch.UntypedStorage] = {}

    def buffer_of(self, value: Any) -> Any:
        """The buffer of a tensor, filled, and of every tensor in a tuple; other values as they are."""
        if isinstance(value, (tuple, list)):
            return tuple(self.buffer_of(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() in self._stable:
            return value
        if storage.data_ptr() not in self._storages:
            self._storages[storage.data_ptr()] = self._allocate(storage.nbytes(), value.device)
        memory, offset = self._storages[storage.data_ptr()], int(value.storage_offset()) * value.dtype.itemsize
        buffer = tensor_like(value, memory, offset)
        copy_tensors(value, buffer)
        return buffer


def safe_source(source: torch.Tensor, target: torch.Tensor, targets: Collection[int]) -> torch.Tensor:
    """The source of one copy among several: a clone if it lies in the target of another, which may be written before.

    Args:
        targets: addresses of all targets.
    """
    if source.data_ptr() == target.data_ptr():
        return source
    return source.clone() if source.untyped_storage().data_ptr() in targets else source


def copy_tensors(source: Any, target: Any) -> None:
    """Copy a tensor, or each of a tuple, to its target."""
    if isinstance(target, tuple):
        for item, item_target in zip(source, target, strict=True):
            copy_tensors(item, item_target)
    elif isinstance(target, torch.Tensor) and source.data_ptr() != target.data_ptr():
        unexpanded(target).copy_(unexpanded(source))


def copy_at_once(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy tensors to targets, as if all were read before one is written."""
    pairs = [
        (source, target) for source, target in zip(sources, targets, strict=True) if not _is_in_place(source, target)
    ]
    written = {target.untyped_storage().data_ptr() for _, target in pairs}
    read = [source.clone() if source.untyped_storage().data_ptr() in written else source for source, _ in pairs]
    for source, (_, target) in zip(read, pairs, strict=True):
        target.copy_(source)


def _is_in_place(source: torch.Tensor, target: torch.Tensor) -> bool:
    return source.data_ptr() == target.data_ptr() and source.stride() == target.stride()
