"""Which function a cubin was compiled from: in memory, and in files for processes that find cubins in a cache."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import build
from ..library import runtime

_VERBOSE = "HOSTCUDA_KERNELS" in os.environ
_known: dict[str, Kernel | None] = {}


@dataclass(eq=False)
class Kernel:
    """A function of Triton's, and what it was compiled with.

    Attributes:
        function: Triton's JITFunction.
        signature: the type of each argument; "constexpr" for those that are none at run time.
        constants: the values of these.
    """

    function: Any
    signature: dict[str, Any]
    constants: dict[str, Any]


def folder() -> Path:
    return Path(os.environ.get("HOSTCUDA_REGISTRY") or build.cache() / "kernels")


def identity(cubin: bytes) -> str:
    name: bytes = runtime().hostcuda_identity(cubin, len(cubin))
    return name.decode()


def after_triton(module: Any) -> None:
    """Note of every kernel that is compiled, or loaded from Triton's cache, which function it is."""
    init = module.CompiledKernel.__init__

    @functools.wraps(init)
    def noting(self: Any, src: Any, *args: Any, **kwargs: Any) -> None:
        init(self, src, *args, **kwargs)
        function = getattr(src, "fn", None)
        if isinstance(self.kernel, bytes) and hasattr(function, "fn"):
            constants = {_argument(function, key): value for key, value in src.constants.items()}
            which, kernel = identity(self.kernel), Kernel(function, dict(src.signature), constants)
            _known[which] = kernel
            _store(which, kernel)

    module.CompiledKernel.__init__ = noting


def find(which: str) -> Kernel | None:
    if which not in _known:
        path = folder() / f"{which}.json"
        _known[which] = _load(which, json.loads(path.read_text())) if path.exists() else None
    return _known[which]


def _argument(function: Any, key: Any) -> str:
    """The name of an argument, or of a part of one that is a tuple, which Triton numbers."""
    first, *rest = key if isinstance(key, tuple) else (key,)
    return ".".join([function.arg_names[first] if isinstance(first, int) else first, *map(str, rest)])


def _store(which: str, kernel: Kernel) -> None:
    path = folder() / f"{which}.json"
    raw = kernel.function.fn
    data = {
        "file": raw.__code__.co_filename,
        "name": raw.__name__,
        "signature": kernel.signature,
        "constants": {name: _as_json(value) for name, value in kernel.constants.items()},
    }
    try:
        text = json.dumps(data)
        if path.exists() and path.read_text() == text:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(path)
    except (OSError, TypeError):
        if _VERBOSE:
            traceback.print_exc()


def _as_json(value: Any) -> Any:
    """Types of Triton's can be constants, too."""
    return {"dtype": value.name} if type(value).__name__ == "dtype" else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        import triton.language as tl

        return tl.dtype(value["dtype"])
    return value


def _load(which: str, data: dict[str, Any]) -> Kernel | None:
    function = None
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == data["file"]:
            function = function or getattr(module, data["name"], None)
    if function is None:
        if not Path(data["file"]).exists():
            return None
        spec = importlib.util.spec_from_file_location(f"hostcuda_kernel_{which}", data["file"])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        function = getattr(module, data["name"], None)
    # Behind Inductor's and Triton's tuners.
    while function is not None and (not hasattr(function, "arg_names") or hasattr(function, "configs")):
        function = getattr(function, "fn", None)
    constants = {name: _from_json(value) for name, value in data["constants"].items()}
    return Kernel(function, data["signature"], constants) if function is not None else None
