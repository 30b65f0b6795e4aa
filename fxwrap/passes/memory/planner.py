"""PLAN: gives every storage of a program a home in memory.

Where addresses are frozen, storages get offsets in an arena. On the CPU they get regions or an allocation per call.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...errors import PlanError
from ...host_graph.nodes import operator_name
from ...host_graph.sizes import symbols_at
from ...host_graph.storages import Origin
from ...packing import Buffer, Placement, Reserved, plan_memory
from ...packing.allocators import BLOCK, taken_on
from ...packing.reserved import lay_out_arena, most_alive
from ...packing.shared_regions import share_regions
from ...plan import (
    Home,
    MemoryPlan,
    Place,
    PlacementHint,
    ProgramPlan,
    Region,
    Reservations,
    SizedProgram,
    Workspace,
)
from ..analysis.saved_tensors import saved_tensors
from .lanes import Piece, choose_lanes, pieces_of, stretched
from .requirements import Requirements, expected_sizes, node_with

if TYPE_CHECKING:
    import networkx as nx

_CPU = torch.device("cpu")
# Alignment in bytes. CPU: a cache line, for wide vector loads. Accelerators: that of their caching allocators.
_ALIGNMENT, _ACCELERATOR_ALIGNMENT = 64, BLOCK


def plan_program(
    sized: SizedProgram,
    reserved: Reservations = MappingProxyType({}),
    hint: PlacementHint | None = None,
    previous: MemoryPlan | None = None,
    lanes: WorkInLanes | None = None,
) -> MemoryPlan:
    """Plan one recording of a program.

    Args:
        lanes: what may run at the same time on the CPU.
        reserved: bytes of arenas that live outputs of other recordings occupy.
        hint: offsets from a joint plan; followed where no reserved bytes are in the way.
        previous: the newest plan; the packer first stacks the buffers in its order of offsets.

    Raises:
        PlanError: a communication is in flight when the program begins or ends.
    """
    requirements = Requirements.of(sized)
    if sized.frozen:
        return _plan_arenas(requirements, reserved, hint, previous)
    return _plan_calls_in_lanes(sized, requirements, lanes) or _plan_calls(requirements)


def _plan_arenas(
    requirements: Requirements,
    reservations: Reservations,
    hint: PlacementHint | None,
    previous: MemoryPlan | None,
) -> MemoryPlan:
    """A plan with one arena per device, which exists between calls, too."""
    regions, offsets, workspaces = list[Region](), list[Mapping[int, int]](), dict[str, Workspace]()
    for device, items in requirements.planned.items():
        alignment, taken = _alignment(device), reservations.get(device, ())
        reserved = tuple(replace(interval, end=requirements.end_of(interval.nodes)) for interval in taken)
        placement = _lay_out(requirements, device, reserved, (hint or {}).get(device), previous)
        separate = sum(-(-buffer.size // alignment) * alignment for _, buffer in items)
        bounds = placement.size, alignment, True, placement.lower_bound, separate, reserved
        regions.append(Region(device, 0, requirements.end, *bounds))
        offsets.append({i: placement.offsets[buffer.name] for i, buffer in items if i is not None})
        for index, buffer in items:
            if index is None:
                place = Workspace(len(regions) - 1, placement.offsets[buffer.name], buffer.size)
                workspaces[node_with(buffer.name)] = place
    plan = _assign_homes(requirements, regions, offsets, Home.RECORDING)
    bound = sum(region.lower_bound for region in regions)
    plain = sum(region.plain for region in regions)
    return replace(plan, peak=plan.size, lower_bound=bound, plain=plain, workspaces=workspaces)


@dataclass(frozen=True)
class WorkInLanes:
    """What decides how much of a call runs at the same time.

    Attributes:
        count: the most lanes.
        dependencies: makes those of the program's graph.
        budget: how many times the memory of one lane several may take, and bytes that do not matter.
    """

    count: int
    dependencies: Callable[[], nx.DiGraph]
    budget: tuple[float, int]


# How many steps longer storages stay so that work may run beside their last use, as far as there is memory for it.
_LONGER = (1 << 30, 64, 16, 4, 0)


def _plan_calls_in_lanes(
    sized: SizedProgram, requirements: Requirements, work: WorkInLanes | None
) -> MemoryPlan | None:
    """A plan with lanes; None where they save no time, or take more memory than they may."""
    if work is None:
        return None
    sizes = expected_sizes(sized.plan.graph, sized.plan.facts, symbols_at(sized.symbol_values))
    pieces = pieces_of(sized, work.dependencies, sizes)
    if not pieces:
        return None
    ratio, negligible = work.budget
    alone = _most_of_call(requirements)
    most = max(int(alone * ratio), alone + negligible)
    for steps in _LONGER:
        longer = functools.partial(stretched, pieces=pieces, steps=steps)
        if _most_of_call(requirements, longer) > most:
            continue
        plan = _plan_calls(requirements, longer)
        lanes, beside = choose_lanes(sized.plan, plan, pieces, work.count)
        if not lanes:
            return None
        if (taken := _most_beside(requirements, plan, sized.plan, beside, pieces)) <= most:
            return replace(plan, lanes=lanes, peak=max(plan.peak, taken))
    return None


# How long a storage exists.
_Lifetime = Callable[[Buffer], Buffer]


def _as_used(buffer: Buffer) -> Buffer:
    return buffer


def _plan_calls(requirements: Requirements, lifetime: _Lifetime = _as_used) -> MemoryPlan:
    """A plan for the memory of one call: temporaries share regions, and other storages are allocated per call.

    The peak is no higher than if each storage were allocated separately, for its lifetime. In a step that also uses
    memory of unknown size, regions therefore take no more bytes than the live storages in them.
    """
    buffers = {i: lifetime(buffer) for i, buffer in _planned(requirements).items()}
    unplanned = [*requirements.donated, *_of_operators(requirements)]
    others = [*unplanned, *(b for index, b in buffers.items() if index not in requirements.region_storages)]
    peak_limit, alignment = most_alive([*unplanned, *buffers.values()]), _alignment(_CPU)
    # Memory of unknown size counts as all that there may be, so that no region grows over that step.
    others += [Buffer("unknown", peak_limit, step, step + 1) for step in requirements.unknown]
    in_regions = {index: buffers[index] for index in requirements.region_storages}
    steps = requirements.end - 1
    shared = share_regions(in_regions, others, peak_limit, alignment, steps, requirements.unshared)
    regions = [Region(_CPU, one.begin, one.end, one.size, alignment, kept=one.kept) for one in shared]
    plan = _assign_homes(requirements, regions, [region.offsets for region in shared], Home.CALL)
    per_call = [buffer for index, buffer in buffers.items() if plan.places[index].home is Home.CALL]
    planned = _planned(requirements).values()
    bound, plain = most_alive(planned), sum(buffer.size for buffer in planned)
    return replace(plan, peak=most_alive([*per_call, *regions]), lower_bound=bound, plain=plain)


def _planned(requirements: Requirements) -> dict[int, Buffer]:
    return {i: buffer for items in requirements.planned.values() for i, buffer in items if i is not None}


def _of_operators(requirements: Requirements) -> list[Buffer]:
    return [buffer for items in requirements.unplanned.values() for _, buffer in items]


def _most_of_call(requirements: Requirements, lifetime: _Lifetime = _as_used) -> int:
    """The most bytes that a call takes if one node runs after the other."""
    planned = map(lifetime, _planned(requirements).values())
    return most_alive([*requirements.donated, *_of_operators(requirements), *planned])


def _most_beside(
    requirements: Requirements,
    plan: MemoryPlan,
    program: ProgramPlan,
    beside: Sequence[range],
    pieces: Sequence[Piece],
) -> int:
    """The most bytes that a call takes if nodes run in lanes.

    Args:
        beside: for each step, the steps that may run while it does.
        pieces: behind each of them inputs are freed that were used last in it.
    """
    users = defaultdict[int, list[int]](list)
    for step, node in enumerate(program.schedule):
        for index in program.facts.named_in([node]):
            users[index].append(step)
    of_region = defaultdict[int, list[int]](list)
    for index, place in enumerate(plan.places):
        if place.home is Home.REGION:
            of_region[place.region] += users[index]

    def in_lanes(item: Any, steps: Iterable[int]) -> Any:
        """What exists from the first to the last of these steps, and while steps may run beside them."""
        reached = [beside[step] for step in (*steps, item.begin, item.end - 1) if step < len(beside)]
        begin, end = min(r.start for r in reached), max(r.stop for r in reached)
        return replace(item, begin=min(begin, item.begin), end=max(end, item.end))

    regions = [region if region.kept else in_lanes(region, of_region[n]) for n, region in enumerate(plan.regions)]
    items = [item for one in (requirements.planned, requirements.unplanned) for own in one.values() for item in own]
    separate = [
        in_lanes(buffer, users[index] if index is not None else ())
        for index, buffer in items
        if index is None or plan.places[index].home is not Home.REGION
    ]
    donated = [stretched(buffer, pieces, len(beside)) for buffer in requirements.donated]
    return most_alive([*regions, *separate, *donated])


def bytes_of_call(sized: SizedProgram, memory: MemoryPlan | None = None, in_pool: int = 0) -> int:
    """The most bytes that a call takes at one time beside its inputs; what its forward has saved counts.

    Storages count from their first to their last use; regions do not raise that (``_plan_calls``). Arenas count as
    a whole; static buffers of inputs lie in them. Results and workspace of operators count in either case. Workspace
    that was not measured is missing (``unmeasured_calls``).

    Args:
        memory: the plan, where addresses are frozen.
        in_pool: bytes that captures are known to take in the pool of the graphs: results of operators and workspace.

    Raises:
        PlanError: data decide on the size of what the call takes.
    """
    requirements = Requirements.of(sized)
    if requirements.unsized:

        def named(node: str) -> str:
            return f"{node} ({operator_name(sized.plan.nodes[node])})"

        raise PlanError(
            f"data decide on the size of {', '.join(map(named, requirements.unsized))}",
            expected="storages whose sizes follow from those of the inputs",
            remedy="pad to a size that the inputs have",
        )
    unplanned = [buffer for items in requirements.unplanned.values() for _, buffer in items]
    if memory is not None and sized.frozen:
        arenas = sum(taken_on(device.type, arena.size) for device, arena in memory.arenas.items())
        return arenas + max(most_alive(unplanned), in_pool) + requirements.own
    planned = (buffer for items in requirements.planned.values() for _, buffer in items)
    return most_alive([*requirements.donated, *unplanned, *planned]) + _numbers_as_tensors(sized.plan)


def _numbers_as_tensors(program: ProgramPlan) -> int:
    """Bytes of the tensors that Dynamo may make of a call's numbers, such as rates, before the program begins."""
    inputs = (node.meta.get("val") for p, node in enumerate(program.placeholders) if p not in program.inputs.static)
    numbers = (value for value in inputs if isinstance(value, torch.Tensor) and value.dtype is torch.float64)
    return sum(value.dtype.itemsize for value in numbers if value.device == _CPU and value.dim() == 0)


def unmeasured_calls(sized: SizedProgram) -> Collection[str]:
    """The library calls and custom operators whose own memory is not known at these sizes, by node."""
    return Requirements.of(sized).unmeasured


def _assign_homes(
    requirements: Requirements, regions: Sequence[Region], offsets: Sequence[Mapping[int, int]], unplaced_home: Home
) -> MemoryPlan:
    """Give every storage a home.

    Args:
        offsets: for each region, offsets of its storages in bytes, by storage.
        unplaced_home: home of allocations of known size that are in no region.
    """
    homes = {Origin.INPUT: Home.INPUT, Origin.CONSTANT: Home.CONSTANT, Origin.EXTERN: Home.OPERATOR}
    places = [
        Place(homes.get(storage.origin) or (unplaced_home if storage.index in requirements.sizes else Home.CALL))
        for storage in requirements.facts.storages
    ]
    for number, inside in enumerate(offsets):
        for index, offset in inside.items():
            places[index] = Place(Home.REGION, number, offset)
    needed = requirements.sizes, requirements.outputs, requirements.copied_back
    return MemoryPlan(tuple(places), tuple(regions), *needed)


def plan_pair(
    first: SizedProgram, second: SizedProgram, saved_as: Mapping[int, Sequence[str]]
) -> tuple[PlacementHint, PlacementHint]:
    """Plan two programs together, where only the second reads what the first saves.

    ::

        steps     first program | second program
        saved          s s s s s|s s s              one live range, up to the last use in the second

    Args:
        saved_as: for each saved storage of the first program, the inputs of the second that are this storage.

    Returns:
        Offsets for the first and for the second program, by device.
    """
    timeline = _Timeline.of([Requirements.of(first), Requirements.of(_with_moved_inputs(second, first))], saved_as)
    hints: tuple[dict[torch.device, Placement], ...] = ({}, {})
    for device, items in timeline.planned.items():
        placement = plan_memory(_renamed(items), _alignment(device))
        for number, hint in enumerate(hints):
            placed = zip(items, placement.offsets.values(), strict=True)
            offsets = {buffer.name: offset for (program, buffer), offset in placed if program == number}
            hint[device] = replace(placement, offsets=offsets)
    return hints[0], hints[1]


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of a call, or of a forward and its backward, on one device, without inputs, in bytes.

    Workspace of operators counts only if it was measured; a driver's own memory for a graph does not count.

    Attributes:
        arena: the arena, which exists all the time, with what its allocator takes for it.
        operators: the peak of results that operators allocate, and of their workspace if that is known.
        outside: the peak of all memory outside of the arena: regions, per-call allocations, ``operators``, and what
            recordings have of their own.
        outputs: the part of all this that the caller still has after the call.
    """

    SHOWN: ClassVar = ("total",)

    device: torch.device
    arena: int
    operators: int
    outside: int
    outputs: int

    @property
    def total(self) -> int:
        return self.arena + self.outside


def predict_memory(programs: Sequence[SizedProgram], saved_as: Mapping[int, Sequence[str]]) -> list[Prediction]:
    """Predict the memory of one program, or of two planned together, by device.

    Args:
        saved_as: for each saved storage of the first program, the inputs of the second that are this storage.
    """
    first, *others = programs
    requirements = [Requirements.of(one) for one in (first, *(_with_moved_inputs(other, first) for other in others))]
    timeline, own = _Timeline.of(requirements, saved_as), sum(part.own for part in requirements)
    predictions = []
    frozen = programs[0].frozen
    for device in {**timeline.planned, **timeline.unplanned}:
        planned = _renamed(timeline.planned.get(device, ()))
        own_bytes = own if device == programs[0].plan.device else 0
        of_operators = _renamed(timeline.unplanned.get(device, ()))
        unplanned = [*of_operators, Buffer("own", own_bytes, 0, timeline.end)]
        predictions.append(
            Prediction(
                device,
                arena=taken_on(device.type, plan_memory(planned, _alignment(device)).size) if frozen else 0,
                operators=most_alive(of_operators),
                outside=most_alive(unplanned if frozen else [*planned, *unplanned]),
                outputs=timeline.outputs.get(device, 0),
            )
        )
    return predictions


def _with_moved_inputs(backward: SizedProgram, forward: SizedProgram) -> SizedProgram:
    """The backward program, to which inputs of its forward that move and are saved are copied as well."""
    buffers, plan = dict(backward.input_buffers), forward.plan
    for index, names in saved_tensors(plan, backward.plan, (Origin.INPUT,)).items():
        if (buffer := forward.input_buffers.get(plan.facts.storages[index].node)) is not None:
            buffers.update(dict.fromkeys(names, buffer))
    return replace(backward, input_buffers=buffers) if buffers != backward.input_buffers else backward


# Buffers, each with the number of its program.
_Numbered = list[tuple[int, Buffer]]


def _renamed(items: Iterable[tuple[int, Buffer]]) -> list[Buffer]:
    """The buffers under names that differ: two programs may have one name for two buffers."""
    return [replace(buffer, name=str(position)) for position, (_, buffer) in enumerate(items)]


@dataclass(frozen=True)
class _Timeline:
    """Buffers of one program, or of two in sequence; the second's steps follow the first's.

    Attributes:
        unplanned: what operators allocate themselves.
        outputs: bytes of the outputs that the caller has at the end, without inputs and constants that are returned.
        end: the step after the last.
    """

    planned: Mapping[torch.device, _Numbered]
    unplanned: Mapping[torch.device, _Numbered]
    outputs: Mapping[torch.device, int]
    end: int

    @classmethod
    def of(cls, requirements: Sequence[Requirements], saved_as: Mapping[int, Sequence[str]]) -> _Timeline:
        planned, unplanned = (defaultdict[torch.device, _Numbered](list) for _ in range(2))
        outputs: dict[torch.device, int] = defaultdict(int)
        begin, last = 0, sum(part.end for part in requirements)
        for number, part in enumerate(requirements):
            after = requirements[number + 1] if number + 1 < len(requirements) else None
            both: Any = ((planned, part.planned), (unplanned, part.unplanned))
            for collected, items in both:
                for device, buffers in items.items():
                    for index, b in buffers:
                        end = b.end
                        # An operator's own result that was copied to planned memory ends before: it is freed at once.
                        if after is not None and end == part.end and index in part.handed_out:
                            end = part.end + after.end_of(saved_as.get(index, ()))
                        collected[device].append((number, replace(b, begin=begin + b.begin, end=begin + end)))
                        if begin + end == last and part.is_new_output(index):
                            outputs[device] += b.size
            begin += part.end
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
    by_index = previous.inside(previous.arenas[device]) if previous is not None and device in previous.arenas else {}
    by_name = {b.name: by_index[index] for index, b in items if index is not None and index in by_index}
    return lay_out_arena([b for _, b in items], outputs, reserved, _alignment(device), hint, by_name)


def _alignment(device: torch.device) -> int:
    return _ALIGNMENT if device.type == "cpu" else _ACCELERATOR_ALIGNMENT
