"""The search of ``exact.cpp``: compiled when it is first needed, and kept for the next process."""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..native_build import built_library
from .problem import Part

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("exact.cpp")
_FLAGS = ("-std=c++17", "-O3")
# Seconds. It takes one on an idle machine.
_PATIENCE = 60


class NativeSearch:
    """``exact.Search`` in C++; ctypes releases the interpreter's lock while it runs."""

    def __init__(self, library: ctypes.CDLL, part: Part, twins: Sequence[int]) -> None:
        self._library = library
        self._count = len(part)
        self._ints = ctypes.c_int * self._count
        self._bytes = ctypes.c_int64 * self._count
        self._search = ctypes.c_void_p(
            library.fxwrap_search_new(
                self._count,
                len(part.loads),
                self._ints(*part.begins),
                self._ints(*part.ends),
                self._bytes(*part.sizes),
                self._ints(*twins),
            )
        )

    def start(self, ranks: Sequence[int], capacity: int, rule: int) -> None:
        self._library.fxwrap_search_start(self._search, self._ints(*ranks), ctypes.c_int64(capacity), rule)

    def run(self, nodes: int, seconds: float) -> bool | None:
        found = self._library.fxwrap_search_run(self._search, ctypes.c_int64(nodes), ctypes.c_double(seconds))
        return None if found < 0 else bool(found)

    @property
    def nodes(self) -> int:
        return int(self._library.fxwrap_search_nodes(self._search))

    def offsets(self) -> list[int]:
        found = self._bytes()
        self._library.fxwrap_search_offsets(self._search, found)
        return list(found)

    def __del__(self) -> None:
        self._library.fxwrap_search_delete(self._search)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled search, or None if it cannot be had here; the reason is logged once."""
    try:
        loaded = ctypes.CDLL(str(built_library("packing", _SOURCE, _FLAGS, patience_s=_PATIENCE)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        log.info("the exact search runs in Python, for exact.cpp cannot be compiled: %s %s", error, said or "")
        return None
    loaded.fxwrap_search_new.restype = ctypes.c_void_p
    loaded.fxwrap_search_nodes.restype = ctypes.c_int64
    return loaded
