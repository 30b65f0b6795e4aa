"""Memory of recordings: scratch that recordings share, and tensors laid over it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .turn import Call, Turn

# Bytes. On a CPU the allocator aligns to 64; asking for more costs a little padding in large blocks only.
_CPU_ALIGNMENT = 64


def tensor_at(
    storage_at: Callable[[int, torch.device, int], torch.UntypedStorage],
    address: int,
    nbytes: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A tensor over memory that somebody else owns and keeps.

    It has a storage of its own that starts at ``address``, so that an operator which counts offsets from the
    start of the storage finds what it expects, and holding it does not hold the owner.
    """
    if nbytes == 0:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty.set_(storage_at(address, device, nbytes), 0, size, stride)  # type: ignore[call-overload]


@dataclass(eq=False)
class Scratch:
    """Arena memory for recordings that do not overlap in time: ``nbytes`` on ``device``.

    Who runs in it has the turn, ``busy``.
    """

    device: torch.device
    nbytes: int
    block: torch.Tensor
    busy: Turn = field(default_factory=Turn)

    def address(self, offset: int) -> int:
        """Where ``offset`` bytes into the block are."""
        return self.block.data_ptr() + offset


class ScratchPool:
    """Scratch by device and stream.

    Recordings of all programs on one stream share the largest block that is free; a recording that needs more
    gets a larger one, which later recordings share. Blocks live as long as a recording uses them. There is no
    lock: threads that find nothing free at the same time allocate one block each.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[torch.device, Any], list[weakref.ref[Scratch]]] = {}

    def take(self, device: torch.device, nbytes: int, stream: Any, call: Call, taken: list[Scratch]) -> Scratch:
        """A block of at least ``nbytes`` that ``call`` now has; it is entered in ``taken``, too."""
        blocks = self._blocks.setdefault((device, stream), [])
        alive = [block for ref in list(blocks) if (block := ref()) is not None]
        for scratch in sorted(alive, key=lambda scratch: scratch.nbytes):
            # Entered first, so that an interrupt cannot come between taking and knowing what to give back.
            taken.append(scratch)
            if scratch.nbytes >= nbytes and scratch.busy.take(call):
                return scratch
            taken.pop()
        scratch = _allocate(device, nbytes)
        taken.append(scratch)
        scratch.busy.take(call)
        blocks.append(weakref.ref(scratch, blocks.remove))
        return scratch


SCRATCH = ScratchPool()


def _allocate(device: torch.device, nbytes: int) -> Scratch:
    if device.type == "cpu":
        whole = torch.empty(nbytes + _CPU_ALIGNMENT, dtype=torch.uint8)
        shift = -whole.data_ptr() % _CPU_ALIGNMENT
        return Scratch(device, nbytes, whole[shift : shift + nbytes])
    return Scratch(device, nbytes, torch.empty(nbytes, dtype=torch.uint8, device=device))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value that an operator returned: a tensor, or a tuple or list with tensors."""
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) and value.layout is torch.strided else []


def reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    steps = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return (1 + steps) * tensor.element_size()
