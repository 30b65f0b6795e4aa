"""What happened at run time, counted with reasons."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Counters:
    """Calls of programs, by what was done and why.

    Every call is counted once: as a replay, a recording or an eager run. ``events`` counts what changed a
    program's ways (an output that was held, an input that moved).
    """

    replays: int = 0
    recordings: Counter[str] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    _lock: Any = field(default_factory=threading.RLock, repr=False)

    def to_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "replays": self.replays,
                "recordings": dict(self.recordings),
                "eager": dict(self.eager),
                "events": dict(self.events),
            }
