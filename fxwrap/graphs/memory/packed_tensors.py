"""Tensors that saved-tensors hooks have packed: the owner of the hooks may keep them, so they are not overwritten."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .output_views import copy_out


class PackedTensors:
    """Outputs of forward programs that ran under saved-tensors hooks.

    AOTAutograd donates saved tensors to the backward program even then, and Inductor's kernels write into them: they
    are copied first.

    Attributes:
        known: the storages of the outputs, by handle.
    """

    def __init__(self) -> None:
        self.known: dict[int, StorageWeakRef] = {}

    def note(self, outputs: Any) -> None:
        self._forget()
        for value in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                storage = StorageWeakRef(value.untyped_storage())
                self.known[storage.cdata] = storage

    def _forget(self) -> None:
        """Drop storages that were freed: native units replay only while there are none."""
        for handle, storage in list(self.known.items()):
            if storage.expired():
                self.known.pop(handle, None)

    def copy_from(self, inputs: list[Any], positions: Iterable[int]) -> None:
        """Replace packed tensors among the inputs by copies.

        Args:
            positions: the inputs that the program may overwrite.
        """
        if self.known:
            self._forget()
        for position in positions if self.known else ():
            storage = self.known.get(inputs[position].untyped_storage()._cdata)
            if storage is not None and not storage.expired():
                inputs[position] = copy_out(inputs[position])  # a clone of a view may have other strides
