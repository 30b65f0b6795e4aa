"""Compilation of a function for ``fxwrap.explain``: independent of earlier compilations, with measured calls."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from ..backend import fxwrap as backend
from ..codegen.dynamo.collection import with_own_code
from ..codegen.dynamo.report import compilations_of
from ..codegen.torch_versions import own_caches
from ..graphs.compilation import Compilation
from ..inspection.document import CallData
from ..inspection.explanation import Explanation, name_of
from ..torch_private.functions import allocations


@runtime_checkable
class Rehearsable(Protocol):
    """What a user calls that compiles by itself, and whose calls change what lasts: a training step."""

    def _fxwrap_afresh(self, options: Mapping[str, Any] | None) -> Callable[..., Any]:
        """The same with code of its own; ``options`` come on top of its own."""

    def _fxwrap_rehearsal(self) -> contextlib.AbstractContextManager[None]:
        """A context in which calls change nothing that lasts."""


def rehearsal_of(fn: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """A context for calls of ``fn`` that are no calls of the user's."""
    return fn._fxwrap_rehearsal() if isinstance(fn, Rehearsable) else contextlib.nullcontext()


def unwrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind what ``torch.compile`` returned."""
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    return getattr(fn, "_orig_mod", fn)


def compile_afresh(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    calls: int = 1,
    then: Callable[[Callable[[], Any]], object] = lambda call: None,
) -> Explanation:
    """Compile ``fn`` with a code object and caches of its own, call it ``calls`` times, and report.

    Args:
        then: gets what makes one more such call, after the others.
    """
    compilation = Compilation()
    compiled: Any
    if isinstance(fn, Rehearsable):
        compiled = fn._fxwrap_afresh(options)
    else:
        compiled = torch.compile(
            with_own_code(fn),
            backend=functools.partial(backend, compilation=compilation),
            options=dict(options) if options else None,
            **own_caches(),
        )
    with rehearsal_of(fn):
        compiled(*args, **kwargs)
        call = functools.partial(compiled, *args, **kwargs)
        measured = [_measured(call) for _ in range(1, calls)]
        then(call)
    compilations, story = compilations_of(compiled)
    return Explanation.of(list(dict.fromkeys([compilation, *compilations])), name_of(fn), story, measured)


def _measured(run: Callable[[], Any]) -> CallData:
    """Time and memory of a call."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    before = _reset_peak() if accelerator is not None else None
    begin = time.perf_counter()
    if accelerator is None:
        changes = allocations(run)
        allocated = {"cpu": max(itertools.accumulate(changes), default=0)} if changes is not None else {}
    else:
        run()
        torch.accelerator.synchronize()
        peak = torch.accelerator.memory.max_memory_allocated() if before is not None else 0
        allocated = {str(accelerator): peak - before} if before is not None else {}
    return CallData((time.perf_counter() - begin) * 1e6, allocated)


def _reset_peak() -> int | None:
    """Reset the accelerator's memory peak. Returns the bytes that are allocated now; None if it has no statistics."""
    try:
        torch.accelerator.memory.reset_peak_memory_stats()
        return torch.accelerator.memory.memory_allocated()
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
