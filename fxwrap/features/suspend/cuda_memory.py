"""CUDA's suspendable memory: physical memory is given back and taken again, and addresses stay.

An arena's memory comes from the driver directly (``cuda_memory.cpp``). What graphs allocate comes from a
``torch.cuda.MemPool``, whose segments torch's allocator asks the same library for. So all of it consists of segments
that this library knows, and can unmap and map again.

The library notes whose memory a thread allocates. Torch could be asked which segments a pool has, but that frees
Python's objects: ``memory_snapshot(pool)`` drops a reference of the pool's identifier that it does not own (torch
2.14.1), and identifiers above 256 are objects of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...errors import DeviceError
from ...native_build import built_library

_SOURCE = Path(__file__).with_name("cuda_memory.cpp")
_HEADERS = (Path(__file__).parents[2] / "torch_private" / "native" / "cuda_driver.h",)
_FLAGS = ("-std=c++17", "-O2", "-ldl")
# Seconds that the compiler may take. It takes two on an idle machine.
_PATIENCE = 120
_DRIVER = b"libcuda.so.1"
# CUDA_ERROR_OUT_OF_MEMORY
_OUT_OF_MEMORY = 2
_owners = itertools.count(1)
# Streams that have worked in suspendable memory, by device. Torch hands out few, again and again.
_streams: defaultdict[torch.device, set[Any]] = defaultdict(set)


class CudaMemory:
    """The suspendable memory of one arena on a CUDA device (``devices.SuspendableMemory``).

    Raises:
        DeviceError: it cannot be had in this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._library, self._allocator = _library()
        self._owner = next(_owners)

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        self.reclaim()
        with self.allocating():
            managed = self._library.fxwrap_memory_tensor(nbytes, self.device.index or 0)
        if not managed:
            raise torch.OutOfMemoryError(f"{self.device}: no {nbytes:,} bytes of suspendable memory")
        return torch.from_dlpack(_capsule(managed, b"dltensor", None)).untyped_storage()

    def new_pool(self) -> Any:
        with torch.cuda.device(self.device):
            return torch.cuda.MemPool(self._allocator)

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        before = self._library.fxwrap_memory_owner(self._owner)
        try:
            yield
        finally:
            self._library.fxwrap_memory_owner(before)

    def allocate_in(self, pool: Any, nbytes: int) -> torch.UntypedStorage:
        with self.allocating(), torch.cuda.use_mem_pool(pool, self.device):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()

    def note_stream(self, stream: Any) -> None:
        _streams[self.device].add(stream)

    def suspend(self, block: torch.UntypedStorage | None) -> int:
        self.reclaim()
        return self._call("fxwrap_memory_unmap")

    def resume(self) -> int:
        return self._call("fxwrap_memory_map")

    def reclaim(self) -> int:
        until = self._library.fxwrap_memory_freed(self.device.index or 0)
        for stream in list(_streams[self.device]) if until else ():
            with torch.cuda.stream(stream):
                if torch.cuda.is_current_stream_capturing():
                    return 0  # a wait would end the capture
            try:
                stream.synchronize()
            except RuntimeError:
                return 0  # a capture of another thread forbids it: at another time
        return int(self._library.fxwrap_memory_reclaim(self.device.index or 0, until)) if until else 0

    def _call(self, function: str) -> int:
        result = int(getattr(self._library, function)(self._owner))
        if result == -_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{self.device}: out of memory when recordings take theirs again")
        if result < 0:
            raise DeviceError(
                f"suspending recordings on {self.device}",
                expected="the driver to map and unmap memory",
                got=f"error {-result} of CUDA's driver",
                remedy="fxwrap.release() ends the recordings; the next calls record again",
            )
        return result


# A function of its own: types that are set on ``ctypes.pythonapi.PyCapsule_New`` would be the whole process's.
_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


@functools.cache
def _library() -> tuple[ctypes.CDLL, Any]:
    """The library, and torch's allocator over it. Both live as long as the process: pools refer to the allocator."""
    wanted = "CUDA's driver, a C++ compiler, and a torch with torch.cuda.MemPool"
    try:
        if not hasattr(torch.cuda, "MemPool"):
            raise OSError(f"torch {torch.__version__} has no torch.cuda.MemPool")
        path = built_library("cuda_memory", _SOURCE, _FLAGS, headers=_HEADERS, patience_s=_PATIENCE)
        library = ctypes.CDLL(str(path))
        library.fxwrap_memory_open.restype = ctypes.c_char_p
        if missing := library.fxwrap_memory_open(_DRIVER):
            raise OSError(f"not found: {missing.decode()}")
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(
            "suspendable memory on cuda",
            expected=wanted,
            got=str(error),
            remedy="leave the option suspendable out",
        ) from error
    library.fxwrap_memory_tensor.argtypes = (ctypes.c_int64, ctypes.c_int)
    library.fxwrap_memory_tensor.restype = ctypes.c_void_p
    library.fxwrap_memory_freed.argtypes = (ctypes.c_int,)
    library.fxwrap_memory_reclaim.argtypes = (ctypes.c_int, ctypes.c_int64)
    for name in ("unmap", "map", "owner"):
        getattr(library, f"fxwrap_memory_{name}").argtypes = (ctypes.c_int64,)
    for name in ("unmap", "map", "owner", "freed", "reclaim"):
        getattr(library, f"fxwrap_memory_{name}").restype = ctypes.c_int64
    with contextlib.suppress(Exception):
        torch.cuda.init()
    functions = "fxwrap_memory_allocate", "fxwrap_memory_free"
    return library, torch.cuda.memory.CUDAPluggableAllocator(str(path), *functions).allocator()
