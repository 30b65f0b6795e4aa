"""All specializations of a program: which of them may have recordings, and the native units that calls try first."""

from __future__ import annotations

from typing import Any

from ...torch_private.native_units import Unit
from ..memory.locks import LockOwner
from ..replay.recording import Recording
from .eviction import MOST_PATIENCE, PATIENCE
from .specialization import Specialization

# The number of shapes without recordings whose memory is planned ahead.
_ESTIMATES = 8
# The number of native units that are tried in turn: that takes less time than to read the sizes of the inputs.
_TRIED = 8
# The number of shapes that are remembered, as a multiple of ``max_recordings``.
_REMEMBERED = 8


class Specializations:
    """The specializations of a program, by sizes.

    Attributes:
        units: native units in the order in which a call tries them; empty if there are more than ``_TRIED``.
        units_by_key: in that case, the units for each set of sizes.
        missed: what a unit returns for a call that it cannot replay; set before there is a unit.
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
        for key, specialization in list(self._by_key.items()):
            recordings = specialization.recordings
            if units := tuple(r.unit for r in recordings if r.unit is not None and not r.ended):
                by_key[key] = units
        in_turn = tuple(unit for units in by_key.values() for unit in units)
        self.units, self.units_by_key = (in_turn, {}) if len(in_turn) <= _TRIED else ((), by_key)

    def add(self, key: Any, specialization: Specialization) -> Specialization:
        """Add a specialization, unless there is one; returns that which is there.

        If there are too many, the oldest ones without recordings are forgotten.
        """
        if len(self._by_key) >= _REMEMBERED * self._most:
            idle = [other_key for other_key, other in list(self._by_key.items()) if not other.recordings]
            for idle_key in idle[: len(idle) // 2 + 1]:
                self._by_key.pop(idle_key, None)
        return self._by_key.setdefault(key, specialization)

    def recordings(self) -> list[Recording]:
        """The recordings that have not ended. (An ended one stays until its specialization is called again.)"""
        return [r for specialization in self.values() for r in specialization.recordings if not r.ended]

    def is_full(self) -> bool:
        return len(self.recordings()) >= self._most

    def should_stop_planning(self) -> bool:
        """Whether planning ahead should stop: there is no room, or many estimates have led to no recording.

        Some sizes are new at every call and never come again, such as those of a growing cache.
        """
        unused = sum(other.estimate is not None and not other.recordings for other in self.values())
        return unused > _ESTIMATES or self.is_full()

    def make_room(self, wanted: Specialization, owner: LockOwner) -> bool:
        """If there are too many recordings, end the least recently used one. Returns whether there is room.

        A recording of another shape is evicted only if ``wanted`` was called ``_patience`` times since its last use.
        Otherwise shapes that are called in turn would evict each other at every call. A call of an evicted shape
        shows that the threshold was too low: it doubles.
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
            if not oldest.end_if_suspended(why):
                if not oldest.acquire(owner):
                    continue
                try:
                    oldest.end(why)
                finally:
                    oldest.release(owner)
            holder.ended_because = why
            holder.recordings = tuple(r for r in holder.recordings if r is not oldest)
            holder.eviction.evicted = holder is not wanted
            return True
        return False
