"""Tensors as memory: whether a tensor has an address, how many bytes it reaches, and tensors over a storage."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from .sizes import storage_bytes


def has_address(tensor: torch.Tensor) -> bool:
    """Whether a tensor has an address: it is strided, and not on the meta device."""
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def stands_for_memory(value: Any) -> bool:
    """Whether a value is a tensor without memory of its own: a fake tensor, or a wrapper of other tensors."""
    if not isinstance(value, torch.Tensor) or type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where a fake tensor is asked for its address
        try:
            return bool(value.numel()) and value.data_ptr() == 0
        except RuntimeError:
            return True


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors with an address in the result of an operator, which may be a (nested) tuple or list."""
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) and has_address(value) else []


def reach(tensor: torch.Tensor) -> int:
    """Bytes from the start of a tensor's first element to the end of its last."""
    return storage_bytes(tensor.size(), tensor.stride(), tensor.dtype)


def tensor_over(
    storage: torch.UntypedStorage,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    offset: int = 0,
) -> torch.Tensor:
    """A tensor that begins ``offset`` bytes after the start of a storage.

    In an arena each planned tensor has its own storage object. An operator may count elements from the start of the
    storage, and the storage's use count tells whether the tensor is live.
    """
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, size, stride)  # type: ignore[call-overload]


def unexpanded(tensor: torch.Tensor, stride: Sequence[int] | None = None) -> torch.Tensor:
    """The part of a tensor with each element once: torch refuses to write to an expanded tensor.

    Args:
        stride: strides to look at instead of the tensor's own. Dimensions of stride 0 get size 1.
    """
    for dimension, step in enumerate(tensor.stride() if stride is None else stride):
        if step == 0 and tensor.size(dimension) > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def tensor_like(value: torch.Tensor, storage: torch.UntypedStorage, offset: int = 0) -> torch.Tensor:
    """A tensor like ``value``, ``offset`` bytes into a storage: its layout, dtype, pending conjugation and negation.

    Work that was compiled for a conjugated tensor conjugates it again to read its memory. Without the bit the tensor
    would hold other bytes, and an operator that checks the bit would raise.
    """
    plain = tensor_over(storage, tuple(value.size()), value.stride(), value.dtype, offset)
    return with_pending(plain, value.is_conj(), value.is_neg())


def with_pending(tensor: torch.Tensor, conjugation: bool, negation: bool) -> torch.Tensor:
    """The same memory as a tensor with exactly these operations pending."""
    tensor = tensor.conj() if tensor.is_conj() is not conjugation else tensor
    return torch._neg_view(tensor) if tensor.is_neg() is not negation else tensor
