"""What happened at run time, counted with reasons."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Counts:
    replays: int = 0
    recordings: Counter[str] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)


class Counters:
    """Calls of programs, by what was done and why.

    Every call is counted once: as a replay, a recording or an eager run. ``events`` counts what changed a
    program's ways (an output that was held, an input that moved).

    Every thread counts for itself, so that no lock is needed which an interrupt could leave closed.
    """

    def __init__(self) -> None:
        # By thread identifier: a thread that is gone leaves its counts to whoever gets its identifier.
        self._by_thread: dict[int, _Counts] = {}

    def _mine(self) -> _Counts:
        thread = threading.get_ident()
        return self._by_thread.get(thread) or self._by_thread.setdefault(thread, _Counts())

    def count_replay(self) -> None:
        self._mine().replays += 1

    def count_recording(self, why: str) -> None:
        self._mine().recordings[why] += 1

    def count_eager(self, reason: str) -> None:
        self._mine().eager[reason] += 1

    def count_event(self, event: str) -> None:
        self._mine().events[event] += 1

    def _sum(self, name: str) -> Counter[str]:
        return sum((Counter(dict(getattr(counts, name))) for counts in list(self._by_thread.values())), Counter())

    @property
    def replays(self) -> int:
        return sum(counts.replays for counts in list(self._by_thread.values()))

    @property
    def recordings(self) -> Counter[str]:
        return self._sum("recordings")

    @property
    def eager(self) -> Counter[str]:
        return self._sum("eager")

    @property
    def events(self) -> Counter[str]:
        return self._sum("events")

    def to_dict(self) -> dict[str, Any]:
        return {
            "replays": self.replays,
            "recordings": dict(self.recordings),
            "eager": dict(self.eager),
            "events": dict(self.events),
        }
