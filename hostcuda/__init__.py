"""A CUDA device on host memory, under torch's own CUDA build. See README.md.

``install()`` has every ``import torch`` of the process find the fake driver and runtime first, and take over ATen's
operators afterwards. A ``.pth`` file calls it when Python starts (unless ``HOSTCUDA=0``).
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from typing import Any

FOLDER = os.environ.get("HOSTCUDA_LIB", os.path.expanduser("~/.cache/hostcuda/lib"))
_runtime: Any = None
_operators: Any = None


def runtime() -> Any:
    global _runtime
    if _runtime is None:
        # In the global scope before any library of torch's: found first, by name and by symbol.
        _runtime = ctypes.CDLL(f"{FOLDER}/libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(f"{FOLDER}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        for name in ("libhostlibraries.so", "libnvidia-ml.so.1"):
            ctypes.CDLL(f"{FOLDER}/{name}", mode=ctypes.RTLD_GLOBAL)
        _runtime.hostcuda_counter.restype = ctypes.c_longlong
        _runtime.hostcuda_identity.restype = ctypes.c_char_p
        _runtime.hostcuda_identity.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
        _runtime.hostcuda_set_callback.argtypes = [ctypes.c_void_p]
    return _runtime


def counter(name: str) -> int:
    value = runtime().hostcuda_counter(name.encode())
    if value < 0:
        raise KeyError(name)
    return value


def _text(function: str) -> dict[str, int]:
    buffer = ctypes.create_string_buffer(1 << 20)
    getattr(runtime(), function)(buffer, len(buffer))
    found = {}
    for line in buffer.value.decode(errors="replace").splitlines():
        count, _, name = line.partition(" ")
        found[name] = int(count)
    return found


def skipped() -> dict[str, int]:
    """Kernels that were launched and not computed, and how often."""
    return _text("hostcuda_skipped")


def refusals() -> dict[str, int]:
    """Calls of CUDA's that were answered with an error, and how often."""
    return _text("hostcuda_refusals")


# Of the operators that have kernels for CUDA and for the CPU, those that stay torch's own.
KEPT = set(
    """_local_scalar_dense _reshape_alias as_strided empty.memory_format empty_strided resize_ set_ set_.source_Storage
    set_.source_Storage_storage_offset set_.source_Tensor unfold view view_as_complex view_as_real record_stream is_set_to
    copy_ _foreach_copy_ _to_sparse _nested_view_from_buffer""".split()
)
# Those that choose a library of CUDA's, from which there is no way to a CPU kernel.
ADDED = ["convolution", "convolution_backward"]


def _after_torch(torch: Any) -> None:
    global _operators
    if os.environ.get("HOSTCUDA_OPERATORS") == "0":
        return

    def registered(key: str) -> set[str]:
        return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))

    here = registered("CPU") | registered("CompositeExplicitAutograd") | registered("CompositeExplicitAutogradNonFunctional")
    both = {name.removeprefix("aten::") for name in registered("CUDA") & here if name.startswith("aten::")}
    names = sorted(n for n in both - KEPT if "sparse" not in n and "quantiz" not in n and "nested" not in n)
    _operators = ctypes.CDLL(f"{FOLDER}/libhostoperators.so")
    # One warning of the dispatcher's, that kernels are replaced, which is the purpose.
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        _operators.hostcuda_override("\n".join([*names, *ADDED]).encode())
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
    torch._C._set_cudnn_enabled(False)
    torch._C._set_sdp_use_cudnn(False)
    torch.cuda.graph_counters = lambda: {"replays": counter("graph_launches")}
    from . import kernels

    kernels.install()


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, name: str) -> None:
        self.inner, self.name = inner, name

    def create_module(self, spec: Any) -> Any:
        return self.inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        if self.name == "torch":
            runtime()
        self.inner.exec_module(module)
        if self.name == "torch":
            _after_torch(module)
        elif self.name == "gpu_place":  # fxwrap's checks for GPUs, in the sizes that a CPU does at once
            if os.environ.get("HOSTCUDA_FULL_SIZE") != "1":
                most = int(os.environ.get("HOSTCUDA_SIZE", "0"))
                module.Place.size = lambda self, here, on_hostsim: min(here, max(on_hostsim, most))
        else:
            from . import kernels

            kernels.after_triton(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in ("torch", "triton.compiler.compiler", "gpu_place"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, name)
        return spec


def install() -> None:
    if os.environ.get("HOSTCUDA") == "0" or any(isinstance(f, _Finder) for f in sys.meta_path):
        return
    os.environ.setdefault("TRITON_LIBCUDA_PATH", FOLDER)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    sys.meta_path.insert(0, _Finder())
