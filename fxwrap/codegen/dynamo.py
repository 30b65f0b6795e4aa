"""What is asked of Dynamo: code of its own for a function, and the programs behind a compiled one."""

from __future__ import annotations

import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list, innermost_fn
from torch._dynamo.symbolic_convert import InstructionTranslator

from ..compilation import Compilation, live_compilations

COLLECTOR = "_fxwrap_compilation"
_serial = itertools.count()


def with_own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``fn`` and whose code object is new.

    Dynamo keeps compiled code by code object and limits how often one may be compiled; an explanation should
    neither find nor leave anything there.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    code = call.__code__.replace(co_name=f"explained_{next(_serial)}")
    return types.FunctionType(code, call.__globals__, closure=call.__closure__)


def collected_by(compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
    """Leave the compilation on what Dynamo will call, where ``compilations_of`` finds it."""
    module = _module_under_compilation()
    compilation.module = weakref.ref(module) if module is not None else None
    compilation.callers.update(_running())
    try:
        # Dynamo strips wrappers of its own making before it calls.
        setattr(innermost_fn(compiled), COLLECTOR, compilation)
        return compiled
    except AttributeError:  # not a plain function

        def run(*args: Any) -> Any:
            return compiled(*args)

        setattr(run, COLLECTOR, compilation)
        return run


def compilations_of(compiled: Callable[..., Any]) -> list[Compilation]:
    """The compilations of the programs that a compiled function runs, graph breaks included.

    What it calls where Dynamo breaks the graph (an optimizer) is compiled while it runs, as code of others.
    """
    compilations: list[Compilation] = []
    module = getattr(compiled, "_orig_mod", None)
    todo, seen = _functions_behind(compiled), set()
    while todo:
        current = todo.pop()
        code, scope = getattr(current, "__code__", None), getattr(current, "__globals__", {})
        if code is None or code in seen:
            continue
        seen.add(code)
        for entry in _debug_get_cache_entry_list(code):
            for name in entry.code.co_names:
                if name.startswith("__compiled_fn"):
                    compilation = _compilation_behind(scope.get(name))
                    if compilation is None or compilation in compilations:
                        continue
                    if module is None or compilation.module is None or compilation.module() is module:
                        compilations.append(compilation)
                elif name.startswith("__resume_at"):
                    todo.append(scope.get(name))
    function = innermost_fn(compiled) if module is None else None  # modules share the code that calls them
    if function is not compiled and (code := getattr(function, "__code__", None)) is not None:
        codes = {code, *(entry.code for entry in _debug_get_cache_entry_list(code))}
        compilations += [
            one for one in live_compilations() if one not in compilations and not codes.isdisjoint(one.callers)
        ]
    return compilations


def _running() -> Iterator[types.CodeType]:
    """The code that this thread is running, innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _module_under_compilation() -> torch.nn.Module | None:
    """The module that ``torch.compile`` was given, when its frame is the one being compiled.

    Modules share the code of the frame that calls them, so that code alone does not tell them apart.
    """
    try:
        scope = InstructionTranslator.current_tx().f_locals
    except Exception:
        return None
    found = [value for value in scope.values() if isinstance(value, torch.nn.Module)]
    return found[0] if len(found) == 1 else None


def _functions_behind(compiled: Any) -> list[Any]:
    """Functions whose code Dynamo may have compiled for what ``torch.compile`` returned."""
    found: list[Any] = []
    todo = [compiled, getattr(compiled, "forward", None), getattr(compiled, "_orig_mod", None)]
    module = getattr(compiled, "_orig_mod", None)
    todo += [getattr(module, "forward", None), type(module).__call__ if module is not None else None]
    while todo:
        current = todo.pop()
        if current is None:
            continue
        function = getattr(current, "__func__", current)
        if hasattr(function, "__code__"):
            found.append(function)
        for link in ("_torchdynamo_orig_callable", "__wrapped__"):
            if isinstance(getattr(function, "__dict__", None), dict):
                todo.append(function.__dict__.get(link))
    return found


def _compilation_behind(function: Any) -> Compilation | None:
    while function is not None:
        compilation = getattr(function, COLLECTOR, None)
        if isinstance(compilation, Compilation):
            return compilation
        function = getattr(function, "_torchdynamo_orig_callable", None) or getattr(function, "__wrapped__", None)
    return None
