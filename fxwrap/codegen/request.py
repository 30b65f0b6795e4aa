"""What one compilation asks for, handed past Inductor to the codegen it instantiates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from ..graphs.torch_functions import TorchFunctions
from ..pipeline import CompileRequest
from . import torch_versions as versions

_current: ContextVar[CompileRequest | None] = ContextVar("fxwrap_request", default=None)


def torch_functions() -> TorchFunctions:
    """What running a program needs of torch's private interfaces."""
    return TorchFunctions(
        use_counter=versions.use_counter,
        pointer_check=versions.pointer_check,
        layout_check=versions.layout_check,
        storage_at=versions.storage_at,
        alive=versions.alive,
        lay_out=versions.lay_out,
        allocations=versions.allocations,
        after_failed_capture=versions.after_failed_capture,
        share_copies=versions.share_copies,
        below_autograd=versions.below_autograd,
        saved_tensors_hooks=versions.saved_tensors_hooks,
    )


def current_request() -> CompileRequest:
    """The request under way on this thread; a plain one where codegen runs outside of fxwrap's backend."""
    return _current.get() or CompileRequest(torch_functions())


@contextlib.contextmanager
def requesting(request: CompileRequest) -> Iterator[None]:
    token = _current.set(request)
    try:
        yield
    finally:
        _current.reset(token)
