"""PLAN: live ranges, and offsets into one arena per device."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..packing import Buffer, Placement, plan_memory
from ..plan import ArenaPlan, MemoryPlan, Planned, Prediction, Suggestion, Taken
from .arena_layout import SEARCH_S, Fixed, fits, lay_out_arena, most_alive
from .memory_needs import Needs
from .regions import share_regions
from .scratch import scratch_of

# Bytes. Wide vector loads on a CPU want a cache line; on accelerators, what their caching allocators give.
_ALIGNMENT = {"cpu": 64}
_ACCELERATOR_ALIGNMENT = 512


def plan_program(
    planned: Planned,
    taken: Callable[[torch.device], Sequence[Taken]] = lambda device: (),
    suggestion: Suggestion | None = None,
    like: MemoryPlan | None = None,
) -> MemoryPlan:
    """Plan one recording of a program.

    Args:
        taken: what outputs of other recordings have in a device's arena.
        suggestion: from a plan for this program and another: followed where what is taken allows it.
        like: a plan for other sizes: the order of its offsets is tried first.

    Raises:
        PlanError: a communication is under way before the program begins or after it ends.
    """
    needs = Needs.of(planned)
    if not planned.frozen:
        return _plan_calls(needs)
    there = {device: tuple(taken(device)) for device in needs.planned}
    fixed = {device: [Fixed(one.low, one.high, 0, needs.end_of(one)) for one in there[device]] for device in there}
    found = suggestion
    if found is None or not _allowed(found, needs, fixed):
        before = {d: one.placement.offsets for d, one in like.arenas.items()} if like is not None else {}
        found = {d: _lay_out(needs, d, fixed[d], before.get(d, {})) for d in needs.planned}
    arenas: dict[torch.device, ArenaPlan] = {}
    location: dict[int, tuple[torch.device, int]] = {}
    for device, items in needs.planned.items():
        alignment = _alignment(device)
        buffers = {buffer.name: buffer for _, buffer in items}
        plain = sum(-(-buffer.size // alignment) * alignment for _, buffer in items)
        offsets = found[device].offsets
        arenas[device] = ArenaPlan(device, buffers, found[device], alignment, plain, there[device])
        location.update({index: (device, offsets[b.name]) for index, b in items})
    main = planned.program.device
    if planned.places_results and main in arenas:
        scratch = scratch_of(planned.program, arenas[main], location, fixed[main])
        arenas[main] = dataclasses.replace(arenas[main], scratch=scratch)
    bound = sum(arena.placement.lower_bound for arena in arenas.values())
    plain = sum(arena.plain for arena in arenas.values())
    plan = MemoryPlan(arenas, location, needs.outputs, needs.sizes, lower_bound=bound, plain=plain)
    return dataclasses.replace(plan, peak=plan.size)


def _plan_calls(needs: Needs) -> MemoryPlan:
    """Memory that comes and goes with each call: regions for temporaries, the rest allocated where it is needed.

    With them no more is taken at any time than if every storage came with its first use and went with its last.
    """
    own = {index: buffer for items in needs.planned.values() for index, buffer in items}
    beside = [*needs.donated, *(b for items in needs.beside.values() for _, b in items)]
    others = [*beside, *(b for index, b in own.items() if index not in needs.temporaries)]
    room = most_alive([*beside, *own.values()])
    regions = share_regions(needs.temporaries, others, room, _ALIGNMENT["cpu"], needs.apart)
    per_call = needs.allocations.difference(*(region.offsets for region in regions))
    lasting = [buffer for index, buffer in own.items() if index in per_call]
    return MemoryPlan(
        {},
        {},
        needs.outputs,
        needs.sizes,
        regions,
        per_call,
        peak=most_alive([*lasting, *regions]),
        lower_bound=most_alive(own.values()),
        plain=sum(buffer.size for buffer in own.values()),
    )


def plan_pair(
    first: Planned, second: Planned, handed_on: Mapping[int, Sequence[Node]]
) -> tuple[Suggestion, Suggestion]:
    """Plan memory for two programs, of which the second gets what the first saves for it, and nobody else does.

    ::

        steps     first program | second program
        saved          s s s s s|s s s              one live range, up to the last use in the second

    Args:
        handed_on: inputs of the second program by storage of the first.
    """
    chain = _Chain.of([Needs.of(first), Needs.of(second)], handed_on)
    placements = {}
    for device, items in chain.planned.items():
        placements[device] = plan_memory(items, _alignment(device), SEARCH_S)

    def half(which: int) -> Suggestion:
        def own(name: str) -> bool:
            return name.startswith(str(which))

        return {
            device: Placement({n[1:]: o for n, o in p.offsets.items() if own(n)}, p.size, p.lower_bound)
            for device, p in placements.items()
        }

    return half(0), half(1)


def predict_memory(programs: Sequence[Planned], handed_on: Mapping[int, Sequence[Node]]) -> list[Prediction]:
    """The memory of a program, or of two that are planned together, by device.

    Args:
        handed_on: inputs of the second program by storage of the first.
    """
    needs = [Needs.of(program) for program in programs]
    chain, copies = _Chain.of(needs, handed_on), sum(own.copies for own in needs)
    found = []
    frozen = programs[0].frozen
    for device in {**chain.planned, **chain.beside}:
        planned = chain.planned.get(device, [])
        own_copies = copies if device == programs[0].program.device else 0
        beside = [*chain.beside.get(device, ()), Buffer("copies", own_copies, 0, chain.end)]
        found.append(
            Prediction(
                device,
                arena=plan_memory(planned, _alignment(device), SEARCH_S).size if frozen else 0,
                operators=most_alive(beside),
                outside=most_alive(beside if frozen else [*planned, *beside]),
                outputs=sum(b.size for b in (*planned, *beside) if b.end == chain.end),
            )
        )
    return found


@dataclass(frozen=True)
class _Chain:
    """Storages of one program, or of two of which the second gets what the first saves; steps count on.

    Names begin with the number of their program.

    Attributes:
        beside: what operators allocate themselves.
        end: the step after the last.
    """

    planned: dict[torch.device, list[Buffer]]
    beside: dict[torch.device, list[Buffer]]
    end: int

    @classmethod
    def of(cls, needs: Sequence[Needs], handed_on: Mapping[int, Sequence[Node]] | None = None) -> _Chain:
        planned: dict[torch.device, list[Buffer]] = defaultdict(list)
        beside: dict[torch.device, list[Buffer]] = defaultdict(list)
        begin = 0
        for number, own in enumerate(needs):
            after = needs[number + 1] if number + 1 < len(needs) else None
            both: Any = ((planned, own.planned), (beside, own.beside))
            for found, items in both:
                for device, buffers in items.items():
                    for index, b in buffers:
                        end = b.end
                        if after is not None and index in own.handed_out:
                            end = own.end + after.end_of(Taken(0, 0, tuple((handed_on or {}).get(index, ()))))
                        found[device].append(Buffer(f"{number}{b.name}", b.size, begin + b.begin, begin + end))
            begin += own.end
        return cls(planned, beside, begin)


def _allowed(suggestion: Suggestion, needs: Needs, fixed: Mapping[torch.device, Sequence[Fixed]]) -> bool:
    for device, items in needs.planned.items():
        buffers = [b for _, b in items]
        placement = suggestion.get(device)
        if placement is None or not fits(placement.offsets, buffers, fixed[device], _alignment(device)):
            return False
    return True


def _lay_out(
    needs: Needs,
    device: torch.device,
    fixed: Sequence[Fixed],
    like: Mapping[str, int],
) -> Placement:
    items = needs.planned[device]
    lasting = [b.name for index, b in items if index in needs.outputs]
    return lay_out_arena([b for _, b in items], lasting, fixed, _alignment(device), like)


def _alignment(device: torch.device) -> int:
    return _ALIGNMENT.get(device.type, _ACCELERATOR_ALIGNMENT)
