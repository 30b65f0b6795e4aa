"""A user's own Triton kernel, tuned by Triton, for ``gpu_checks``: where Triton is installed."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.autotune([triton.Config({"BLOCK": size}, num_warps=4) for size in (256, 1024)], key=["count"])
@triton.jit
def scaled_sum(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = tl.load(x_ptr + offsets, mask=inside)
    y = tl.load(y_ptr + offsets, mask=inside)
    tl.store(out_ptr + offsets, 2 * x + y, mask=inside)


def twice_and(x: Tensor, y: Tensor) -> Tensor:
    """2 x + y."""
    out = torch.empty_like(x)
    scaled_sum[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())
    return out
