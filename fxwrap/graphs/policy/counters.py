"""What happened at run time, counted with reasons."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RecordingMade:
    """One recording of a program, as it was made.

    Attributes:
        when: seconds since 1970.
        seconds: that making it took, its first run included.
        sizes: the number of each size and stride of an input that may vary, by its expression in symbols.
        graphs: device graphs that it replays; a CPU's are lists of calls.
        arenas: bytes of arenas that its plan takes; 0 where memory comes and goes with each call.
        copied_in, copied_out: bytes that every replay copies: inputs to static buffers, outputs to memory of their
            own.
    """

    when: float
    why: str
    seconds: float
    sizes: Mapping[str, Any]
    graphs: int
    arenas: int
    copied_in: int
    copied_out: int


class Counters:
    """Calls of programs, by what was done and why.

    Every call is counted once: as a replay, a recording or an eager run. ``events`` counts what changed a
    program's ways (an output that was live, an input that moved).

    Every thread counts for itself, so that no lock is needed which an interrupt could leave closed.
    """

    def __init__(self) -> None:
        # By thread identifier: a thread that is gone leaves its counts to whoever gets its identifier.
        self._by_thread: dict[int, Counter[tuple[str, str]]] = {}
        self._by_unit: list[ctypes.c_int64] = []

    def count(self, kind: str, reason: str = "") -> int:
        """Count one of ``replays``, ``recordings``, ``eager``, ``events``; returns how often this thread has."""
        thread = threading.get_ident()
        mine = self._by_thread.get(thread) or self._by_thread.setdefault(thread, Counter())
        what = kind, reason
        mine[what] = count = mine[what] + 1
        return count

    def cell(self) -> ctypes.c_int64:
        """What a unit counts its replays in."""
        cell = ctypes.c_int64()
        self._by_unit.append(cell)
        return cell

    def _by_reason(self, kind: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for counts in list(self._by_thread.values()):
            found.update({reason: count for (what, reason), count in dict(counts).items() if what == kind})
        return found

    @property
    def replays(self) -> int:
        return self._by_reason("replays")[""] + sum(cell.value for cell in list(self._by_unit))

    @property
    def recordings(self) -> Counter[str]:
        return self._by_reason("recordings")

    @property
    def eager(self) -> Counter[str]:
        return self._by_reason("eager")

    @property
    def events(self) -> Counter[str]:
        return self._by_reason("events")

    def to_dict(self) -> dict[str, Any]:
        by_reason = {kind: dict(self._by_reason(kind)) for kind in ("recordings", "eager", "events")}
        return {"replays": self.replays, **by_reason}
