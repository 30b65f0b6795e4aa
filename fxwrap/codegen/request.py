"""What one compilation asks for, handed past Inductor to the codegen it instantiates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from ..compiler import CompileRequest

_current: ContextVar[CompileRequest | None] = ContextVar("fxwrap_request", default=None)


def current_request() -> CompileRequest:
    """The request under way on this thread; a plain one where codegen runs outside of fxwrap's backend."""
    return _current.get() or CompileRequest()


@contextlib.contextmanager
def requesting(request: CompileRequest) -> Iterator[None]:
    token = _current.set(request)
    try:
        yield
    finally:
        _current.reset(token)
