"""The few functions of torch that running a program needs and that have no public name.

They are looked up in ``codegen/``, where private torch interfaces live, and handed in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def _same_pointers(inputs: list[Any], pointers: list[int], positions: list[int]) -> bool:
    return all(inputs[p].data_ptr() == pointers[p] for p in positions)


@dataclass(frozen=True)
class TorchFunctions:
    """
    Attributes:
        storage_use_count: how many tensors and storage objects share a storage. None where torch cannot tell:
            then every output counts as held.
        same_data_pointers: ``(inputs, pointers, positions)``: whether ``inputs[p]`` is at ``pointers[p]`` for
            every ``p`` in ``positions``.
        fresh_alias: a new tensor object over the same memory.
        below_autograd: makes a context in which operators skip autograd's layer of the dispatcher.
    """

    storage_use_count: Callable[[torch.UntypedStorage], int] | None = None
    same_data_pointers: Callable[[list[Any], list[int], list[int]], bool] = _same_pointers
    fresh_alias: Callable[[torch.Tensor], torch.Tensor] = _alias
    below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
