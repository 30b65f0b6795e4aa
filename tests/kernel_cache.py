"""Where compiled kernels stay between runs of the tests, and how a run that was killed is got over."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import struct
from pathlib import Path

# Where an ELF file says how far its table of sections reaches, which is the last thing in it.
_OFFSET, _ENTRY_SIZE = 0x28, 0x3A


def kernel_cache() -> Path:
    """A folder outside of the checkout, for each torch one; the Makefile names the same."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fxwrap-tests" / f"torch-{importlib.metadata.version('torch').split('+')[0]}"


def end_of_sections(header: bytes) -> int:
    """Bytes up to the end of the table of sections; 0 if the header is not whole."""
    if len(header) < 64:
        return 0
    (offset,) = struct.unpack_from("<Q", header, _OFFSET)
    size, count = struct.unpack_from("<HH", header, _ENTRY_SIZE)
    return int(offset + size * count) if offset else 0


def is_whole(library: Path) -> bool:
    """Whether a shared library was written to its end."""
    with open(library, "rb") as file:
        end = end_of_sections(file.read(64))
    return 0 < end <= library.stat().st_size


def remove_halves(cache: Path) -> list[Path]:
    """Remove the libraries that a linker was killed over: Inductor would find them for ever, and fail to load them.

    Who builds one at this moment has its lock, and is waited for.
    """
    removed = []
    for library in cache.glob("*/*.so"):
        if is_whole(library):
            continue
        locks = cache / "locks"
        locks.mkdir(exist_ok=True)
        with open(locks / f"{library.name.split('.')[0]}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if library.exists() and not is_whole(library):
                library.unlink()
                removed.append(library)
    return removed
