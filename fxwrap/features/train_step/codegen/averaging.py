"""Averages of gradients over processes, as functional collectives, which are part of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

# The most bytes of gradients that one communication takes, as for DistributedDataParallel. A bucket is a copy of
# its gradients, so that larger ones take more memory.
_BUCKET_BYTES = 25 * 2**20

Gradients = Sequence[torch.Tensor | None]


def averaging(group: dist.ProcessGroup) -> Callable[[Gradients], list[torch.Tensor | None]]:
    """The function by which a traced step averages its gradients over a group; None stays None.

    A communication costs more than copying a small gradient: gradients are put one behind the other into buckets.
    Gloo does so, too, in ``all_reduce_coalesced``, but slower and in memory that no plan knows.
    """
    ops, name, size = torch.ops._c10d_functional, group.group_name, dist.get_world_size(group)

    def average(gradients: Gradients) -> list[torch.Tensor | None]:
        averages: list[torch.Tensor | None] = [None] * len(gradients)
        begun = []
        for bucket in _buckets(gradients):
            # Divided first, as DistributedDataParallel does it: the kernels that copy gradients also divide them.
            flat = torch.cat([gradient.reshape(-1) / size for _, gradient in bucket])
            begun.append((bucket, ops.all_reduce(flat, "sum", name)))
        for bucket, flat in begun:
            parts = ops.wait_tensor(flat).split([gradient.numel() for _, gradient in bucket])
            for (place, gradient), part in zip(bucket, parts, strict=True):
                averages[place] = part.view(gradient.shape)
        return averages

    return average


def _buckets(gradients: Gradients) -> list[list[tuple[int, torch.Tensor]]]:
    """Gradients with their positions, those of one kind together, from the last: backward computes it first."""
    buckets: list[list[tuple[int, torch.Tensor]]] = []
    # By kind, the bucket that is being filled, and the bytes in it.
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[tuple[int, torch.Tensor]], int]] = {}
    for place, gradient in reversed(list(enumerate(gradients))):
        if gradient is None:
            continue
        kind, size = (gradient.dtype, gradient.device), gradient.numel() * gradient.element_size()
        bucket, filled = filling.get(kind, ([], 0))
        if filled + size > _BUCKET_BYTES or not bucket:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append((place, gradient))
        filling[kind] = bucket, filled + size
    return buckets
