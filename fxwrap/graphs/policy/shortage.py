"""Shortage of memory: when a program that could not be recorded for lack of memory tries again."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from ..memory.arenas import OUT_OF_MEMORY
from ..memory.shared_state import SHARED

# The number of calls after which recording is retried, if the device was out of memory: initial value, maximum.
ASKED_AGAIN, _MOST_CALLS = 32, 2048
# A pressure that no measurement falls below: only the number of calls counts.
NOTHING_IS_ENOUGH = -sys.maxsize


@dataclass(eq=False)
class Shortage:
    """The last shortage of memory for one set of sizes.

    Attributes:
        known: the reason, and ``ArenaPool.pressure`` at that time; None without a shortage.
        calls_since: calls since then.
        retry_after: calls after which recording is retried.
    """

    known: tuple[str, int] | None = None
    calls_since: int = 0
    retry_after: int = ASKED_AGAIN

    def note(self, why: str, pressure: int) -> None:
        """Note a shortage. ``pressure``: see ``ArenaPool.pressure``."""
        self.known, self.calls_since = (why, pressure), 0

    def reason_to_wait(self, device: torch.device) -> str:
        """Why there is too little memory to record; empty if there may be enough now. Counts the call."""
        if self.known is None:
            return ""
        why, before = self.known
        self.calls_since += 1
        if SHARED.arenas.pressure(why, device) < before:
            self.known = None
        elif why == OUT_OF_MEMORY and self.calls_since >= self.retry_after:
            self.known, self.retry_after = None, min(2 * self.retry_after, _MOST_CALLS)
        return why if self.known is not None else ""
