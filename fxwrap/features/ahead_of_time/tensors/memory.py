"""Conversion of tensors to and from what safetensors can store, and tests whether tensors share memory."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

import torch

from ....graphs.replay.overlaps import MutatedInputs
from ....host_graph.tensors import unexpanded

# Dtypes that every version of safetensors knows. Tensors of other dtypes are stored as bytes.
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


def to_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, contiguous on the CPU, with pending negations and conjugations resolved."""
    plain = unexpanded(tensor).resolve_conj().resolve_neg().cpu().contiguous()
    return plain if plain.dtype in _NAMED else plain.reshape(-1).view(torch.uint8)


def from_stored(stored: torch.Tensor, destination: torch.Tensor) -> bool:
    """Fill a tensor with what ``to_stored`` returned; False if dtype or size do not fit."""
    target = unexpanded(destination)
    if target.dtype not in _NAMED:
        if stored.dtype != torch.uint8 or stored.numel() != target.numel() * target.itemsize:
            return False
        stored = stored.view(target.dtype).view(target.size())
    if stored.dtype != target.dtype or stored.size() != target.size():
        return False
    target.copy_(stored)
    return True


def overlapping(tensors: Sequence[tuple[torch.Tensor, bool]]) -> tuple[int, int] | None:
    """The positions of two tensors that share an element, of which at least one is written; None if there are none.

    Args:
        tensors: each with whether it is written.
    """
    everything = MutatedInputs([(place, written) for place, (_, written) in enumerate(tensors)], (), ())
    if everything.are_apart([tensor for tensor, _ in tensors]):
        return None
    pair = MutatedInputs([(0, True), (1, False)], (), ())  # which two of them?
    for place, (tensor, written) in enumerate(tensors):
        for other_place, (other, _) in enumerate(tensors) if written else ():
            if other_place != place and not pair.are_apart([tensor, other]):
                return place, other_place
    return None


def same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same memory and layout, so that each sees what is written to the other."""
    return first is second or identity(first) == identity(second)


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """The memory of a tensor and its layout, as a key."""
    memory = tensor.device, tensor.data_ptr() if tensor.numel() else 0
    layout = tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), tensor.is_conj(), tensor.is_neg()
    return *memory, *layout


def content(tensor: torch.Tensor) -> tuple[object, ...]:
    """The values of a tensor and its layout, as a key."""
    stored = to_stored(tensor)
    data = (ctypes.c_char * stored.nbytes).from_address(stored.data_ptr())  # a view, without numpy
    return tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), hashlib.sha256(data).digest()
