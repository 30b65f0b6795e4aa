"""The record of one call of the backend: the programs that it made, and the compiled function they belong to."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from .memory.locks import lock_of_process


@runtime_checkable
class HasPrograms(Protocol):
    """What a feature returns in place of a compiled function; ``fxwrap.report`` and its like take it, too."""

    def fxwrap_programs(self) -> tuple[list[Any], str]:
        """Its programs, and its name in reports."""


@runtime_checkable
class HasCompilations(Protocol):
    """What a feature returns that calls the backend by itself, without Dynamo.

    Attributes:
        _fxwrap_without: why it may have no compilation yet, for an error's ``got``.
    """

    _fxwrap_without: str

    def _fxwrap_compilations(self) -> list[Compilation]:
        """Its compilations, the oldest first."""


@dataclass(eq=False)
class Compilation:
    """One call of the backend, which compiles one graph of Dynamo's.

    Attributes:
        programs: programs in the order in which they were made; a backward program may come much later.
        fallbacks: the reason of each graph that runs through Inductor's own wrapper.
        not_stored: the parts that no cache can hold; every process compiles them.
        pieces: Dynamo's id of each frame that was compiled, and the code object of the frame.
        callers: the functions made by ``torch.compile`` that were running then.
        skipped: code objects that Dynamo had skipped, and that were running inside of the callers.
        lines: source lines that its graph was traced from (``codegen/store/user_lines.py``); None without a trace.
        keeps_saved: whether a backward's kernels must not write over what its forward has saved.
        seconds: how long the call of the backend took, without what is compiled later (a backward).
    """

    programs: list[Any] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    not_stored: list[str] = field(default_factory=list)
    pieces: list[tuple[Any, weakref.ref[Any]]] = field(default_factory=list)
    callers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    skipped: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    lines: Any = None
    keeps_saved: bool = False
    seconds: float = 0.0

    def __post_init__(self) -> None:
        with _lock:
            _compilations[next(_serial)] = self
            for compilations in _keeping:
                compilations.append(self)


_lock = lock_of_process()
_serial = itertools.count()
_compilations: weakref.WeakValueDictionary[int, Compilation] = weakref.WeakValueDictionary()
_keeping: list[list[Compilation]] = []


def live_compilations() -> list[Compilation]:
    """The compilations whose compiled code is still in use, the oldest first."""
    with _lock:
        return list(_compilations.values())


def compilation_of(program: Any) -> Compilation | None:
    """The compilation that has made a program; None for a program that is in none."""
    found = (compilation for compilation in live_compilations() if program in compilation.programs)
    return next(found, None)


@contextlib.contextmanager
def all_kept() -> Iterator[None]:
    """Keep every compilation that any thread makes inside of the context, even if its function is collected."""
    compilations: list[Compilation] = []
    with _lock:
        _keeping.append(compilations)
    try:
        yield
    finally:
        with _lock:
            _keeping[:] = [other for other in _keeping if other is not compilations]
