"""What ``gpu.py`` checks of memory that operators allocate: it lies in the arena, at the addresses of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from callers import programs
from gpu_place import Findings, Place
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_CALLS = 6
_MIB = 1 << 20


class _Attention(nn.Module):
    def __init__(self, width: int, kernel: SDPBackend) -> None:
        super().__init__()
        self.split, self.kernel = nn.Linear(width, 3 * width), kernel

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.split(x).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.kernel):
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def operators_in_the_arena(place: Place, findings: Findings) -> None:
    """Convolutions and fused attention, forward and backward: results, temporaries and workspaces."""
    edge, length = place.size(64, 16), place.size(512, 64)
    half, single = torch.float16, torch.float32
    convolution: Callable[[], nn.Module] = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, stride=2), nn.ReLU(), nn.Conv2d(64, 16, 1)
    )
    image, text = (8, 16, edge, edge), (4, length, 256)
    cases: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {
        "convolutions": (convolution, image, single),
        "convolutions, half": (convolution, image, half),
        "math attention": (lambda: _Attention(256, SDPBackend.MATH), text, single),
    }
    if not (place.simulated or place.small):
        for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
            kernel = getattr(SDPBackend, name)
            cases[name.lower()] = (lambda kernel=kernel: _Attention(256, kernel), text, half)
    for name, (make, shape, dtype) in cases.items():
        _one(place, findings, name, place.model(make).to(dtype), place.random(*shape).to(dtype))


def _one(place: Place, findings: Findings, name: str, model: nn.Module, x: Tensor) -> None:
    def gradients(fn: Callable[[Tensor], Any]) -> list[Tensor]:
        model.zero_grad()
        value = fn(x)
        value.backward()
        return [value.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    def loss(x: Tensor) -> Tensor:
        return model(x).float().pow(2).mean()

    ours, theirs = place.ours(loss), place.inductors(loss)
    for _ in range(_CALLS):
        findings.same(gradients(ours), gradients(theirs), rtol=1e-2)
    events: Counter[str] = sum((program.counters.events for program in programs(ours)), Counter())
    outside = [event for event in events if "outside of the plan" in event]
    findings.demand(not outside, f"{name}: {'; '.join(outside)}")
    if place.name == "cuda":
        place.synchronize()
        place.empty_cache()
        segments = place.module.memory_snapshot()
        pools = sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))
        findings.note(f"{name}: {pools / _MIB:.0f} MiB in pools of graphs")
