"""PLAN: a home for every storage: offsets in arenas, or regions and per-call allocations (CPU)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from ...packing import Buffer, Placement, Reserved, plan_memory
from ...packing.reserved import lay_out_arena, most_alive
from ...packing.shared_regions import share_regions
from ...plan import (
    Home,
    MemoryPlan,
    Origin,
    Place,
    PlacementHint,
    Prediction,
    Region,
    Reservations,
    SizedProgram,
)
from .requirements import Requirements

_CPU = torch.device("cpu")
# Alignment in bytes. CPU: a cache line, for wide vector loads. Accelerators: that of their caching allocators.
_ALIGNMENT, _ACCELERATOR_ALIGNMENT = 64, 512


def plan_program(
    planned: SizedProgram,
    reserved: Reservations = MappingProxyType({}),
    hint: PlacementHint | None = None,
    previous: MemoryPlan | None = None,
) -> MemoryPlan:
    """Plan one recording of a program.

    Args:
        reserved: intervals of arenas that live outputs of other recordings occupy.
        hint: offsets from a joint plan; used where nothing reserved is in the way.
        previous: a plan for other sizes; its order of offsets is tried, too.

    Raises:
        PlanError: a communication is in flight when the program begins or ends.
    """
    requirements = Requirements.of(planned)
    if planned.frozen:
        return _plan_arenas(requirements, reserved, hint, previous)
    return _plan_calls(requirements)


def _plan_arenas(
    requirements: Requirements,
    reservations: Reservations,
    hint: PlacementHint | None,
    previous: MemoryPlan | None,
) -> MemoryPlan:
    """One arena per device. It exists between calls, too."""
    reserved = {
        d: [replace(one, end=requirements.end_of(one.nodes)) for one in reservations.get(d, ())]
        for d in requirements.planned
    }
    placements = {
        d: _lay_out(requirements, d, reserved[d], (hint or {}).get(d), previous) for d in requirements.planned
    }
    regions, offsets = list[Region](), list[Mapping[int, int]]()
    for device, items in requirements.planned.items():
        alignment, placement = _alignment(device), placements[device]
        plain = sum(-(-buffer.size // alignment) * alignment for _, buffer in items)
        bounds = placement.size, alignment, True, placement.lower_bound, plain, tuple(reserved[device])
        region = Region(device, 0, requirements.end, *bounds)
        offsets.append({index: placement.offsets[buffer.name] for index, buffer in items})
        regions.append(region)
    plan = _assign_homes(requirements, regions, offsets, Home.RECORDING)
    bound = sum(region.lower_bound for region in regions)
    return replace(plan, peak=plan.size, lower_bound=bound, plain=sum(region.plain for region in regions))


def _plan_calls(requirements: Requirements) -> MemoryPlan:
    """Memory of one call: temporaries share regions; the rest is allocated per call.

    The peak is no higher than if each storage were allocated separately, from first to last use. In a step in which
    nobody knows what else is taken, regions therefore take no more than the storages in them.
    """
    own = {index: buffer for items in requirements.planned.values() for index, buffer in items}
    unplanned = [*requirements.donated, *(b for items in requirements.unplanned.values() for _, b in items)]
    others = [*unplanned, *(b for index, b in own.items() if index not in requirements.temporaries)]
    peak_limit, alignment = most_alive([*unplanned, *own.values()]), _alignment(_CPU)
    others += [Buffer("unknown", peak_limit, step, step + 1) for step in requirements.unknown]
    shared = share_regions(requirements.temporaries, others, peak_limit, alignment, requirements.apart)
    regions = [Region(_CPU, one.begin, one.end, one.size, alignment) for one in shared]
    plan = _assign_homes(requirements, regions, [one.offsets for one in shared], Home.CALL)
    per_call = [buffer for index, buffer in own.items() if plan.places[index].home is Home.CALL]
    bound, plain = most_alive(own.values()), sum(buffer.size for buffer in own.values())
    return replace(plan, peak=most_alive([*per_call, *regions]), lower_bound=bound, plain=plain)


def _assign_homes(
    requirements: Requirements, regions: Sequence[Region], offsets: Sequence[Mapping[int, int]], unplaced_home: Home
) -> MemoryPlan:
    """Give every storage a home.

    Args:
        offsets: by region: offsets of its storages.
        unplaced_home: home of allocations of known size that lie in no region.
    """
    homes = {Origin.INPUT: Home.INPUT, Origin.CONSTANT: Home.CONSTANT, Origin.EXTERN: Home.OPERATOR}
    places = [
        Place(homes.get(storage.origin) or (unplaced_home if storage.index in requirements.sizes else Home.CALL))
        for storage in requirements.facts.storages
    ]
    for number, inside in enumerate(offsets):
        for index, offset in inside.items():
            places[index] = Place(Home.REGION, number, offset)
    return MemoryPlan(tuple(places), tuple(regions), requirements.sizes, requirements.outputs)


def plan_pair(
    first: SizedProgram, second: SizedProgram, saved_as: Mapping[int, Sequence[str]]
) -> tuple[PlacementHint, PlacementHint]:
    """Plan two programs together. Only the second gets what the first saves for it.

    ::

        steps     first program | second program
        saved          s s s s s|s s s              one live range, up to the last use in the second

    Args:
        saved_as: by storage of the first program: the inputs of the second that are this storage.
    """
    timeline = _Timeline.of([Requirements.of(first), Requirements.of(second)], saved_as)
    placements = {d: plan_memory(items, _alignment(d)) for d, items in timeline.planned.items()}

    def half(which: str) -> PlacementHint:
        return {
            device: Placement({n[1:]: o for n, o in p.offsets.items() if n[0] == which}, p.size, p.lower_bound)
            for device, p in placements.items()
        }

    return half("0"), half("1")


def predict_memory(programs: Sequence[SizedProgram], saved_as: Mapping[int, Sequence[str]]) -> list[Prediction]:
    """Predict the memory of one program, or of two planned together, by device.

    Args:
        saved_as: by storage of the first program: the inputs of the second that are this storage.
    """
    requirements = [Requirements.of(program) for program in programs]
    timeline, copies = _Timeline.of(requirements, saved_as), sum(own.copies for own in requirements)
    found = []
    frozen = programs[0].frozen
    for device in {**timeline.planned, **timeline.unplanned}:
        planned = timeline.planned.get(device, [])
        own_copies = copies if device == programs[0].program.device else 0
        unplanned = [*timeline.unplanned.get(device, ()), Buffer("copies", own_copies, 0, timeline.end)]
        found.append(
            Prediction(
                device,
                arena=plan_memory(planned, _alignment(device)).size if frozen else 0,
                operators=most_alive(unplanned),
                outside=most_alive(unplanned if frozen else [*planned, *unplanned]),
                outputs=timeline.outputs.get(device, 0),
            )
        )
    return found


@dataclass(frozen=True)
class _Timeline:
    """Buffers of one program, or of two in sequence; the second's steps follow the first's.

    Names are prefixed with the program's number.

    Attributes:
        unplanned: what operators allocate themselves.
        outputs: bytes of those that the caller has in the end: no input buffers, no static copies.
        end: the step after the last.
    """

    planned: dict[torch.device, list[Buffer]]
    unplanned: dict[torch.device, list[Buffer]]
    outputs: Mapping[torch.device, int]
    end: int

    @classmethod
    def of(cls, requirements: Sequence[Requirements], saved_as: Mapping[int, Sequence[str]]) -> _Timeline:
        planned: dict[torch.device, list[Buffer]] = defaultdict(list)
        unplanned: dict[torch.device, list[Buffer]] = defaultdict(list)
        outputs: dict[torch.device, int] = defaultdict(int)
        begin, last = 0, sum(own.end for own in requirements)
        for number, own in enumerate(requirements):
            after = requirements[number + 1] if number + 1 < len(requirements) else None
            both: Any = ((planned, own.planned), (unplanned, own.unplanned))
            for found, items in both:
                for device, buffers in items.items():
                    for index, b in buffers:
                        end = b.end
                        if after is not None and index in own.handed_out:
                            end = own.end + after.end_of(saved_as.get(index, ()))
                        found[device].append(Buffer(f"{number}{b.name}", b.size, begin + b.begin, begin + end))
                        if begin + end == last and own.is_output(index):
                            outputs[device] += b.size
            begin += own.end
        return cls(planned, unplanned, outputs, begin)


def _lay_out(
    requirements: Requirements,
    device: torch.device,
    reserved: Sequence[Reserved],
    hint: Placement | None,
    previous: MemoryPlan | None,
) -> Placement:
    items = requirements.planned[device]
    outputs = [b.name for index, b in items if index in requirements.outputs]
    known = previous.inside(previous.arenas[device]) if previous is not None and device in previous.arenas else {}
    before = {b.name: known[index] for index, b in items if index in known}
    return lay_out_arena([b for _, b in items], outputs, reserved, _alignment(device), hint, before)


def _alignment(device: torch.device) -> int:
    return _ALIGNMENT if device.type == "cpu" else _ACCELERATOR_ALIGNMENT
