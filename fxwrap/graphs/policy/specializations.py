"""The specializations of a program, by sizes: which of them keep recordings, and the units that calls try first."""

from __future__ import annotations

from typing import Any

from ..memory.locks import LockOwner
from ..replay.native import Unit
from ..replay.recording import Recording
from .eviction import MOST_PATIENCE, PATIENCE
from .specialization import Specialization

# Shapes whose memory is planned ahead although none of them was recorded yet.
_ESTIMATES = 8
# Up to so many native units are tried one after another: that takes less time than reading the sizes of the inputs.
_TRIED = 8
# Shapes that are remembered, as a multiple of ``max_recordings``.
_KNOWN = 8


class Specializations:
    """A program's specializations by sizes. Decides which may keep recordings.

    Attributes:
        units: native units, in the order in which a call tries them; none if there are more than ``_TRIED``.
        units_by_key: then, those for each set of sizes.
        missed: what a unit returns for a call that does not suit it; set before there is a unit.
    """

    def __init__(self, most: int) -> None:
        self._most, self._patience = most, PATIENCE
        self._by_key: dict[Any, Specialization] = {}
        self.get = self._by_key.get
        self.units: tuple[Unit, ...] = ()
        self.units_by_key: dict[Any, tuple[Unit, ...]] = {}
        self.missed: Any = None

    def __len__(self) -> int:
        return len(self._by_key)

    def values(self) -> list[Specialization]:
        return list(self._by_key.values())

    def clear(self) -> None:
        self._by_key.clear()
        self.find_units()

    def find_units(self) -> None:
        """Find the native units of all recordings."""
        by_key = dict[Any, tuple[Unit, ...]]()
        for key, one in list(self._by_key.items()):
            if units := tuple(r.unit for r in one.recordings if r.unit is not None and not r.ended):
                by_key[key] = units
        in_turn = tuple(unit for units in by_key.values() for unit in units)
        self.units, self.units_by_key = (in_turn, {}) if len(in_turn) <= _TRIED else ((), by_key)

    def add(self, key: Any) -> Specialization:
        """Make a specialization; if there are too many, forget the oldest that have no recordings."""
        if len(self._by_key) >= _KNOWN * self._most:
            idle = [known_key for known_key, known in list(self._by_key.items()) if not known.recordings]
            for idle_key in idle[: len(idle) // 2 + 1]:
                self._by_key.pop(idle_key, None)
        return self._by_key.setdefault(key, Specialization())

    def recordings(self) -> list[Recording]:
        """The recordings that have not ended. An ended one stays until its specialization is called again."""
        return [r for specialization in self.values() for r in specialization.recordings if not r.ended]

    def is_full(self) -> bool:
        return len(self.recordings()) >= self._most

    def are_enough(self) -> bool:
        """Whether no more is to be estimated ahead: there is no room, or many estimates have led to no recording.

        Some sizes are new at every call, and never come again: those of a cache that grows.
        """
        vain = sum(one.estimate is not None and not one.recordings for one in self.values())
        return vain > _ESTIMATES or self.is_full()

    def make_room(self, wanted: Specialization, owner: LockOwner) -> bool:
        """If there are too many recordings, end the least recently used one. Returns whether there is room.

        A recording of another shape is evicted only if ``wanted`` was called ``_patience`` times since that one's
        last use. Otherwise shapes called alternately would evict each other at every call. A call of an evicted shape
        shows that the threshold was too low; it doubles.
        """
        if wanted.eviction.evicted:
            wanted.eviction.evicted = False
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        while self.is_full():
            if not self._evict_for(wanted, owner):
                wanted.eviction.refuse()
                return False
        wanted.eviction.admit()
        return True

    def _evict_for(self, wanted: Specialization, owner: LockOwner) -> bool:
        holders = ((r, holder) for holder in self.values() for r in holder.recordings if not r.ended)
        for oldest, holder in sorted(holders, key=lambda pair: pair[0].used):
            too_early = wanted.eviction.calls_since(oldest.used, self._patience) < self._patience
            if too_early and holder is not wanted:
                return False
            why = "max_recordings: the least recently used"
            try:
                if not oldest.acquire(owner):
                    continue
                oldest.end(why)
            finally:
                oldest.release(owner)
            holder.ended_because = why
            holder.recordings = tuple(r for r in holder.recordings if r is not oldest)
            holder.eviction.evicted = holder is not wanted
            return True
        return False
