"""The policy: what is recorded, kept, copied and made static for one set of sizes, and on which event.

================================== ==================================================================================
no recording can be replayed, for  answer
================================== ==================================================================================
every one is in use                record another: calls that run at one time have one each
another stream works in its memory record another; with ``AT_ONE_TIME`` of them, or if no more may be recorded,
                                   wait for that stream and replay
they have ended                    record again (the arena moved, they were released or evicted)
a static input is elsewhere        record for the new address; after ``_MOVES`` moves the input is no longer static
an output is live                  run eagerly; an output found live twice is copied from then on (one of the warm-up
                                   that is still live at the first recording: at once)
another program's output is live   run eagerly, then record around it; found live twice, its program copies it
there are ``max_recordings``       the least recently used one ends, if this shape is called more often; asked again
                                   after 0, 1, 2, 4, ... ``_MOST_PATIENCE`` other calls: looking at all takes time
there is too little memory         run eagerly until more is free; if the device was out of memory, also retry after a
                                   growing number of calls: not every holder of memory is visible
an eager run needed its memory     run eagerly, and retry after a growing number of calls: both may be called in turn
================================== ==================================================================================

Live outputs matter only where graphs freeze addresses. Elsewhere outputs are allocated per call.
"""

from __future__ import annotations

import collections
import logging
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...host_graph.nodes import is_aligned
from ...host_graph.tensors import has_address
from ..memory.arenas import AT_ONE_TIME, NEEDED_ELSEWHERE, OUT_OF_MEMORY, Arena
from ..memory.locks import LockOwner
from ..memory.memory_provider import Estimate
from ..memory.shared_state import SHARED
from ..replay.native import Unit
from ..replay.recording import Recording

log = logging.getLogger(__name__)

# After so many moves an input is no longer static. One that AOTAutograd does not mark static may not move at all.
_MOVES = 3
# Bytes: up to this size, copying an output takes less time than finding out whether it is live.
_SMALL = 1 << 20
# How many recordings for other input addresses are kept.
_ELSEWHERE = 3
# At most so many recordings are made because of live outputs of other programs; from the second on, in an arena
# without live outputs.
BLOCKED = 3
# Calls of a shape, since another shape's last use, before it may evict the other: initial value, maximum.
_PATIENCE, _MOST_PATIENCE = 2, 64
# Calls after which recording is retried on a device that was out of memory and reports no more: initial value,
# maximum.
ASKED_AGAIN, _MOST_CALLS = 32, 2048
# A pressure that never is: only calls count.
_NOTHING_IS_ENOUGH = -sys.maxsize
# Shapes whose memory is planned ahead although none of them was recorded yet.
_ESTIMATES = 8
# Up to so many native units are tried one after another: that takes less time than reading the sizes of the inputs.
_TRIED = 8
# Shapes that are remembered, as a multiple of ``max_recordings``.
_KNOWN = 8


@dataclass(frozen=True)
class InputLocation:
    """Address and storage of an input, without keeping it alive.

    An address alone does not identify a tensor: a new one often gets a freed address. So the storage must still be
    alive, too.
    """

    address: int
    storage: StorageWeakRef

    @classmethod
    def of(cls, value: Any) -> InputLocation | None:
        """None for what has no address: numbers, opaque tensors."""
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


@dataclass
class Decision:
    """What to do with a call that cannot be replayed as it is.

    Attributes:
        replay: a recording that can be replayed after all; the call holds its locks.
        record: why to record; empty if the call is not recorded.
        eager: why to run eagerly.
        event: what happened, for the counters.
        without_live_outputs: record in an arena without live outputs.
        in_use: arenas of recordings that fit the call, but are in use by others.
    """

    replay: Recording | None = None
    record: str = ""
    eager: str = ""
    event: str = ""
    without_live_outputs: bool = False
    in_use: frozenset[Arena] = frozenset()

    def excludes(self, arena: Arena) -> bool:
        """Whether an arena must not be used for the recording."""
        return arena in self.in_use or (self.without_live_outputs and bool(arena.live()))


@dataclass(eq=False)
class Specialization:
    """The recordings for one set of sizes, and what was learnt about its inputs and outputs.

    Several threads may use it at one time, without a lock. Most attributes are replaced as a whole. ``moves``,
    ``live`` and ``missed_at`` change in place; a count that is lost or late only delays a decision.

    Attributes:
        warm_locations: where the inputs of the last warm-up run were.
        moves: how often a static input was found at another address, by position.
        live: how often an output was found live when its memory was needed, by storage.
        copied: storages of outputs that are copied when handed out.
        copies_all: whether all outputs are.
        warm_outputs: outputs of the last warm-up run, by storage.
        blocked: how often live outputs of other programs blocked every recording that fits.
        without_live_outputs: the verifier refused a plan around live outputs; record in an arena without any.
        ended_because: why the last recording ended; the next one gives it as its reason.
        missed_at: times of recent calls that were not replayed (``next_use``).
        evicted: whether its last recording was ended in favour of another shape.
        refused: calls until room for a recording is looked for again, and how many it will be after the next refusal.
        shortage: the shortage of memory, and ``ArenaPool.pressure`` at that time.
        calls_since: calls since then.
        retry_after: calls after which recording is retried.
    """

    recordings: tuple[Recording, ...] = ()
    eager_runs: int = 0
    warm_locations: dict[int, InputLocation | None] = field(default_factory=dict)
    moves: collections.Counter[int] = field(default_factory=collections.Counter)
    live: collections.Counter[int] = field(default_factory=collections.Counter)
    copied: frozenset[int] = frozenset()
    copies_all: bool = False
    warm_outputs: list[tuple[int, StorageWeakRef]] = field(default_factory=list)
    blocked: int = 0
    without_live_outputs: bool = False
    ended_because: str = ""
    estimate: Estimate | None = None
    missed_at: collections.deque[int] = field(default_factory=lambda: collections.deque(maxlen=_MOST_PATIENCE))
    evicted: bool = False
    refused: tuple[int, int] = (0, 0)
    shortage: tuple[str, int] | None = None
    calls_since: int = 0
    retry_after: int = ASKED_AGAIN

    # -- what a call finds ------------------------------------------------------------------------------

    def decide(self, inputs: list[Any], owner: LockOwner, full: bool) -> Decision:
        """Find out why no recording could be replayed, and what to do about it.

        Args:
            full: there are as many recordings as there may be.
        """
        self._drop_ended()
        here = [recording for recording in self.recordings if recording.same_addresses(inputs)]
        if not here:
            return self._decide_moved(inputs) if self.recordings and not self.ended_because else self._decide_first()
        live, blocked, other_stream = list[Recording](), list[Recording](), list[Recording]()
        for recording in here:
            if not recording.acquire(owner):
                recording.release(owner)
                continue
            if recording.is_free():
                if recording.is_idle_for(owner):
                    return Decision(replay=recording)
                other_stream.append(recording)
            else:
                (live if recording.live() else blocked).append(recording)
            recording.release(owner)
        for recording in other_stream if full or len(other_stream) >= AT_ONE_TIME else ():
            if recording.acquire(owner):
                for arena in recording.request.arenas.values():
                    arena.follow(owner.stream)
                return Decision(replay=recording)
            recording.release(owner)
        if live:
            return self._decide_live(live)
        if blocked:
            return self._decide_blocked(blocked)
        arenas = frozenset(arena for recording in here for arena in recording.request.arenas.values())
        why = "another stream works in its memory" if other_stream else "every recording is in use"
        return Decision(record=why, in_use=arenas)

    def _drop_ended(self) -> None:
        gone = [r for r in self.recordings if r.ended or r.superseded]
        if gone:
            self.ended_because = gone[-1].ended or gone[-1].superseded
            self.recordings = tuple(r for r in self.recordings if not (r.ended or r.superseded))
            if self.ended_because == NEEDED_ELSEWHERE:
                self.note_shortage(OUT_OF_MEMORY, _NOTHING_IS_ENOUGH)

    def _decide_first(self) -> Decision:
        why, self.ended_because = self.ended_because, ""
        return Decision(record=why or "first")

    def _decide_moved(self, inputs: Sequence[Any]) -> Decision:
        """No recording fits the addresses of the static inputs.

        A move inside an arena is not counted while there is a recording for each address: an arena has few of them.
        """

        def moved_from(recording: Recording) -> list[int]:
            return [p for p in recording.request.static_inputs if not recording.is_at(p, inputs[p])]

        moved = min(map(moved_from, self.recordings), key=len)
        in_arena = [p for p in moved if SHARED.arenas.owns(inputs[p].data_ptr())]
        many = len(self.recordings) > _ELSEWHERE  # the next one takes the place of one that is needed again
        self.moves.update(moved if many else set(moved).difference(in_arena))
        if len(in_arena) == len(moved):
            return Decision(record="inputs lie elsewhere in an arena")
        return Decision(record="inputs moved", event="a static input has moved")

    def _decide_live(self, recordings: Sequence[Recording]) -> Decision:
        outputs = frozenset[int]().union(*(output.indices for r in recordings for output in r.live()))
        event = "an output was still live at the next call"
        if not self.found_live(outputs):
            return Decision(eager="an output of an earlier call is live", event=event)
        self._drop_ended()
        return Decision(record="live outputs are copied from now on", event=event)

    def _decide_blocked(self, recordings: Sequence[Recording]) -> Decision:
        for recording in recordings:
            recording.tell_who_is_in_the_way()
        self.blocked += 1
        event = "an output of another program was live in memory that was needed"
        if self.blocked % 2 or self.blocked > 2 * BLOCKED:
            return Decision(eager="an output of another program is live in its memory", event=event)
        return Decision(
            record="around live outputs of other programs", event=event, without_live_outputs=self.blocked > 2
        )

    def found_live(self, outputs: Collection[int]) -> bool:
        """Note that outputs (storages) were live although their memory was needed.

        Returns whether more are copied from now on. An output found live twice is copied, and all small ones with it;
        the next time, all outputs. So few recordings are replaced.
        """
        self.live.update(outputs)
        twice = frozenset(index for index in outputs if self.live[index] > 1) - self.copied
        if not twice:
            return False
        self.copies_all = bool(self.copied)
        small = (o.indices for r in self.recordings for o in r.watched_outputs if o.storage.nbytes() <= _SMALL)
        self.copied |= twice.union(*small)
        for recording in self.recordings:
            if not recording.request.copied >= self.copied:
                recording.supersede("live outputs are copied from now on")
        return True

    def copied_of(self, outputs: Iterable[int]) -> frozenset[int]:
        """Which outputs (storages) are copied when handed out."""
        return frozenset(outputs) if self.copies_all else self.copied.intersection(outputs)

    def drop_recordings(self) -> None:
        """The program has new partitions: an operator could not be captured."""
        self.recordings, self.ended_because = (), "cut again around what could not be captured"

    def copy_live_warm_outputs(self) -> None:
        """From now on copy outputs that are still live after the warm-up.

        The caller will probably keep later ones, too.
        """
        self.copied |= {index for index, storage in self.warm_outputs if not storage.expired()}
        self.warm_outputs = []

    # -- inputs -----------------------------------------------------------------------------------------

    def static_positions(
        self,
        inputs: Sequence[Any],
        expected: Collection[int],
        others_copied: bool,
        backward: bool,
        saved: Collection[int],
        aligned: Collection[int],
    ) -> list[int]:
        """Positions of the inputs that are static: whose addresses are expected to stay.

        Args:
            expected: positions that AOTAutograd marks as static. In a backward program these are all saved tensors:
                parameters stay; activations stay only in an arena.
            others_copied: whether the other inputs are copied at every call. Then an input that has not moved is
                static.
            saved: positions of tensors that the forward allocates: new at every call unless in an arena.
            aligned: positions of inputs that kernels expect to be aligned. One that is not is copied to a static
                input buffer, which is.
        """
        asked = range(len(inputs)) if others_copied else sorted(expected)
        believed = frozenset(expected) if others_copied or not backward else frozenset()
        asked = [p for p in asked if p not in aligned or is_aligned(inputs[p])]
        return [p for p in asked if self._stays(p, inputs[p], p in believed, p in saved)]

    def _stays(self, position: int, value: Any, expected: bool, saved: bool) -> bool:
        moves = self.moves[position]
        if moves >= (_MOVES if expected else 1) or (here := InputLocation.of(value)) is None:
            return False
        in_arena = SHARED.arenas.owns(here.address)
        if expected and saved:
            return in_arena
        if expected and (moves or not self.warm_locations or in_arena):
            return True  # with no call to compare with (warmup=0), AOTAutograd is believed
        before = self.warm_locations.get(position)
        return before is not None and before.unchanged_at(here)

    def note(self, inputs: Sequence[Any]) -> None:
        """Remember where the inputs of an eager run are."""
        self.warm_locations = {position: InputLocation.of(value) for position, value in enumerate(inputs)}

    # -- recordings -------------------------------------------------------------------------------------

    def add(self, recording: Recording, inputs: list[Any]) -> None:
        """Add a recording; of those for other addresses only the most recently used are kept."""
        elsewhere = [r for r in self.recordings if not r.same_addresses(inputs)]
        dropped = sorted(elsewhere, key=lambda r: r.used)[: max(0, len(elsewhere) - _ELSEWHERE)]
        # Most static inputs first: a recording with fewer may fit, too, but copies more.
        kept = [r for r in self.recordings if r not in dropped]
        for one in dropped:
            log.info("%s: a recording goes: %d for other addresses are kept", one.request.name, _ELSEWHERE)
        self.recordings = tuple(sorted([*kept, recording], key=lambda r: -len(r.request.static_inputs)))
        self.ended_because = ""

    def memory_shortage(self, device: torch.device) -> str:
        """Why there is too little memory to record; empty if there may be enough by now."""
        if self.shortage is None:
            return ""
        why, before = self.shortage
        self.calls_since += 1
        if SHARED.arenas.pressure(why, device) < before:
            self.shortage = None
        elif why == OUT_OF_MEMORY and self.calls_since >= self.retry_after:
            self.shortage, self.retry_after = None, min(2 * self.retry_after, _MOST_CALLS)
        return why if self.shortage is not None else ""

    def waits_for_room(self) -> bool:
        """Whether it is too early to look for room for a recording again."""
        calls, after = self.refused
        if calls:
            self.refused = calls - 1, after
        return bool(calls)

    def note_shortage(self, why: str, pressure: int) -> None:
        """Note a shortage. ``pressure``: see ``ArenaPool.pressure``."""
        self.shortage, self.calls_since = (why, pressure), 0


class Specializations:
    """A program's specializations by sizes. Decides which may keep recordings.

    Attributes:
        units: native units, in the order in which a call tries them; none if there are more than ``_TRIED``.
        units_by_key: then, those for each set of sizes.
    """

    def __init__(self, most: int) -> None:
        self._most, self._patience = most, _PATIENCE
        self._by_key: dict[Any, Specialization] = {}
        self.get = self._by_key.get
        self.units: tuple[Unit, ...] = ()
        self.units_by_key: dict[Any, tuple[Unit, ...]] = {}

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
        if wanted.evicted:
            wanted.evicted = False
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
        while self.is_full():
            if not self._evict_for(wanted, owner):
                _, calls = wanted.refused
                wanted.refused = calls, min(max(2 * calls, 1), _MOST_PATIENCE)
                return False
        wanted.refused = 0, 0
        return True

    def _evict_for(self, wanted: Specialization, owner: LockOwner) -> bool:
        recent = list(wanted.missed_at)[-self._patience :]  # other threads append
        holders = ((r, holder) for holder in self.values() for r in holder.recordings if not r.ended)
        for oldest, holder in sorted(holders, key=lambda pair: pair[0].used):
            if sum(when > oldest.used for when in recent) < self._patience and holder is not wanted:
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
            holder.evicted = holder is not wanted
            return True
        return False
