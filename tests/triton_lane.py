"""Triton kernels on a machine without a GPU: Inductor emits them for CPU tensors, Triton's interpreter runs them.

Everything of Inductor is the real thing, from lowering to the tuner's launcher; for what stands in for Triton's
compiler and driver see ``examples/hostsim/triton_interpreter.py``. Only the benchmark is made up: ``cost`` tells what
a configuration takes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.benchmarking import benchmarker

# Beside the package hostsim, which this leaves alone: importing that would make it this process's accelerator. Other
# processes that tests begin get this path, too.
sys.path.append(str(Path(__file__).parents[1] / "examples" / "hostsim"))

from triton_interpreter import Launch, interpreted_triton

__all__ = ["Launch", "triton_on_cpu"]


def usual_cost(launch: Launch) -> float:
    return 1.0


@contextlib.contextmanager
def triton_on_cpu(cost: Callable[[Launch], float] = usual_cost) -> Iterator[list[Launch]]:
    """Have Inductor emit Triton kernels for CPU tensors, and run them.

    Args:
        cost: how long a launch takes when the tuner measures it.

    Yields:
        The launches so far, without those that were measured.
    """

    def benchmark(fn: Callable[[], Any], *args: Any, **kwargs: Any) -> float:
        fn()
        return cost(launches.pop())

    with (
        interpreted_triton("cpu") as launches,
        config.patch(cpu_backend="triton", compile_threads=1),
        # Descriptors are for some GPUs only, about which torch asks CUDA.
        mock.patch("torch.utils._triton.has_triton_tensor_descriptor_host_tma", lambda: True),
        mock.patch.object(benchmarker, "benchmark", benchmark),
    ):
        # Kernels that were compiled for another of these contexts know its launches.
        PyCodeCache.cache_clear()
        yield launches
