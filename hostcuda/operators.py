"""Which of ATen's operators the device computes: those that have a kernel for CUDA and one for the CPU.

ATen's CUDA kernels cannot run on host memory; their CPU counterparts run over the same bytes
(src/operators). What allocates, views, copies bytes or waits stays torch's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

from . import build
from .kernels import launches
from .library import runtime

# What stays torch's own.
_KEPT = """
    _foreach_copy_ _local_scalar_dense _nested_view_from_buffer _reshape_alias _to_sparse as_strided copy_
    empty.memory_format empty_strided is_set_to record_stream resize_ set_ set_.source_Storage
    set_.source_Storage_storage_offset set_.source_Tensor unfold view view_as_complex view_as_real
"""
KEPT = frozenset(_KEPT.split())
# Those that choose a library of CUDA's, from which there is no way to a CPU kernel.
ADDED = ("convolution", "convolution_backward")
# Those that call a library of CUDA's, which is not there even where nothing is computed.
PRODUCTS = frozenset(["mm", "addmm", "bmm", "baddbmm", "addmv", "dot", "_addmm_activation"])
# Kinds of tensors that the device does not have.
_WITHOUT = ("sparse", "quantiz", "nested")
_CPU_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_library: Any = None


def install(torch: Any) -> None:
    """Take over the operators, and what chooses CUDA's libraries.

    ``HOSTCUDA_OPERATORS=0`` leaves all but products to torch.
    """
    global _library  # noqa: PLW0603
    names = sorted(computed(torch))
    _library = ctypes.CDLL(str(build.libraries() / build.OPERATORS))
    if os.environ.get("HOSTCUDA_OPERATORS") == "0":
        with _quietly():
            _library.hostcuda_override("\n".join(name for name in names if name.split(".")[0] in PRODUCTS).encode())
        return
    with _quietly():
        _library.hostcuda_override("\n".join([*names, *ADDED]).encode())
        _library.hostcuda_override_others()
    torch._C._set_cudnn_enabled(False)
    torch._C._set_sdp_use_cudnn(False)
    # benchmarks/gpu.py asks a device for its own count of launches by this name.
    torch.cuda.graph_counters = _graph_counters
    launches.install()


def computed(torch: Any) -> set[str]:
    """Names of the operators, without ``aten::``."""

    def registered(key: str) -> set[str]:
        return set(torch._C._dispatch_get_registrations_for_dispatch_key(key))

    on_cpu = set[str]().union(*map(registered, _CPU_KEYS))
    both = {name.removeprefix("aten::") for name in registered("CUDA") & on_cpu if name.startswith("aten::")}
    return {name for name in both - KEPT if not any(kind in name for kind in _WITHOUT)}


def _graph_counters() -> dict[str, int]:
    counters = {"captures": b"captures", "replays": b"graph_launches"}
    return {name: runtime().hostcuda_counter(counter) for name, counter in counters.items()}


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the dispatcher's warning that kernels are replaced, which is the purpose."""
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
