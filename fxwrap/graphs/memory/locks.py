"""Non-blocking locks of calls. Only another thread's capture is waited for, for a limited time.

A forked child has one thread, the one that has forked. Calls of other threads hold no lock there; its own go on.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_POLL_S = 0.0005


def after_fork(act: Callable[[], object]) -> None:
    """Call ``act`` in every forked child from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)


def lock_of_process() -> Any:
    """A reentrant lock for as long as the process lives. In a forked child no other thread of the parent holds it."""
    lock: Any = threading.RLock()
    after_fork(lambda: lock._is_owned() or lock._at_fork_reinit())
    return lock


def drop_other_threads(table: dict[int, Any]) -> None:
    """Remove the entries of all threads but this one, by their identifiers: new threads may get the same ones."""
    for thread in table.keys() - {threading.get_ident()}:
        del table[thread]


class LockOwner:
    """One call of a program, as the owner of locks. Only a local variable of the call refers to it.

    Attributes:
        process, thread: identifiers of the process and the thread of the call.
        stream: the stream to which the call issues its work; None on devices without streams.
    """

    __slots__ = ("__weakref__", "process", "stream", "thread")

    def __init__(self, stream: Any = None) -> None:
        self.process, self.thread, self.stream = os.getpid(), threading.get_ident(), stream


class TryLock:
    """A lock that one call holds at a time.

    Acquiring it is one atomic step that also stores the owner. The lock refers to its owner weakly, so that it is
    free at the latest when the call is over: no interrupt can leave it locked, not even one in the ``finally`` that
    releases it.
    """

    def __init__(self) -> None:
        self.native = ctypes.c_int64()  # the process in which a native unit holds the lock; 0 for none
        self.owners: dict[int, weakref.ref[LockOwner]] = {}  # one, or none

    def acquire(self, owner: LockOwner, wait_s: float = 0.0) -> bool:
        """Try to acquire the lock; returns whether ``owner`` has it now.

        Args:
            wait_s: how long to wait for another thread, in seconds. A call of this thread is not waited for, since it
                cannot end before.
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
        holder = self.owners.setdefault(0, weakref.ref(owner, self._collected))()
        if holder is not None and holder.process != owner.process and holder.thread != threading.main_thread().ident:
            self.owners.clear()  # a thread of the parent, and not the one that has forked
            holder = self.owners.setdefault(0, weakref.ref(owner, self._collected))()
        if holder is owner and self.native.value == owner.process:
            self.release(owner)  # a unit began earlier; one that begins from now on sees the owner
            return False
        return holder is owner

    def release(self, owner: LockOwner) -> None:
        """Release the lock, if ``owner`` has it."""
        holder = self.owners.get(0)
        if holder is not None and holder() is owner:
            self.owners.clear()

    def locked(self) -> bool:
        return bool(self.owners) or self.native.value == os.getpid()

    def _collected(self, gone: weakref.ref[LockOwner]) -> None:
        if self.owners.get(0) is gone:
            self.owners.clear()
