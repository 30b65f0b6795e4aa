"""Loads the modules that define compiled kernels; kernels that no earlier process has compiled are compiled."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

from torch._inductor.codecache import PyCodeCache

from ..store.caches import write_module


def load_kernels(text: str) -> types.ModuleType:
    """The module with the definitions in ``text``. In a process, one text is loaded once."""
    write_module(text)
    module: types.ModuleType = PyCodeCache.load(text)
    return module


def loaded_kernel(module: types.ModuleType, name: str) -> Any:
    """A kernel of the module. It waits for a kernel that is still being compiled."""
    kernel = getattr(module, name)
    if hasattr(kernel, "result"):  # compiled in the background
        kernel = kernel.result()
        setattr(module, name, kernel)
    return kernel


def object_file(text: str, name: str) -> Path:
    """The shared library of a C++ kernel that ``text`` defines."""
    definition = loaded_kernel(load_kernels(text), name)
    return Path(definition.__self__.__file__)
