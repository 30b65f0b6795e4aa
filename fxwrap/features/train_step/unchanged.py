"""Calls of a training step that leave everything as it was: for ``record``, ``explain`` and dry runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


@contextlib.contextmanager
def kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back what tensors hold, and random numbers, when the context ends; also after an error.

    Whole storages are kept, on the host: a device that is filled by parameters and states has no room for them twice.
    """
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    devices = {storage.device for storage in storages.values() if storage.device.type != "cpu"}
    device_type = next((device.type for device in devices), "cuda")
    copies = [storage.cpu() if storage.device.type != "cpu" else storage.clone() for storage in storages.values()]
    with torch.random.fork_rng(devices=[device.index or 0 for device in devices], device_type=device_type):
        try:
            yield
        finally:
            for storage, copy in zip(storages.values(), copies, strict=True):
                storage.copy_(copy)
