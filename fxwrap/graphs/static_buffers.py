"""StaticBuffers: memory that stays, for captured work that reads fixed addresses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Fill:
    """Copies inputs to their static buffers, which ``tensors`` are, one element along repeated dimensions."""

    tensors: list[torch.Tensor]

    def __call__(self, *inputs: torch.Tensor) -> None:
        torch._foreach_copy_(self.tensors, list(map(unexpanded, inputs)))


class StaticBuffers:
    """Memory that stays, for values that eager work allocates at every call.

    Values that share a storage get buffers that share one.

    Args:
        stable: addresses of storages that stay where they are.
    """

    def __init__(self, stable: set[int]) -> None:
        self._stable = stable
        self._storages: dict[int, torch.UntypedStorage] = {}

    def put(self, value: Any) -> Any:
        """The place of a tensor, filled, and of every tensor in a tuple; other values as they are."""
        if isinstance(value, (tuple, list)):
            return tuple(self.put(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() in self._stable:
            return value
        if storage.data_ptr() not in self._storages:
            new = torch.empty(storage.nbytes(), dtype=torch.uint8, device=value.device)
            self._storages[storage.data_ptr()] = new.untyped_storage()
        place = torch.empty(0, dtype=value.dtype, device=value.device).set_(
            self._storages[storage.data_ptr()],  # type: ignore[call-overload]
            value.storage_offset(),
            value.size(),
            value.stride(),
        )
        copy_tensors(value, place)
        return place


def apart(source: torch.Tensor, place: torch.Tensor, places: Collection[int]) -> torch.Tensor:
    """A tensor that can be copied after others have been, too: what lies in the place of another is cloned.

    Args:
        places: addresses of all places.
    """
    if source.data_ptr() == place.data_ptr():
        return source
    return source.clone() if source.untyped_storage().data_ptr() in places else source


def copy_tensors(source: Any, place: Any) -> None:
    """Copy a tensor, or each of a tuple, to its place."""
    if isinstance(place, tuple):
        for item, item_place in zip(source, place, strict=True):
            copy_tensors(item, item_place)
    elif isinstance(place, torch.Tensor) and source.data_ptr() != place.data_ptr():
        unexpanded(place).copy_(unexpanded(source))


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """One element along dimensions that repeat it: copying to every repetition of a place is not allowed."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
