"""Machines that need not be there: the properties that a driver would give of their devices."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget


@dataclass(frozen=True, eq=False)
class Machine:
    """The description of a machine with a device that this machine lacks.

    Attributes:
        properties: the device's properties, as its driver would give them.
        capability: as ``get_device_capability`` returns it.
        triton: Triton's target; None where its wheel has no compiler for the device.
    """

    device: torch.device
    properties: Any
    capability: Any
    triton: Any = None

    @property
    def name(self) -> str:
        return str(self.properties.name)


# A device of each capability: multiprocessors, threads of each, GiB of memory, MiB of cache, and the bytes of shared
# memory that a kernel may use (a multiprocessor has 1 KiB more). From NVIDIA's programming guide and data sheets.
_CUDA = {
    75: ("Tesla T4", 40, 1024, 16, 4, 65536),
    80: ("NVIDIA A100-SXM4-80GB", 108, 2048, 80, 40, 166912),
    86: ("NVIDIA GeForce RTX 3090", 82, 1536, 24, 6, 101376),
    89: ("NVIDIA GeForce RTX 4090", 128, 1536, 24, 72, 101376),
    90: ("NVIDIA H100 80GB HBM3", 132, 2048, 80, 50, 232448),
    100: ("NVIDIA B200", 148, 2048, 180, 126, 232448),
    120: ("NVIDIA GeForce RTX 5090", 170, 1536, 32, 96, 101376),
}
CAPABILITIES = tuple(_CUDA)


def cuda_machine(capability: int) -> Machine:
    """A machine with one CUDA device of a capability in ``CAPABILITIES``."""
    name, multiprocessors, threads, memory, cache, shared = _CUDA[capability]
    major, minor = divmod(capability, 10)
    properties = types.SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=multiprocessors,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=threads,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=memory * 2**30,
        L2_cache_size=cache * 2**20,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + (0 if capability == 75 else 1024),
    )
    target = GPUTarget("cuda", capability, properties.warp_size)
    return Machine(torch.device("cuda", 0), properties, (major, minor), target)


def xpu_machine() -> Machine:
    """A machine with one XPU: one of the two stacks of a data-center GPU."""
    properties = types.SimpleNamespace(
        name="Intel(R) Data Center GPU Max 1550",
        total_memory=64 * 2**30,
        max_compute_units=512,
        gpu_eu_count=512,
        gpu_subslice_count=64,
        multi_processor_count=64,  # the subslices, by CUDA's name
        max_work_group_size=1024,
        max_num_sub_groups=64,
        sub_group_sizes=[16, 32],
        local_mem_size=128 * 2**10,
        has_fp16=True,
        has_fp64=True,
        has_atomic64=True,
    )
    return Machine(torch.device("xpu", 0), properties, vars(properties))
