"""PLAN: live ranges, and offsets into one arena per device."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..packing import Buffer, Placement, plan_memory
from ..plan import (
    ArenaPlan,
    MemoryPlan,
    Planned,
    Prediction,
    Slab,
    Suggestion,
    Taken,
)
from .arena_layout import SEARCH_S, Fixed, alive_at_steps, fits, lay_out_arena, most_alive
from .memory_needs import Needs
from .residency import choose_anew
from .scratch import scratch_of
from .slabs import share_slabs

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
    there = {device: tuple(taken(device)) for device in needs.planned}
    fixed = {device: [Fixed(one.low, one.high, 0, needs.end_of(one)) for one in there[device]] for device in there}
    found = suggestion
    if found is None or not _allowed(found, needs, fixed):
        chain = _Chain.of([needs])
        anew = frozenset(name[1:] for name in chain.anew)
        before = {d: one.placement.offsets for d, one in like.arenas.items()} if like is not None else {}
        placements = {d: _lay_out(needs, d, anew, fixed[d], before.get(d, {})) for d in needs.planned}
        found = Suggestion(placements, anew, chain.slabs[0])
    arenas: dict[torch.device, ArenaPlan] = {}
    location: dict[int, tuple[torch.device, int]] = {}
    for device, items in needs.planned.items():
        alignment = _alignment(device)
        buffers = {buffer.name: buffer for _, buffer in items if buffer.name not in found.anew}
        plain = sum(-(-buffer.size // alignment) * alignment for _, buffer in items)
        offsets = found.placements[device].offsets
        arenas[device] = ArenaPlan(device, buffers, found.placements[device], alignment, plain, there[device])
        location.update({index: (device, offsets[b.name]) for index, b in items if b.name in buffers})
    anew_indices = frozenset(i for items in needs.planned.values() for i, b in items if b.name in found.anew)
    main = planned.program.device
    if planned.places_results and main in arenas:
        scratch = scratch_of(planned.program, arenas[main], location, fixed[main])
        arenas[main] = dataclasses.replace(arenas[main], scratch=scratch)
    return MemoryPlan(arenas, location, needs.outputs, needs.sizes, anew_indices, found.slabs)


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
        placements[device] = plan_memory((b for b in items if b.name not in chain.anew), _alignment(device), SEARCH_S)

    def half(which: int) -> Suggestion:
        def own(name: str) -> bool:
            return name.startswith(str(which))

        split = {
            device: Placement({n[1:]: o for n, o in p.offsets.items() if own(n)}, p.size, p.lower_bound)
            for device, p in placements.items()
        }
        return Suggestion(split, frozenset(name[1:] for name in chain.anew if own(name)), chain.slabs[which])

    return half(0), half(1)


def predict_memory(programs: Sequence[Planned], handed_on: Mapping[int, Sequence[Node]]) -> list[Prediction]:
    """The memory of a program, or of two that are planned together, by device.

    Args:
        handed_on: inputs of the second program by storage of the first.
    """
    needs = [Needs.of(program) for program in programs]
    chain, copies = _Chain.of(needs, handed_on), sum(own.copies for own in needs)
    found = []
    for device in {**chain.planned, **chain.beside}:
        alignment = _alignment(device)
        inside = [b for b in chain.planned.get(device, ()) if b.name not in chain.anew]
        anew = [b for b in chain.planned.get(device, ()) if b.name in chain.anew]
        own_copies = copies if device == programs[0].program.device else 0
        beside = [*chain.beside.get(device, ()), Buffer("copies", own_copies, 0, chain.end)]
        found.append(
            Prediction(
                device,
                arena=plan_memory(inside, alignment, SEARCH_S).size,
                anew=_most_alive(anew),
                operators=_most_alive(beside),
                outside=_most_alive([*anew, *beside]),
                outputs=sum(b.size for b in (*inside, *anew, *beside) if b.end == chain.end),
            )
        )
    return found


def _most_alive(buffers: Sequence[Buffer]) -> int:
    return most_alive((buffer.size, buffer.begin, buffer.end) for buffer in buffers)


@dataclass(frozen=True)
class _Chain:
    """Storages of one program, or of two of which the second gets what the first saves; steps count on.

    Names begin with the number of their program.

    Attributes:
        beside: what operators allocate themselves.
        anew: names of storages that are allocated at every call.
        slabs: what of them shares memory, by program, in the program's own steps.
        end: the step after the last.
    """

    planned: dict[torch.device, list[Buffer]]
    beside: dict[torch.device, list[Buffer]]
    anew: frozenset[str]
    slabs: tuple[tuple[Slab, ...], ...]
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
        asked = {f"{number}{name}" for number, own in enumerate(needs) for name in own.asked}
        movable = {f"{number}{name}" for number, own in enumerate(needs) for name in own.movable}
        brief = {f"{number}{b.name}" for number, own in enumerate(needs) for b in own.temporaries.values()}
        anew = frozenset[str]()
        for device, buffers in planned.items():
            anew |= choose_anew(buffers, beside.get(device, ()), _alignment(device), movable, asked, movable - brief)
        outside = [b for found in planned.values() for b in found if b.name in anew]
        outside += itertools.chain(*beside.values())
        slabs = _slabs(needs, anew, outside)
        return cls(planned, beside, anew, slabs, begin)


def _slabs(needs: Sequence[Needs], anew: frozenset[str], outside: Sequence[Buffer]) -> tuple[tuple[Slab, ...], ...]:
    """What shares memory beside an arena, by program, without more being taken in a chain of programs."""
    room, first, found = _most_alive(outside), 0, []
    for number, own in enumerate(needs):
        buffers = {index: b for index, b in own.temporaries.items() if f"{number}{b.name}" in anew}
        names = {f"{number}{b.name}" for b in buffers.values()}
        others = ((b.size, b.begin, b.end) for b in outside if b.name not in names)
        taken = alive_at_steps(others, first + own.end, first)
        found.append(share_slabs(buffers, taken, room, _ALIGNMENT["cpu"], own.apart))
        first += own.end
    return tuple(found)


def _allowed(suggestion: Suggestion, needs: Needs, fixed: Mapping[torch.device, Sequence[Fixed]]) -> bool:
    for device, items in needs.planned.items():
        buffers = [b for _, b in items if b.name not in suggestion.anew]
        placement = suggestion.placements.get(device)
        if placement is None or not fits(placement.offsets, buffers, fixed[device], _alignment(device)):
            return False
    return True


def _lay_out(
    needs: Needs,
    device: torch.device,
    anew: frozenset[str],
    fixed: Sequence[Fixed],
    like: Mapping[str, int],
) -> Placement:
    items = [(index, b) for index, b in needs.planned[device] if b.name not in anew]
    lasting = [b.name for index, b in items if index in needs.outputs]
    return lay_out_arena([b for _, b in items], lasting, fixed, _alignment(device), like)


def _alignment(device: torch.device) -> int:
    return _ALIGNMENT.get(device.type, _ACCELERATOR_ALIGNMENT)
