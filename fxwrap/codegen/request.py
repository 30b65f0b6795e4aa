"""Passes the request of a compilation around Inductor, to the codegen that Inductor instantiates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..pipeline import CompileRequest

_current: ContextVar[CompileRequest | None] = ContextVar("fxwrap_request", default=None)


def current_request() -> CompileRequest:
    """The current request of this thread; a default one where codegen runs outside of fxwrap's backend."""
    return _current.get() or CompileRequest()


@dataclass
class HandedOver:
    """What the codegen passes around Inductor, to the module that Inductor loads.

    Attributes:
        compiled: compiled host graphs by the digest of their stored form. This process takes the compiled object
            instead of loading the stored form.
        not_stored: names of what could not be stored.
    """

    compiled: dict[str, Callable[..., Any]] = field(default_factory=dict)
    not_stored: list[str] = field(default_factory=list)


_handed_over: ContextVar[HandedOver | None] = ContextVar("fxwrap_handed_over", default=None)


def handed_over() -> HandedOver:
    """The handover of this thread's current request."""
    return _handed_over.get() or HandedOver()


@contextlib.contextmanager
def requesting(request: CompileRequest) -> Iterator[HandedOver]:
    """Make a request the current one of this thread, inside the context."""
    handover = HandedOver()
    tokens = _current.set(request), _handed_over.set(handover)
    try:
        yield handover
    finally:
        _current.reset(tokens[0])
        _handed_over.reset(tokens[1])
