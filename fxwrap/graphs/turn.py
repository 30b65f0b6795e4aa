"""Taking turns without waiting."""

from __future__ import annotations

import os
import weakref


class Call:
    """One call's token. Whoever makes it keeps it in a local variable, and nowhere else."""

    __slots__ = ("__weakref__", "process")

    def __init__(self) -> None:
        self.process = os.getpid()


class Turn:
    """Who may use something now: one call at a time, and nobody waits.

    Taking is one atomic step that also notes who took it. The note is a weak reference, so that a turn ends with
    its call at the latest: an interrupt, wherever it comes, and be it in the ``finally`` that gives back, leaves
    nothing taken. A call that a fork left behind in the parent process has no turn in the child.
    """

    def __init__(self) -> None:
        self._holder: dict[int, weakref.ref[Call]] = {}

    def take(self, call: Call) -> bool:
        """Whether ``call`` has the turn now."""
        holder = self._holder.setdefault(0, weakref.ref(call, self._end))()
        if holder is not None and holder.process != call.process:
            self._holder.clear()
            holder = self._holder.setdefault(0, weakref.ref(call, self._end))()
        return holder is call

    def give(self, call: Call) -> None:
        """Give the turn back, if ``call`` has it."""
        holder = self._holder.get(0)
        if holder is not None and holder() is call:
            self._holder.clear()

    def taken(self) -> bool:
        return bool(self._holder)

    def _end(self, gone: weakref.ref[Call]) -> None:
        if self._holder.get(0) is gone:
            self._holder.clear()
