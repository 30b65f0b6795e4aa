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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LANGUAGE, _INTERPRETER = "triton.hostcuda_language", "triton.runtime.hostcuda_interpreter"
_COPIED = {_LANGUAGE: "triton.language", _INTERPRETER: "triton.runtime.interpreter"}


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
    return module


def counterpart(name: str) -> Any:
    """The copy of a module of the language, by the original's name."""
    return importlib.import_module(_LANGUAGE + name.removeprefix(_COPIED[_LANGUAGE]))


def is_of_copy(name: str | None) -> bool:
    """Whether a module of this name is one of the copy."""
    return name is not None and name.startswith(_LANGUAGE)
