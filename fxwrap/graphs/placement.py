"""For devices whose allocator takes hints: what operators allocate lies in the arena."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from ..devices import PlaceAllocations
from ..errors import CaptureError
from ..host_graph.nodes import operator_name
from .memory.arenas import Arena
from .memory.shared_state import SHARED
from .record.flat import PostProcessing, Steps
from .record.placed_results import PlacedResults
from .replay.steps import CallPython

# At how many calls more of what an operator allocates is looked at, to find its results.
_TRIES = 4


class MemoryKeptError(CaptureError):
    """An operator has begun to keep memory in an arena: nobody else may ever have that again."""


class PlacementHints:
    """Tells the allocator, around an operator's call, where its results lie, and its workspace if it is captured.

    An operator may keep what it allocates: nobody may have that memory again, and the operator is offered no more.

    Attributes:
        workspace: what is free in the arena while a captured operator runs.
        keeper: the operator that kept what it was offered while it was captured: nothing may be replayed there.
    """

    def __init__(self, place_allocations: PlaceAllocations, alive: Alive) -> None:
        self._place, self._alive = place_allocations, alive
        self.workspace: dict[Node, Sequence[torch.UntypedStorage]] = {}
        self.keeper = ""

    def around(
        self, nodes: Sequence[Node], captured: bool, results: PlacedResults, processing: PostProcessing
    ) -> tuple[Steps, PostProcessing]:
        """What to call before nodes run, and with what they have returned."""
        offers: dict[Node, _CapturedOffer | _EagerOffer] = {}
        for node in nodes:
            places, workspace = results.places.get(node, {}), self.workspace.get(node, ())
            land = processing.get(node, list.pop)
            if captured and (places or workspace):
                offers[node] = _CapturedOffer(self, node, land, tuple(places.values()), workspace)
            elif places and not captured and self.in_use() is not None:
                offers[node] = _EagerOffer(self, node, land, places=places, alive=self._alive)
        return {node: [CallPython(offer.begin)] for node, offer in offers.items()}, {**processing, **offers}

    def place(self, places: Sequence[torch.UntypedStorage], workspace: Sequence[torch.UntypedStorage] = ()) -> None:
        self._place([_span(s) for s in places], [_span(s) for s in workspace])

    def in_use(self) -> Collection[int] | None:
        """From now on things lie where the allocator wants them.

        Returns:
            Addresses in use, of all that it was ever told; None if it does not know.
        """
        return self._place(())

    def end(self, error: BaseException, arenas: Sequence[Arena]) -> None:
        """A replay has raised ``error``."""
        self.in_use()
        if isinstance(error, MemoryKeptError):
            for arena in arenas:
                arena.clear(error.subject)


# What a weak reference refers to; None if that is gone.
Alive = Callable[[StorageWeakRef], "torch.UntypedStorage | None"]


class _Offer:
    """Memory that one operator is offered, from just before its call until its results are there."""

    def __init__(
        self,
        hints: PlacementHints,
        node: Node,
        land: Callable[[list[Any]], Any],
        places: Sequence[torch.UntypedStorage] = (),
        workspace: Sequence[torch.UntypedStorage] = (),
    ) -> None:
        self._hints, self._node, self._land = hints, node, land
        self._places, self._workspace = places, workspace
        self._offers = False

    def begin(self) -> None:
        self._offers = self._node.target not in SHARED.keeping
        if self._offers:
            self._hints.place(self._places, self._workspace)

    def _kept(self, offered: Iterable[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """What is in use of the memory that was offered."""
        in_use = self._hints.in_use() or ()
        return [s for s in offered if any(s.data_ptr() <= at < s.data_ptr() + s.nbytes() for at in in_use)]

    def _note(self, kept: Sequence[torch.UntypedStorage]) -> None:
        SHARED.keeping.add(self._node.target)
        SHARED.kept.extend(kept)


class _CapturedOffer(_Offer):
    """To an operator that is captured: it is called once."""

    def __call__(self, made: list[Any]) -> Any:
        self._hints.in_use()
        landed = self._land(made)
        if self._offers and (kept := self._kept((*self._places, *self._workspace))):
            self._note(kept)
            self._hints.keeper = operator_name(self._node)
        return landed


@dataclass
class _Slot:
    """Memory that a call is offered: a place, or memory of its own, which goes when the call is over."""

    nbytes: int
    place: torch.UntypedStorage | None = None


class _EagerOffer(_Offer):
    """To an operator that runs at every call.

    It may allocate something else of a result's size before it, and results in any order: which of its allocations
    are results is found on memory of its own, one more at every call. If it begins to keep things later, that is
    noticed before anybody else uses the place.
    """

    def __init__(self, *args: Any, places: Mapping[int | None, torch.UntypedStorage], alive: Alive) -> None:
        super().__init__(*args)
        self._planned, self._alive = places, alive
        self._slots, self._tries = [_Slot(place.nbytes()) for place in places.values()], _TRIES

    def begin(self) -> None:
        device = next(iter(self._planned.values())).device
        own = partial(torch.empty, dtype=torch.uint8, device=device)
        self._places = [slot.place or own(slot.nbytes).untyped_storage() for slot in self._slots]
        super().begin()

    def __call__(self, made: list[Any]) -> Any:
        if not self._offers:
            return self._land(made)
        results = {element: made[0] if element is None else made[0][element] for element in self._planned}
        storages = {e: value.untyped_storage() for e, value in results.items() if isinstance(value, torch.Tensor)}
        lies_at = {storage.data_ptr(): element for element, storage in storages.items()}
        planned = {place.data_ptr() for place in self._planned.values()}
        self._refuse([place for place in self._kept(self._planned.values()) if place.data_ptr() not in lies_at])
        for element, storage in storages.items():
            if self._planned[element].data_ptr() != storage.data_ptr() in planned:
                _move_away(storage)  # in another's place: it may be kept
        references = [StorageWeakRef(storage) for storage in storages.values()]
        del results, storages, storage
        landed = self._land(made)
        if kept := self._kept(self._places):
            for reference in references:  # a result that is kept in a place gets memory of its own
                if (alive := self._alive(reference)) is not None and alive.data_ptr() in planned:
                    _move_away(alive)
                del alive
            self._note(kept)
            self._refuse(self._kept(self._planned.values()))
        else:
            self._learn(lies_at)
        self._places = ()
        return landed

    def _learn(self, lies_at: Mapping[int, int | None]) -> None:
        """Offer a result's place next time where it lay in memory of its own."""
        for slot, memory in zip(self._slots, self._places, strict=True):
            if slot.place is None and memory.data_ptr() in lies_at:
                slot.place = self._planned[lies_at[memory.data_ptr()]]
        missing = [place for place in self._planned.values() if all(slot.place is not place for slot in self._slots)]
        if missing and self._tries:
            self._tries -= 1
            self._slots += [_Slot(place.nbytes()) for place in missing]
        while self._slots and not missing and self._slots[-1].place is None:
            self._slots.pop()

    def _refuse(self, kept: Sequence[torch.UntypedStorage]) -> None:
        """Raise if something is in use that is to be written now."""
        if kept:
            self._note(kept)
            raise MemoryKeptError(
                f"{operator_name(self._node)} has begun to keep memory that it allocates",
                expected="that it does so at its first call, if at all",
                got="memory as large as one of its results, in the place of that result, in use after the call",
                remedy="call again: from now on its results are copied to their places",
            )


def _move_away(storage: torch.UntypedStorage) -> None:
    """Give a storage, and so all tensors over it, memory of its own, with what is in it."""
    with suppress(RuntimeError):  # a device may have no way to do that
        storage.resize_(storage.nbytes())


def _span(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()
