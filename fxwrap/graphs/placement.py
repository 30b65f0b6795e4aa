"""What operators return lies where the plan wants it.

Where the device's allocator can be told, it is offered the places around each call. What lies elsewhere is copied as
soon as it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from ..devices import PlaceAllocations
from ..errors import CaptureError
from ..host_graph.nodes import operator_name
from .arenas import reach, tensor_over
from .flat import Calls, Landings
from .shared_state import SHARED
from .static_buffers import apart, copy_tensors
from .torch_functions import TorchFunctions

# At how many calls more of what an operator allocates is looked at, to find its results.
_TRIES = 4


class PlacedResults:
    """Planned memory for results of operators, and the allocator that is told, if it can be.

    An operator may keep what it allocates: a result, or a table that happens to be as large as one. One that runs at
    every call is first offered memory of its own, and the plan's only if it let go of that; if it begins to keep
    things later, that is noticed before anybody else uses the place.

    Attributes:
        keeper: the operator that kept what it was offered while it was captured: nothing may be replayed there.
    """

    def __init__(self, offer: PlaceAllocations | None, functions: TorchFunctions) -> None:
        self._offer, self._functions = offer, functions
        self._planned: dict[Node, dict[int | None, torch.UntypedStorage]] = {}
        self._workspace: dict[Node, list[torch.UntypedStorage]] = {}
        self.keeper = ""

    def add(self, node: Node, element: int | None, planned: torch.UntypedStorage) -> None:
        """Plan a result at ``planned``."""
        self._planned.setdefault(node, {})[element] = planned

    def add_workspace(self, node: Node, spans: Sequence[torch.UntypedStorage]) -> None:
        """Offer a captured operator what is free while it runs."""
        self._workspace[node] = list(spans)

    @property
    def addresses(self) -> set[int]:
        return {storage.data_ptr() for planned in self._planned.values() for storage in planned.values()}

    def around(self, nodes: Iterable[Node], captured: bool, others: set[int]) -> tuple[Calls, Landings]:
        """What to call before nodes run, and what brings their results to their places.

        Args:
            others: addresses of other storages that stay where they are.
        """
        found: dict[Node, _Captured | _Eager] = {}
        addresses = self.addresses
        for node in nodes:
            planned, workspace = self._planned.get(node, {}), self._workspace.get(node, []) if captured else []
            common = node, planned, self._offer, addresses, others
            if captured and (planned or workspace):
                found[node] = _Captured(*common, workspace=workspace, note=self._note)
            elif planned:
                found[node] = _Eager(*common, alive=self._functions.alive)
        return {node: [landing.begin] for node, landing in found.items()}, found

    def stop(self) -> None:
        """From now on things lie where the allocator wants them."""
        if self._offer is not None and (self._planned or self._workspace):
            self._offer(())

    def captured(self) -> None:
        """Nothing more is captured."""
        self._workspace = {}

    def end(self) -> None:
        """Let go of the plan's memory."""
        self._planned, self._workspace = {}, {}

    def _note(self, keeper: str) -> None:
        self.keeper = keeper


class MemoryKeptError(CaptureError):
    """An operator has begun to keep memory in an arena: nobody else may ever have that again."""


@dataclass
class _Slot:
    """Memory that a call is offered.

    Attributes:
        planned: the place of a result; None for memory of its own, which goes when the call is over.
        element: which result, for operators with several.
    """

    nbytes: int
    planned: torch.UntypedStorage | None = None
    element: int | None = None


class _Landing:
    """Brings the results of one operator to their places."""

    def __init__(
        self,
        node: Node,
        planned: Mapping[int | None, torch.UntypedStorage],
        offer: PlaceAllocations | None,
        places: set[int],
        others: set[int],
    ) -> None:
        self._node, self._planned, self._offer = node, planned, offer
        self._places, self._others = places, others.difference(s.data_ptr() for s in planned.values())
        self._tensors: dict[int | None, torch.Tensor] | None = None
        self._memory: list[torch.UntypedStorage] = []  # what was offered

    def __call__(self, made: list[Any]) -> Any:
        """The results, where they shall lie."""
        in_use = frozenset((self._offer(()) if self._offer is not None else None) or ())
        results = _by_element(made.pop())
        if self._tensors is None:
            self._tensors = self._lay_out(results)
        lies_at = {_address(results[element]): element for element in self._tensors}
        returned = [StorageWeakRef(results[element].untyped_storage()) for element in self._tensors]
        self._before_copies(results, in_use.difference(lies_at))
        # All of them before one is copied: they may lie in each other's places.
        for element, place in self._tensors.items():
            results[element] = apart(results[element], place, self._places)
        for element, place in self._tensors.items():
            copy_tensors(results[element], place)
            results[element] = place
        if self._memory:
            self._look(returned, lies_at)
            self._memory = []
        return results[None] if None in results else tuple(results.values())

    def _lay_out(self, results: Mapping[int | None, Any]) -> dict[int | None, torch.Tensor]:
        found = {}
        for element, planned in self._planned.items():
            value = results.get(element)
            if not isinstance(value, torch.Tensor) or _address(value) in self._others:
                continue  # schemas do not say which results are somebody's memory
            if value.untyped_storage().nbytes() == planned.nbytes():
                offset = int(value.storage_offset()) * value.dtype.itemsize
                found[element] = tensor_over(planned, tuple(value.size()), value.stride(), value.dtype, offset)
            elif reach(value) <= planned.nbytes():
                found[element] = tensor_over(planned, tuple(value.size()), value.stride(), value.dtype)
        return found

    def _before_copies(self, results: Mapping[int | None, Any], others_in_use: Collection[int]) -> None:
        """The call is over.

        Args:
            others_in_use: addresses that are in use by something else than its results.
        """

    def _look(self, returned: Sequence[StorageWeakRef], lies_at: Mapping[int, int | None]) -> None:
        """Nobody needs what was offered any more.

        Args:
            returned: what it returned.
            lies_at: results, by the address where they lay.
        """
        raise NotImplementedError

    def _kept(self) -> list[torch.UntypedStorage]:
        """What somebody has of the memory that was offered. Nobody else may have it again."""
        assert self._offer is not None
        in_use = self._offer(()) or ()
        return [s for s in self._memory if any(s.data_ptr() <= at < s.data_ptr() + s.nbytes() for at in in_use)]


class _Captured(_Landing):
    """Of an operator that is captured: called once."""

    def __init__(self, *args: Any, workspace: Sequence[torch.UntypedStorage], note: Callable[[str], None]) -> None:
        super().__init__(*args)
        self._workspace, self._note = workspace, note

    def begin(self) -> None:
        """The operator is about to be called."""
        if self._offer is not None and self._node.target not in SHARED.keeping:
            self._memory = [*self._planned.values(), *self._workspace]
            self._offer([_span(one) for one in self._planned.values()], [_span(one) for one in self._workspace])

    def _look(self, returned: Sequence[StorageWeakRef], lies_at: Mapping[int, int | None]) -> None:
        if kept := self._kept():
            SHARED.keeping.add(self._node.target)
            SHARED.kept.extend(kept)
            self._note(operator_name(self._node))


class _Eager(_Landing):
    """Of an operator that runs at every call.

    It may allocate something else of a result's size before it, and results in any order: which of its allocations
    are results is found on memory of its own, one more at every call.
    """

    def __init__(self, *args: Any, alive: Callable[[StorageWeakRef], torch.UntypedStorage | None]) -> None:
        super().__init__(*args)
        self._alive = alive
        if self._offer is not None and self._offer(()) is None:
            self._offer = None  # nobody says what is in use
        self._slots = [_Slot(planned.nbytes()) for planned in self._planned.values()]
        self._tries = _TRIES

    def begin(self) -> None:
        """The operator is about to be called."""
        if self._offer is not None and self._node.target not in SHARED.keeping:
            self._memory = [slot.planned or self._of_its_own(slot.nbytes) for slot in self._slots]
            self._offer([_span(one) for one in self._memory])

    def _of_its_own(self, nbytes: int) -> torch.UntypedStorage:
        device = next(iter(self._planned.values())).device
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def _before_copies(self, results: Mapping[int | None, Any], others_in_use: Collection[int]) -> None:
        kept = [s.planned for s in self._slots if s.planned is not None and s.planned.data_ptr() in others_in_use]
        if kept and self._memory:
            self._give_up(kept)
        for element, planned in self._planned.items():
            value = results.get(element)
            if isinstance(value, torch.Tensor) and planned.data_ptr() != _address(value) in self._places:
                _move_away(value.untyped_storage())  # in another's place: it may be kept

    def _look(self, returned: Sequence[StorageWeakRef], lies_at: Mapping[int, int | None]) -> None:
        kept = self._kept()
        if not kept:
            self._learn(lies_at)
            return
        SHARED.keeping.add(self._node.target)
        planned = {slot.planned.data_ptr() for slot in self._slots if slot.planned is not None}
        for result in returned:  # one that is kept in a place gets memory of its own
            storage = self._alive(result)
            if storage is not None and storage.data_ptr() in planned:
                _move_away(storage)
            del storage
        kept = self._kept()
        if any(storage.data_ptr() in planned for storage in kept):
            self._give_up(kept)
        SHARED.kept.extend(kept)

    def _give_up(self, kept: Sequence[torch.UntypedStorage]) -> None:
        SHARED.keeping.add(self._node.target)
        SHARED.kept.extend(kept)
        raise MemoryKeptError(
            f"{operator_name(self._node)} has begun to keep memory that it allocates",
            expected="that it does so at its first call, if at all",
            got="memory as large as one of its results, in the place of that result, in use after the call",
            remedy="call again: from now on its results are copied to their places",
        )

    def _learn(self, lies_at: Mapping[int, int | None]) -> None:
        """Offer a result's place next time where it lay in memory of its own."""
        assert self._tensors is not None
        for slot, memory in zip(self._slots, self._memory, strict=True):
            if slot.planned is None and memory.data_ptr() in lies_at:
                slot.element = lies_at[memory.data_ptr()]
                slot.planned = self._planned[slot.element]
        found = {slot.element for slot in self._slots if slot.planned is not None}
        missing = self._tensors.keys() - found
        if missing and self._tries:
            self._tries -= 1
            self._slots += [_Slot(self._planned[element].nbytes()) for element in missing]
        else:
            needed = max((i for i, slot in enumerate(self._slots) if slot.planned is not None), default=-1)
            del self._slots[needed + 1 :]


def _by_element(value: Any) -> dict[int | None, Any]:
    return dict(enumerate(value)) if isinstance(value, (tuple, list)) else {None: value}


def _move_away(storage: torch.UntypedStorage) -> None:
    """Give a storage, and so all tensors over it, memory of its own, with what is in it."""
    with suppress(RuntimeError):  # a device may have no way to do that
        storage.resize_(storage.nbytes())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _span(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()
