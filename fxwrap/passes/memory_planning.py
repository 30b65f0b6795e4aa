"""PLAN: live ranges, and offsets into one arena per device."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..errors import PlanError
from ..host_graph import control_flow_of, counts_from_storage, effective_users, only_computes, output_node
from ..packing import Buffer, Placement, plan_memory
from ..plan import (
    ArenaPlan,
    MemoryPlan,
    Origin,
    Planned,
    Prediction,
    ProgramPlan,
    Slab,
    StorageFacts,
    Suggestion,
    Taken,
    Verdict,
)
from .arena_layout import SEARCH_S, Fixed, alive_at_steps, fits, lay_out_arena, most_alive
from .operator_results import placeable_results
from .residency import choose_anew
from .slabs import share_slabs
from .symbols import concrete, hinted_layout, storage_bytes

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
    needs = _Needs.of(planned)
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
    chain = _Chain.of([_Needs.of(first), _Needs.of(second)], handed_on)
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
    needs = [_Needs.of(program) for program in programs]
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
    def of(cls, needs: Sequence[_Needs], handed_on: Mapping[int, Sequence[Node]] | None = None) -> _Chain:
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


def _slabs(needs: Sequence[_Needs], anew: frozenset[str], outside: Sequence[Buffer]) -> tuple[tuple[Slab, ...], ...]:
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


def _stays(planned: Planned) -> frozenset[int]:
    """Storages that need memory of the plan."""
    facts = planned.program.facts
    if planned.frozen:
        # A captured partition could allocate from the pool of its graph; but that gives whole blocks which earlier
        # captures have freed, or new ones, and grew by as much as the arena shrank, or more.
        return frozenset(storage.index for storage in facts.storages)
    # What a communication works on must live until it is waited for, wherever that is.
    begun = frozenset[Node]().union(*facts.ends.values())
    return frozenset[int]().union(*(facts.touched(node) for node in (*begun, *facts.ends)))


def _temporaries(program: ProgramPlan) -> dict[int, tuple[int, int]]:
    """Allocated storages that nobody can have after a call, and the steps in which they are named."""
    found: dict[int, tuple[int, int]] = {}
    kept = set(program.facts.named_in(n for p in program.partitions if p.index in program.compiled for n in p.nodes))
    kept |= _handed_out(program) | {s.index for s in program.facts.storages if s.origin is not Origin.ALLOCATION}
    for step, node in enumerate(program.schedule):
        named = program.facts.named_in([node])
        found.update({index: (found.get(index, (step, step))[0], step + 1) for index in named})
        if not only_computes(node):
            kept |= named
    return {index: steps for index, steps in found.items() if index not in kept}


def _counted_from(program: ProgramPlan) -> frozenset[int]:
    """Storages from the start of which an operator may count."""
    nodes = [n for n in program.graph.graph.nodes if counts_from_storage(n) or control_flow_of(n) is not None]
    return program.facts.behind(operand for node in nodes for operand in node.all_input_nodes)


def _allowed(suggestion: Suggestion, needs: _Needs, fixed: Mapping[torch.device, Sequence[Fixed]]) -> bool:
    for device, items in needs.planned.items():
        buffers = [b for _, b in items if b.name not in suggestion.anew]
        placement = suggestion.placements.get(device)
        if placement is None or not fits(placement.offsets, buffers, fixed[device], _alignment(device)):
            return False
    return True


def _lay_out(
    needs: _Needs,
    device: torch.device,
    anew: frozenset[str],
    fixed: Sequence[Fixed],
    like: Mapping[str, int],
) -> Placement:
    items = [(index, b) for index, b in needs.planned[device] if b.name not in anew]
    lasting = [b.name for index, b in items if index in needs.outputs]
    return lay_out_arena([b for _, b in items], lasting, fixed, _alignment(device), like)


@dataclass(frozen=True)
class _Needs:
    """What a program needs of arenas.

    Attributes:
        planned: storages to place, by device.
        beside: what operators allocate themselves, as far as sizes were known when the program was compiled; None for
            what is no storage.
        asked: names of what shall be allocated when it is needed.
        movable: names of what may be.
        temporaries: of these, what nobody can have after a call, in the steps that name them.
        apart: of these, what an operator works on that counts from the start of a storage.
        copies: bytes that are kept for what eager work returns and captured work reads.
        end: the step after the last.
    """

    facts: StorageFacts
    planned: Mapping[torch.device, list[tuple[int, Buffer]]]
    beside: Mapping[torch.device, list[tuple[int | None, Buffer]]]
    sizes: Mapping[int, int]
    outputs: frozenset[int]
    handed_out: frozenset[int]
    ranges: Mapping[int, tuple[int, int]]
    asked: frozenset[str]
    movable: frozenset[str]
    temporaries: Mapping[int, Buffer]
    apart: frozenset[int]
    copies: int
    end: int

    def end_of(self, taken: Taken) -> int:
        """The step from which on others may have the bytes of another program's output."""
        indices = self.facts.behind(taken.nodes)
        if not indices or indices & self.handed_out:
            return self.end
        return max(self.ranges.get(index, (0, 0))[1] for index in indices)

    @classmethod
    def of(cls, planned: Planned) -> _Needs:
        program = planned.program
        if program.facts.in_flight:
            # An arena is used by others between calls, and an input or output that is copied too early is wrong.
            names = sorted(program.facts.storages[index].name for index in program.facts.in_flight)
            raise PlanError(
                f"a communication on {', '.join(names)} is under way at a call's begin or end",
                expected="every collective to be waited for in the graph that begins it",
                remedy="wait for it inside of the compiled region, with wait_tensor",
            )
        ranges = live_ranges(program)
        outputs = output_storages(program)
        written = frozenset[int]().union(*program.facts.writes.values())
        handed_out = _handed_out(program)
        end = len(program.schedule) + 1
        sizes: dict[int, int] = {}
        items: dict[torch.device, list[tuple[int, Buffer]]] = defaultdict(list)
        elsewhere = frozenset().union(*(compiled.signature.temporaries for compiled in program.compiled.values()))
        for storage in program.facts.storages:
            if storage.index in elsewhere:
                continue  # whoever compiled the partition allocates it
            first, last = ranges.get(storage.index, (0, 1))
            if storage.origin is Origin.ALLOCATION:
                layout = concrete(storage.node.args[:2], planned.numbers)
                if layout is None:
                    continue  # its size depends on data: allocated when it is known
                kwargs: Mapping[str, Any] = storage.node.kwargs
                sizes[storage.index] = storage_bytes(layout[0], layout[1], kwargs["dtype"])
                device = kwargs["device"]
                if kwargs.get("pin_memory") or not (storage.index in ranges or storage.index in outputs):
                    continue
                begin, stop = first, end if storage.index in outputs else last
            elif storage.node in planned.places:
                device, sizes[storage.index] = planned.places[storage.node]
                # Filled before the first step; an updated one is copied back after the last.
                begin, stop = 0, end if storage.index in written | handed_out else last
            else:
                continue
            buffer = Buffer(storage.name, sizes[storage.index], begin, stop)
            items[device].append((storage.index, buffer))
        results, made_at = _placed_results(planned, handed_out), {n: i for i, n in enumerate(program.schedule)}
        outputs |= handed_out & results.keys()
        for index, nbytes in results.items():
            begin = made_at[program.facts.storages[index].node]
            _, last = ranges.get(index, (begin, begin + 1))
            stop = end if index in outputs else max(last, begin + 1)
            sizes[index] = nbytes
            buffer = Buffer(program.facts.storages[index].name, nbytes, begin, stop)
            items[program.device].append((index, buffer))
        placed = {index for buffers in items.values() for index, _ in buffers}
        beside = _beside(planned, ranges, handed_out, end, placed)
        stays = _stays(planned)
        free = {index: b.name for buffers in items.values() for index, b in buffers if index not in stays}
        asked = frozenset(name for index, name in free.items() if index in planned.anew)
        temporaries = {
            index: Buffer(free[index], sizes[index], *steps)
            for index, steps in (_temporaries(program).items() if free else ())
            if index in free
        }
        return cls(
            facts=program.facts,
            planned=items,
            beside=beside,
            sizes=sizes,
            outputs=outputs,
            handed_out=handed_out,
            ranges=ranges,
            asked=asked,
            movable=frozenset(free.values()),
            temporaries=temporaries,
            apart=_counted_from(program) if temporaries else frozenset(),
            copies=_copies(planned, placed) if planned.frozen else 0,
            end=end,
        )


def _placed_results(planned: Planned, handed_out: frozenset[int]) -> dict[int, int]:
    """Bytes of what operators return that lies in the plan, by storage; if handed out, of captured work."""
    program = planned.program
    if not planned.places_results:
        return {}
    work = {n: p for p in program.partitions if p.index not in program.compiled for n in p.nodes}
    found = {}
    for index, nbytes in placeable_results(program.facts, program.graph, program.device).items():
        node = program.facts.storages[index].node
        if node not in work or program.verdicts[node].data_dependent:
            continue
        if index not in handed_out or work[node].verdict is Verdict.CAPTURED:
            found[index] = nbytes
    return found


def _beside(
    planned: Planned,
    ranges: Mapping[int, tuple[int, int]],
    handed_out: frozenset[int],
    end: int,
    placed: Collection[int],
) -> dict[torch.device, list[tuple[int | None, Buffer]]]:
    """What operators allocate themselves: results, from the call that makes them to the last use, and workspace."""
    program = planned.program
    steps = {node: step for step, node in enumerate(program.schedule)}
    sizes = hinted_sizes(program.facts)
    found: dict[torch.device, list[tuple[int | None, Buffer]]] = defaultdict(list)
    for node, nbytes in planned.workspace.items():
        buffer = Buffer(f"{node.name} workspace", nbytes, steps[node], steps[node] + 1)
        found[program.device].append((None, buffer))
    for storage in program.facts.storages:
        if storage.index in placed:
            continue
        if storage.origin is Origin.EXTERN and storage.node in steps and sizes.get(storage.index):
            begin = steps[storage.node]
            _, last = ranges.get(storage.index, (begin, begin + 1))
            stop = end if storage.index in handed_out else max(last, begin + 1)
            found[storage.value.device].append(
                (storage.index, Buffer(storage.name, sizes[storage.index], begin, stop))
            )
    return found


def _copies(planned: Planned, placed: Collection[int]) -> int:
    """Bytes of what eager work returns and others than its partition get: it is copied to memory that stays."""
    program = planned.program
    partition_of = {node: partition for partition in program.partitions for node in partition.nodes}
    sizes, found = hinted_sizes(program.facts), 0
    for storage in program.facts.storages:
        own = partition_of.get(storage.node)
        if storage.origin is not Origin.EXTERN or storage.index in placed or own is None:
            continue
        if own.verdict is Verdict.CAPTURED or program.verdicts[storage.node].data_dependent:
            continue
        if any(partition_of.get(user) is not own for user in effective_users(storage.node)):
            found += sizes.get(storage.index, 0)
    return found


def _alignment(device: torch.device) -> int:
    return _ALIGNMENT.get(device.type, _ACCELERATOR_ALIGNMENT)


def _handed_out(program: ProgramPlan) -> frozenset[int]:
    """Storages that the caller gets, or gets back."""
    return program.facts.behind(output_node(program.graph).all_input_nodes)


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
        if (layout := hinted_layout(storage.value)) is not None:
            sizes[storage.index] = storage_bytes(*layout, storage.value.dtype)
    return sizes


def inner_storages(gm: GraphModule, facts: StorageFacts) -> frozenset[int]:
    """Storages that live and die inside a program; the others live anyway, whatever the order."""
    handed_out = facts.behind(output_node(gm).all_input_nodes)
    return frozenset(
        storage.index
        for storage in facts.storages
        if storage.origin in (Origin.ALLOCATION, Origin.EXTERN) and storage.index not in handed_out
    )


def output_storages(program: ProgramPlan) -> frozenset[int]:
    """Allocated storages that values handed to the caller live in."""
    storages = program.facts.storages
    return frozenset(index for index in _handed_out(program) if storages[index].origin is Origin.ALLOCATION)
