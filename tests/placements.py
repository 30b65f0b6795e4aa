"""What placements are compared with: promises looked up step by step, and every order of a few buffers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fxwrap.packing import Buffer, Placement
from fxwrap.passes.memory.requirements import Requirements
from fxwrap.plan import Home, MemoryPlan, Place, ProgramPlan, SizedProgram


def aligned(size: int, alignment: int) -> int:
    return (size + alignment - 1) // alignment * alignment


def heaviest_step(buffers: Sequence[Buffer], alignment: int) -> int:
    """The largest number of aligned bytes live in one step."""
    return max(
        (sum(aligned(b.size, alignment) for b in buffers if b.begin <= step < b.end) for step in begins(buffers)),
        default=0,
    )


def begins(buffers: Sequence[Buffer]) -> list[int]:
    return sorted({buffer.begin for buffer in buffers})


def check_placement(buffers: Sequence[Buffer], placement: Placement, alignment: int) -> None:
    """Every promise of ``plan_memory``, worked out step by step, the slow and obvious way."""
    assert set(placement.offsets) == {buffer.name for buffer in buffers}
    for step in begins(buffers):
        live = [buffer for buffer in buffers if buffer.begin <= step < buffer.end]
        # Sorted by offset, each must end before the next begins. One of no bytes is nowhere.
        spans = sorted((placement.offsets[b.name], placement.offsets[b.name] + b.size) for b in live if b.size)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans)), f"overlap at step {step}"
    for buffer in buffers:
        offset = placement.offsets[buffer.name]
        assert offset >= 0 and offset % alignment == 0
        assert offset + buffer.size <= placement.size
    assert heaviest_step(buffers, alignment) <= placement.lower_bound <= placement.size
    assert placement.size <= sum(aligned(buffer.size, alignment) for buffer in buffers)
    assert placement.proven == (placement.size == placement.lower_bound)


def smallest_arena(buffers: Sequence[Buffer], alignment: int) -> int:
    """By all orders of placing buffers on top of one another: sorted by offset, an optimum is one of them."""
    sizes = [aligned(buffer.size, alignment) for buffer in buffers]
    meet = [[a.begin < b.end and b.begin < a.end for b in buffers] for a in buffers]
    best = sum(sizes)
    for order in itertools.permutations(range(len(buffers))):
        tops: dict[int, int] = {}
        for i in order:
            tops[i] = sizes[i] + max((top for j, top in tops.items() if meet[i][j]), default=0)
        best = min(best, max(tops.values(), default=0))
    return best


def random_buffers(draw: random.Random, count: int, steps: int, length: int, size: int) -> list[Buffer]:
    found = []
    for i in range(count):
        begin = draw.randrange(steps)
        found.append(Buffer(f"b{i}", draw.randrange(size), begin, begin + draw.randint(1, length)))
    return found


def tiling(draw: random.Random, pieces: int, steps: int, height: int) -> list[Buffer]:
    """An arena of so many steps and bytes cut into pieces: they fit without a gap, which is hard to find again."""
    found = [(0, steps, 0, height)]
    while len(found) < pieces:
        largest = max(range(len(found)), key=lambda i: area(found[i]) * draw.uniform(0.1, 1))
        begin, end, low, high = found.pop(largest)
        if draw.random() < 0.5 and end - begin > 1:
            cut = draw.randrange(begin + 1, end)
            found += [(begin, cut, low, high), (cut, end, low, high)]
        elif high - low > 1:
            cut = draw.randrange(low + 1, high)
            found += [(begin, end, low, cut), (begin, end, cut, high)]
        else:
            found.append((begin, end, low, high))
    return [Buffer(f"b{i}", high - low, begin, end) for i, (begin, end, low, high) in enumerate(found)]


def area(piece: tuple[int, int, int, int]) -> int:
    begin, end, low, high = piece
    return (end - begin) * (high - low)


def located(memory: MemoryPlan) -> dict[int, int]:
    """Offsets in arenas, by storage."""
    return {i: place.offset for i, place in enumerate(memory.places) if in_arena(memory, place)}


def in_arena(memory: MemoryPlan, place: Place) -> bool:
    return place.home is Home.REGION and memory.regions[place.region].arena


def put(memory: MemoryPlan, index: int, place: Place) -> MemoryPlan:
    """A plan with one storage elsewhere."""
    return replace(memory, places=(*memory.places[:index], place, *memory.places[index + 1 :]))


def moved(memory: MemoryPlan, offsets: Mapping[int, int], region: int = 0) -> MemoryPlan:
    """A plan with storages at other offsets of a region."""
    for index, offset in offsets.items():
        memory = put(memory, index, Place(Home.REGION, region, offset))
    return memory


def changed(memory: MemoryPlan, which: int = 0, **changes: Any) -> MemoryPlan:
    """A plan with another region."""
    regions = list(memory.regions)
    regions[which] = replace(regions[which], **changes)
    return replace(memory, regions=tuple(regions))


def buffers_of(planned: SizedProgram) -> dict[str, Buffer]:
    """What is planned, by name."""
    return {b.name: b for items in Requirements.of(planned).planned.values() for _, b in items}


def placement_of(memory: MemoryPlan, plan: ProgramPlan) -> Placement:
    """The first arena's."""
    region = memory.regions[0]
    names = {i: storage.name for i, storage in enumerate(plan.facts.storages)}
    offsets = {names[i]: offset for i, offset in memory.inside(region).items()}
    return Placement(offsets, region.size, region.lower_bound)
