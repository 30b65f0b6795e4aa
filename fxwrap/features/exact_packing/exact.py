"""Python's side of the exact search (``exact.cpp``), which is compiled at its first use and cached on disk."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ...native_build import built_library
from ...packing.problem import Part

# Numbers of the rules by which the search chooses the section of time to decide about next.
RULES = range(4)

_SOURCE = Path(__file__).with_name("exact.cpp")
_FLAGS = ("-std=c++17", "-O3")
# Seconds that the compiler may take. It takes one on an idle machine.
_PATIENCE = 60


class Search:
    """A search for a placement of a part below a capacity. ``start`` begins it, and each ``run`` continues it.

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
        """Begin a new search. Of buffers at the same offset, the one of the lower rank is tried first.

        Args:
            ranks: by position in the part.
            capacity: bytes that the placement may need.
            rule: one of ``RULES``.
        """
        self._library.fxwrap_search_start(self._search, self._ints(*ranks), ctypes.c_int64(capacity), rule)

    def run(self, nodes: int, seconds: float) -> bool | None:
        """Search for at most so many nodes and seconds.

        Returns:
            True if a placement is found, False if there is none, None if that is not known yet.
        """
        result = self._library.fxwrap_search_run(self._search, ctypes.c_int64(nodes), ctypes.c_double(seconds))
        return None if result < 0 else bool(result)

    @property
    def nodes(self) -> int:
        """The number of nodes that all searches have visited."""
        return int(self._library.fxwrap_search_nodes(self._search))

    def offsets(self) -> list[int]:
        """The offsets of the placement that was found, in bytes, by position in the part."""
        offsets = self._bytes()
        self._library.fxwrap_search_offsets(self._search, offsets)
        return list(offsets)

    def __del__(self) -> None:
        if hasattr(self, "_search"):
            self._library.fxwrap_search_delete(self._search)


def _twins(part: Part) -> list[int]:
    """For each buffer, the position of the last one before it with the same live range and size; -1 if there is none.

    Either may lie below the other, so that the search tries one order alone.
    """
    latest: dict[tuple[int, int, int], int] = {}
    twins = []
    for i, shape in enumerate(zip(part.begins, part.ends, part.sizes, strict=True)):
        twins.append(latest.get(shape, -1))
        latest[shape] = i
    return twins


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled search.

    Raises:
        RuntimeError: it cannot be compiled here.
    """
    try:
        loaded = ctypes.CDLL(str(built_library("packing", _SOURCE, _FLAGS, patience_s=_PATIENCE)))
    except (OSError, subprocess.SubprocessError) as error:
        message = getattr(error, "stderr", None)
        raise RuntimeError(
            "an exact plan needs a C++ compiler, for its search is compiled when it is first needed; "
            f"got: {error} {message or ''}\n"
            "name a compiler in CXX, or plan without exact=True"
        ) from error
    loaded.fxwrap_search_new.restype = ctypes.c_void_p
    loaded.fxwrap_search_nodes.restype = ctypes.c_int64
    return loaded
