"""The memory plan as data: where each storage lies and when, what is alive at the peak, what is copied."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from torch.fx import Node

from ..graphs.program import Program
from ..host_graph.nodes import output_values, user_line
from ..packing import Buffer, plan_memory
from ..passes.memory.planner import predict_memory
from ..passes.memory.requirements import Requirements
from ..plan import Home, MemoryPlan, Origin, Planned, Prediction, ProgramPlan


class StorageData(TypedDict):
    """A rectangle of the memory picture: bytes ``[address, address + bytes)`` in steps ``[begin, end)``.

    Addresses are those of the arena. Where memory comes and goes with each call, and for what operators allocate
    themselves, they are made up: so that storages that are there at one time do not overlap.

    ``use`` is one of temporary, output, saved for backward, copy of an input, result of an operator, workspace.
    ``partition`` is that of the first step; None for what is there before it.
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
    """The step in which most is alive (the first such), the bytes, and the storages, the largest first."""

    step: int
    node: str
    bytes: int
    storages: list[str]
    user_line: str


class CopyData(TypedDict):
    """What every replay copies: ``what`` is "input" (to a static buffer) or "output" (to memory of its own)."""

    what: str
    name: str
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
        arena_bytes: of the arenas of all devices; 0 where memory comes and goes with each call.
        peak_bytes: what the plan takes at one time, at most.
        lower_bound_bytes: what is alive at one time, at most.
        inductor_peak_bytes: what Inductor's own wrapper has alive at one time, at most, of the same storages, in the
            order of its lines.
        without_reuse_bytes: of separate allocations.
        operator_bytes: what operators allocate themselves, at one time, at most, as far as it is known.
        predicted: what a call takes, by device; that of a forward and its backward is with the forward.
        predicted_with: "alone", or the phase of the other graph that was looked at together with this one.
        steps: how many there are.
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
    predicted: list[PredictionData]
    predicted_with: str
    static_input_bytes: int
    steps: int
    storages: list[StorageData]
    peak: PeakData | None
    copies: list[CopyData]


def predictions(program: Program) -> list[Prediction]:
    """The memory of calls with the newest shape that is known, by device.

    That of a forward is with its backward, as soon as that has run; then there is none of the backward alone.
    """
    estimate = program.recorder.newest_estimate
    if estimate is None or estimate.follows:
        return []
    if estimate.successor is None or (backward := estimate.successor[0]()) is None:
        return predict_memory([estimate.planned], {})
    return predict_memory([estimate.planned, backward.planned], estimate.successor[1])


def memory_data(program: Program, plan: ProgramPlan, planned: Planned | None, memory: MemoryPlan) -> MemoryData:
    """The newest plan of a program.

    Args:
        plan, planned, memory: the program's, taken at one time: another thread may plan meanwhile.
    """
    estimate = program.recorder.newest_estimate
    if planned is None or planned.program is not plan:
        storages, operators, inductor_peak = list[StorageData](), 0, 0  # of an older cut
    else:
        storages, operators = _storages(planned, memory)
        inductor_peak = _peak_in_order_of_lines(planned)
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
        "predicted": [
            {
                "device": str(one.device),
                "arena": one.arena,
                "operators": one.operators,
                "outside": one.outside,
                "outputs": one.outputs,
                "total": one.total,
            }
            for one in predictions(program)
        ],
        "predicted_with": predicted_with,
        "static_input_bytes": estimate.static_inputs if estimate is not None else 0,
        "steps": len(plan.schedule),
        "storages": storages,
        "peak": _peak(storages, plan.schedule),
        "copies": _copies(program, planned, memory),
    }


def _storages(planned: Planned, memory: MemoryPlan) -> tuple[list[StorageData], int]:
    """All that is known of, and the bytes that operators allocate at one time, at most."""
    program, requirements = planned.program, Requirements.of(planned)
    partitions = [partition.index for partition in program.partitions for _ in partition.nodes]
    saved = _saved(program)
    found = list[StorageData]()

    def add(name: str, index: int | None, device: Any, buffer: Buffer, use: str, address: int, region: Any) -> None:
        node = program.facts.storages[index].node if index is not None else name.removesuffix(" workspace")
        found.append(
            {
                "name": name,
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
        own = [(index, buffer) for index, buffer in requirements.planned.get(device, ()) if buffer.size]
        addresses = _addresses(memory, own)
        for index, buffer in own:
            place = memory.places[index]
            region = place.region if place.home is Home.REGION else None
            use = _use(program, index, requirements, saved)
            add(buffer.name, index, device, buffer, use, addresses[buffer.name], region)
        height = max((addresses[b.name] + b.size for _, b in own), default=0)
        others = [(which, buffer) for which, buffer in requirements.unplanned.get(device, ()) if buffer.size]
        above = plan_memory([buffer for _, buffer in others])
        for which, buffer in others:
            use = _WORKSPACE if which is None else _use(program, which, requirements, saved)
            add(buffer.name, which, device, buffer, use, height + above.offsets[buffer.name], None)
        operators += above.lower_bound
    return found, operators


_COPIED, _WORKSPACE = "copy of an input", "workspace"


def _use(program: ProgramPlan, index: int, requirements: Requirements, saved: frozenset[int]) -> str:
    if program.facts.storages[index].origin is Origin.INPUT:
        return _COPIED
    if index in saved:
        return "saved for backward"
    if index in requirements.handed_out:
        return "output"
    return "temporary" if program.facts.storages[index].origin is Origin.ALLOCATION else "result of an operator"


def _saved(program: ProgramPlan) -> frozenset[int]:
    """Storages that only the backward gets."""
    values = list(enumerate(output_values(program.graph)))
    saved = program.facts.behind(value for p, value in values if p in program.saved and isinstance(value, Node))
    return saved - program.facts.behind(v for p, v in values if p not in program.saved and isinstance(v, Node))


def _addresses(memory: MemoryPlan, own: Sequence[tuple[int, Buffer]]) -> dict[str, int]:
    """Where storages of one device lie: in its arena, or where regions and allocations would fit at one time."""
    if any(region.arena for region in memory.regions):
        return {buffer.name: memory.places[index].offset for index, buffer in own}
    inside: Mapping[int, list[tuple[int, Buffer]]] = defaultdict(list)
    alone = list[Buffer]()
    for index, buffer in own:
        place = memory.places[index]
        if place.home is Home.REGION:
            inside[place.region].append((index, buffer))
        else:
            alone.append(buffer)
    regions = [(number, memory.regions[number]) for number in inside]
    blocks = [Buffer(f"region {number}", one.size, one.begin, one.end) for number, one in regions]
    placed = plan_memory([*blocks, *alone]).offsets
    found = {buffer.name: placed[buffer.name] for buffer in alone}
    for number, items in inside.items():
        base = placed[f"region {number}"]
        found.update({buffer.name: base + memory.places[index].offset for index, buffer in items})
    return found


def _peak(storages: Sequence[StorageData], schedule: Sequence[Node]) -> PeakData | None:
    changes = Counter[int]()
    for one in storages:
        changes[one["begin"]] += one["bytes"]
        changes[one["end"]] -= one["bytes"]
    if not changes or not schedule:
        return None
    steps = sorted(changes)
    alive = list(itertools.accumulate(changes[step] for step in steps))
    most = max(alive)
    step = steps[alive.index(most)]
    there = [one for one in storages if one["begin"] <= step < one["end"]]
    node = schedule[min(step, len(schedule) - 1)]
    names = [one["name"] for one in sorted(there, key=lambda one: -one["bytes"])]
    return {"step": step, "node": node.name, "bytes": most, "storages": names, "user_line": user_line(node)}


def _peak_in_order_of_lines(planned: Planned) -> int:
    """Bytes of planned allocations that are alive at one time, if each is there from its line to its last use."""
    program, sizes = planned.program, Requirements.of(planned).sizes
    position = {node: number for number, node in enumerate(program.graph.graph.nodes)}
    handed_out = Requirements.of(planned).handed_out
    last: dict[int, int] = {}
    for node, number in position.items():
        for index in program.facts.of(node) | program.facts.touched(node):
            last[index] = number
    changes = Counter[int]()  # by twice the position: what ends there, ends after it
    for index in _allocated(program, sizes):
        begin = position[program.maker(index)]
        changes[2 * begin] += sizes[index]
        if index not in handed_out:
            changes[2 * last.get(index, begin) + 1] -= sizes[index]
    return max(itertools.accumulate(changes[step] for step in sorted(changes)), default=0)


def _allocated(program: ProgramPlan, sizes: Mapping[int, int]) -> Iterable[int]:
    return (index for index in sizes if program.facts.storages[index].origin is Origin.ALLOCATION)


def _copies(program: Program, planned: Planned | None, memory: MemoryPlan) -> list[CopyData]:
    """Copies of each replay of the newest plan, the largest first."""
    found: list[CopyData] = []
    for name, (_, nbytes) in (planned.input_buffers if planned is not None else {}).items():
        found.append({"what": "input", "name": name, "bytes": nbytes})
    for recording in program.specializations.recordings():
        if recording.request.memory is memory and memory.arenas:  # elsewhere outputs are new tensors
            for index in sorted(recording.request.copied):
                name = program.plan.facts.storages[index].name
                found.append({"what": "output", "name": name, "bytes": memory.sizes.get(index, 0)})
            break
    return sorted(found, key=lambda one: -one["bytes"])
