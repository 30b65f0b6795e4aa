"""The exact search of ``exact.cpp``: compiled when it is first needed, and kept for the next process."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..native_build import built_library
from .problem import Part

# Rules of which section of time to decide about.
RULES = range(4)

_SOURCE = Path(__file__).with_name("exact.cpp")
_FLAGS = ("-std=c++17", "-O3")
# Seconds. It takes one on an idle machine.
_PATIENCE = 60


class Search:
    """Whether a part fits below a capacity: begun with ``start``, it goes on a little at every call of ``run``.

    ctypes releases the interpreter's lock while it runs.
    """

    def __init__(self, part: Part) -> None:
        self._library = library()
        self._count = len(part)
        self._ints = ctypes.c_int * self._count
        self._bytes = ctypes.c_int64 * self._count
        self._search = ctypes.c_void_p(
            self._library.fxwrap_search_new(
                self._count,
                len(part.loads),
                self._ints(*part.begins),
                self._ints(*part.ends),
                self._bytes(*part.sizes),
                self._ints(*_twins(part)),
            )
        )

    def start(self, ranks: Sequence[int], capacity: int, rule: int) -> None:
        """Begin again. Of buffers at the same offset, the one of the lower rank is tried first."""
        self._library.fxwrap_search_start(self._search, self._ints(*ranks), ctypes.c_int64(capacity), rule)

    def run(self, nodes: int, seconds: float) -> bool | None:
        """Go on for so many nodes or seconds. True: a placement is found; False: there is none."""
        found = self._library.fxwrap_search_run(self._search, ctypes.c_int64(nodes), ctypes.c_double(seconds))
        return None if found < 0 else bool(found)

    @property
    def nodes(self) -> int:
        """Looked at in all."""
        return int(self._library.fxwrap_search_nodes(self._search))

    def offsets(self) -> list[int]:
        """Of the placement that was found."""
        found = self._bytes()
        self._library.fxwrap_search_offsets(self._search, found)
        return list(found)

    def __del__(self) -> None:
        if hasattr(self, "_search"):
            self._library.fxwrap_search_delete(self._search)


def _twins(part: Part) -> list[int]:
    """For each buffer, the one before it with the same life and size, or -1: either may lie below the other."""
    seen: dict[tuple[int, int, int], int] = {}
    found = []
    for i, alike in enumerate(zip(part.begins, part.ends, part.sizes, strict=True)):
        found.append(seen.get(alike, -1))
        seen[alike] = i
    return found


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled search.

    Raises:
        RuntimeError: it cannot be compiled here.
    """
    try:
        loaded = ctypes.CDLL(str(built_library("packing", _SOURCE, _FLAGS, patience_s=_PATIENCE)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        raise RuntimeError(
            "an exact plan needs a C++ compiler, for its search is compiled when it is first needed; "
            f"got: {error} {said or ''}\n"
            "name a compiler in CXX, or plan without exact=True"
        ) from error
    loaded.fxwrap_search_new.restype = ctypes.c_void_p
    loaded.fxwrap_search_nodes.restype = ctypes.c_int64
    return loaded
