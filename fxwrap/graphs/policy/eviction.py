"""Eviction: when a shape may replace another shape's recording, once there are ``max_recordings``."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

# How often a shape must be called since another shape's last use before it may evict it: initial value, maximum.
PATIENCE, MOST_PATIENCE = 2, 64


@dataclass(eq=False)
class Eviction:
    """The state of a shape that competes for recordings.

    Attributes:
        missed_at: times (``next_use``) of recent calls that were not replayed. Other threads append.
        evicted: whether its last recording was evicted for another shape.
        refused: the number of calls until the next attempt to evict, and that number after the next refusal.
    """

    missed_at: collections.deque[int] = field(default_factory=lambda: collections.deque(maxlen=MOST_PATIENCE))
    evicted: bool = False
    refused: tuple[int, int] = (0, 0)

    def must_wait(self) -> bool:
        """Whether it is too early for another attempt to evict. Counts the call."""
        calls, after = self.refused
        if calls:
            self.refused = calls - 1, after
        return bool(calls)

    def refuse(self) -> None:
        _, calls = self.refused
        self.refused = calls, min(max(2 * calls, 1), MOST_PATIENCE)

    def admit(self) -> None:
        self.refused = 0, 0

    def calls_since(self, use: int, patience: int) -> int:
        """How many of the last ``patience`` calls are later than a use (``next_use``) of another shape."""
        return sum(when > use for when in list(self.missed_at)[-patience:])
