"""Addresses for what calls allocate on a CUDA device while they are captured.

torch's allocator takes no addresses from its callers. But a ``torch.cuda.MemPool`` asks a function of its owner for
each segment, and with ``no_split`` a segment holds one allocation at a time. So each call gets a pool, whose function
hands out planned addresses (``native/placed_allocations.cpp``): it decides where all that the call allocates lies,
results, temporaries, and the workspaces that libraries get from the allocator.

What a call has allocated is read from the allocator's history, which knows the exact bytes; a pool knows segments.

Rules that were learnt from crashes (torch 2.14.1):

- A pool must not be freed inside of a capture: its destructor raises, which ends the process.
- Each pool needs an allocator object of its own: torch keeps what it knows of pools by that pointer.
- No planned address may be that of a block that torch has handed out, since blocks are found by their address. So an
  arena does not begin where its block does (``graphs/memory/arenas.py``).
- ``torch.cuda.use_mem_pool`` does not do: a graph keeps the pools that are entered so in its capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import logging
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..native_build import built_library
from .functions import frees_workspaces, storage_at

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("native") / "placed_allocations.cpp"
_HEADERS = (_SOURCE.with_name("cuda_driver.h"),)
_FLAGS = ("-std=c++17", "-O2", "-ldl")
# Seconds that the compiler may take. It takes one on an idle machine.
_PATIENCE = 120
# Bytes; that of torch's blocks.
_ALIGNMENT = 512
_DRIVER = b"libcuda.so.1"


class CudaPlacements:
    """What calls allocate during one capture on this thread (``devices.Placements``)."""

    def __init__(self, device: torch.device) -> None:
        found = _library()
        assert not isinstance(found, str)
        self._library, self._device, self._pools, self._used = found, device, list[Any](), 0
        self._index = device.index if device.index is not None else torch.cuda.current_device()

    @contextlib.contextmanager
    def at(self, addresses: Sequence[int]) -> Iterator[None]:
        given = (ctypes.c_uint64 * len(addresses))(*addresses)
        self._library.fxwrap_place_at(given, len(addresses))
        try:
            with self._in_a_pool():
                yield
        except torch.OutOfMemoryError as error:
            # Of torch, too: while the capture lasts, it counts a whole segment for each allocation.
            left = self._library.fxwrap_end_placing()
            why = str(error) if left >= 0 else f"more than {len(addresses)} allocations"
            raise RuntimeError(why) from None
        finally:
            left = self._library.fxwrap_end_placing()
        if left:
            raise RuntimeError(f"{len(addresses) - left} allocations in place of {len(addresses)}")

    @contextlib.contextmanager
    def without_memory(self) -> Iterator[None]:
        self._operand(0)  # from here on there is a stage
        self._library.fxwrap_place_on_stage()
        try:
            with self._in_a_pool():
                yield
        finally:
            self._library.fxwrap_end_placing()

    def stand_in(self, nbytes: int) -> torch.UntypedStorage:
        storage: torch.UntypedStorage = storage_at(self._operand(nbytes), self._device, nbytes)
        return storage

    def _operand(self, nbytes: int) -> int:
        offset, self._used = self._used, self._used + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if not (address := self._library.fxwrap_operand_on_stage(self._index, offset, nbytes)):
            raise torch.OutOfMemoryError(f"{self._used:,} bytes of addresses are not to be had")
        return int(address)

    def clear(self) -> None:
        """Give back what a capture that never runs has had behind its addresses."""
        self._library.fxwrap_clear_stage(self._index)

    @contextlib.contextmanager
    def _in_a_pool(self) -> Iterator[None]:
        pool = torch.cuda.MemPool(_allocator(self._library), no_split=True)
        self._pools.append(pool)
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._index, pool.id)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(self._index, pool.id)
            torch._C._cuda_releasePool(self._index, pool.id)

    def made(self) -> list[list[tuple[int, int]] | None]:
        numbers = {tuple(pool.id): number for number, pool in enumerate(self._pools)}
        made: list[list[tuple[int, int]]] = [[] for _ in self._pools]
        freed = [0 for _ in self._pools]
        for entry in torch._C._cuda_memorySnapshot(None)["device_traces"][self._index]:  # type: ignore[attr-defined]
            if (number := numbers.get(tuple(entry.get("pool_id", ())))) is not None:
                if entry["action"] == "alloc":
                    made[number].append((entry["addr"], entry["size"]))
                freed[number] += entry["action"] == "free_completed"
        if kept := [number for number, count in enumerate(freed) if count < len(made[number])]:
            # A library that keeps a workspace would use it in later calls. Freed so, it asks for another one.
            torch._C._cuda_clearCublasWorkspaces()
        return [None if number in kept else allocations for number, allocations in enumerate(made)]


@contextlib.contextmanager
def cuda_placements(device: torch.device) -> Iterator[CudaPlacements]:
    """Placements for one capture, which lies within the context (``devices.DeviceSupport.placements``)."""
    with _HISTORY.on():
        placements = CudaPlacements(device)
        try:
            yield placements  # the pools are freed with it, after the capture
        finally:
            placements.clear()


class _History:
    """The allocator's history of what is allocated, which is on while anybody uses it. The user's own goes on."""

    def __init__(self) -> None:
        self._users, self._lock = 0, threading.Lock()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        with self._lock:
            ours = self._users > 0 or not torch._C._cuda_isHistoryEnabled()
            if ours and not self._users:
                torch.cuda.memory._record_memory_history(context=None, stacks="python")
            self._users += ours
        try:
            yield
        finally:
            with self._lock:
                self._users -= ours
                if ours and not self._users:
                    torch.cuda.memory._record_memory_history(None)


_HISTORY = _History()


_NEEDED = (
    "_cuda_beginAllocateCurrentThreadToPool",
    "_cuda_endAllocateToPool",
    "_cuda_releasePool",
    "_cuda_customAllocator",
    "_cuda_isHistoryEnabled",
)


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The library that hands out addresses; otherwise why there is none."""
    if "no_split" not in inspect.signature(torch.cuda.MemPool.__init__).parameters:
        return f"torch {torch.__version__} has no MemPool(no_split=True)"
    if missing := [name for name in _NEEDED if not hasattr(torch._C, name)]:
        return f"torch {torch.__version__} has no {', '.join(missing)}"
    if not frees_workspaces():
        return f"torch {torch.__version__} cannot free the workspaces of one stream"
    try:
        path = built_library("placed_allocations", _SOURCE, _FLAGS, headers=_HEADERS, patience_s=_PATIENCE)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        return f"its library cannot be built: {error}"
    library.fxwrap_placing_open.restype = ctypes.c_char_p
    library.fxwrap_place_at.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
    library.fxwrap_operand_on_stage.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]
    library.fxwrap_operand_on_stage.restype = ctypes.c_uint64
    library.fxwrap_end_placing.restype = ctypes.c_int64
    if missing_function := library.fxwrap_placing_open(_DRIVER):
        return f"{missing_function.decode()} of CUDA's driver is missing"
    return library


def _allocator(library: ctypes.CDLL) -> Any:
    place, unplace = (ctypes.cast(f, ctypes.c_void_p).value for f in (library.fxwrap_place, library.fxwrap_unplace))
    assert place and unplace
    return torch._C._cuda_customAllocator(place, unplace)


@functools.cache
def cuda_can_place() -> bool:
    """Whether this torch can place what calls allocate. Why it cannot is logged once."""
    if isinstance(found := _library(), str):
        log.info("what operators allocate lies outside of the plan: %s", found)
        return False
    return True
