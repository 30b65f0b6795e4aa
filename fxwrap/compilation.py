"""Who a compilation belongs to: collects the programs made by one call of the backend."""

from __future__ import annotations

import threading
import types
import weakref
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Compilation:
    """
    Attributes:
        programs: programs in the order in which they were made; a backward program may come much later.
        fallbacks: reasons of graphs that run through Inductor's own wrapper.
        not_stored: what no cache could hold, so that every process compiles it.
        module: the module that was compiled, if it was one.
        callers: the code that was running when it was compiled.
    """

    programs: list[Any] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    not_stored: list[str] = field(default_factory=list)
    module: weakref.ref[Any] | None = None
    callers: weakref.WeakSet[types.CodeType] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        with _lock:
            _compilations.add(self)


_lock = threading.RLock()
_compilations: weakref.WeakSet[Compilation] = weakref.WeakSet()


def live_compilations() -> list[Compilation]:
    """The compilations whose compiled code is still in use."""
    with _lock:
        return list(_compilations)
