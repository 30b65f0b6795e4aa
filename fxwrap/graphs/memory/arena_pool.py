"""The pool of all arenas: which one a call gets, how large it is, and what ends when memory is short."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...errors import MemoryLimitError
from .arenas import NEEDED_ELSEWHERE, OUT_OF_MEMORY, Arena
from .locks import LockOwner
from .take_memory import reclaim_memory

# The number of streams that may work at the same time, each in its own arena; another stream waits for one of these.
AT_ONE_TIME = 4
# The largest ratio of an arena's size to what its largest user needs; up to which ratio a growth is small.
_SLACK, _SMALL_GROWTH = 2, 1.125
# An arena that others have recorded in grows by this part more than it must: the next size may be a little larger,
# and all these recordings would end again.
_ROOM = 32


def wanted_size(present: int, needed: int, expected: int) -> int:
    """The bytes that an arena should have.

    Args:
        present: what it has. It keeps that where it is enough, and not more than twice what is needed.
        needed: by the recordings that there are, and the one that is made.
        expected: what others are expected to need.
    """
    wanted = max(needed, expected)
    return present if needed <= present <= _SLACK * wanted else wanted


def room_around_outputs(present: int, needed: int, used: int, has_grown: bool) -> int:
    """The bytes for an arena that grows while it has live outputs: twice what its largest recording uses.

    The next plan around live outputs may need more again: so few recordings end. A first small growth is all that
    many training steps need: then no room is left (0).
    """
    return _SLACK * used if has_grown or needed > _SMALL_GROWTH * present else 0


class ArenaPool:
    """The arenas of all devices.

    Recordings of all programs share one arena on each device; those whose options ask for another
    class share another. While an arena is busy (another thread, a program that runs inside of another, a stream that
    still works in it), recordings are made in a second one of its class, and so on. An arena lives as long as a
    recording uses it.
    """

    def __init__(self) -> None:
        self._arenas: dict[torch.device, list[weakref.ref[Arena]]] = {}
        self._announced: dict[torch.device, dict[int, tuple[weakref.ref[Any], int]]] = {}

    def acquire(
        self,
        device: torch.device,
        stream: Any,
        owner: LockOwner,
        locked: list[Arena],
        exclude: Callable[[Arena], bool] = lambda arena: False,
        kind: type[Arena] = Arena,
    ) -> Arena:
        """Lock an arena for ``owner`` and append it to ``locked``. A new one is made if none is free.

        Args:
            stream: the stream to which the call issues its work.
            exclude: returns whether an arena must not be used.
            kind: its class.

        Raises:
            MemoryLimitError: an arena is suspended, and the device has too little memory for it.
        """
        alive = [arena for arena in self.alive(device) if type(arena) is kind]
        busy = [arena for arena in alive if not arena.is_idle_for(stream)]
        for arena in alive:
            if exclude(arena) or (arena in busy and len(busy) < AT_ONE_TIME):
                continue
            arena.resume()
            # Appended first, so that after an interrupt the caller knows what to release.
            locked.append(arena)
            if arena.lock.acquire(owner):
                arena.move_to(stream)
                return arena
            locked.pop()
        arena = kind.new(device)
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

    def fit(self, arena: Arena, nbytes: int, limit: int, exactly: bool = False) -> bool:
        """Resize an arena if it is too small, or more than twice as large as its largest user needs.

        Args:
            limit: the bytes that all arenas of the device, and what recordings keep outside of them, may take; 0 is
                no limit.
            exactly: whether the arena gets what its largest user needs, and no room for what comes.

        Returns:
            Whether the arena's memory moved.

        Raises:
            MemoryLimitError: the limit would be exceeded, or the device is out of memory.
        """
        again, grows = arena.needed_again(), nbytes > arena.nbytes and bool(arena.live())
        room = 0
        if grows:
            room = room_around_outputs(arena.nbytes, nbytes, max(arena.needed(), again), arena.grown)
        elif nbytes > arena.nbytes and arena.users():
            room = nbytes + nbytes // _ROOM
        # At first with what others are expected to need; where that is too much, without.
        needed, most = max(nbytes, arena.needed()), max(room, again, self.largest_announced(arena.device))
        for expected in (0,) if exactly else dict.fromkeys((most, 0)):
            size = needed if exactly else wanted_size(arena.nbytes, needed, expected)
            if limit and not self.make_room(arena, size, limit):
                continue
            if size == arena.nbytes:
                return False
            try:
                arena.resize(size)
            except MemoryLimitError:
                if not expected:
                    raise
            else:
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

    def suspended(self) -> list[Arena]:
        """The arenas whose memory is suspended. First those end that no caller's output keeps."""
        for arena in self.alive():
            arena.end_if_suspended((), "")
        return [arena for arena in self.alive() if arena.is_suspended()]

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
                allocated, reserved = _taken_of(module, device)
                return int(allocated - min(free + reserved, allowed))
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
            if arena.end_if_suspended((), ""):
                continue
            if arena.lock.acquire(owner) and not arena.users():
                arena.clear("")
            arena.lock.release(owner)
        reclaim_memory()


def _taken_of(module: Any, device: torch.device) -> tuple[int, int]:
    """Bytes that the allocator of a device has given out, and that it holds."""
    if (ask := getattr(module, "memory_stats_as_nested_dict", None)) is None:
        return module.memory_allocated(device), module.memory_reserved(device)
    stats = ask(device)  # a tenth of the time in which ``memory_allocated`` looks one number up
    return stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]
