"""The memory plan as data for reports: the place and live range of each storage, the peak, copies, predictions."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from torch.fx import Node
from typing_extensions import NotRequired

from ..graphs.program import Program
from ..host_graph.nodes import output_values
from ..host_graph.typed_json import to_data
from ..host_graph.user_code import shown_name, user_line
from ..packing import Buffer, plan_memory
from ..passes.memory.planner import predict_memory
from ..passes.memory.requirements import Requirements
from ..plan import Home, MemoryPlan, Origin, Prediction, ProgramPlan, SizedProgram


class StorageData(TypedDict):
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
    bytes: int
    address: int
    begin: int
    end: int
    region: int | None
    partition: int | None
    user_line: str


class PeakData(TypedDict):
    """The first step with the largest number of live bytes, that number, and the live storages, largest first."""

    step: int
    node: str
    bytes: int
    storages: list[str]
    user_line: str


class CopyData(TypedDict):
    """A copy that every replay makes; ``what`` is "input" (to a static input buffer) or "output" (to new memory)."""

    what: str
    name: str
    node: str
    bytes: int


class ArenaData(TypedDict):
    device: str
    bytes: int
    lower_bound_bytes: int
    without_reuse_bytes: int
    storages: int


class PredictionData(TypedDict):
    device: str
    arena: int
    operators: int
    outside: int
    outputs: int
    total: int


class MemoryData(TypedDict):
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
    """

    arena_bytes: int
    peak_bytes: int
    lower_bound_bytes: int
    inductor_peak_bytes: int
    without_reuse_bytes: int
    operator_bytes: int
    output_bytes: int
    arenas: list[ArenaData]
    regions: int
    region_bytes: int
    kept_bytes: NotRequired[int]
    predicted: list[PredictionData]
    predicted_with: str
    static_input_bytes: int
    steps: int
    storages: list[StorageData]
    peak: PeakData | None
    copies: list[CopyData]


def predictions(program: Program) -> list[Prediction]:
    """The predicted memory of a call with the newest known shape, by device.

    A forward's prediction includes its backward, once that has run; the backward alone has none then.
    """
    estimate = program.recorder.newest_estimate
    if estimate is None or estimate.follows:
        return []
    if estimate.successor is None or (backward := estimate.successor[0]()) is None:
        return predict_memory([estimate.sized], {})
    return predict_memory([estimate.sized, backward.sized], estimate.successor[1])


def memory_data(program: Program, plan: ProgramPlan, sized: SizedProgram | None, memory: MemoryPlan) -> MemoryData:
    """The data of a program's newest memory plan.

    Args:
        plan, sized, memory: read from the program at the same time, because another thread may plan.
    """
    estimate = program.recorder.newest_estimate
    if sized is None or sized.program is not plan:
        storages, operators, inductor_peak = list[StorageData](), 0, 0  # the plan is of older partitions
    else:
        storages, operators = _storages(sized, memory)
        inductor_peak = _peak_in_order_of_lines(sized)
    predicted_with = "alone"
    if estimate is not None and (estimate.follows or estimate.successor is not None):
        predicted_with = "forward" if estimate.follows else "backward"
    return {
        "arena_bytes": memory.size,
        "peak_bytes": memory.peak,
        "lower_bound_bytes": memory.lower_bound,
        "inductor_peak_bytes": inductor_peak,
        "without_reuse_bytes": memory.plain,
        "operator_bytes": operators,
        "output_bytes": sum(memory.sizes.get(index, 0) for index in memory.outputs),
        "arenas": [
            {
                "device": str(device),
                "bytes": arena.size,
                "lower_bound_bytes": arena.lower_bound,
                "without_reuse_bytes": arena.plain,
                "storages": len(memory.inside(arena)),
            }
            for device, arena in memory.arenas.items()
        ],
        "regions": len(shared := [region for region in memory.regions if not region.arena]),
        "region_bytes": sum(region.size for region in shared),
        "kept_bytes": memory.kept,
        "predicted": [cast(PredictionData, {**to_data(p), "total": p.total}) for p in predictions(program)],
        "predicted_with": predicted_with,
        "static_input_bytes": estimate.static_inputs if estimate is not None else 0,
        "steps": len(plan.schedule),
        "storages": storages,
        "peak": _peak(storages, plan.schedule),
        "copies": _copies(program, sized, memory),
    }


def _storages(sized: SizedProgram, memory: MemoryPlan) -> tuple[list[StorageData], int]:
    """The data of all storages, and the peak of what operators allocate, in bytes."""
    program, requirements = sized.program, Requirements.of(sized)
    partitions = [partition.index for partition in program.partitions for _ in partition.nodes]
    saved = _saved(program)
    rectangles = list[StorageData]()

    def add(name: str, index: int | None, device: Any, buffer: Buffer, use: str, address: int, region: Any) -> None:
        node = program.facts.storages[index].node if index is not None else name.removesuffix(" workspace")
        rectangles.append(
            {
                "name": name if index is None else program.shown_name(index),
                "node": node,
                "use": use,
                "device": str(device),
                "bytes": buffer.size,
                "address": address,
                "begin": buffer.begin,
                "end": buffer.end,
                "region": region,
                "partition": partitions[buffer.begin] if use != _COPIED and buffer.begin < len(partitions) else None,
                "user_line": user_line(program.nodes[node]),
            }
        )

    operators = 0
    for device in dict.fromkeys([*requirements.planned, *requirements.unplanned]):
        buffers = [(index, buffer) for index, buffer in requirements.planned.get(device, ()) if buffer.size]
        addresses = _addresses(memory, buffers)
        for index, buffer in buffers:
            place = memory.places[index]
            region = place.region if place.home is Home.REGION else None
            use = _use(program, index, requirements, saved)
            add(buffer.name, index, device, buffer, use, addresses[buffer.name], region)
        height = max((addresses[b.name] + b.size for _, b in buffers), default=0)
        others = [(number, buffer) for number, buffer in requirements.unplanned.get(device, ()) if buffer.size]
        above = plan_memory([buffer for _, buffer in others])
        copied = {index for index, _ in buffers}  # to planned memory, which has the result's use
        for number, buffer in others:
            if number is None:
                use = _WORKSPACE
            else:
                use = _RESULT if number in copied else _use(program, number, requirements, saved)
            add(buffer.name, number, device, buffer, use, height + above.offsets[buffer.name], None)
        operators += above.lower_bound
    return rectangles, operators


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
    values = list(enumerate(output_values(program.graph)))
    saved = program.facts.behind(value for p, value in values if p in program.saved and isinstance(value, Node))
    return saved - program.facts.behind(v for p, v in values if p not in program.saved and isinstance(v, Node))


def _addresses(memory: MemoryPlan, buffers: Sequence[tuple[int, Buffer]]) -> dict[str, int]:
    """Addresses of the storages of one device: offsets in its arena, or, without one, addresses for the picture."""
    if any(region.arena for region in memory.regions):
        return {buffer.name: memory.places[index].offset for index, buffer in buffers}
    inside: Mapping[int, list[tuple[int, Buffer]]] = defaultdict(list)
    alone = list[Buffer]()
    for index, buffer in buffers:
        place = memory.places[index]
        if place.home is Home.REGION:
            inside[place.region].append((index, buffer))
        else:
            alone.append(buffer)
    regions = [(number, memory.regions[number]) for number in inside]
    blocks = [Buffer(f"region {number}", region.size, region.begin, region.end) for number, region in regions]
    placed = plan_memory([*blocks, *alone]).offsets
    addresses = {buffer.name: placed[buffer.name] for buffer in alone}
    for number, items in inside.items():
        base = placed[f"region {number}"]
        addresses.update({buffer.name: base + memory.places[index].offset for index, buffer in items})
    return addresses


def _peak(storages: Sequence[StorageData], schedule: Sequence[Node]) -> PeakData | None:
    changes = Counter[int]()
    for storage in storages:
        changes[storage["begin"]] += storage["bytes"]
        changes[storage["end"]] -= storage["bytes"]
    if not changes or not schedule:
        return None
    steps = sorted(changes)
    alive = list(itertools.accumulate(changes[step] for step in steps))
    most = max(alive)
    step = steps[alive.index(most)]
    live = [storage for storage in storages if storage["begin"] <= step < storage["end"]]
    node = schedule[min(step, len(schedule) - 1)]
    names = [storage["name"] for storage in sorted(live, key=lambda storage: -storage["bytes"])]
    return {"step": step, "node": node.name, "bytes": most, "storages": names, "user_line": user_line(node)}


def _peak_in_order_of_lines(sized: SizedProgram) -> int:
    """The peak of planned allocations in bytes, if each exists from its line in the host graph to its last use."""
    program, sizes = sized.program, Requirements.of(sized).sizes
    position = {node: number for number, node in enumerate(program.graph.graph.nodes)}
    handed_out = Requirements.of(sized).handed_out
    last: dict[int, int] = {}
    for node, number in position.items():
        for index in program.facts.of(node) | program.facts.touched(node):
            last[index] = number
    changes = Counter[int]()  # by twice the position, so that a storage ends after its last use
    for index in (i for i in sizes if program.facts.storages[i].origin is Origin.ALLOCATION):
        begin = position[program.maker(index)]
        changes[2 * begin] += sizes[index]
        if index not in handed_out:
            changes[2 * last.get(index, begin) + 1] -= sizes[index]
    return max(itertools.accumulate(changes[step] for step in sorted(changes)), default=0)


def _copies(program: Program, sized: SizedProgram | None, memory: MemoryPlan) -> list[CopyData]:
    """The copies that each replay of the newest plan makes, largest first."""
    copies: list[CopyData] = []
    for name, (_, nbytes) in (sized.input_buffers if sized is not None else {}).items():
        shown = shown_name(program.plan.nodes[name])
        copies.append({"what": "input", "name": shown, "node": name, "bytes": nbytes})
    for recording in program.specializations.recordings():
        if recording.request.memory is memory and memory.arenas:  # without arenas outputs are new tensors
            for index in sorted(recording.request.copied):
                name, node = program.plan.shown_name(index), program.plan.facts.storages[index].node
                copies.append({"what": "output", "name": name, "node": node, "bytes": memory.sizes.get(index, 0)})
            break
    return sorted(copies, key=lambda copy: -copy["bytes"])
