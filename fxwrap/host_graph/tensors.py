"""What a tensor is as memory: whether it has an address, how far it reaches, and tensors laid over a storage."""

from __future__ import annotations

import warnings
from typing import Any

import torch


def has_address(tensor: torch.Tensor) -> bool:
    """Whether a tensor has an address: it is strided, and not on the meta device."""
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def stands_for_memory(value: Any) -> bool:
    """Whether a value is a tensor without memory: a fake one, or one that wraps others."""
    if not isinstance(value, torch.Tensor) or type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of asking a fake tensor for its address
        try:
            return bool(value.numel()) and value.data_ptr() == 0
        except RuntimeError:
            return True


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value that an operator returned: a tensor, or a tuple or list with tensors."""
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) and has_address(value) else []


def reach(tensor: torch.Tensor) -> int:
    """Bytes from the start of a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    steps = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return (1 + steps) * tensor.element_size()


def tensor_over(
    storage: torch.UntypedStorage,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    offset: int = 0,
) -> torch.Tensor:
    """A tensor that begins ``offset`` bytes after a storage does.

    In an arena each planned tensor has its own storage object, for two reasons: operators may address from the
    storage's start, and the storage's use count tells whether the tensor is live.
    """
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, size, stride)  # type: ignore[call-overload]


def tensor_like(value: torch.Tensor, storage: torch.UntypedStorage, offset: int = 0) -> torch.Tensor:
    """A tensor that stands for ``value`` and begins ``offset`` bytes after a storage does: its layout, its dtype, and
    its pending conjugation or negation.

    Work that was compiled for a conjugated tensor conjugates it again to read its memory. A stand-in without the bit
    would hold other bytes, and an operator that looks at the bit would raise.
    """
    plain = tensor_over(storage, tuple(value.size()), value.stride(), value.dtype, offset)
    return with_pending(plain, value.is_conj(), value.is_neg())


def with_pending(tensor: torch.Tensor, conjugation: bool, negation: bool) -> torch.Tensor:
    """The same memory, of which these and nothing else is pending."""
    tensor = tensor.conj() if tensor.is_conj() is not conjugation else tensor
    return torch._neg_view(tensor) if tensor.is_neg() is not negation else tensor
