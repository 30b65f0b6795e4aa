"""Which inputs are static: their addresses are expected to stay, so captured work reads them without a copy."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...host_graph.nodes import is_aligned
from ...host_graph.tensors import has_address
from ..memory.shared_state import SHARED

# The number of moves after which an input is no longer static. One that AOTAutograd does not mark may not move.
_MOVES = 3


@dataclass(frozen=True)
class InputLocation:
    """The address and the storage of an input, without keeping it alive.

    An address alone does not identify a tensor, because a new one often gets a freed address: the storage must still
    be alive as well.
    """

    address: int
    storage: StorageWeakRef

    @classmethod
    def of(cls, value: Any) -> InputLocation | None:
        """The location of a value; None if it has no address (a number, an opaque tensor)."""
        if not isinstance(value, torch.Tensor) or not has_address(value):
            return None
        if value.is_conj() or value.is_neg():
            return None  # memory holds the value before conjugation or negation
        try:
            storage = value.untyped_storage()
            return cls(value.data_ptr(), StorageWeakRef(storage))
        except RuntimeError:
            return None

    def unchanged_at(self, other: InputLocation) -> bool:
        alive = not self.storage.expired()
        return alive and self.storage.cdata == other.storage.cdata and self.address == other.address


@dataclass(eq=False)
class StaticInputs:
    """The addresses of inputs in earlier calls.

    Attributes:
        warm_locations: the locations of the inputs of the last warm-up run, by position.
        moves: how often a static input was found at another address, by position. It is changed in place: a count
            that another thread loses only delays a decision.
    """

    warm_locations: dict[int, InputLocation | None] = field(default_factory=dict)
    moves: collections.Counter[int] = field(default_factory=collections.Counter)

    def note(self, inputs: Sequence[Any]) -> None:
        """Remember the locations of the inputs of an eager run."""
        self.warm_locations = {position: InputLocation.of(value) for position, value in enumerate(inputs)}

    def positions(
        self,
        inputs: Sequence[Any],
        expected: Collection[int],
        others_copied: bool,
        backward: bool,
        saved: Collection[int],
        aligned: Collection[int],
    ) -> list[int]:
        """The positions of static inputs.

        Args:
            expected: positions that AOTAutograd marks as static. In a backward program these are all saved tensors:
                parameters stay; activations stay only in an arena.
            others_copied: whether the other inputs are copied at every call. Then an input that has not moved is
                static.
            backward: whether the program is a backward one.
            saved: positions of tensors that the forward allocates: new at every call unless in an arena.
            aligned: positions of inputs that kernels expect to be aligned. If such an input is not, it is copied to a
                static input buffer, which is.
        """
        candidates = range(len(inputs)) if others_copied else sorted(expected)
        trusted = frozenset(expected) if others_copied or not backward else frozenset()
        candidates = [p for p in candidates if p not in aligned or is_aligned(inputs[p])]
        return [p for p in candidates if self._stays(p, inputs[p], p in trusted, p in saved)]

    def _stays(self, position: int, value: Any, expected: bool, saved: bool) -> bool:
        moves = self.moves[position]
        if moves >= (_MOVES if expected else 1) or (here := InputLocation.of(value)) is None:
            return False
        in_arena = SHARED.arenas.owns(here.address)
        if expected and saved:
            return in_arena
        if expected and (moves or not self.warm_locations or in_arena):
            return True  # without a call to compare with (warmup=0), AOTAutograd's mark decides
        before = self.warm_locations.get(position)
        return before is not None and before.unchanged_at(here)
