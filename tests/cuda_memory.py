"""What torch's CUDA allocator keeps, for tests and benchmarks that compare it with what fxwrap reports."""

from __future__ import annotations

import gc

import torch


def kept_bytes() -> int:
    """The bytes of all segments of graphs' pools, and of what is allocated outside of them.

    Nothing is left of eager work: cached memory and workspaces of cuBLAS are freed first.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return sum(
        segment["total_size"] if tuple(segment["segment_pool_id"]) != (0, 0) else segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
    )
