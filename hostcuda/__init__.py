"""A CUDA device on host memory, under torch's own CUDA build: no GPU, and nothing of its speed. See README.md.

Here is what a script or a test asks the device. It is switched on by ``python -m hostcuda``, or by
``pytest -p hostcuda.plugin``.
"""

from __future__ import annotations

import ctypes

from .imports import install, is_on
from .library import runtime

__all__ = ["clear_sticky", "counter", "install", "is_on", "missing", "refusals", "runtime", "skipped"]


def counter(name: str) -> int:
    """One of the device's counters: graph_launches, captures, mallocs, used_bytes, ... Raises KeyError."""
    value: int = runtime().hostcuda_counter(name.encode())
    if value < 0:
        raise KeyError(name)
    return value


def skipped() -> dict[str, int]:
    """Kernels that were launched and not computed, and how often."""
    return _counted("hostcuda_skipped")


def refusals() -> dict[str, int]:
    """Calls of CUDA's that were answered with an error, and how often."""
    return _counted("hostcuda_refusals")


def missing() -> dict[str, int]:
    """Functions that were looked up by name and are not there, and how often."""
    return _counted("hostcuda_missing")


def clear_sticky() -> None:
    """Forget an error that leaves the device unusable; of a GPU's, only a new process is rid."""
    runtime().hostcuda_clear_sticky()


def _counted(function: str) -> dict[str, int]:
    """Lines of a count and a name."""
    buffer = ctypes.create_string_buffer(1 << 20)
    getattr(runtime(), function)(buffer, len(buffer))
    lines = buffer.value.decode(errors="replace").splitlines()
    return {name: int(count) for count, _, name in (line.partition(" ") for line in lines)}
