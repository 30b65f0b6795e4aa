"""Tensors of a file: in a form that safetensors has, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ..codegen.torch_runtime import overlap
from ..graphs.replay.overlaps import MutatedInputs

# What every version of safetensors has a name for. Tensors of other dtypes are stored as bytes.
_NAMED = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}


def without_repeats(tensor: torch.Tensor, stride: Sequence[int] | None = None) -> torch.Tensor:
    """Each element once: dimensions of stride 0, which say the same again, have one.

    Args:
        stride: which dimensions these are, if not those of the tensor itself.
    """
    for dimension, step in enumerate(tensor.stride() if stride is None else stride):
        if step == 0 and tensor.size(dimension) > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def to_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, as they are meant: its memory may hold their negatives or conjugates."""
    plain = without_repeats(tensor).resolve_conj().resolve_neg().cpu().contiguous()
    return plain if plain.dtype in _NAMED else plain.reshape(-1).view(torch.uint8)


def from_stored(stored: torch.Tensor, like: torch.Tensor) -> bool:
    """Fill a tensor with what ``to_stored`` has made of one with its dtype, size and strides; False if it was not."""
    target = without_repeats(like)
    if target.dtype not in _NAMED:
        if stored.dtype != torch.uint8 or stored.numel() != target.numel() * target.itemsize:
            return False
        stored = stored.view(target.dtype).view(target.size())
    if stored.dtype != target.dtype or stored.size() != target.size():
        return False
    target.copy_(stored)
    return True


def overlapping(tensors: Sequence[tuple[torch.Tensor, bool]]) -> tuple[int, int] | None:
    """The numbers of two tensors that share an element.

    Args:
        tensors: each with whether it is written: of two that overlap, one is.
    """
    everything = MutatedInputs([(place, written) for place, (_, written) in enumerate(tensors)], (), (), overlap)
    if everything.are_apart([tensor for tensor, _ in tensors]):
        return None
    pair = MutatedInputs([(0, True), (1, False)], (), (), overlap)  # which two of them?
    for place, (one, written) in enumerate(tensors):
        for other_place, (other, _) in enumerate(tensors) if written else ():
            if other_place != place and not pair.are_apart([one, other]):
                return place, other_place
    return None


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are one: what is written to one of them, the other has."""
    return one is other or identity(one) == identity(other)


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """What tensors have in common that are one: memory, and how it is read."""
    where = tensor.device, tensor.data_ptr() if tensor.numel() else 0
    how = tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), tensor.is_conj(), tensor.is_neg()
    return *where, *how


def content(tensor: torch.Tensor) -> tuple[object, ...]:
    """What tensors have in common that say the same, wherever they lie."""
    data: Any = to_stored(tensor).reshape(-1).view(torch.uint8).numpy()
    return tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), hashlib.sha256(data).digest()
