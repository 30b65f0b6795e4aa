"""Handing out results: views laid over the caller's own memory, copies, and who may rely on their addresses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


class OutputAddresses:
    """Addresses of the outputs of live recordings: the next program may rely on them (saved activations).

    Recordings end at any allocation, also inside of a call here: every step is one atomic step of a dictionary.
    """

    def __init__(self) -> None:
        self._by_recording: dict[int, frozenset[int]] = {}
        self._serial = itertools.count()

    def add(self, addresses: Iterable[int]) -> int:
        """Enter one recording's addresses; returns what ``remove`` takes."""
        ticket = next(self._serial)
        self._by_recording[ticket] = frozenset(addresses)
        return ticket

    def remove(self, ticket: int) -> None:
        self._by_recording.pop(ticket, None)

    def __contains__(self, address: int) -> bool:
        return any(address in addresses for addresses in list(self._by_recording.values()))


OUTPUT_ADDRESSES = OutputAddresses()


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
    shift = (value.data_ptr() - address) // value.element_size()
    return View(tuple(value.size()), value.stride(), shift, value.dtype)


def relay(views: Any, base: torch.Tensor) -> Any:
    """Lay the same views over another tensor."""
    if isinstance(views, tuple):
        return tuple(relay(view, base) for view in views)
    typed = base if base.dtype is views.dtype else base.view(views.dtype)
    return typed.as_strided(views.size, views.stride, typed.storage_offset() + views.shift)


def copy_out(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
