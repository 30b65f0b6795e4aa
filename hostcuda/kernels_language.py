"""A copy of Triton's language, and of its interpreter, under other names: for kernels that are interpreted.

The interpreter replaces functions of ``triton.language``, in which another thread may be compiling, and Triton's
hashes of sources look at them. In a copy they can be replaced once, and for good.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_LANGUAGE, _INTERPRETER = "triton.hostcuda_language", "triton.runtime.hostcuda_interpreter"
_COPIED = {_LANGUAGE: "triton.language", _INTERPRETER: "triton.runtime.interpreter"}
# Of the functions that are evaluated while a kernel is compiled, those that are not in the language.
_BUILTINS: dict[str, Callable[..., Any]] = {
    "constexpr_next_power_of_2": lambda n: 1 << (int(_value(n)) - 1).bit_length(),
    "if_mask": lambda mask, val: None if _value(mask) is None else val,
}


def _value(argument: Any) -> Any:
    return getattr(argument, "value", argument)


class _Source(importlib.machinery.SourceFileLoader):
    """Its absolute imports of the language are those of the copy."""

    def get_code(self, fullname: str) -> types.CodeType:
        text = Path(self.path).read_text()
        changed = text.replace("import triton.language as", f"import {_LANGUAGE} as")
        changed = changed.replace("from triton.language", f"from {_LANGUAGE}")
        code: types.CodeType = compile(changed, self.path, "exec", dont_inherit=True)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        for copy, original in _COPIED.items():
            if fullname == copy or fullname.startswith(f"{copy}."):
                found = importlib.util.find_spec(original + fullname[len(copy) :])
                if found is None or found.origin is None:
                    return None
                folders = found.submodule_search_locations
                return importlib.util.spec_from_file_location(
                    fullname,
                    found.origin,
                    loader=_Source(fullname, found.origin),
                    submodule_search_locations=list(folders) if folders is not None else None,
                )
        return None


@functools.cache
def interpreter() -> Any:
    """The copy of triton.runtime.interpreter; its ``tl`` is the copy of the language, made ready for it."""
    sys.meta_path.append(_Finder())
    module: Any = importlib.import_module(_INTERPRETER)
    language = importlib.import_module(_LANGUAGE)
    within = types.FunctionType((lambda: None).__code__, {"tl": language, "core": language.core})
    module._patch_lang(within)  # never undone
    from . import kernels_operations

    kernels_operations.improve(module)
    return module


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
        from . import kernels_libdevice

        return kernels_libdevice.functions()
    if name == "triton.language" or name.startswith("triton.language."):
        return importlib.import_module(_LANGUAGE + name[len("triton.language") :])
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
