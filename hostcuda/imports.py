"""Switches the device on: libraries before ``import torch``, operators after it, kernels after ``import triton``.

Only modules that are imported later are touched, and only in processes that were told to: nothing is written into
anybody's Python.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from . import build
from .library import runtime

STARTUP = Path(__file__).absolute().parent / "startup"
_TRITON = "triton.compiler.compiler"
# A part of the keys of torch's caches.
_CACHE_TAG, _NOT_COMPUTED = "TORCH_COMPILE_CACHE_KEY_TAG", "hostcuda computes nothing"


def is_on() -> bool:
    """Whether this process uses the device, or will when it imports torch."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def wanted() -> bool:
    return os.environ.get("HOSTCUDA") != "0"


def computes(given: Mapping[str, str]) -> bool:
    """Whether kernels are computed in an environment."""
    return "0" not in (given.get("HOSTCUDA_COMPUTE"), given.get("HOSTCUDA_OPERATORS"))


def install() -> None:
    """Have this process and its children use the device.

    Raises:
        RuntimeError: torch was imported before.
    """
    if not wanted() or is_on():
        return
    if "torch" in sys.modules:
        raise RuntimeError(
            "hostcuda has to be there before torch, which this process has imported already: "
            "python -m hostcuda script.py, or -p hostcuda.plugin before other plugins of pytest"
        )
    os.environ.update(environment(os.environ))
    sys.meta_path.insert(0, _Finder())


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a child needs to have the device, too."""
    paths = [path for path in given.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = str(STARTUP)
    needed = {
        "PYTHONPATH": os.pathsep.join([own, *(path for path in paths if path != own)]),
        # Processes that compile kernels in advance would tell nobody which kernels they are.
        "TORCHINDUCTOR_COMPILE_THREADS": given.get("TORCHINDUCTOR_COMPILE_THREADS", "1"),
    }
    tag = given.get(_CACHE_TAG, "")
    if not computes(given) and not tag.endswith(_NOT_COMPUTED):
        # Inductor computes constants on the device, and its cache would hand them to those that compute.
        needed[_CACHE_TAG] = tag + _NOT_COMPUTED
    return needed


def _before_torch() -> None:
    try:
        runtime()
    except build.BuildError as error:
        # No traceback through the import system: the text says it all. And no torch without the device: the real
        # driver of this machine is never used instead.
        raise ImportError(str(error)) from None


# Imported when they are needed: every Python that has the device starts with this file.
def _after_torch(torch: ModuleType) -> None:
    from . import operators

    operators.install(torch)


def _after_triton(module: ModuleType) -> None:
    from .kernels import registry

    registry.after_triton(module)


_HOOKS: dict[str, tuple[Callable[[], None] | None, Callable[[ModuleType], None]]] = {
    "torch": (_before_torch, _after_torch),
    _TRITON: (None, _after_triton),
}


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: Any) -> Any:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        before, after = _HOOKS[module.__name__]
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        if before is not None:
            before()
        self._inner.exec_module(module)
        after(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the finders after it find, for the modules that have a hook."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _HOOKS:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None
