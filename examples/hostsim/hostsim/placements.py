"""Where operators allocate while a graph is captured: fxwrap plans it, and the allocator does as it is told."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .device import _C

_ALIGNMENT = 512


class Placements:
    """During one capture on this thread (`fxwrap.Placements`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._contexts: list[Any] = []
        self._begin, self._count = _C.addresses_without_memory()
        self._operands = self._begin

    @contextlib.contextmanager
    def at(self, addresses: Sequence[int]) -> Iterator[None]:
        placing = _C.placing_at(list(addresses))
        try:
            with self._placed_by(placing):
                yield
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"more than {len(addresses)} allocations: {error}") from None
        if left := _C.placing_left(placing):
            raise RuntimeError(f"{len(addresses) - left} allocations in place of {len(addresses)}")

    @contextlib.contextmanager
    def without_memory(self) -> Iterator[None]:
        with self._placed_by(_C.placing_without_memory(self._begin + self._count // 2)):
            yield

    @contextlib.contextmanager
    def _placed_by(self, placing: Any) -> Iterator[None]:
        self._contexts.append(placing)
        _C.place_by(placing)
        try:
            yield
        finally:
            _C.place_by(None)

    def stand_in(self, nbytes: int) -> torch.UntypedStorage:
        address = self._operands
        self._operands += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._operands > self._begin + self._count // 2:
            raise RuntimeError(f"operands of more than {self._count // 2:,} bytes")
        return torch._C._construct_storage_from_data_pointer(address, self._device, nbytes)

    def made(self) -> list[list[tuple[int, int]] | None]:
        return [None if _C.placing_in_use(one) else _C.placing_made(one) for one in self._contexts]


@contextlib.contextmanager
def placements(device: torch.device) -> Iterator[Placements]:
    """Around one capture."""
    yield Placements(device)
