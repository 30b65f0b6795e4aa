"""When a shape may have a recording of its own, although there are ``max_recordings``."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

# Calls of a shape, since another shape's last use, before it may evict the other: initial value, maximum.
PATIENCE, MOST_PATIENCE = 2, 64


@dataclass(eq=False)
class Eviction:
    """What a shape knows of its claim.

    Attributes:
        missed_at: times of recent calls that were not replayed (``next_use``). Other threads append.
        evicted: whether its last recording was ended in favour of another shape.
        refused: calls until room for a recording is looked for again, and how many it will be after the next refusal.
    """

    missed_at: collections.deque[int] = field(default_factory=lambda: collections.deque(maxlen=MOST_PATIENCE))
    evicted: bool = False
    refused: tuple[int, int] = (0, 0)

    def waits_for_room(self) -> bool:
        """Whether it is too early to look for room for a recording again. Counts a call."""
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
        """How many of the last ``patience`` calls came after a use (``next_use``) of another shape."""
        return sum(when > use for when in list(self.missed_at)[-patience:])
