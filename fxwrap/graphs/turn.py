"""Taking turns."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

_POLL_S = 0.0005


class Call:
    """One call's token. Whoever makes it keeps it in a local variable, and nowhere else.

    Attributes:
        stream: where its work is issued; None where there are no streams.
    """

    __slots__ = ("__weakref__", "process", "stream", "thread")

    def __init__(self, stream: Any = None) -> None:
        self.process, self.thread, self.stream = os.getpid(), threading.get_ident(), stream


class Turn:
    """Who may use something now: one call at a time.

    Taking is one atomic step that also notes who took it. The note is a weak reference, so that a turn ends with
    its call at the latest: an interrupt, wherever it comes, and be it in the ``finally`` that gives back, leaves
    nothing taken. A call that a fork left behind in the parent process has no turn in the child.
    """

    def __init__(self) -> None:
        self._holder: dict[int, weakref.ref[Call]] = {}

    def take(self, call: Call, wait_s: float = 0.0) -> bool:
        """Whether ``call`` has the turn now.

        Args:
            wait_s: so many seconds another thread is waited for, but no call of this one, which cannot end before.
        """
        if not wait_s:
            return self._try(call)
        end = time.monotonic() + wait_s
        while not (has := self._try(call)) and time.monotonic() < end:
            holder = next(iter(self._holder.values()), lambda: None)()
            if holder is not None and holder.thread == call.thread:
                break
            del holder
            time.sleep(_POLL_S)
        return has

    def _try(self, call: Call) -> bool:
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
