"""Memory of recordings: arenas that they share, and tensors laid over them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from ..errors import MemoryLimitError
from .devices.runtime import DeviceRuntime, GraphPool
from .live_outputs import LiveOutputs, OutputStorage
from .locks import LockOwner, TryLock

# Bytes. On a CPU the allocator aligns so, but a build may have another allocator.
_CPU_ALIGNMENT = 64

# What there may be too little of.
TOO_LARGE, OUT_OF_MEMORY = "more than max_memory", "out of memory"
Value = TypeVar("Value")


def take_memory(device: torch.device, take: Callable[[], Value], let_go: Callable[[], object]) -> Value:
    """What ``take`` returns. Where the device is out of memory, it is called twice: in between the cache is emptied.
    Allocators do not do that themselves while a graph is captured.

    Args:
        let_go: lets go of what the first try has left.

    Raises:
        MemoryLimitError: the device is out of memory.
    """
    with contextlib.suppress(torch.OutOfMemoryError):
        return take()
    let_go()
    with contextlib.suppress(Exception):  # not while somebody else captures, and no accelerator has none
        torch.accelerator.empty_cache()  # waits for the device, too
    try:
        return take()
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(
            f"{device} is out of memory",
            got=str(error),
            remedy="set max_memory, so that less is kept for recordings, or free what is kept elsewhere",
        ) from error


def tensor_over(
    storage: torch.UntypedStorage,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    offset: int = 0,
) -> torch.Tensor:
    """A tensor that begins ``offset`` bytes after a storage does.

    In an arena each planned tensor has a storage of its own, so that an operator which counts offsets from the start
    of the storage finds what it expects, and so that use counts tell who is held.
    """
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, size, stride)  # type: ignore[call-overload]


@dataclass(eq=False)
class Arena:
    """Memory that recordings share, on one device: for what lives while they run, and for their outputs.

    Who runs in it, or changes it, has its ``lock``.

    Attributes:
        nbytes: how large it is.
        live_outputs: the outputs in it that were handed out, by recording.
        version: changes whenever ``live_outputs`` does.
        stream: where its work was issued last; None where there are no streams.
        block: all of it.
    """

    device: torch.device
    nbytes: int = 0
    live_outputs: list[LiveOutputs] = field(default_factory=list)
    version: int = 0
    stream: Any = None
    lock: TryLock = field(default_factory=TryLock)
    block: torch.UntypedStorage | None = None
    _begin: int = 0
    _users: list[tuple[weakref.ref[ArenaUser], int]] = field(default_factory=list)
    _moved: list[tuple[weakref.ref[ArenaUser], int]] = field(default_factory=list)
    _pool: GraphPool | None = None

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """A storage of its own over bytes of the arena; it keeps them."""
        if not nbytes:
            return torch.UntypedStorage(0, device=self.device)  # the arena may have no memory at all
        assert self.block is not None
        begin = self._begin + offset
        return self.block[begin : begin + nbytes]  # type: ignore[return-value]

    def resize(self, nbytes: int) -> None:
        """Become so large. Memory moves: whatever was recorded in it ends; outputs keep theirs.

        Raises:
            MemoryLimitError: the device is out of memory; the arena has none.
        """
        # Whoever ends now will be back, and the pool's memory will do for the graphs to come.
        moved, pool = [*self._moved, *((weakref.ref(user), size) for user, size in self.users())], self._pool
        self.clear("the arena moved")
        self._moved, self._pool = moved, pool
        del pool  # it may have to go
        take = functools.partial(torch.empty, nbytes, dtype=torch.uint8, device=self.device)
        whole = take_memory(self.device, take, self.leave_pool)
        if self.device.type == "cpu" and whole.data_ptr() % _CPU_ALIGNMENT:
            whole = torch.empty(nbytes + _CPU_ALIGNMENT, dtype=torch.uint8)
        self._begin = -whole.data_ptr() % _CPU_ALIGNMENT if self.device.type == "cpu" else 0
        self.block, self.nbytes = whole.untyped_storage(), nbytes

    def is_idle_for(self, stream: Any) -> bool:
        """Whether work on ``stream`` may begin now: all other streams have done what was issued in the arena."""
        return self.stream is None or self.stream == stream or self.stream.query()

    def follow(self, stream: Any) -> None:
        """Have work on ``stream`` begin after what was issued before; from now on it is where the arena's work is."""
        if not self.is_idle_for(stream):
            stream.wait_stream(self.stream)
        self.stream = stream

    def keep_until_done(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have nobody be given the arena, or memory that was used with it, before the stream is done."""
        if self.stream is not None and self.block is not None and self.device.type != "cpu":
            for tensor in (tensor_over(self.block, (0,), (1,), torch.uint8), *tensors):
                if tensor.device == self.device:
                    tensor.record_stream(self.stream)

    def pool(self, runtime: DeviceRuntime) -> GraphPool:
        """The memory pool of the graphs that work in the arena. Nothing in it outlives the call that has its lock."""
        if self._pool is None or self._pool.spoiled or self._pool.runtime is not runtime:
            self._pool = runtime.make_pool()
        return self._pool

    def leave_pool(self) -> None:
        """Take another pool for the next graph: what is in this one goes with its graphs."""
        self._pool = None

    def clear(self, why: str) -> None:
        """End what was recorded, and give the memory back as soon as nobody has an output in it."""
        for user, _ in self.users():
            user.end(why)
        self._users, self._moved, self.live_outputs, self.block, self.nbytes = [], [], [], None, 0
        self.leave_pool()
        self.changed()

    def users(self) -> list[tuple[ArenaUser, int]]:
        """Who works in it, and how many of its bytes each needs."""
        alive = [(user, nbytes) for reference, nbytes in self._users if (user := reference()) is not None]
        return [(user, nbytes) for user, nbytes in alive if not user.ended]

    def needed(self) -> int:
        """Bytes that who works in it needs."""
        return max((nbytes for _, nbytes in self.users()), default=0)

    def needed_again(self) -> int:
        """Bytes that who worked in it until it moved will need, unless they are forgotten."""
        self._moved = [(user, nbytes) for user, nbytes in self._moved if user() is not None]
        return max((nbytes for _, nbytes in self._moved), default=0)

    def enter(self, user: ArenaUser, live: LiveOutputs, nbytes: int) -> None:
        """Note who was recorded, what it hands out, and how large the arena has to be for it."""
        self._users = [(weakref.ref(known), size) for known, size in self.users()]
        self._users.append((weakref.ref(user), nbytes))
        self.live_outputs = [one for one in self.live_outputs if not one.is_dead()]
        self.live_outputs.append(live)
        self.changed()

    def changed(self) -> None:
        """Have everybody look again at what is live."""
        self.version = next(_versions)

    def held(self) -> dict[OutputStorage, int]:
        """The outputs in it that somebody has, and how many tensors they have of each."""
        held = {output: count for live in self.live_outputs for output, count in live.held().items()}
        return {output: count for output, count in held.items() if output.device == self.device}


_versions = itertools.count(1)
# Streams that may work at one time, in an arena each; others wait for one of them.
AT_ONE_TIME = 4


class ArenaUser(Protocol):
    """Something that works at fixed places of an arena.

    Attributes:
        ended: why it does no more; empty while it does.
        used: when it was used last, as a number that grows.
        own_bytes: what it keeps beside the arena.
    """

    ended: str
    used: int

    @property
    def own_bytes(self) -> int: ...

    def end(self, why: str) -> None:
        """Never run again, and let go of the arena's memory. Called by who has the arena's lock."""


_Choice = Callable[[Arena], bool] | None


class ArenaPool:
    """Arenas by device.

    Recordings of all programs share one. Where that is busy (another thread, a program that runs inside of another,
    a stream that still works in it) they share a second, and so on. An arena lives as long as a recording uses it.
    """

    def __init__(self) -> None:
        self._arenas: dict[torch.device, list[weakref.ref[Arena]]] = {}
        self._expected: dict[torch.device, dict[int, tuple[weakref.ref[Any], int]]] = {}

    def acquire(
        self, device: torch.device, stream: Any, owner: LockOwner, held: list[Arena], but: _Choice = None
    ) -> Arena:
        """An arena that ``owner`` now has; it is entered in ``held``, too. A new one if none is free.

        Args:
            stream: where the call issues its work.
            but: tells which arenas will not do.
        """
        arenas = self._arenas.setdefault(device, [])
        known = self._alive(arenas)
        elsewhere = [arena for arena in known if not arena.is_idle_for(stream)]
        for arena in known:
            if (but is not None and but(arena)) or (arena in elsewhere and len(elsewhere) < AT_ONE_TIME):
                continue
            # Entered first, so that an interrupt cannot come between taking and knowing what to give back.
            held.append(arena)
            if arena.lock.acquire(owner):
                arena.follow(stream)
                return arena
            held.pop()
        arena = Arena(device, stream=stream)
        held.append(arena)
        arena.lock.acquire(owner)
        arenas.append(weakref.ref(arena, arenas.remove))
        return arena

    def expect(self, device: torch.device, who: Any, nbytes: int) -> None:
        """Say that an arena will have to be so large, for as long as ``who`` lives: it need not grow in steps."""
        expected = self._expected.setdefault(device, {})
        number = id(who)
        expected[number] = weakref.ref(who, lambda _: expected.pop(number, None) and None), nbytes

    def correct(self, device: torch.device, who: Any, nbytes: int) -> None:
        """Say that ``who`` needs no more than so much, as is known now."""
        expected = self._expected.get(device, {})
        known = expected.get(id(who))
        if known is not None and nbytes < known[1]:
            expected[id(who)] = known[0], nbytes

    def withdraw(self, who: Any) -> None:
        """Take back what ``who`` is said to need."""
        for expected in list(self._expected.values()):
            expected.pop(id(who), None)

    def expected(self, device: torch.device) -> int:
        """Bytes that an arena will have to have, as far as is known."""
        return max((nbytes for _, nbytes in list(self._expected.get(device, {}).values())), default=0)

    def kept(self, device: torch.device | None = None) -> int:
        """Bytes of the arenas of a device (None: of all), and of what recordings in them keep beside them."""
        return sum(map(self._kept_by, self._on(device)))

    @staticmethod
    def _kept_by(arena: Arena) -> int:
        return arena.nbytes + sum(user.own_bytes for user, _ in arena.users())

    def make_room(self, arena: Arena, nbytes: int, limit: int) -> bool:
        """End recordings, the least recently used first, until ``arena`` may have ``nbytes``; whether it may.

        Whatever another call uses at the moment stays. An arena in which nothing is left gives its memory back.

        Args:
            limit: bytes of all arenas of the device, and of what recordings keep beside them.
        """
        owner = LockOwner()
        mine = [one for one in self._on(arena.device) if one is arena or one.lock.acquire(owner)]
        if nbytes + sum(self._kept_by(one) for one in self._on(arena.device) if one not in mine) > limit:
            return False
        if nbytes != arena.nbytes:
            arena.resize(0)
        while self.kept(arena.device) - arena.nbytes + nbytes > limit:
            users = [(user, one) for one in mine for user, _ in one.users()]
            if not users:
                return False
            user, its = min(users, key=lambda known: known[0].used)
            user.end("max_memory: the least recently used")
            if its is not arena and not its.users():
                its.clear("")
        return True

    def owns(self, address: int) -> bool:
        """Whether an address lies in an arena: what lives there is an output of a recording."""
        blocks = [arena.block for arena in self._on(None) if arena.block is not None]
        return any(block.data_ptr() <= address < block.data_ptr() + block.nbytes() for block in blocks)

    def pressure(self, short_of: str, device: torch.device) -> int:
        """A number of bytes: what there is too little of is too little until there are fewer.

        Of a device these are minus those that can be had, cached ones, too; of ``max_memory`` those that may become
        free by themselves: outputs that somebody has, and arenas that calls have now.
        """
        with contextlib.suppress(Exception):  # a device may not tell
            if short_of == OUT_OF_MEMORY:
                module = torch.get_device_module(device)
                free, total = module.mem_get_info(device)
                allowed = int(module.get_per_process_memory_fraction(device) * total)
                return int(module.memory_allocated(device) - min(free + module.memory_reserved(device), allowed))
        return sum(
            self._kept_by(arena) if arena.lock.locked() else sum(output.high - output.low for output in arena.held())
            for arena in self._on(device)
        )

    def pools(self) -> list[Any]:
        """The pools in which graphs allocate."""
        return [arena._pool.id for arena in self._on(None) if arena._pool is not None]

    def give_back(self) -> None:
        """Have arenas in which nothing is recorded any more give their memory back."""
        for arena in self._on(None):
            owner = LockOwner()
            if arena.lock.acquire(owner) and not arena.users():
                arena.clear("")
            arena.lock.release(owner)

    def _on(self, device: torch.device | None) -> list[Arena]:
        known = [arenas for where, arenas in list(self._arenas.items()) if device in (None, where)]
        return [arena for arenas in known for arena in self._alive(arenas)]

    @staticmethod
    def _alive(arenas: list[weakref.ref[Arena]]) -> list[Arena]:
        """In the order in which they were made, so that everybody asks for the same one first."""
        return [arena for ref in list(arenas) if (arena := ref()) is not None]


def has_address(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory: a sparse one is made of others, one on the meta device is nowhere."""
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value that an operator returned: a tensor, or a tuple or list with tensors."""
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [value] if isinstance(value, torch.Tensor) and has_address(value) else []


def reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    steps = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return (1 + steps) * tensor.element_size()
