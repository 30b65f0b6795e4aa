"""What ``gpu.py`` checks of training steps as one program, beside ordinary loops in ``mode="reduce-overhead"``."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from any_step_programs import as_written, compiled_by, world_model
from callers import programs
from gpu_place import Findings, Place
from speed_models import mlp
from timing import compare
from torch import Tensor, nn
from train_step import adamw, loss, ordinary

import fxwrap
from fxwrap.passes.memory.planner import bytes_of_call

# Steps whose losses are compared; after so many, graph trees replay, too.
_COMPARED = 6
_MIB = 1 << 20
_SEGMENT = 2 * _MIB  # what torch's allocator takes of the driver for small blocks
TREES: dict[str, Any] = {"mode": "reduce-overhead"}
CAPTURED: dict[str, Any] = {"capture": "always"}


@dataclass(frozen=True)
class Sides:
    """Calls that make one step each, from the same numbers.

    Attributes:
        whole: what ``fxwrap.train_step`` returned.
        call: calls it.
        loop: the loop without a compiler.
        trees: the loop, each part compiled with graph trees.
    """

    whole: Callable[..., Any]
    call: Callable[[], Any]
    loop: Callable[[], Any]
    trees: Callable[[], Any]


def world_models_step(place: Place, findings: Findings) -> None:
    """As it is written: three losses, three optimizers, a target."""
    length = place.size(8, 2)

    def side(compiled: Callable[..., Any], whole: bool = False) -> tuple[Any, Callable[[], Any]]:
        with place.device:
            step, batch = world_model(compiled, length, horizon=length)
        made = fxwrap.train_step(step, options=CAPTURED) if whole else step
        return made, lambda: made(*batch)

    sides = Sides(*side(as_written, whole=True), side(as_written)[1], side(compiled_by(**TREES))[1])
    _beside_trees(place, findings, sides)


def mlps_step(place: Place, findings: Findings) -> None:
    model, (x,) = mlp(blocks=place.size(6, 2))
    _beside_trees(place, findings, _sides(model.to(place.device), x.to(place.device)))


def step_within_a_limit(place: Place, findings: Findings) -> None:
    """Half of what it takes without one. Activations are most of that, beside cuBLAS's workspace of 32 MiB."""
    if place.small:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"  # 128 KiB: torch asks at the first product of a process
    rows, width = place.size(1 << 16, 1 << 11), place.size(512, 64)
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(12))
    model, x = nn.Sequential(*layers).to(place.device), place.random(rows, width)
    of_others = {(0, 0), *(pool for pool, _ in _pools(place))}
    free = _sides(copy.deepcopy(model), x)
    expected = [free.call() for _ in range(_COMPARED)]
    (program,) = programs(free.whole)
    planned = bytes_of_call(program.recorder.newest_sized)
    fxwrap.release(free.whole)
    limit = planned // 2
    sides = _sides(model, x, memory_limit=limit)
    for step, right in enumerate(expected):
        findings.exactly(sides.call(), right, f"loss {step} is another one than without a limit")
    taken = _taken(place, sides, of_others)
    findings.note(f"limit {limit / _MIB:,.1f} of {planned / _MIB:,.1f} MiB, taken {taken / _MIB:,.1f}")
    findings.demand(taken <= limit + _SEGMENT, "takes more than its limit")
    _beside_trees(place, findings, sides, compared=0)


def _sides(model: nn.Module, x: Tensor, **options: Any) -> Sides:
    """Of a model with AdamW."""
    loop, trees = ordinary(copy.deepcopy(model), (x,), backend="eager"), ordinary(copy.deepcopy(model), (x,), **TREES)
    whole = fxwrap.train_step(model, loss, adamw(model), options={**CAPTURED, **options})
    return Sides(whole, lambda: whole(x), loop, trees)


def _beside_trees(place: Place, findings: Findings, sides: Sides, compared: int = _COMPARED) -> None:
    """The first losses are the loop's; then calls are replays, and faster than graph trees."""

    def by_trees() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return sides.trees()

    for _ in range(compared):
        right = sides.loop()
        findings.same(sides.call(), right)
        findings.same(by_trees(), right)
    place.steady(findings, [sides.whole], sides.call)
    if hasattr(torch.cuda, "graph_counters"):  # hostcuda
        findings.note("not timed: the device computes on the host")
        return
    for _ in range(_COMPARED - compared):
        by_trees()
    times = compare(sides.call, by_trees, pairs=9, calls=20, synchronize=place.synchronize)
    findings.note(f"{times.first:.0f} us, reduce-overhead {times.second:.0f} us, ratio {times.ratio:.2f}")
    findings.demand(times.ratio <= 1, "slower than reduce-overhead")


def _pools(place: Place) -> list[tuple[tuple[int, int], int]]:
    """The pools of torch's allocator, by their ids, and the bytes of each segment."""
    return [(tuple(segment["segment_pool_id"]), segment["total_size"]) for segment in place.module.memory_snapshot()]


def _taken(place: Place, sides: Sides, of_others: set[tuple[int, int]]) -> int:
    """The most that a call holds: the arena, the pools of its graphs, and what is allocated beside them."""
    (program,) = programs(sides.whole)
    place.synchronize()
    before = place.module.memory_allocated(place.device) - program.newest_plan.size
    place.module.reset_peak_memory_stats(place.device)
    sides.call()
    place.synchronize()
    most = int(place.module.max_memory_allocated(place.device))
    return most - before + sum(size for pool, size in _pools(place) if pool not in of_others)
