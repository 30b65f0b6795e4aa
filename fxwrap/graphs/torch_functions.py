"""The few functions of torch that running a program needs and that have no public name.

They are looked up in ``codegen/``, where private torch interfaces live, and handed in.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import CaptureError
from ..plan import Allocations

# Asked of the inputs at every call.
InputCheck = Callable[[list[Any]], bool]


def _lay_out(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    return tensor.detach().as_strided(size, stride, tensor.storage_offset() + offset)


def _chooser(positions: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    if len(positions) < 2:  # a getter of one item returns no tuple
        return lambda inputs: [inputs[p] for p in positions]
    return operator.itemgetter(*positions)


def pointer_check(pointers: Sequence[Any], positions: Sequence[int]) -> InputCheck:
    """Asked of a hundred parameters: what can be is looked up beforehand."""
    expected, pointer_of, chosen = [pointers[p] for p in positions], torch.Tensor.data_ptr, _chooser(positions)
    return lambda inputs: [*map(pointer_of, chosen(inputs))] == expected


def _storage_at(address: int, device: torch.device, nbytes: int) -> torch.UntypedStorage:
    if device.type != "cpu":
        raise CaptureError(f"this torch makes no storage over memory on {device}")
    memory = (ctypes.c_char * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _alive(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    storage: Any = torch.UntypedStorage
    return storage._new_with_weak_ptr(reference.cdata)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TorchFunctions:
    """
    Attributes:
        use_counter: makes a function that tells how many tensors and storage objects share each of some
            storages. None where torch cannot tell: then every output counts as held.
        pointer_check: ``(pointers, positions)``: makes a function that tells whether ``inputs[p]`` is at
            ``pointers[p]`` for every ``p`` in ``positions``.
        storage_at: ``(address, device, bytes)``: a storage over memory that somebody else owns and keeps.
        alive: what a weak reference refers to; None if that is gone.
        lay_out: ``(tensor, size, stride, offset)``: a new tensor object over the same memory.
        saved_tensors_hooks: tells whether hooks pack what autograd saves, in this thread.
        allocations: tells what a function allocates on the CPU.
        below_autograd: makes a context in which operators skip autograd's layer of the dispatcher.
    """

    use_counter: Callable[[Sequence[torch.UntypedStorage]], Callable[[], list[int]]] | None = None
    pointer_check: Callable[[Sequence[Any], Sequence[int]], InputCheck] = pointer_check
    storage_at: Callable[[int, torch.device, int], torch.UntypedStorage] = _storage_at
    alive: Callable[[StorageWeakRef], torch.UntypedStorage | None] = _alive
    lay_out: Callable[..., torch.Tensor] = _lay_out
    saved_tensors_hooks: Callable[[], bool] = lambda: False
    allocations: Allocations = lambda run: None
    below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
