"""An arena: a block of device memory that recordings share. Usually there is one on a device (``arena_pool.py``)."""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...devices import RecoverFromFailedCapture, SuspendableMemory
from ...host_graph.tensors import tensor_over
from ..devices.runtime import DeviceRuntime, GraphPool
from .live_outputs import OutputStorage, WatchedOutputs
from .locks import TryLock
from .take_memory import SUSPENDABLE, empty_cache, take_memory

log = logging.getLogger(__name__)

# Bytes. Torch's CPU allocator aligns to this; that of a custom build may not.
_CPU_ALIGNMENT = 64

# Bytes. Allocators serve requests up to this size from small segments (c10/core/AllocatorConfig.h, kSmallSize).
_SMALL = 1 << 20

# Why there is too little memory.
TOO_LARGE, OUT_OF_MEMORY = "more than max_memory", "out of memory"
# Why a recording has ended.
NEEDED_ELSEWHERE = "an eager run needed its memory"


@dataclass(eq=False)
class Arena:
    """Memory on one device that recordings share, for temporaries and for outputs.

    A call that runs in the arena or changes it holds its ``lock``.

    Attributes:
        nbytes: its size in bytes.
        watched_outputs: the outputs that each recording returned without a copy.
        version: changes when outputs are added, a recording ends, or the arena is cleared. Native units compare it,
            and ask Python when it has changed.
        stream: the stream that last worked in the arena; None on devices without streams.
        stream_id: the identifier of that stream; -1 without a stream.
        block: its memory; None if it has none.
        memory: where its memory comes from; None for torch's allocator.
        grown: whether it has grown around live outputs.
    """

    device: torch.device
    nbytes: int = 0
    watched_outputs: list[WatchedOutputs] = field(default_factory=list)
    version: ctypes.c_int64 = field(default_factory=ctypes.c_int64)
    stream_id: ctypes.c_int64 = field(default_factory=lambda: ctypes.c_int64(-1))
    lock: TryLock = field(default_factory=TryLock)
    block: torch.UntypedStorage | None = None
    memory: SuspendableMemory | None = None
    grown: bool = False
    _stream: Any = None
    _begin: int = 0
    _users: list[tuple[weakref.ref[ArenaUser], int]] = field(default_factory=list)
    _ended_by_move: list[tuple[weakref.ref[ArenaUser], int]] = field(default_factory=list)
    _pool: GraphPool | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            SUSPENDABLE[self.device] = self.memory

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        """A new storage object over a span of bytes. It keeps the arena's memory alive."""
        if not nbytes:
            return torch.UntypedStorage(0, device=self.device)  # the arena may have no memory
        assert self.block is not None
        begin = self._begin + offset
        return self.block[begin : begin + nbytes]  # type: ignore[return-value]

    def address(self, offset: int) -> int:
        """The address of a byte of its memory."""
        assert self.block is not None
        return self.block.data_ptr() + self._begin + offset

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
            # While an arena that was cut from a cached segment is alive, the allocator cannot return the rest of the
            # segment. Inductor's autotuning leaves such a segment: the buffer that it writes to clear the L2 cache.
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

    def move_to(self, stream: Any) -> None:
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

    def pool_bytes(self) -> int:
        """The bytes of the segments in that pool; 0 where the device does not tell."""
        if (pool := self._pool) is None or (snapshot := getattr(self._module, "memory_snapshot", None)) is None:
            return 0
        identifiers = {pool.id, getattr(pool.memory_pool, "id", pool.id)}
        segments: list[dict[str, Any]] = snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) in identifiers)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)

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

    # -- hooks: a subclass may release the memory; meanwhile it holds the lock (``hooks.ARENAS``)

    @classmethod
    def new(cls, device: torch.device) -> Arena:
        """An arena without memory. A subclass says where its memory comes from."""
        return cls(device)

    def is_suspended(self) -> bool:
        """Whether its memory is released, so that its recordings cannot run."""
        return False

    def resume(self) -> int:
        """Take memory again if it is released; returns the bytes. Raises MemoryLimitError if there is too little."""
        return 0

    def end_if_suspended(self, users: Iterable[ArenaUser], why: str) -> bool:
        """End some of its recordings if it is suspended; returns whether it was. Its lock need not be held."""
        return False

    # -- what lies in it

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

    def tell_unit_of_others(self) -> None:
        """Prepare it for the outputs that others have in the arena by now. The caller holds the arena's lock."""
