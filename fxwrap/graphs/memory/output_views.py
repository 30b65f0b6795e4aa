"""Results for the caller: the layouts of views, the same views over other memory, and copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...host_graph.tensors import has_address, tensors_in, with_pending
from .static_buffers import copy_tensors


def each(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``function`` to a tensor or to each of a tuple."""
    if isinstance(value, (tuple, list)):
        return tuple(each(function, item) for item in value)
    return function(value) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class OutputView:
    """A tensor's layout relative to its base, and its pending conjugation or negation.

    Attributes:
        shift: the distance to the first element of the base, in elements.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    shift: int
    dtype: torch.dtype
    conjugation: bool
    negation: bool


def views_of(value: Any, address: int) -> Any:
    """The layouts of the tensors in ``value``, relative to ``address``; the tensors are not kept alive."""
    if isinstance(value, (tuple, list)):
        return tuple(views_of(item, address) for item in value)
    if value is None:
        return None  # an unused element
    shift = (value.data_ptr() - address) // value.element_size()
    return OutputView(tuple(value.size()), value.stride(), shift, value.dtype, value.is_conj(), value.is_neg())


def relay(views: Any, base: torch.Tensor) -> Any:
    """Make the same views of another tensor."""
    if isinstance(views, tuple):
        return tuple(view and relay(view, base) for view in views)
    plain = with_pending(base, False, False)  # torch refuses to view other tensors with another dtype
    typed = plain if plain.dtype is views.dtype else plain.view(views.dtype)
    laid = typed.as_strided(views.size, views.stride, typed.storage_offset() + views.shift)
    return with_pending(laid, views.conjugation, views.negation)


def shares_storage(base: torch.Tensor, value: Any) -> bool:
    """Whether ``value`` contains tensors, and all of them have the storage of ``base``.

    Storages are compared by handle: in an arena another storage may have the same address.
    """
    tensors, storage = tensors_in(value), base.untyped_storage()._cdata
    return bool(tensors) and all(tensor.untyped_storage()._cdata == storage for tensor in tensors)


def relay_shared(seen: torch.Tensor, value: Any, base: torch.Tensor) -> Any:
    """Views of ``base`` in place of views of ``seen``; other values are returned as they are.

    An operator may return a view of an operand at one call and new memory at the next.
    """
    return relay(views_of(value, seen.data_ptr()), base) if shares_storage(seen, value) else value


def clones_alike(value: Any) -> bool:
    """Whether ``clone`` copies a value as ``copy_out`` does: a plain tensor without gaps and pending bits."""
    plain = type(value) is torch.Tensor and has_address(value) and not (value.is_conj() or value.is_neg())
    return plain and torch.empty_like(value, device="meta").stride() == value.stride()


def copies_out(value: Any) -> Any:
    """``copy_out`` of a tensor, or of each of a tuple."""
    return each(copy_out, value)


def copy_out(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with the same strides and pending bits."""
    if not has_address(tensor):
        return tensor.clone()
    new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    copy = with_pending(new, tensor.is_conj(), tensor.is_neg())
    copy_tensors(tensor, copy)
    return copy
