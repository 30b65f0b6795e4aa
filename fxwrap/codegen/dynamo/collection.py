"""What is asked of Dynamo while it compiles: code of its own for a function, and whom a compilation is for."""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import (
    _TorchDynamoContext,
    innermost_fn,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import CompileContext

from ...compilation import Compilation

COLLECTOR = "_fxwrap_compilation"
# How names of functions begin that Dynamo makes of the rest of one, after a graph break.
RESUMED = "torch_dynamo_resume_in_"
# The code of what ``torch.compile`` returns; a frame of it knows which one is running.
WRAPPER = next(
    constant
    for constant in _TorchDynamoContext.__call__.__code__.co_consts
    if isinstance(constant, types.CodeType) and constant.co_name == "compile_wrapper"
)
_serial = itertools.count()


def with_own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``fn`` and whose code object is new.

    Dynamo keeps compiled code by code object and limits how often one may be compiled; an explanation should
    neither find nor leave anything there (``torch_versions.own_caches`` is for the functions that it calls).
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    code = call.__code__.replace(co_name=f"explained_{next(_serial)}")
    return types.FunctionType(code, call.__globals__, closure=call.__closure__)


def collected_by(compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
    """Keep the compilation as long as what Dynamo will call, and note whom it is for."""
    with contextlib.suppress(AttributeError):  # nobody translates: it was not Dynamo that asked
        code = InstructionTranslator.current_tx().f_code
        compilation.pieces.append((CompileContext.current_compile_id(), weakref.ref(code)))
    running: list[types.CodeType] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is WRAPPER:
            compilation.callers.add(frame.f_locals["self"])
            for code in running:
                compilation.skipped.add(code)
            running = []
        elif frame.f_code in convert_frame.input_codes:
            running.append(frame.f_code)
        frame = frame.f_back
    try:
        # Dynamo strips wrappers of its own making before it calls.
        setattr(innermost_fn(compiled), COLLECTOR, compilation)
        return compiled
    except AttributeError:  # not a plain function

        def run(*args: Any) -> Any:
            return compiled(*args)

        setattr(run, COLLECTOR, compilation)
        return run
