"""A function of a kernel, rewritten for the interpreter."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

from . import language
from .names import mapped

_running = threading.local()


def interpreting() -> bool:
    """Whether this thread runs a kernel."""
    return getattr(_running, "depth", 0) > 0


@contextlib.contextmanager
def running() -> Iterator[None]:
    """While a kernel runs in this thread."""
    _running.depth = getattr(_running, "depth", 0) + 1
    try:
        yield
    finally:
        _running.depth -= 1


@functools.cache
def interpretable(function: Any) -> Any:
    """A function rewritten for the interpreter, in globals of its own, which name the copy of the language."""
    interpreter = language.interpreter()
    # A function of the copy names the copy already.
    names = function.__globals__ if language.is_of_copy(function.__module__) else _Names(function.__globals__)
    copy = types.FunctionType(
        function.__code__, names, function.__name__, _mapped_all(function.__defaults__), function.__closure__
    )
    copy.__kwdefaults__, copy.__module__ = function.__kwdefaults__, function.__module__
    copy.__annotations__ = inspect.get_annotations(function)
    return interpreter.FunctionRewriter(copy).rewrite_ast()


def _mapped_all(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return tuple(map(mapped, values)) if values is not None else None


class _Names(dict[str, Any]):
    """A module's globals, mapped."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        super().__init__({name: mapped(value) for name, value in list(names.items())})
