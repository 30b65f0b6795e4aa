"""What a kernel names, as its counterpart in the copy of Triton's language."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

from . import libdevice
from .language import counterpart, interpreter

# Of the functions that are evaluated while a kernel is compiled, those that are not in the language.
_BUILTINS: dict[str, Callable[..., Any]] = {
    "constexpr_next_power_of_2": lambda n: 1 << (int(_value(n)) - 1).bit_length(),
    "if_mask": lambda mask, val: None if _value(mask) is None else val,
}


def _value(argument: Any) -> Any:
    return getattr(argument, "value", argument)


class _Mapped:
    """A module as interpreted kernels see it."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = mapped(getattr(self._module, name))
        setattr(self, name, found)
        return found


@functools.cache
def _mapped_module(module: types.ModuleType) -> Any:
    name = module.__name__
    if name.endswith("libdevice"):
        return libdevice.functions()
    if name == "triton.language" or name.startswith("triton.language."):
        return counterpart(name)
    # Others are what they are, but for what they have of the language.
    return _Mapped(module) if name == "triton" or name.startswith("torch._inductor.runtime") else module


def mapped(value: Any) -> Any:
    """What a kernel names, as its counterpart in the copy of the language."""
    if isinstance(value, types.ModuleType):
        return _mapped_module(value)
    if getattr(value, "__triton_builtin__", False) and value.__name__ in ("wrapper", *_BUILTINS):
        return _BUILTINS.get(_wrapped_name(value), value)
    kind = type(value)
    if kind.__module__ == "triton.language.core":
        core = interpreter().tl.core
        if kind.__name__ == "constexpr":
            return core.constexpr(mapped(value.value))
        if kind.__name__ == "dtype":
            return core.dtype(value.name)
    origin = getattr(value, "__module__", None)
    if isinstance(value, type) and origin == "triton.language.core":
        return getattr(interpreter().tl.core, value.__name__)
    if callable(value) and isinstance(origin, str) and origin.startswith("triton.language"):
        # A function of the language that was imported by its name.
        module = _mapped_module(importlib.import_module(origin))
        return getattr(module, getattr(value, "__name__", ""), value)
    return value


def _wrapped_name(builtin: Any) -> str:
    """Of a function that Inductor's decorator has wrapped, which keeps no name."""
    cells = getattr(builtin, "__closure__", None) or ()
    names = [getattr(cell.cell_contents, "__name__", "") for cell in cells]
    return next((name for name in (builtin.__name__, *names) if name in _BUILTINS), "")
