"""Saved tensors that hooks have packed: their owner may keep them as they are, so that nobody overwrites them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .output_views import copy_out


class PackedTensors:
    """Outputs of forward programs that ran while hooks pack what autograd saves, by the handle of their storage.

    AOTAutograd donates saved tensors to the backward program all the same, and Inductor's kernels write into them.
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
        """Leave out those that are gone: units replay only while there are none."""
        for handle, storage in list(self.known.items()):
            if storage.expired():
                self.known.pop(handle, None)

    def copy_from(self, inputs: list[Any], positions: Iterable[int]) -> None:
        """Put copies in the place of packed tensors among the inputs that are to be overwritten."""
        if self.known:
            self._forget()
        for position in positions if self.known else ():
            known = self.known.get(inputs[position].untyped_storage()._cdata)
            if known is not None and not known.expired():
                inputs[position] = copy_out(inputs[position])  # a clone of a view may be laid out otherwise
