"""Notes, while Dynamo compiles, which functions a compilation is for; gives a function a code object of its own."""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import _TorchDynamoContext, innermost_fn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import CompileContext

from ...graphs.compilation import Compilation

COLLECTOR = "_fxwrap_compilation"
# Prefix of the functions that Dynamo makes of the rest of a function after a graph break.
RESUMED = "torch_dynamo_resume_in_"
# Prefix of the globals under which compiled code calls them.
RESUME_CALL = "__resume_at"
# The code of the wrapper that ``torch.compile`` returns. Its frame's ``self`` identifies the compiled function.
WRAPPER = next(
    constant
    for constant in _TorchDynamoContext.__call__.__code__.co_consts
    if isinstance(constant, types.CodeType) and constant.co_name == "compile_wrapper"
)
_serial = itertools.count()


def with_own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``fn`` and whose code object is new.

    Dynamo caches compiled code by code object, and limits how often one is compiled. An explanation must neither use
    nor fill these caches. (``torch_versions.own_caches`` does the same for the functions that ``fn`` calls.)
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    code = call.__code__.replace(co_name=f"explained_{next(_serial)}")
    return types.FunctionType(code, call.__globals__, closure=call.__closure__)


def collected_by(compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
    """Attach a compilation to the function that Dynamo will call, and note which functions it is for.

    The compilation lives as long as that function.
    """
    with contextlib.suppress(AttributeError):  # no translator: the caller is not Dynamo
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
