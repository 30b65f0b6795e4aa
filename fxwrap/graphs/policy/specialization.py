"""The policy for one set of sizes: when to record, which recordings stay, which inputs and outputs are copied.

================================== ==================================================================================
no recording can be replayed:      what the policy does
================================== ==================================================================================
every one is in use                record another: calls that run at one time have one each
another stream works in its memory record another; with ``AT_ONE_TIME`` of them, or if no more may be recorded,
                                   wait for that stream and replay
all have ended                     record again (the arena moved, they were released or evicted)
a static input is elsewhere        record for the new address; after a few moves the input is no longer static
an output is live                  run eagerly; an output found live twice is copied from then on, with all small
                                   ones; the next time, all outputs are (an output of the last warm-up that is still
                                   live at the first recording is copied from the start)
another program's output is live   run eagerly, then record around it; found live twice, its program copies it
there are ``max_recordings``       the least recently used one ends, if these sizes are called more often; after a
                                   refusal they wait 0, 1, 2, 4, ... ``MOST_PATIENCE`` calls, since an attempt looks
                                   at all specializations
there is too little memory         run eagerly until more is free; if the device was out of memory, also retry after a
                                   growing number of calls: not every holder of memory is visible
an eager run needed its memory     run eagerly, and retry after a growing number of calls: the two may alternate
================================== ==================================================================================

Live outputs matter only where graphs freeze addresses. Elsewhere outputs are allocated per call.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..memory.arena_pool import AT_ONE_TIME
from ..memory.arenas import NEEDED_ELSEWHERE, OUT_OF_MEMORY, Arena
from ..memory.locks import LockOwner
from ..memory.memory_provider import Estimate
from ..memory.shared_state import SHARED
from ..replay.recording import Recording
from .eviction import Eviction
from .output_copies import SMALL, OutputCopies
from .shortage import NOTHING_IS_ENOUGH, Shortage
from .static_inputs import StaticInputs

log = logging.getLogger(__name__)

# The number of recordings for other input addresses that are kept.
_ELSEWHERE = 3
# The number of recordings that are made because of live outputs of other programs; from the second on, they are made
# in an arena without live outputs. Afterwards such calls run eagerly.
_BLOCKED = 3


# What to do with a call for which no recording could be replayed at once. ``event`` tells the counters what happened.


@dataclass(frozen=True)
class ReplayIt:
    """Replay a recording after all. The call holds its locks."""

    recording: Recording
    event: str = ""


@dataclass(frozen=True)
class Record:
    """Record the call.

    Attributes:
        first: whether nothing was recorded for these sizes before.
        without_live_outputs: whether to record in an arena without live outputs.
        in_use: arenas of recordings that fit the call, but are in use by other calls or streams.
    """

    why: str
    event: str = ""
    first: bool = False
    without_live_outputs: bool = False
    in_use: frozenset[Arena] = frozenset()


@dataclass(frozen=True)
class RunEagerly:
    """Run the call eagerly."""

    why: str
    event: str = ""


@dataclass(eq=False)
class Specialization:
    """The recordings for one set of sizes, and the states of their policy.

    Several threads use it at the same time, without a lock. Most attributes are replaced as a whole; a lost count
    only delays a decision.

    Attributes:
        estimate: the first memory plan: made before the first recording, or with it.
        recorded_around: how often it was recorded because live outputs of other programs blocked every recording.
        waited_for_outputs: whether a call has run eagerly for such outputs since the last such recording.
        avoids_live_outputs: whether the verifier refused a plan around live outputs, so that the next recording is
            made in an arena without any.
        fits: whether a call with the present plan is known to be within ``memory_limit``.
        measured: whether an eager run has measured what calls allocate beyond the plan.
        ended_because: why the last recording ended; it is the reason of the next one.
    """

    recordings: tuple[Recording, ...] = ()
    eager_runs: int = 0
    estimate: Estimate | None = None
    static_inputs: StaticInputs = field(default_factory=StaticInputs)
    output_copies: OutputCopies = field(default_factory=OutputCopies)
    shortage: Shortage = field(default_factory=Shortage)
    eviction: Eviction = field(default_factory=Eviction)
    recorded_around: int = 0
    waited_for_outputs: bool = False
    avoids_live_outputs: bool = False
    fits: bool = False
    measured: bool = False
    ended_because: str = ""

    # -- decisions --------------------------------------------------------------------------------------

    def decide(self, inputs: list[Any], owner: LockOwner, full: bool) -> ReplayIt | Record | RunEagerly:
        """Find out why no recording could be replayed, and decide what to do.

        If the decision is to replay, the call holds that recording's locks on return, and its stream waits for
        earlier work in the arenas.

        Args:
            owner: the call.
            full: whether the program has as many recordings as it may have.
        """
        self._drop_ended()
        here = [recording for recording in self.recordings if recording.same_addresses(inputs)]
        if not here:
            return self._decide_moved(inputs) if self.recordings and not self.ended_because else self._decide_anew()
        live, blocked, other_stream = list[Recording](), list[Recording](), list[Recording]()
        for recording in here:
            if not recording.acquire(owner):
                continue
            if recording.spares_live_outputs():
                if recording.is_idle_for(owner):
                    return ReplayIt(recording)
                other_stream.append(recording)
            else:
                (live if recording.live() else blocked).append(recording)
            recording.release(owner)
        for recording in other_stream if full or len(other_stream) >= AT_ONE_TIME else ():
            if recording.acquire(owner):
                for arena in recording.request.arenas.values():
                    arena.move_to(owner.stream)
                return ReplayIt(recording)
        if live:
            return self._decide_live(live)
        if blocked:
            return self._decide_blocked(blocked)
        arenas = frozenset(arena for recording in here for arena in recording.request.arenas.values())
        why = "another stream works in its memory" if other_stream else "every recording is in use"
        return Record(why, in_use=arenas)

    def excludes(self, arena: Arena, decided: Record) -> bool:
        """Whether an arena must not be used for the recording that was decided."""
        avoids = decided.without_live_outputs or self.avoids_live_outputs
        return arena in decided.in_use or (avoids and bool(arena.live()))

    def _drop_ended(self) -> None:
        gone = [r for r in self.recordings if r.ended or r.superseded]
        if gone:
            self.ended_because = gone[-1].ended or gone[-1].superseded
            self.recordings = tuple(r for r in self.recordings if not (r.ended or r.superseded))
            if self.ended_because == NEEDED_ELSEWHERE:
                self.shortage.note(OUT_OF_MEMORY, NOTHING_IS_ENOUGH)

    def _decide_anew(self) -> Record:
        # The reason stays until there is a recording (``add``): this one may be refused.
        return Record(self.ended_because or "first", first=not self.ended_because)

    def _decide_moved(self, inputs: Sequence[Any]) -> Record:
        """Decide for static inputs at addresses that no recording has.

        Moves inside an arena, which has few addresses, count only when there are more than ``_ELSEWHERE`` recordings.
        """

        def moved_from(recording: Recording) -> list[int]:
            return [p for p in recording.request.static_inputs if not recording.is_at(p, inputs[p])]

        moved = min(map(moved_from, self.recordings), key=len)
        in_arena = [p for p in moved if SHARED.arenas.owns(inputs[p].data_ptr())]
        many = len(self.recordings) > _ELSEWHERE  # the next recording would replace one that is needed again
        self.static_inputs.moves.update(moved if many else set(moved).difference(in_arena))
        if len(in_arena) == len(moved):
            return Record("inputs lie elsewhere in an arena")
        return Record("inputs moved", "a static input has moved")

    def _decide_live(self, recordings: Sequence[Recording]) -> Record | RunEagerly:
        outputs = frozenset[int]().union(*(output.indices for r in recordings for output in r.live()))
        event = "an output was still live at the next call"
        if not self.note_live(outputs):
            return RunEagerly("an output of an earlier call is live", event)
        self._drop_ended()
        return Record("live outputs are copied from now on", event)

    def _decide_blocked(self, recordings: Sequence[Recording]) -> Record | RunEagerly:
        for recording in recordings:
            recording.report_live_outputs()
        event = "an output of another program was live in memory that was needed"
        # Eager runs and recordings alternate: the output may be gone by the next call.
        if not self.waited_for_outputs or self.recorded_around >= _BLOCKED:
            self.waited_for_outputs = True
            return RunEagerly("an output of another program is live in its memory", event)
        self.waited_for_outputs = False
        self.recorded_around += 1
        why, is_second = "around live outputs of other programs", self.recorded_around > 1
        return Record(why, event, without_live_outputs=is_second)

    def note_live(self, outputs: Collection[int]) -> bool:
        """Note that outputs (storage indices) were live when their memory was needed.

        Returns whether more outputs are copied from now on; recordings that do not copy them are replaced.
        """
        small, numbers = frozenset[int](), frozenset[int]()
        for recording in self.recordings:
            numbers |= recording.plan.numbers_returned
            for output in recording.watched_outputs:
                small |= output.indices if output.storage.nbytes() <= SMALL else frozenset()
        if not self.output_copies.note_live(outputs, small, numbers):
            return False
        for recording in self.recordings:
            if not recording.request.copied >= self.output_copies.copied:
                recording.supersede("live outputs are copied from now on")
        return True

    def drop_recordings(self, why: str) -> None:
        self.recordings, self.ended_because = (), why

    # -- recordings -------------------------------------------------------------------------------------

    def add(self, recording: Recording, inputs: list[Any]) -> None:
        """Add a recording. Of recordings for other addresses, only the most recently used are kept."""
        elsewhere = [r for r in self.recordings if not r.same_addresses(inputs)]
        dropped = sorted(elsewhere, key=lambda r: r.used)[: max(0, len(elsewhere) - _ELSEWHERE)]
        remaining = [r for r in self.recordings if r not in dropped]
        for old in dropped:
            log.info("%s: a recording goes: %d for other addresses are kept", old.request.name, _ELSEWHERE)
        # Most static inputs first: a recording with fewer may also fit, but copies more.
        self.recordings = tuple(sorted([*remaining, recording], key=lambda r: -len(r.request.static_inputs)))
        self.ended_because = ""
