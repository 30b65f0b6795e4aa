"""Arenas: blocks of device memory that the recordings of all programs share, and the pool of all arenas."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...devices import RecoverFromFailedCapture, SuspendableMemory
from ...errors import DeviceError, MemoryLimitError
from ...host_graph.tensors import tensor_over
from ..devices.runtime import DeviceRuntime, GraphPool, reclaim_memory, suspendable_memory
from .live_outputs import OutputStorage, WatchedOutputs
from .locks import LockOwner, TryLock, lock_of_process
from .suspension import Suspension
from .take_memory import empty_cache, take_memory

log = logging.getLogger(__name__)

# Bytes. Torch's CPU allocator aligns to this; that of a custom build may not.
_CPU_ALIGNMENT = 64

# Bytes. Allocators cut no more than this from small segments (c10/core/AllocatorConfig.h, kSmallSize).
_SMALL = 1 << 20

# Why there is too little memory.
TOO_LARGE, OUT_OF_MEMORY = "more than max_memory", "out of memory"
# Why a recording has ended.
NEEDED_ELSEWHERE = "an eager run needed its memory"


# Held while memory is suspended or resumed, for milliseconds. Reentrant: a signal handler may call a program.
_changing = lock_of_process()


@dataclass(eq=False)
class Arena:
    """Memory on one device that recordings share, for temporaries and for outputs.

    A call that runs in the arena or changes it holds its ``lock``.

    Attributes:
        nbytes: its size in bytes.
        watched_outputs: the outputs that each recording returned without a copy.
        version: changes when outputs are added, a recording ends, or the arena is cleared or suspended. Native units
            compare it, and ask Python when it has changed.
        stream: the stream that last worked in the arena; None on devices without streams.
        stream_id: the identifier of that stream; -1 without a stream.
        block: its memory; None if it has none.
        suspendable: whether its recordings are of programs with the option ``suspendable``.
        memory: where its memory comes from; None for torch's allocator.
        suspension: what is kept while its memory is suspended; None while it is not.
        grown: whether it has grown around live outputs.
        kept: gets the arena while live outputs are on the host: whoever has one need not have its recording.
    """

    device: torch.device
    nbytes: int = 0
    watched_outputs: list[WatchedOutputs] = field(default_factory=list)
    version: ctypes.c_int64 = field(default_factory=ctypes.c_int64)
    stream_id: ctypes.c_int64 = field(default_factory=lambda: ctypes.c_int64(-1))
    lock: TryLock = field(default_factory=TryLock)
    block: torch.UntypedStorage | None = None
    suspendable: bool = False
    memory: SuspendableMemory | None = None
    suspension: Suspension | None = None
    grown: bool = False
    kept: set[Arena] = field(default_factory=set)
    _stream: Any = None
    _begin: int = 0
    _users: list[tuple[weakref.ref[ArenaUser], int]] = field(default_factory=list)
    _ended_by_move: list[tuple[weakref.ref[ArenaUser], int]] = field(default_factory=list)
    _pool: GraphPool | None = None

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """A new storage object over a span of bytes. It keeps the arena's memory alive."""
        if not nbytes:
            return torch.UntypedStorage(0, device=self.device)  # the arena may have no memory
        assert self.block is not None
        begin = self._begin + offset
        return self.block[begin : begin + nbytes]  # type: ignore[return-value]

    def resize(self, nbytes: int) -> None:
        """Replace the memory with ``nbytes`` new bytes. All recordings end; live outputs keep the old memory alive.

        Raises:
            MemoryLimitError: the device is out of memory; the arena has no memory then.
        """
        # Keep the pool: recordings that end now will be captured again and reuse its memory.
        moved = [*self._ended_by_move, *((weakref.ref(user), size) for user, size in self.users())]
        pool, grown = self._pool, self.grown
        self.clear("the arena moved")
        self._ended_by_move, self._pool, self.grown = moved, pool, grown
        del pool  # self._pool is the only reference left, so that drop_pool frees the pool
        if nbytes > _SMALL and self.device.type != "cpu":
            # An arena cut from a cached segment would keep the allocator from returning the rest for as long as it
            # lives. Inductor's autotuning leaves such a segment: the buffer that it writes to clear the L2 cache.
            empty_cache()
        if self.memory is not None and nbytes:
            take_block = functools.partial(self.memory.allocate, nbytes)
            self.block, self.nbytes = take_memory(self.device, take_block, self.drop_pool), nbytes
            return
        take = functools.partial(torch.empty, nbytes, dtype=torch.uint8, device=self.device)
        memory = take_memory(self.device, take, self.drop_pool)
        if self.device.type == "cpu" and memory.data_ptr() % _CPU_ALIGNMENT:
            memory = torch.empty(nbytes + _CPU_ALIGNMENT, dtype=torch.uint8)
        self._begin = -memory.data_ptr() % _CPU_ALIGNMENT if self.device.type == "cpu" else 0
        self.block, self.nbytes = memory.untyped_storage(), nbytes

    @property
    def stream(self) -> Any:
        return self._stream

    @stream.setter
    def stream(self, stream: Any) -> None:
        self._stream, self.stream_id.value = stream, getattr(stream, "stream_id", -1)
        if self.memory is not None and stream is not None:
            self.memory.note_stream(stream)

    def is_idle_for(self, stream: Any) -> bool:
        """Whether work on ``stream`` may begin now: no other stream still works in the arena."""
        return self.stream is None or self.stream == stream or self.stream.query()

    def follow(self, stream: Any) -> None:
        """Make ``stream`` wait for earlier work in the arena, and note it as the arena's stream."""
        if not self.is_idle_for(stream):
            stream.wait_stream(self.stream)
        self.stream = stream

    def keep_until_done(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tell the allocator not to reuse the arena, or ``tensors`` used with it, before the stream is done."""
        if self.stream is not None and self.block is not None and self.device.type != "cpu":
            for storage in (self.block, *map(torch.Tensor.untyped_storage, tensors)):
                if storage.device == self.device:  # as bytes: of a conjugated tensor torch would record a copy
                    tensor_over(storage, (0,), (1,), torch.uint8).record_stream(self.stream)

    def pool(self, runtime: DeviceRuntime, recover: RecoverFromFailedCapture | None = None) -> GraphPool:
        """The memory pool of the arena's device graphs.

        Results in it are valid only while a call holds the arena's lock; outputs in it are copied.

        Args:
            recover: as for ``DeviceRuntime.make_pool``.
        """
        if self._pool is None or self._pool.spoiled or self._pool.runtime is not runtime:
            self._pool = runtime.make_pool(recover, self.memory if runtime.device == self.device else None)
        return self._pool

    @property
    def graph_pool(self) -> GraphPool | None:
        """The pool that its device graphs have used; None before the first."""
        return self._pool

    def drop_pool(self) -> None:
        """Use a new pool for the next graph; the present one is freed with its graphs."""
        self._pool = None

    def clear(self, why: str) -> None:
        """End all recordings in the arena; its memory is freed when none of their outputs is live."""
        for user, _ in self.users():
            user.end(why)
        self._users, self._ended_by_move, self.watched_outputs, self.block, self.nbytes = [], [], [], None, 0
        self.grown = False
        self.drop_pool()
        self.changed()

    def suspend(self, owner: LockOwner) -> int:
        """Give its physical memory back. Until it is resumed, its lock is held, and live outputs are on the host.

        Args:
            owner: holds the arena's lock. The suspension keeps it until ``resume``.

        Returns:
            The number of bytes.
        """
        assert self.memory is not None
        with _changing:
            self.suspension = Suspension.of(owner, self.live())
            if self.suspension.outputs:
                self.kept.add(self)
            self.changed()  # native units miss: the call goes through Python, which resumes
            return self.memory.suspend(self.block)

    def resume(self) -> int:
        """Take physical memory again; returns how many bytes, 0 if the arena was not suspended. Other threads wait.

        Raises:
            MemoryLimitError: the device is out of memory. The arena stays suspended.
        """
        with _changing:
            suspension = self.suspension
            if suspension is None or self.memory is None:
                return 0
            nbytes = take_memory(self.device, self.memory.resume, lambda: None)
            suspension.restore()
            self._end_suspension(suspension)
            return nbytes

    def _end_suspension(self, suspension: Suspension) -> None:
        self.suspension = None
        self.kept.discard(self)
        self.lock.release(suspension.owner)

    def end_suspended(self, users: Iterable[ArenaUser], why: str) -> bool:
        """End some of its recordings if it is suspended; returns whether it was.

        If it then has neither recordings nor live outputs, it is an empty arena again, and its lock is released.
        """
        with _changing:
            suspension = self.suspension
            if suspension is None:
                return False
            for user in users:
                user.end(why)
            if not self.users() and not self.live():
                self.clear("")
                self._end_suspension(suspension)
            return True

    def users(self) -> list[tuple[ArenaUser, int]]:
        """The arena's recordings that have not ended, each with the bytes of the arena that it needs."""
        alive = [(user, nbytes) for reference, nbytes in self._users if (user := reference()) is not None]
        return [(user, nbytes) for user, nbytes in alive if not user.ended]

    def needed(self) -> int:
        """The bytes that the largest of the arena's recordings needs."""
        return max((nbytes for _, nbytes in self.users()), default=0)

    def needed_again(self) -> int:
        """The bytes needed by the largest recording that ended when the arena moved, and may be made again."""
        self._ended_by_move = [(user, nbytes) for user, nbytes in self._ended_by_move if user() is not None]
        return max((nbytes for _, nbytes in self._ended_by_move), default=0)

    def enter(self, user: ArenaUser, outputs: WatchedOutputs, nbytes: int) -> None:
        """Add a recording, its outputs, and the bytes of the arena that it needs."""
        self._users = [(weakref.ref(other), size) for other, size in self.users()]
        self._users.append((weakref.ref(user), nbytes))
        self.watched_outputs = [*(other for other in self.watched_outputs if not other.is_dead()), outputs]
        self.changed()

    def changed(self) -> None:
        """Change the version, so that liveness guards collect the outputs again."""
        self.version.value = next(_versions)

    def live(self) -> dict[OutputStorage, int]:
        """The live outputs in the arena, each with the number of tensors that the caller has of it."""
        live = {output: count for outputs in self.watched_outputs for output, count in outputs.live().items()}
        return {output: count for output, count in live.items() if output.device == self.device}


_versions = itertools.count(1)
# The number of streams that may work at the same time, each in its own arena; another stream waits for one of these.
AT_ONE_TIME = 4
# The largest ratio of an arena's size to what its largest user needs; up to which ratio a growth is small.
_SLACK, _SMALL_GROWTH = 2, 1.125


class ArenaUser(Protocol):
    """What an arena needs to know of a recording.

    Attributes:
        ended: why the recording can never run again; empty while it can.
        used: the time of its last use, as a growing number.
        own_bytes: the bytes that it keeps outside of the arena.
    """

    ended: str

    @property
    def used(self) -> int: ...

    @property
    def own_bytes(self) -> int: ...

    def end(self, why: str) -> None:
        """End the recording for good and drop its references. The caller holds the arena's lock."""


def _memory_for(device: torch.device) -> SuspendableMemory | None:
    """Suspendable memory; None if the device has none. Programs then run without, and ``fxwrap.suspend`` says why."""
    try:
        return suspendable_memory(device)
    except DeviceError as error:
        log.warning("%s", str(error))  # a log handler that keeps the error would keep its frames, and their tensors
        return None


class ArenaPool:
    """The arenas of all devices.

    Recordings of all programs share one arena on each device; those with the option ``suspendable`` share another.
    While an arena is busy (another thread, a program that runs inside of another, a stream that still works in it),
    recordings are made in a second one of its kind, and so on. An arena lives as long as a recording uses it, or
    live outputs of it are on the host.
    """

    def __init__(self) -> None:
        self._arenas: dict[torch.device, list[weakref.ref[Arena]]] = {}
        self._kept: set[Arena] = set()
        self._announced: dict[torch.device, dict[int, tuple[weakref.ref[Any], int]]] = {}

    def acquire(
        self,
        device: torch.device,
        stream: Any,
        owner: LockOwner,
        locked: list[Arena],
        exclude: Callable[[Arena], bool] = lambda arena: False,
        suspendable: bool = False,
    ) -> Arena:
        """Lock an arena for ``owner`` and append it to ``locked``. A new one is made if none is free.

        Args:
            stream: the stream to which the call issues its work.
            exclude: returns whether an arena must not be used.
            suspendable: whether its memory is to be suspendable, where the device has such memory.

        Raises:
            MemoryLimitError: the device is out of memory, and an arena stays suspended.
        """
        alive = [arena for arena in self.alive(device) if arena.suspendable == suspendable]
        busy = [arena for arena in alive if not arena.is_idle_for(stream)]
        for arena in alive:
            if exclude(arena) or (arena in busy and len(busy) < AT_ONE_TIME):
                continue
            arena.resume()
            # Appended first, so that after an interrupt the caller knows what to release.
            locked.append(arena)
            if arena.lock.acquire(owner):
                arena.follow(stream)
                return arena
            locked.pop()
        memory = _memory_for(device) if suspendable else None
        arena = Arena(device, suspendable=suspendable, memory=memory, kept=self._kept)
        arena.stream = stream
        locked.append(arena)
        arena.lock.acquire(owner)
        arenas = self._arenas.setdefault(device, [])
        arenas.append(weakref.ref(arena, arenas.remove))
        return arena

    def announce(self, device: torch.device, estimate: Any, nbytes: int) -> None:
        """Announce that a recording will need ``nbytes``. It counts while its estimate is alive.

        Arenas grow to the largest announced size at once, if memory allows.
        """
        announced = self._announced.setdefault(device, {})
        key = id(estimate)
        announced[key] = weakref.ref(estimate, lambda _: announced.pop(key, None)), nbytes

    def lower(self, device: torch.device, estimate: Any, nbytes: int) -> None:
        """Lower the announced size of an estimate to ``nbytes``, if that is less."""
        announced = self._announced.get(device, {})
        entry = announced.get(id(estimate))
        if entry is not None and nbytes < entry[1]:
            announced[id(estimate)] = entry[0], nbytes

    def withdraw(self, estimate: Any) -> None:
        """Remove the announced sizes of an estimate."""
        for announced in list(self._announced.values()):
            announced.pop(id(estimate), None)

    def largest_announced(self, device: torch.device) -> int:
        """The largest announced size, in bytes."""
        return max((nbytes for _, nbytes in list(self._announced.get(device, {}).values())), default=0)

    def kept(self, device: torch.device | None = None) -> int:
        """Bytes of a device's arenas (None: of all), and of what their recordings keep outside of them."""
        return sum(map(self._kept_by, self.alive(device)))

    @staticmethod
    def _kept_by(arena: Arena) -> int:
        return arena.nbytes + sum(user.own_bytes for user, _ in arena.users())

    def make_room(self, arena: Arena, nbytes: int, limit: int) -> bool:
        """End recordings, the least recently used first, until ``arena`` may have ``nbytes``.

        If ``arena`` has another size, all its recordings end first. Any other arena is freed when its last recording
        ends. Arenas that other calls have locked do not change.

        Args:
            limit: the bytes that all arenas of the device, and what recordings keep outside of them, may take.

        Returns:
            Whether ``arena`` may have ``nbytes``.
        """
        owner = LockOwner()  # the locks are free when it is gone
        locked = [other for other in self.alive(arena.device) if other is arena or other.lock.acquire(owner)]
        if nbytes + sum(self._kept_by(other) for other in self.alive(arena.device) if other not in locked) > limit:
            return False
        if nbytes != arena.nbytes:
            arena.resize(0)
        while self.kept(arena.device) - arena.nbytes + nbytes > limit:
            users = [(user, home) for home in locked for user, _ in home.users()]
            if not users:
                return False
            user, home = min(users, key=lambda pair: pair[0].used)
            user.end("max_memory: the least recently used")
            if home is not arena and not home.users():
                home.clear("")
        return True

    def fit(self, arena: Arena, nbytes: int, limit: int) -> bool:
        """Resize an arena if it is too small, or more than twice as large as its largest user needs.

        Args:
            limit: the bytes that all arenas of the device, and what recordings keep outside of them, may take; 0 is
                no limit.

        Returns:
            Whether the arena's memory moved.

        Raises:
            MemoryLimitError: the limit would be exceeded, or the device is out of memory.
        """
        again, grows = arena.needed_again(), nbytes > arena.nbytes and bool(arena.live())
        # The next plan around live outputs may need more again: the arena doubles, so that few recordings end. Not at
        # a first small growth, which is all that many training steps need.
        doubles = grows and (arena.grown or nbytes > _SMALL_GROWTH * arena.nbytes)
        room = _SLACK * max(arena.needed(), again) if doubles else 0
        for expected in (max(room, again, self.largest_announced(arena.device)), 0):
            needed = max(nbytes, arena.needed(), expected)
            size = arena.nbytes if nbytes <= arena.nbytes <= _SLACK * needed else needed
            if not limit or self.make_room(arena, size, limit):
                if size == arena.nbytes:
                    return False
                try:
                    arena.resize(size)
                except MemoryLimitError:
                    if not expected:
                        raise
                    continue  # again, without the expected need of others
                arena.grown = arena.grown or grows
                return True
        raise MemoryLimitError(
            f"recording needs {nbytes:,} bytes on {arena.device}",
            expected=f"no more than max_memory, {limit:,}, with what other calls use now",
            remedy="raise max_memory, or free outputs that are kept",
        )

    def alive(self, device: torch.device | None = None) -> list[Arena]:
        """The arenas of a device (None: of all), oldest first, so that all calls try the same one first."""
        lists = [arenas for key, arenas in list(self._arenas.items()) if device in (None, key)]
        return [arena for arenas in lists for ref in list(arenas) if (arena := ref()) is not None]

    def with_suspended_outputs(self) -> list[Arena]:
        """Suspended arenas with live outputs, whose bytes are on the host."""
        for arena in list(self._kept):
            arena.end_suspended((), "")  # if nobody has anything of it any more
        return [arena for arena in list(self._kept) if arena.live()]

    def owns(self, address: int) -> bool:
        """Whether an address lies in an arena. An input at such an address is an output of a recording."""
        blocks = [arena.block for arena in self.alive() if arena.block is not None]
        return any(block.data_ptr() <= address < block.data_ptr() + block.nbytes() for block in blocks)

    def pressure(self, short_of: str, device: torch.device) -> int:
        """A measure of shortage, in bytes: a specialization tries again when it falls.

        If memory ran out: minus the bytes that can be allocated, including cached ones. If ``max_memory`` was
        exceeded, or the device does not report its memory: what the arenas keep that are locked now, and the bytes of
        live outputs in the others.
        """
        with contextlib.suppress(Exception):  # not every device reports its memory
            if short_of == OUT_OF_MEMORY:
                module = torch.get_device_module(device)
                free, total = module.mem_get_info(device)
                allowed = int(module.get_per_process_memory_fraction(device) * total)
                return int(module.memory_allocated(device) - min(free + module.memory_reserved(device), allowed))
        return sum(
            self._kept_by(arena) if arena.lock.locked() else sum(output.high - output.low for output in arena.live())
            for arena in self.alive(device)
        )

    def pools(self) -> list[Any]:
        """Identifiers of the memory pools in which device graphs allocate."""
        return [pool.id for arena in self.alive() if (pool := arena.graph_pool) is not None]

    def end_idle(self, device: torch.device) -> int:
        """End the recordings in arenas that no call uses, and free the arenas' memory; returns how many ended.

        All of them end: how much the eager run needs is unknown, and an arena is freed with its last recording only.
        """
        ended = 0
        for arena in self.alive(device):
            owner = LockOwner()
            try:
                if arena.lock.acquire(owner):
                    ended += len(arena.users())
                    arena.clear(NEEDED_ELSEWHERE)
            finally:
                arena.lock.release(owner)
        return ended

    def give_back(self) -> None:
        """Free the memory of arenas without recordings."""
        for arena in self.alive():
            owner = LockOwner()
            if arena.end_suspended((), ""):
                continue
            if arena.lock.acquire(owner) and not arena.users():
                arena.clear("")
            arena.lock.release(owner)
        reclaim_memory()
