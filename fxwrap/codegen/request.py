"""What one compilation asks for, handed past Inductor to the codegen it instantiates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ..pipeline import CompileRequest
from .torch_runtime import torch_functions

_current: ContextVar[CompileRequest | None] = ContextVar("fxwrap_request", default=None)


def current_request() -> CompileRequest:
    """The request under way on this thread; a plain one where codegen runs outside of fxwrap's backend."""
    return _current.get() or CompileRequest(torch_functions())


@dataclass
class HandedOver:
    """Past Inductor, from the codegen that it instantiates to the module that it loads.

    Attributes:
        compiled: what host graphs were compiled to, by the digest of their stored form: who loads that form next, in
            this process, gets the very same.
        not_stored: what could not be stored.
    """

    compiled: dict[str, Callable[..., Any]] = field(default_factory=dict)
    not_stored: list[str] = field(default_factory=list)


_handed_over: ContextVar[HandedOver | None] = ContextVar("fxwrap_handed_over", default=None)


def handed_over() -> HandedOver:
    """Of the request under way on this thread."""
    return _handed_over.get() or HandedOver()


@contextlib.contextmanager
def requesting(request: CompileRequest) -> Iterator[HandedOver]:
    own = HandedOver()
    tokens = _current.set(request), _handed_over.set(own)
    try:
        yield own
    finally:
        _current.reset(tokens[0])
        _handed_over.reset(tokens[1])
