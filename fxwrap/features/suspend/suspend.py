"""``fxwrap.suspend`` and ``fxwrap.resume``: physical memory of recordings goes to the device and comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ...api.report import report
from ...devices import device_function
from ...errors import InputError, SuspendError
from ...graphs.compilation import HasPrograms
from ...graphs.devices.runtime import capture_check, current_stream, freezes_addresses
from ...graphs.memory.arenas import Arena
from ...graphs.memory.locks import LockOwner
from ...graphs.memory.shared_state import SHARED
from ...graphs.program import Program
from . import OPTION
from .arena import SuspendableArena
from .memory import suspendable_memory

# Seconds for which a call or a capture of another thread is waited for.
_WAIT_S = 1.0


def suspend(fn: Callable[..., Any] | HasPrograms | None = None, live: Literal["refuse", "copy"] = "refuse") -> int:
    """Give the memory of recordings back to the device. Their graphs and addresses stay.

    It is for programs with the option ``suspendable``: arenas with their static input buffers, memory that graphs
    allocate, and static buffers between partitions. No bytes are needed between calls, so none are kept, except those
    of live outputs. The next call of a program resumes what it needs by itself; ``fxwrap.resume`` does so ahead of
    time. Until then its arena is locked, as if a call ran in it. If nothing is left to suspend, nothing
    happens. Waits up to a second for calls of other threads, and for the device, as ``torch.cuda.synchronize`` does.

    Args:
        fn: what ``torch.compile``, ``fxwrap.aot_compile`` or ``fxwrap.load`` returned; None for all programs. An
            arena that other functions also use is suspended for them, too.
        live: what becomes of outputs in an arena that the caller still has. "refuse" raises. "copy" copies their
            bytes to the host, and back when the arena is resumed: in between they must not be used, except by
            ``fxwrap.resume`` and by calls that cannot be replayed without resuming.

    Returns:
        The number of bytes of device memory that were given back.

    Raises:
        SuspendError: the caller's stream captures, a call of another thread or an outer call of this one uses an
            arena, outputs are live with ``live="refuse"``, or the programs were not compiled with ``suspendable``.
            Nothing is suspended then.
        DeviceError: the device has no suspendable memory, or its driver fails.
        InputError: ``live`` is neither "refuse" nor "copy".
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    if live not in ("refuse", "copy"):
        raise InputError("wrong value for live", expected="'refuse' or 'copy'", got=repr(live))
    arenas = [arena for arena in _arenas(fn, "suspend") if arena.suspension is None and arena.memory is not None]
    with _locked(arenas) as locked:
        if live == "refuse":
            _refuse_live_outputs(list(locked))
        for device in {arena.device for arena in locked}:
            if device.type != "cpu":  # the simulated device
                device_function(device.type, "synchronize")(device)
        return sum(arena.suspend(owner) for arena, owner in locked.items())


def resume(fn: Callable[..., Any] | HasPrograms | None = None) -> int:
    """Take the memory of suspended recordings again. Arenas that are not suspended are left alone.

    Args:
        fn: as for ``suspend``. Live outputs come back from the host whichever function they are of, as at a call.

    Returns:
        The number of bytes of device memory that were taken; 0 if nothing was suspended.

    Raises:
        MemoryLimitError: the device is out of memory. What could not be resumed stays suspended, and can be resumed
            later. Until then calls run eagerly, or, with ``strict`` or live outputs on the host, raise this, too.
        SuspendError: the caller's stream captures, or the programs were not compiled with ``suspendable``.
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    return sum(arena.resume() for arena in _arenas(fn, "resume"))


def _arenas(fn: Callable[..., Any] | HasPrograms | None, doing: str) -> list[SuspendableArena]:
    """The suspendable arenas of a function's recordings; all for None. Raises as ``suspend`` does."""
    programs = [graph.program for graph in report(fn).graphs]
    on_devices = [program for program in programs if freezes_addresses(program.plan.device)]
    asked = [program for program in on_devices if program.options.is_set(OPTION)]
    used = {arena for program in asked for arena in _arenas_of(program)}
    # Whose output is on the host may have been released or dropped.
    used.update(arena for arena in SHARED.arenas.suspended() if doing == "resume" and arena.live())
    arenas = [arena for arena in _all() if arena in used or fn is None]
    if len(asked) < len(on_devices) and (fn is not None or not (asked or arenas)):
        raise SuspendError(
            f"cannot {doing} {'any program' if fn is None else 'this function'}",
            expected="programs that were compiled with the option suspendable",
            got=", ".join(program.name for program in on_devices if program not in asked),
            remedy='torch.compile(model, backend="fxwrap", options={"suspendable": True})',
        )
    for device in {*(program.plan.device for program in asked), *(arena.device for arena in arenas)}:
        if capture_check(device)():
            raise SuspendError(
                f"cannot {doing} recordings on {device}",
                expected="a stream that does not capture",
                got="the current stream captures",
                remedy=f"call fxwrap.{doing} before or after the capture",
            )
    for arena in arenas:
        if arena.memory is None:
            suspendable_memory(arena.device)  # raises, and says why it has none
    return arenas


def _all() -> list[SuspendableArena]:
    return [arena for arena in SHARED.arenas.alive() if isinstance(arena, SuspendableArena)]


def _arenas_of(program: Program) -> Iterator[Arena]:
    for recording in program.specializations.recordings():
        yield from recording.request.arenas.values()


@contextlib.contextmanager
def _locked(arenas: Sequence[SuspendableArena]) -> Iterator[dict[SuspendableArena, LockOwner]]:
    """Hold the locks of arenas, each for an owner of its own, and their devices' locks of captures.

    An arena that is suspended inside keeps its lock. One that another thread suspends meanwhile is left out.
    """
    owners = {arena: LockOwner(current_stream(arena.device)) for arena in arenas}
    capturing = [(SHARED.capturing[device], LockOwner()) for device in {arena.device for arena in arenas}]
    try:
        for lock, owner in capturing:
            if not lock.acquire(owner, _WAIT_S):
                raise _in_use("a graph is being captured")
        for arena, owner in owners.items():
            if not arena.lock.acquire(owner, _WAIT_S) and arena.suspension is None:
                raise _in_use(f"an arena of {arena.nbytes:,} bytes on {arena.device} is in use")
        yield {arena: owner for arena, owner in owners.items() if arena.suspension is None}
    finally:
        for lock, owner in capturing:
            lock.release(owner)
        for arena, owner in owners.items():
            if arena.suspension is None or arena.suspension.owner is not owner:
                arena.lock.release(owner)


def _in_use(got: str) -> SuspendError:
    return SuspendError(
        "cannot suspend recordings",
        expected="no call that uses them: of another thread, or an outer call of this thread",
        got=got,
        remedy="wait until these calls have returned",
    )


def _refuse_live_outputs(arenas: Sequence[SuspendableArena]) -> None:
    live = [output for arena in arenas for output in arena.live()]
    if live:
        nbytes = sum(output.storage.nbytes() for output in live)
        raise SuspendError(
            "cannot suspend recordings",
            expected="no live outputs: with their arena's memory their values would be lost",
            got=f"{len(live)} live output(s) of {nbytes:,} bytes in all",
            remedy='drop them or clone them first; live="copy" keeps their values on the host meanwhile',
        )
