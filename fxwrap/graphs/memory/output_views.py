"""Handing out results: views laid over the caller's own memory, and copies."""

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
class View:
    """A tensor's layout, and whether a conjugation or a negation is pending; ``shift`` counts elements from the first
    one of what it is a view of."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    shift: int
    dtype: torch.dtype
    conjugation: bool
    negation: bool


def views_of(value: Any, address: int) -> Any:
    """The layouts of the tensors in ``value``, counted from ``address``; holds none of them."""
    if isinstance(value, (tuple, list)):
        return tuple(views_of(item, address) for item in value)
    if value is None:
        return None  # an element that nobody needs
    shift = (value.data_ptr() - address) // value.element_size()
    return View(tuple(value.size()), value.stride(), shift, value.dtype, value.is_conj(), value.is_neg())


def relay(views: Any, base: torch.Tensor) -> Any:
    """Lay the same views over another tensor."""
    if isinstance(views, tuple):
        return tuple(view and relay(view, base) for view in views)
    plain = with_pending(base, False, False)  # torch refuses to view other tensors with another dtype
    typed = plain if plain.dtype is views.dtype else plain.view(views.dtype)
    laid = typed.as_strided(views.size, views.stride, typed.storage_offset() + views.shift)
    return with_pending(laid, views.conjugation, views.negation)


def shares_storage(seen: torch.Tensor, value: Any) -> bool:
    """Whether all tensors in ``value`` lie in the storage of ``seen``, and there are any.

    By its handle: in an arena another storage may be at the same address.
    """
    tensors, storage = tensors_in(value), seen.untyped_storage()._cdata
    return bool(tensors) and all(tensor.untyped_storage()._cdata == storage for tensor in tensors)


def relay_shared(seen: torch.Tensor, value: Any, base: torch.Tensor) -> Any:
    """The same views over ``base`` of what shares ``seen``'s storage; an operator may return new memory next time."""
    return relay(views_of(value, seen.data_ptr()), base) if shares_storage(seen, value) else value


def copy_out(tensor: torch.Tensor) -> torch.Tensor:
    if not has_address(tensor):
        return tensor.clone()
    new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    copy = with_pending(new, tensor.is_conj(), tensor.is_neg())
    copy_tensors(tensor, copy)
    return copy
