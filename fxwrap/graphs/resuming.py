"""A call resumes the suspended memory that it needs (``fxwrap.suspend``)."""

from __future__ import annotations

from ..errors import MemoryLimitError, SuspendError
from .memory.shared_state import SHARED
from .policy.specialization import Specialization
from .prepared import ProgramContext

_NOT_RESUMED = "suspended, and the device is out of memory"


def resume_for(context: ProgramContext, specialization: Specialization, captures: bool) -> tuple[str, bool]:
    """Resume the arenas of a specialization's recordings, and all with live outputs, which a call may read.

    Args:
        captures: whether the caller captures; then nothing can be resumed.

    Returns:
        Why the call must run eagerly, if it must, and whether there was one to resume.

    Raises:
        MemoryLimitError: there is too little memory, and ``strict`` is set or live outputs are on the host.
        SuspendError: the caller captures, and live outputs are on the host.
    """
    suspended = SHARED.arenas.suspended()
    read = [arena for arena in suspended if arena.live()]
    if captures and read:
        raise SuspendError(
            f"{context.name} called while the caller captures, after fxwrap.suspend",
            expected="live outputs on the device, which the call may read",
            got="they are on the host",
            remedy="call fxwrap.resume() before the capture",
        )
    own = {arena for recording in specialization.recordings for arena in recording.request.arenas.values()}
    needed = [arena for arena in suspended if arena in own or arena in read]
    try:
        for arena in needed if not captures else ():
            if arena.resume():
                context.count("events", "a call resumed suspended memory")
    except MemoryLimitError:
        if context.options.strict or any(arena.is_suspended() for arena in read):
            raise
        return _NOT_RESUMED, False
    return "", bool(needed)
