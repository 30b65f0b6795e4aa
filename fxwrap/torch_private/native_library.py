"""The helper library of native replay (``native/replay.cpp``): built for each torch, Python and compiler."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from ..native_build import built_library, library_path
from .native_units import NativeReplay

log = logging.getLogger(__name__)

_MODULE = "fxwrap_replay"
_SOURCE = Path(__file__).with_name("native") / "replay.cpp"
_NOTICE = (
    "fxwrap: compiling the C++ library that replays programs, once for each torch, Python and compiler "
    "(a quarter of a minute; minutes on a busy machine) ..."
)
_PATIENCE = 900  # seconds
# Where a call passes pointers and integers of 64 bits alike.
_MACHINES = ("x86_64", "AMD64", "aarch64", "arm64")


@functools.cache
def native_replay() -> NativeReplay | str:
    """The library; otherwise why it is not available, which is logged once, or "" if it is switched off."""
    if os.environ.get("FXWRAP_NATIVE_REPLAY") == "0":
        return ""
    try:
        return _load()
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines()
        why = f"the helper library cannot be built: {error}" + (f": {said[0]}" if said else "")
        log.warning("recordings replay in Python, for %s", why)
        return why


def kept_region(nbytes: int) -> Any:
    """An object whose ``storage`` has memory that is kept for later calls; None without the library."""
    native = native_replay()
    return None if isinstance(native, str) else native.library.KeptRegion(nbytes)


def kept_memory() -> int:
    """The bytes that are kept for later calls, and not in use."""
    native = native_replay()
    return 0 if isinstance(native, str) else native.library.kept_memory()


def replay_library() -> Path:
    """Where the library is, or will be. Raises OSError where it cannot be had on such a machine."""
    name, source, flags, how = _what_to_build()
    return library_path(name, source, flags, **how)


def _what_to_build() -> tuple[str, Path, tuple[str, ...], dict[str, Any]]:
    if platform.system() == "Windows" or platform.machine() not in _MACHINES:
        raise OSError(f"untested on {platform.system()} {platform.machine()}")
    key = (torch.__version__, str(torch.version.git_version), sys.version)
    headers, suffix = sorted(_SOURCE.parent.glob("*.h")), importlib.machinery.EXTENSION_SUFFIXES[0]
    return "replay", _SOURCE, _flags(), {"key": key, "headers": headers, "suffix": suffix}


def _load() -> NativeReplay:
    name, source, flags, how = _what_to_build()
    path = built_library(name, source, flags, **how, patience_s=_PATIENCE, notice=_NOTICE)
    loader = importlib.machinery.ExtensionFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_loader(_MODULE, loader)
    assert spec is not None
    library: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(library)
    return NativeReplay(library, _gemms())


def _gemms() -> tuple[int, int, int] | None:
    """``NativeReplay.gemms``: of the BLAS in torch's library, if exported. Elsewhere than on x86 ATen has several."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        first, second = (ctypes.cast(gemm, ctypes.c_void_p).value for gemm in (torch_cpu.sgemm_, torch_cpu.dgemm_))
    except (OSError, AttributeError):
        return None
    threads = getattr(torch_cpu, "MKL_Set_Num_Threads_Local", None)
    address = ctypes.cast(threads, ctypes.c_void_p).value if threads is not None else 0
    return (first, second, address or 0) if first and second else None


def _flags() -> tuple[str, ...]:
    root = Path(torch.__file__).parent
    include, lib = root / "include", root / "lib"
    folders = (include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include")))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    common = ("-std=c++20", "-O2", "-fvisibility=hidden", abi, *(f"-I{folder}" for folder in folders))
    common = (*common, *shlex.split(os.environ.get("FXWRAP_NATIVE_FLAGS", "")))  # a sanitizer's: make sanitize
    if platform.system() == "Darwin":
        return (*common, "-undefined", "dynamic_lookup")
    return (*common, "-fopenmp", f"-L{lib}", "-ltorch_python", "-ltorch_cpu", "-lc10")
