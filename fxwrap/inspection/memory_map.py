"""The memory plan as data for reports: the place and live range of each storage, the peak, copies, predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from ..graphs.program import Program
from ..host_graph.nodes import output_values
from ..host_graph.storages import Origin
from ..host_graph.user_code import shown_name, user_line
from ..packing import Buffer, plan_memory
from ..packing.reserved import alive_at_steps, most_alive
from ..passes.memory.planner import Prediction, predict_memory
from ..passes.memory.requirements import Requirements, node_with
from ..plan import Home, Lanes, MemoryPlan, ProgramPlan, SizedProgram


@dataclass(frozen=True)
class StorageData:
    """A rectangle of the memory picture: bytes ``[address, address + bytes)`` in steps ``[begin, end)``.

    Addresses are offsets in the arena. Storages that are allocated per call or by operators have no planned address:
    they get one that does not overlap others which are alive at the same time.

    ``use`` is one of temporary, output, saved for backward, copy of an input, result of an operator, workspace.
    ``partition`` is that of the first step; None for a storage that exists before it.
    """

    name: str
    node: str
    use: str
    device: str
    size: int = field(metadata={"key": "bytes"})
    address: int
    begin: int
    end: int
    region: int | None
    partition: int | None
    user_line: str


@dataclass(frozen=True)
class PeakData:
    """The first step with the largest number of live bytes, that number, and the live storages, largest first."""

    step: int
    node: str
    bytes: int
    storages: tuple[str, ...]
    user_line: str


@dataclass(frozen=True)
class CopyData:
    """A copy that every replay makes; ``what`` is "input" (to a static input buffer) or "output" (to new memory)."""

    what: str
    name: str
    node: str
    bytes: int


@dataclass(frozen=True)
class ArenaData:
    device: str
    bytes: int
    lower_bound_bytes: int
    without_reuse_bytes: int
    storages: int


@dataclass(frozen=True)
class LanesData:
    """Work of a call that runs at the same time (``plan.Lanes``).

    Attributes:
        nodes: by lane, in order.
        waits: how many nodes wait for other lanes.
        one_after_the_other_us, in_lanes_us: estimates.
    """

    nodes: tuple[tuple[str, ...], ...]
    waits: int
    one_after_the_other_us: float
    in_lanes_us: float

    @classmethod
    def of(cls, lanes: Lanes) -> LanesData:
        nodes = tuple(tuple(n for n, own in lanes.lane_of.items() if own == lane) for lane in range(lanes.count))
        return cls(nodes, len(lanes.waits_for), lanes.serial, lanes.beside)


@dataclass(frozen=True)
class MemoryData:
    """The newest plan, at concrete sizes, in bytes.

    Attributes:
        arena_bytes: the size of the arenas of all devices; 0 if memory is allocated per call.
        peak_bytes: the peak of the plan's memory.
        lower_bound_bytes: the largest sum of live storages.
        inductor_peak_bytes: the peak of the same storages in Inductor's own wrapper, in the order of its lines.
        without_reuse_bytes: the sum of separate allocations.
        operator_bytes: the peak of what operators allocate themselves, as far as it is known.
        region_bytes, kept_bytes: the sizes of all regions on the CPU, and of those that are kept for later calls.
        predicted: the memory of a call by device; that of a forward and its backward together is in the forward.
        predicted_with: "alone", or the phase of the other graph that the prediction includes.
        steps: the number of steps.
        lanes: what runs at the same time over this memory.
    """

    arena_bytes: int
    peak_bytes: int
    lower_bound_bytes: int
    inductor_peak_bytes: int
    without_reuse_bytes: int
    operator_bytes: int
    output_bytes: int
    arenas: tuple[ArenaData, ...]
    regions: int
    region_bytes: int
    kept_bytes: int = field(metadata={"added": 0})
    predicted: tuple[Prediction, ...]
    predicted_with: str
    static_input_bytes: int
    steps: int
    storages: tuple[StorageData, ...]
    peak: PeakData | None
    copies: tuple[CopyData, ...]
    lanes: tuple[LanesData, ...] = field(default=(), metadata={"added": ()})


def predictions(program: Program) -> tuple[Prediction, ...]:
    """The predicted memory of a call with the newest known shape, by device.

    A forward's prediction includes its backward, once that has run; the backward alone has none then.
    """
    estimate = program.recorder.newest_estimate
    if estimate is None or estimate.follows_forward:
        return ()
    if estimate.successor is None or (backward := estimate.successor[0]()) is None:
        return tuple(predict_memory([estimate.sized], {}))
    return tuple(predict_memory([estimate.sized, backward.sized], estimate.successor[1]))


def memory_data(program: Program, plan: ProgramPlan, sized: SizedProgram | None, memory: MemoryPlan) -> MemoryData:
    """The data of a program's newest memory plan.

    Args:
        plan, sized, memory: read from the program at the same time, because another thread may plan.
    """
    estimate = program.recorder.newest_estimate
    storages, operators, inductor_peak = tuple[StorageData, ...](), 0, 0
    if sized is not None and sized.plan is plan:  # otherwise the memory plan is of older partitions
        storages, operators = _storages(sized, memory)
        inductor_peak = _peak_in_order_of_lines(sized)
    predicted_with = "alone"
    if estimate is not None and (estimate.follows_forward or estimate.successor is not None):
        predicted_with = "forward" if estimate.follows_forward else "backward"
    regions = [region for region in memory.regions if not region.arena]
    return MemoryData(
        arena_bytes=memory.size,
        peak_bytes=memory.peak,
        lower_bound_bytes=memory.lower_bound,
        inductor_peak_bytes=inductor_peak,
        without_reuse_bytes=memory.plain,
        operator_bytes=operators,
        output_bytes=sum(memory.sizes.get(index, 0) for index in memory.outputs),
        arenas=tuple(
            ArenaData(str(device), arena.size, arena.lower_bound, arena.plain, len(memory.inside(arena)))
            for device, arena in memory.arenas.items()
        ),
        regions=len(regions),
        region_bytes=sum(region.size for region in regions),
        kept_bytes=memory.kept,
        predicted=predictions(program),
        predicted_with=predicted_with,
        static_input_bytes=estimate.static_input_bytes if estimate is not None else 0,
        steps=len(plan.schedule),
        storages=storages,
        peak=_peak(storages, plan.schedule),
        copies=_copies(program, sized, memory),
        lanes=tuple(map(LanesData.of, memory.lanes)),
    )


def _storages(sized: SizedProgram, memory: MemoryPlan) -> tuple[tuple[StorageData, ...], int]:
    """The data of all storages, and the peak of what operators allocate, in bytes."""
    program, requirements = sized.plan, Requirements.of(sized)
    partitions = [partition.index for partition in program.partitions for _ in partition.nodes]
    saved = _saved(program)
    rectangles = list[StorageData]()

    def add(name: str, index: int | None, device: Any, buffer: Buffer, use: str, address: int, region: Any) -> None:
        node = program.facts.storages[index].node if index is not None else node_with(name)
        rectangles.append(
            StorageData(
                name=name if index is None else program.shown_name(index),
                node=node,
                use=use,
                device=str(device),
                size=buffer.size,
                address=address,
                begin=buffer.begin,
                end=buffer.end,
                region=region,
                partition=partitions[buffer.begin] if use != _COPIED and buffer.begin < len(partitions) else None,
                user_line=user_line(program.nodes[node]),
            )
        )

    operators = 0
    for device in dict.fromkeys([*requirements.planned, *requirements.unplanned]):
        planned = [(index, buffer) for index, buffer in requirements.planned.get(device, ()) if buffer.size]
        buffers = [(index, buffer) for index, buffer in planned if index is not None]
        addresses = _addresses(memory, buffers)
        for index, buffer in planned:
            if index is None:
                at = memory.workspaces[node_with(buffer.name)]
                addresses[buffer.name] = at.offset
                add(buffer.name, None, device, buffer, _WORKSPACE, at.offset, at.region)
                continue
            place = memory.places[index]
            region = place.region if place.home is Home.REGION else None
            use = _use(program, index, requirements, saved)
            add(buffer.name, index, device, buffer, use, addresses[buffer.name], region)
        height = max((addresses[b.name] + b.size for _, b in planned), default=0)
        others = [(number, buffer) for number, buffer in requirements.unplanned.get(device, ()) if buffer.size]
        operators += most_alive(buffer for _, buffer in others)
        others += _numbers(sized, requirements) if device == program.device else []
        above = plan_memory([buffer for _, buffer in others])
        copied = {index for index, _ in buffers}  # to planned memory, which has the result's use
        for number, buffer in others:
            if number is None:
                use = _WORKSPACE
            else:
                use = _RESULT if number in copied else _use(program, number, requirements, saved)
            add(buffer.name, number, device, buffer, use, height + above.offsets[buffer.name], None)
    return tuple(rectangles), operators


def _numbers(sized: SizedProgram, requirements: Requirements) -> list[tuple[int | None, Buffer]]:
    """The numbers that the caller gets, which have blocks of their own."""
    numbers = sorted(sized.plan.numbers_returned) if sized.frozen else []
    named = ((index, sized.plan.facts.storages[index].name) for index in numbers)
    return [(index, Buffer(name, requirements.sizes[index], 0, requirements.end)) for index, name in named]


_COPIED, _WORKSPACE, _RESULT = "copy of an input", "workspace", "result of an operator"


def _use(program: ProgramPlan, index: int, requirements: Requirements, saved: frozenset[int]) -> str:
    if program.facts.storages[index].origin is Origin.INPUT:
        return _COPIED
    if index in saved:
        return "saved for backward"
    if index in requirements.handed_out:
        return "output"
    return "temporary" if program.facts.storages[index].origin is Origin.ALLOCATION else _RESULT


def _saved(program: ProgramPlan) -> frozenset[int]:
    """Storages of outputs that only the backward gets."""
    values, names = list(enumerate(output_values(program.graph))), program.inputs.saved
    saved = program.facts.behind(value for p, value in values if p in names and isinstance(value, Node))
    return saved - program.facts.behind(v for p, v in values if p not in names and isinstance(v, Node))


def _addresses(memory: MemoryPlan, buffers: Sequence[tuple[int, Buffer]]) -> dict[str, int]:
    """Addresses of the storages of one device: offsets in its arena, or, without one, addresses for the picture."""
    places = {buffer.name: memory.places[index] for index, buffer in buffers}
    if any(region.arena for region in memory.regions):
        return {name: place.offset for name, place in places.items()}
    regions = {place.region: memory.regions[place.region] for place in places.values() if place.home is Home.REGION}
    blocks = [Buffer(f"region {number}", one.size, one.begin, one.end) for number, one in regions.items()]
    alone = [buffer for index, buffer in buffers if memory.places[index].home is not Home.REGION]
    placed = plan_memory([*blocks, *alone]).offsets
    return {
        name: placed[f"region {place.region}"] + place.offset if place.home is Home.REGION else placed[name]
        for name, place in places.items()
    }


def _peak(storages: Sequence[StorageData], schedule: Sequence[Node]) -> PeakData | None:
    alive = alive_at_steps(storages)
    if not alive or not schedule:
        return None
    step = alive.index(max(alive))
    live = [storage for storage in storages if storage.begin <= step < storage.end]
    node = schedule[min(step, len(schedule) - 1)]
    names = tuple(storage.name for storage in sorted(live, key=lambda storage: -storage.size))
    return PeakData(step, node.name, alive[step], names, user_line(node))


def _peak_in_order_of_lines(sized: SizedProgram) -> int:
    """The peak of planned allocations in bytes, if each exists from its line in the host graph to its last use."""
    program, requirements = sized.plan, Requirements.of(sized)
    position = {node: number for number, node in enumerate(program.graph.graph.nodes)}
    last: dict[int, int] = {}
    for node, number in position.items():
        for index in program.facts.of(node) | program.facts.touched(node):
            last[index] = len(position) if index in requirements.handed_out else number
    return most_alive(
        Buffer("", size, begin := position[program.maker(index)], last.get(index, begin) + 1)
        for index, size in requirements.sizes.items()
        if program.facts.storages[index].origin is Origin.ALLOCATION
    )


def _copies(program: Program, sized: SizedProgram | None, memory: MemoryPlan) -> tuple[CopyData, ...]:
    """The copies that each replay of the newest plan makes, largest first."""
    copies = list[CopyData]()
    for name, (_, nbytes) in (sized.input_buffers if sized is not None else {}).items():
        copies.append(CopyData("input", shown_name(program.plan.nodes[name]), name, nbytes))
    for recording in program.specializations.recordings():
        if recording.request.memory is memory and memory.arenas:  # without arenas outputs are new tensors
            for index in sorted(recording.request.copied):
                name, node = program.plan.shown_name(index), program.plan.facts.storages[index].node
                copies.append(CopyData("output", name, node, memory.sizes.get(index, 0)))
            break
    return tuple(sorted(copies, key=lambda copy: -copy.bytes))
