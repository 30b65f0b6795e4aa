"""Counters of a program's calls: replays, recordings and eager runs, by reason (``fxwrap.stats``)."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RecordingMade:
    """How one recording of a program was made.

    Attributes:
        when: seconds since 1970.
        why: the reason to record.
        us: how long it took, including the first run, in microseconds.
        sizes: values of the symbolic sizes and strides of inputs, by expression.
        graphs: the number of device graphs that it replays; those of the CPU are lists of calls.
        arena_bytes: bytes of arenas that its plan takes; 0 if memory is allocated per call.
        copied_in_bytes, copied_out_bytes: what every replay copies: inputs to static input buffers, outputs to memory
            of their own.
    """

    when: float
    why: str
    us: float
    sizes: Mapping[str, Any]
    graphs: int
    arena_bytes: int
    copied_in_bytes: int
    copied_out_bytes: int


class Counters:
    """Counts the calls of a program by kind and reason.

    Every call counts once: as a replay, a recording or an eager run. ``events`` counts what makes the policy decide
    differently: a live output, an input that moved.

    Every thread has counters of its own: a lock could stay closed after an interrupt.
    """

    def __init__(self) -> None:
        # By thread identifier. A later thread with the identifier of one that has ended continues its counts.
        self._by_thread: dict[int, Counter[tuple[str, str]]] = {}
        self._by_unit: list[ctypes.c_int64] = []

    def count(self, kind: str, reason: str = "") -> int:
        """Count one of ``replays``, ``recordings``, ``eager``, ``events``; returns this thread's new count."""
        thread = threading.get_ident()
        counts = self._by_thread.get(thread) or self._by_thread.setdefault(thread, Counter())
        key = kind, reason
        counts[key] = count = counts[key] + 1
        return count

    def add(self, kind: str, reason: str, number: int) -> None:
        """Add a number, such as rows, to what ``count`` counts one by one."""
        thread = threading.get_ident()
        counts = self._by_thread.get(thread) or self._by_thread.setdefault(thread, Counter())
        counts[kind, reason] += number

    def cell(self) -> ctypes.c_int64:
        """A new native counter, in which a unit counts its replays."""
        cell = ctypes.c_int64()
        self._by_unit.append(cell)
        return cell

    def _by_reason(self, kind: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for counts in list(self._by_thread.values()):
            total.update({reason: count for (counted, reason), count in dict(counts).items() if counted == kind})
        return total

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
