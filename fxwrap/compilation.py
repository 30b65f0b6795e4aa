"""Who a compilation belongs to: collects the programs made by one call of the backend."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Compilation:
    """
    Attributes:
        programs: programs in the order in which they were made; a backward program may come much later.
        fallbacks: reasons of graphs that run through Inductor's own wrapper.
        not_stored: what no cache could hold, so that every process compiles it.
        pieces: Dynamo's id of each piece that was compiled, and the code that it is a piece of.
        callers: what ``torch.compile`` had made and was running then.
        skipped: the code that was running inside of these as it is, for Dynamo had skipped it.
        lines: source lines that its graph was traced from (``codegen/store/user_lines.py``); None without a trace.
        seconds: that the call of the backend took; what is compiled later (a backward) is not in it.
    """

    programs: list[Any] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    not_stored: list[str] = field(default_factory=list)
    pieces: list[tuple[Any, weakref.ref[Any]]] = field(default_factory=list)
    callers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    skipped: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    lines: Any = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        with _lock:
            _compilations[next(_serial)] = self
            for kept in _keeping:
                kept.append(self)


_lock = threading.RLock()
_serial = itertools.count()
_compilations: weakref.WeakValueDictionary[int, Compilation] = weakref.WeakValueDictionary()
_keeping: list[list[Compilation]] = []


def live_compilations() -> list[Compilation]:
    """The compilations whose compiled code is still in use, the oldest first."""
    with _lock:
        return list(_compilations.values())


@contextlib.contextmanager
def all_kept() -> Iterator[None]:
    """Keep what is compiled meanwhile, by whatever thread, although the code that has it compiled is gone."""
    kept: list[Compilation] = []
    with _lock:
        _keeping.append(kept)
    try:
        yield
    finally:
        with _lock:
            _keeping[:] = [one for one in _keeping if one is not kept]
