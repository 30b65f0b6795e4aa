"""What a call does that needs suspended memory: it resumes it, and replays."""

from __future__ import annotations

from ...errors import MemoryLimitError, SuspendError
from ...graphs.policy.specialization import Specialization
from ...graphs.program import Program
from ...graphs.program_runs import Miss
from .arena import SuspendableArena, with_suspended_outputs

_NOT_RESUMED = "suspended, and the device is out of memory"


def resume_for(program: Program, specialization: Specialization, captures: bool) -> Miss:
    """Resume what a call needs: the arenas of its recordings, and all that have live outputs, which it may read.

    While the caller captures, the call runs eagerly, and nothing is resumed. A hook of ``MISSES``.

    Raises:
        MemoryLimitError: there is too little memory, and ``strict`` is set or live outputs are on the host.
        SuspendError: the caller captures, and live outputs are on the host.
    """
    own = [arena for recording in specialization.recordings for arena in recording.request.arenas.values()]
    suspended = [arena for arena in own if isinstance(arena, SuspendableArena) and arena.is_suspended()]
    arenas = list(dict.fromkeys([*suspended, *with_suspended_outputs()]))
    try:
        for arena in arenas:
            if captures and arena not in with_suspended_outputs():
                continue  # the call runs eagerly, and no live output is on the host
            if captures:
                raise SuspendError(
                    f"{program.name} called while the caller captures, after fxwrap.suspend",
                    expected="live outputs on the device, which the call may read",
                    got="they are on the host",
                    remedy="call fxwrap.resume() before the capture",
                )
            if arena.resume():
                program.context.count("events", "a call resumed suspended memory")
    except MemoryLimitError:
        if program.options.strict or with_suspended_outputs():
            raise
        return Miss(run_eagerly=_NOT_RESUMED)
    return Miss(changed=bool(arenas))
