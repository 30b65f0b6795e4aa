"""Handing out results: views laid over the caller's own memory, and copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .arenas import has_address
from .static_buffers import copy_tensors


def each(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``function`` to a tensor or to each of a tuple."""
    if isinstance(value, (tuple, list)):
        return tuple(each(function, item) for item in value)
    return function(value) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class View:
    """A tensor's layout; ``shift`` counts elements from the first one of what it is a view of."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    shift: int
    dtype: torch.dtype


def views_of(value: Any, address: int) -> Any:
    """The layouts of the tensors in ``value``, counted from ``address``; holds none of them."""
    if isinstance(value, (tuple, list)):
        return tuple(views_of(item, address) for item in value)
    if value is None:
        return None  # an element that nobody needs
    shift = (value.data_ptr() - address) // value.element_size()
    return View(tuple(value.size()), value.stride(), shift, value.dtype)


def relay(views: Any, base: torch.Tensor) -> Any:
    """Lay the same views over another tensor."""
    if isinstance(views, tuple):
        return tuple(view and relay(view, base) for view in views)
    typed = base if base.dtype is views.dtype else base.view(views.dtype)
    return typed.as_strided(views.size, views.stride, typed.storage_offset() + views.shift)


def copy_out(tensor: torch.Tensor) -> torch.Tensor:
    if not has_address(tensor):
        return tensor.clone()
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    copy_tensors(tensor, copy)
    return copy
