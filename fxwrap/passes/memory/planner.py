"""PLAN: live ranges, and offsets into one arena per device."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...packing import Buffer, Placement, plan_memory
from ...packing.reserved import SEARCH_S, Fixed, fits, lay_out_arena, most_alive
from ...plan import ArenaPlan, MemoryPlan, PlacementHint, Planned, Prediction, Taken
from .free_spans import free_spans_of
from .regions import share_regions
from .requirements import Requirements

# Bytes. Wide vector loads on a CPU want a cache line; on accelerators, what their caching allocators give.
_ALIGNMENT = {"cpu": 64}
_ACCELERATOR_ALIGNMENT = 512


def plan_program(
    planned: Planned,
    taken: Callable[[torch.device], Sequence[Taken]] = lambda device: (),
    hint: PlacementHint | None = None,
    like: MemoryPlan | None = None,
) -> MemoryPlan:
    """Plan one recording of a program.

    Args:
        taken: what outputs of other recordings have in a device's arena.
        hint: from a plan for this program and another: followed where what is taken allows it.
        like: a plan for other sizes: the order of its offsets is tried first.

    Raises:
        PlanError: a communication is under way before the program begins or after it ends.
    """
    requirements = Requirements.of(planned)
    if not planned.frozen:
        return _plan_calls(requirements)
    there = {device: tuple(taken(device)) for device in requirements.planned}
    fixed = {
        device: [Fixed(one.low, one.high, 0, requirements.end_of(one)) for one in there[device]] for device in there
    }
    found = hint
    if found is None or not _allowed(found, requirements, fixed):
        before = {d: one.placement.offsets for d, one in like.arenas.items()} if like is not None else {}
        found = {d: _lay_out(requirements, d, fixed[d], before.get(d, {})) for d in requirements.planned}
    arenas: dict[torch.device, ArenaPlan] = {}
    location: dict[int, tuple[torch.device, int]] = {}
    for device, items in requirements.planned.items():
        alignment = _alignment(device)
        buffers = {buffer.name: buffer for _, buffer in items}
        plain = sum(-(-buffer.size // alignment) * alignment for _, buffer in items)
        offsets = found[device].offsets
        arenas[device] = ArenaPlan(device, buffers, found[device], alignment, plain, there[device])
        location.update({index: (device, offsets[b.name]) for index, b in items})
    main = planned.program.device
    if planned.places_results and main in arenas:
        workspace = free_spans_of(planned.program, arenas[main], location, fixed[main])
        arenas[main] = dataclasses.replace(arenas[main], workspace=workspace)
    bound = sum(arena.placement.lower_bound for arena in arenas.values())
    plain = sum(arena.plain for arena in arenas.values())
    plan = MemoryPlan(arenas, location, requirements.outputs, requirements.sizes, lower_bound=bound, plain=plain)
    return dataclasses.replace(plan, peak=plan.size)


def _plan_calls(requirements: Requirements) -> MemoryPlan:
    """Memory that comes and goes with each call: regions for temporaries, the rest allocated where it is needed.

    With them no more is taken at any time than if every storage came with its first use and went with its last.
    """
    own = {index: buffer for items in requirements.planned.values() for index, buffer in items}
    unplanned = [*requirements.donated, *(b for items in requirements.unplanned.values() for _, b in items)]
    others = [*unplanned, *(b for index, b in own.items() if index not in requirements.temporaries)]
    room = most_alive([*unplanned, *own.values()])
    regions = share_regions(requirements.temporaries, others, room, _ALIGNMENT["cpu"], requirements.apart)
    per_call = requirements.allocations.difference(*(region.offsets for region in regions))
    lasting = [buffer for index, buffer in own.items() if index in per_call]
    return MemoryPlan(
        {},
        {},
        requirements.outputs,
        requirements.sizes,
        regions,
        per_call,
        peak=most_alive([*lasting, *regions]),
        lower_bound=most_alive(own.values()),
        plain=sum(buffer.size for buffer in own.values()),
    )


def plan_pair(
    first: Planned, second: Planned, saved_as: Mapping[int, Sequence[Node]]
) -> tuple[PlacementHint, PlacementHint]:
    """Plan memory for two programs, of which the second gets what the first saves for it, and nobody else does.

    ::

        steps     first program | second program
        saved          s s s s s|s s s              one live range, up to the last use in the second

    Args:
        saved_as: inputs of the second program by storage of the first.
    """
    chain = _Chain.of([Requirements.of(first), Requirements.of(second)], saved_as)
    placements = {}
    for device, items in chain.planned.items():
        placements[device] = plan_memory(items, _alignment(device), SEARCH_S)

    def half(which: int) -> PlacementHint:
        def own(name: str) -> bool:
            return name.startswith(str(which))

        return {
            device: Placement({n[1:]: o for n, o in p.offsets.items() if own(n)}, p.size, p.lower_bound)
            for device, p in placements.items()
        }

    return half(0), half(1)


def predict_memory(programs: Sequence[Planned], saved_as: Mapping[int, Sequence[Node]]) -> list[Prediction]:
    """The memory of a program, or of two that are planned together, by device.

    Args:
        saved_as: inputs of the second program by storage of the first.
    """
    requirements = [Requirements.of(program) for program in programs]
    chain, copies = _Chain.of(requirements, saved_as), sum(own.copies for own in requirements)
    found = []
    frozen = programs[0].frozen
    for device in {**chain.planned, **chain.unplanned}:
        planned = chain.planned.get(device, [])
        own_copies = copies if device == programs[0].program.device else 0
        unplanned = [*chain.unplanned.get(device, ()), Buffer("copies", own_copies, 0, chain.end)]
        found.append(
            Prediction(
                device,
                arena=plan_memory(planned, _alignment(device), SEARCH_S).size if frozen else 0,
                operators=most_alive(unplanned),
                outside=most_alive(unplanned if frozen else [*planned, *unplanned]),
                outputs=sum(b.size for b in (*planned, *unplanned) if b.end == chain.end),
            )
        )
    return found


@dataclass(frozen=True)
class _Chain:
    """Storages of one program, or of two of which the second gets what the first saves; steps count on.

    Names begin with the number of their program.

    Attributes:
        unplanned: what operators allocate themselves.
        end: the step after the last.
    """

    planned: dict[torch.device, list[Buffer]]
    unplanned: dict[torch.device, list[Buffer]]
    end: int

    @classmethod
    def of(cls, requirements: Sequence[Requirements], saved_as: Mapping[int, Sequence[Node]] | None = None) -> _Chain:
        planned: dict[torch.device, list[Buffer]] = defaultdict(list)
        unplanned: dict[torch.device, list[Buffer]] = defaultdict(list)
        begin = 0
        for number, own in enumerate(requirements):
            after = requirements[number + 1] if number + 1 < len(requirements) else None
            both: Any = ((planned, own.planned), (unplanned, own.unplanned))
            for found, items in both:
                for device, buffers in items.items():
                    for index, b in buffers:
                        end = b.end
                        if after is not None and index in own.handed_out:
                            end = own.end + after.end_of(Taken(0, 0, tuple((saved_as or {}).get(index, ()))))
                        found[device].append(Buffer(f"{number}{b.name}", b.size, begin + b.begin, begin + end))
            begin += own.end
        return cls(planned, unplanned, begin)


def _allowed(hint: PlacementHint, requirements: Requirements, fixed: Mapping[torch.device, Sequence[Fixed]]) -> bool:
    for device, items in requirements.planned.items():
        buffers = [b for _, b in items]
        placement = hint.get(device)
        if placement is None or not fits(placement.offsets, buffers, fixed[device], _alignment(device)):
            return False
    return True


def _lay_out(
    requirements: Requirements,
    device: torch.device,
    fixed: Sequence[Fixed],
    like: Mapping[str, int],
) -> Placement:
    items = requirements.planned[device]
    lasting = [b.name for index, b in items if index in requirements.outputs]
    return lay_out_arena([b for _, b in items], lasting, fixed, _alignment(device), like)


def _alignment(device: torch.device) -> int:
    return _ALIGNMENT.get(device.type, _ACCELERATOR_ALIGNMENT)
