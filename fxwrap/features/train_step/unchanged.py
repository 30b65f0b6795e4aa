"""Calls of a training step that leave everything as it was: for ``record``, ``explain``, dry runs, checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from ...graphs.copies import Generators


class Kept:
    """What tensors hold, and random numbers, as they are now.

    Whole storages are kept, on the host: a device that is filled by parameters and states has no room for them twice.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._storages = list({one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}.values())
        self._copies = [one.cpu() if one.device.type != "cpu" else one.clone() for one in self._storages]
        devices = {storage.device for storage in self._storages} or {torch.device("cpu")}
        self._generators = [Generators(device) for device in devices]

    def put_back(self) -> None:
        for storage, copy in zip(self._storages, self._copies, strict=True):
            storage.copy_(copy)
        for generators in self._generators:
            generators.set()


@contextlib.contextmanager
def kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back what tensors hold, and random numbers, when the context ends; also after an error."""
    before = Kept(tensors)
    try:
        yield
    finally:
        before.put_back()
