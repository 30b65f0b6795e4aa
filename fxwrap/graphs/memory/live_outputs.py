"""Liveness of outputs: whether the caller still has an output that was returned without a copy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ...torch_private.functions import use_counter

UseCounter = Callable[[Sequence[torch.UntypedStorage]], Callable[[], list[int]]]


@dataclass(frozen=True, eq=False)
class OutputStorage:
    """The storage of an output, and its place in an arena.

    Attributes:
        indices: the storage indices of the program that it may belong to.
        device: the device of the arena; None for a storage outside of arenas.
        low: the offset of its first byte in the arena.
        owner: the recording that returns it.
    """

    storage: torch.UntypedStorage
    indices: frozenset[int]
    device: torch.device | None = None
    low: int = 0
    owner: weakref.ref[Any] | None = None

    @property
    def high(self) -> int:
        return self.low + self.storage.nbytes()

    def within(self, footprint: Sequence[tuple[int, int]]) -> bool:
        """Whether it shares a byte with any of these spans ``[low, high)``."""
        return any(low < self.high and self.low < high for low, high in footprint)


class WatchedOutputs:
    """The outputs of one recording, and their use counts.

    An output is live if its storage's use count is above the baseline, its count when it was not live.
    """

    def __init__(
        self,
        outputs: Sequence[OutputStorage] = (),
        counter: UseCounter = use_counter,
        handed_out: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            handed_out: the number of tensors that the caller already has of each storage, by the storage's handle.
        """
        self.outputs = list(outputs)
        self._counts = counter([output.storage for output in self.outputs])
        counted = zip(self._counts(), self.outputs, strict=True)
        self.baseline = [count - handed_out.get(output.storage._cdata, 0) for count, output in counted]
        self._retired = False

    def live(self) -> dict[OutputStorage, int]:
        """The live outputs, each with the number of tensors that the caller has of it."""
        counts = self._counts()
        if counts == self.baseline:
            return {}
        # Garbage that referred to an output when watching began made the baseline too high.
        self.baseline = list(map(min, counts, self.baseline))
        counted = zip(self.outputs, counts, self.baseline, strict=True)
        return {output: count - baseline for output, count, baseline in counted if count > baseline}

    def retire(self) -> None:
        """Note that the recording ended: only the caller and this object still refer to its outputs."""
        # One statement: an interrupt between the two would leave live outputs that look dead.
        self.baseline, self._retired = [1] * len(self.outputs), True

    def is_dead(self) -> bool:
        """Whether the recording has ended, and none of its outputs is live."""
        return self._retired and not self.live()
