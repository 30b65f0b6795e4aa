"""Try-locks: nobody waits for memory, but for another thread's capture."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from typing import Any

_POLL_S = 0.0005


class LockOwner:
    """One call of a program, as the owner of locks. Only a local variable of the call refers to it.

    Attributes:
        stream: where the call issues its work; None where there are no streams.
    """

    __slots__ = ("__weakref__", "process", "stream", "thread")

    def __init__(self, stream: Any = None) -> None:
        self.process, self.thread, self.stream = os.getpid(), threading.get_ident(), stream


class TryLock:
    """A lock that one call has at a time.

    To acquire it is one atomic step that also stores the owner. The lock refers to its owner weakly, so that it is
    free when the call is over at the latest: an interrupt leaves no lock behind, wherever it comes, and be it in the
    ``finally`` that releases. A call that a fork left behind in the parent process owns no lock in the child.
    """

    def __init__(self) -> None:
        self.native = ctypes.c_int64()  # the process in which a unit runs that has the lock
        self.owners: dict[int, weakref.ref[LockOwner]] = {}  # one, or none

    def acquire(self, owner: LockOwner, wait_s: float = 0.0) -> bool:
        """Whether ``owner`` has the lock now.

        Args:
            wait_s: for how many seconds to wait for another thread. A call of this thread is not waited for, since
                it cannot end before.
        """
        if not wait_s:
            return self._try(owner)
        end = time.monotonic() + wait_s
        while not (has := self._try(owner)) and time.monotonic() < end:
            other = next(iter(self.owners.values()), lambda: None)()
            if other is not None and other.thread == owner.thread:
                break
            del other
            time.sleep(_POLL_S)
        return has

    def _try(self, owner: LockOwner) -> bool:
        known = self.owners.setdefault(0, weakref.ref(owner, self._collected))()
        if known is not None and known.process != owner.process:
            self.owners.clear()
            known = self.owners.setdefault(0, weakref.ref(owner, self._collected))()
        if known is owner and self.native.value == owner.process:
            self.release(owner)  # a unit has begun before; one that begins after this sees the owner
            return False
        return known is owner

    def release(self, owner: LockOwner) -> None:
        """Release the lock, if ``owner`` has it."""
        known = self.owners.get(0)
        if known is not None and known() is owner:
            self.owners.clear()

    def locked(self) -> bool:
        return bool(self.owners) or self.native.value == os.getpid()

    def is_this_thread_s(self) -> bool:
        """Whether a call of this thread has it."""
        owner = next(iter(self.owners.values()), lambda: None)()
        return owner is not None and owner.thread == threading.get_ident()

    def _collected(self, gone: weakref.ref[LockOwner]) -> None:
        if self.owners.get(0) is gone:
            self.owners.clear()
