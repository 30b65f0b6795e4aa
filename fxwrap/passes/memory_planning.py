"""PLAN: live ranges, and offsets into one arena per device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..errors import PlanError
from ..host_graph import nodes_in, output_node
from ..plan import ArenaPlan, Buffer, MemoryPlan, Origin, Placement, ProgramPlan, StorageFacts
from .symbols import concrete, hint, storage_bytes

# Bytes. Wide vector loads on a CPU want a cache line; on accelerators, what their caching allocators give.
_ALIGNMENT = {"cpu": 64}
_ACCELERATOR_ALIGNMENT = 512


def plan_memory(buffers: Iterable[Buffer], alignment: int = 64, budget_s: float | None = None) -> Placement:
    """Place buffers in one arena so that those live at the same time do not overlap.

    Tries a few orders and puts each buffer at the lowest offset that is free during its life (first fit);
    stops as soon as an arena is as small as the lower bound. First fit by decreasing size is the heuristic
    of Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020).

    Args:
        buffers: sizes in bytes, live ranges in steps; names are unique.
        alignment: bytes; every offset is a multiple.
        budget_s: seconds after which no further order is tried.

    Returns:
        Offsets, the arena's size and the lower bound, all in bytes.

    Raises:
        ValueError: a size is negative, a live range is empty or a name is given twice.
    """
    import time

    items = list(buffers)
    _validate(items, alignment)
    sizes = [-(-item.size // alignment) * alignment for item in items]
    bound = _largest_live_set(items, sizes)
    conflicts = _conflicts(items)
    deadline = None if budget_s is None else time.monotonic() + budget_s
    best: list[int] = []
    best_size = -1
    for key in _ORDERS:
        order = sorted(range(len(items)), key=lambda i: key(items[i], sizes[i]))
        offsets = _first_fit(order, sizes, conflicts)
        size = max((offsets[i] + sizes[i] for i in order), default=0)
        if best_size < 0 or size < best_size:
            best, best_size = offsets, size
        if best_size == bound or (deadline is not None and time.monotonic() > deadline):
            break
    return Placement({item.name: offset for item, offset in zip(items, best, strict=True)}, max(best_size, 0), bound)


_ORDERS: tuple[Callable[[Buffer, int], Any], ...] = (
    lambda item, size: (-size, item.begin),
    lambda item, size: (-(item.end - item.begin), -size),
    lambda item, size: (-size * (item.end - item.begin), item.begin),
    lambda item, size: (item.begin, -size),
    lambda item, size: (-item.end, -size),
)


def _validate(items: list[Buffer], alignment: int) -> None:
    if alignment < 1:
        raise ValueError(f"alignment must be at least 1 byte, got {alignment}")
    seen: set[str] = set()
    for item in items:
        if item.size < 0 or item.end <= item.begin:
            raise ValueError(f"buffer {item.name!r} needs size >= 0 and begin < end, got {item}")
        if item.name in seen:
            raise ValueError(f"buffer name {item.name!r} is given twice")
        seen.add(item.name)


def _largest_live_set(items: list[Buffer], sizes: list[int]) -> int:
    change: dict[int, int] = defaultdict(int)
    for item, size in zip(items, sizes, strict=True):
        change[item.begin] += size
        change[item.end] -= size
    live = largest = 0
    for step in sorted(change):
        live += change[step]
        largest = max(largest, live)
    return largest


def _conflicts(items: list[Buffer]) -> list[list[int]]:
    """For each buffer, the buffers live at a same time: a sweep over begins."""
    conflicts: list[list[int]] = [[] for _ in items]
    live: list[int] = []
    for i in sorted(range(len(items)), key=lambda i: items[i].begin):
        live = [j for j in live if items[j].end > items[i].begin]
        for j in live:
            conflicts[i].append(j)
            conflicts[j].append(i)
        live.append(i)
    return conflicts


def _first_fit(order: list[int], sizes: list[int], conflicts: list[list[int]]) -> list[int]:
    offsets = [-1] * len(sizes)
    for i in order:
        offset = 0
        taken = sorted((offsets[j], offsets[j] + sizes[j]) for j in conflicts[i] if offsets[j] >= 0)
        for begin, end in taken:
            if begin >= offset + sizes[i]:
                break
            offset = max(offset, end)
        offsets[i] = offset
    return offsets


def plan_program(
    program: ProgramPlan, numbers: Mapping[Node, Any], places: Mapping[Node, tuple[torch.device, int]]
) -> MemoryPlan:
    """Plan one recording of a program.

    Args:
        numbers: concrete sizes (``evaluate_sizes``).
        places: inputs that are copied to a place in the arena: device and bytes.

    Raises:
        PlanError: a communication is under way before the program begins or after it ends.
    """
    if program.facts.in_flight:
        # An arena is used by others between calls, and an input or output that is copied too early is wrong.
        names = sorted(program.facts.storages[index].name for index in program.facts.in_flight)
        raise PlanError(
            f"a communication on {', '.join(names)} is under way at a call's begin or end",
            expected="every collective to be waited for in the graph that begins it",
            remedy="wait for it inside of the compiled region, with wait_tensor",
        )
    ranges = live_ranges(program)
    apart = output_storages(program)
    sizes: dict[int, int] = {}
    planned: dict[torch.device, list[tuple[int, Buffer]]] = defaultdict(list)
    elsewhere = frozenset().union(*(compiled.signature.temporaries for compiled in program.compiled.values()))
    for storage in program.facts.storages:
        if storage.index in elsewhere:
            continue  # whoever compiled the partition allocates it
        if storage.origin is Origin.ALLOCATION:
            layout = concrete(storage.node.args[:2], numbers)
            if layout is None:
                continue  # its size depends on data: allocated when it is known
            kwargs: Mapping[str, Any] = storage.node.kwargs
            sizes[storage.index] = storage_bytes(layout[0], layout[1], kwargs["dtype"])
            device = kwargs["device"]
            if storage.index in apart or storage.index not in ranges or kwargs.get("pin_memory"):
                continue
            begin, end = ranges[storage.index]
        elif storage.node in places:
            device, sizes[storage.index] = places[storage.node]
            # Filled before the first step; an updated one is copied back after the last.
            begin, end = 0, len(program.schedule) + 1
        else:
            continue
        buffer = Buffer(storage.name, sizes[storage.index], begin, end)
        planned[device].append((storage.index, buffer))

    arenas: dict[torch.device, ArenaPlan] = {}
    location: dict[int, tuple[torch.device, int]] = {}
    for device, items in planned.items():
        alignment = _ALIGNMENT.get(device.type, _ACCELERATOR_ALIGNMENT)
        placement = plan_memory((buffer for _, buffer in items), alignment, budget_s=0.05)
        plain = sum(-(-buffer.size // alignment) * alignment for _, buffer in items)
        buffers = {buffer.name: buffer for _, buffer in items}
        arenas[device] = ArenaPlan(device, buffers, placement, alignment, plain)
        for index, buffer in items:
            location[index] = (device, placement.offsets[buffer.name])
    return MemoryPlan(arenas, location, apart, sizes)


def live_ranges(program: ProgramPlan) -> dict[int, tuple[int, int]]:
    """``[first step that touches a storage, last step + 1)``, in steps of the schedule.

    A step is one work node. Views do not touch storage; what they are used for does.
    """
    ranges: dict[int, tuple[int, int]] = {}
    for step, node in enumerate(program.schedule):
        for index in program.facts.touched(node):
            begin, _ = ranges.get(index, (step, step))
            ranges[index] = (begin, step + 1)
    return ranges


def hinted_sizes(facts: StorageFacts) -> dict[int, int]:
    """Bytes of storages at the sizes a program was compiled for; those that only data decides are missing."""
    sizes = {}
    for storage in facts.storages:
        value = storage.node.meta.get("val")
        if storage.element is not None and isinstance(value, (tuple, list)):
            # A loop has storages for what its body hands over, besides those of its results.
            value = value[storage.element] if storage.element < len(value) else None
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            size, stride = [hint(n) for n in value.size()], [hint(n) for n in value.stride()]
            if None not in size and None not in stride:
                sizes[storage.index] = storage_bytes(tuple(size), tuple(stride), value.dtype)  # type: ignore[arg-type]
    return sizes


def inner_storages(gm: GraphModule, facts: StorageFacts) -> frozenset[int]:
    """Storages that live and die inside a program; the others live anyway, whatever the order."""
    handed_out = frozenset[int]().union(*(facts.of.get(n, ()) for n in nodes_in(output_node(gm).args)))
    return frozenset(
        storage.index
        for storage in facts.storages
        if storage.origin in (Origin.ALLOCATION, Origin.EXTERN) and storage.index not in handed_out
    )


def output_storages(program: ProgramPlan) -> frozenset[int]:
    """Allocated storages that values handed to the caller live in."""
    output = output_node(program.graph)
    found: Collection[frozenset[int]] = [program.facts.of.get(node, frozenset()) for node in nodes_in(output.args)]
    storages = program.facts.storages
    return frozenset(index for index in frozenset().union(*found) if storages[index].origin is Origin.ALLOCATION)
