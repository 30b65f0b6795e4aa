"""CHECK: prove a memory plan safe, from the host graph alone: overlap comes from a sweep over steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...errors import PlanError
from ...host_graph.listing import line_of
from ...host_graph.nodes import control_flow_of, counts_from_storage, only_computes, reinterpret
from ...plan import ArenaPlan, MemoryPlan, Origin, Region, Storage, StorageFacts, Taken
from .accesses import Accesses, Root, fault, name_of

# Bytes: wide vector loads on a CPU want a cache line.
_REGION_ALIGNMENT = 64


def verify_memory(
    gm: GraphModule,
    schedule: Sequence[Node],
    facts: StorageFacts,
    plan: MemoryPlan,
    numbers: Mapping[Node, Any],
) -> None:
    """Prove that no two storages that are live at one time share a byte of an arena.

    Of ``facts`` only the numbering of storages is used, to read the plan.

    Raises:
        PlanError: naming the two storages, the step and the byte ranges; or the storage that is misaligned,
            outside of its arena, or smaller than what is accessed, or one that a communication works on beyond
            the program.
    """
    memory = Accesses(gm.graph)
    if memory.in_flight:
        names = ", ".join(sorted(map(name_of, memory.in_flight)))
        raise PlanError(
            f"plan: a communication on {names} is under way beyond the program",
            expected="every collective to be waited for in the graph that begins it",
        )
    spans = _spans(memory, schedule)
    position = {node: step for step, node in enumerate(schedule)}
    end = len(schedule) + 1
    handed_out = {root for node in _output_nodes(gm.graph) for root in memory.roots(node)}
    written = {root for node in schedule if memory.works(node) for root in memory.written(node)}
    _check_regions(memory, schedule, spans, facts, plan, numbers, handed_out)
    _check_homes(facts, plan, spans.keys() | handed_out)
    placed: dict[torch.device, list[_Placed]] = defaultdict(list)
    for storage in facts.storages:
        if storage.index not in plan.location:
            continue
        device, offset = plan.location[storage.index]
        arena = plan.arenas[device]
        size = _size_there(memory, storage, plan, numbers, offset, arena.placement.size, arena.alignment, "arena")
        name, root = storage.name, (storage.node, storage.element)
        begin, stop = spans.get(root, (0, 0))
        if storage.origin is Origin.EXTERN:
            begin = position[storage.node]
            stop = max(stop, begin + 1)
        if storage.node.op == "placeholder":
            begin = 0  # filled before the first step
            stop = end if root in written else max(stop, 1)
        if root in handed_out:
            stop = end  # the caller reads it afterwards
        if size and begin < stop:
            placed[device].append(_Placed(name, offset, offset + size, begin, stop))
    for device, items in placed.items():
        others = list(_others(memory, plan.arenas[device].taken, spans, handed_out, end))
        _check_overlap([*items, *others], schedule)
        _check_workspace(plan.arenas[device], [*items, *others], position)


def _check_homes(facts: StorageFacts, plan: MemoryPlan, used: Collection[Root]) -> None:
    """Memory that is used and of which the size is known is in one place."""
    places = Counter([*plan.location, *plan.per_call, *(i for region in plan.regions for i in region.offsets)])
    for storage in facts.storages:
        index, own, options = storage.index, storage.origin is Origin.ALLOCATION, storage.node.kwargs
        # Whoever brings a storage into being brings memory, too.
        count = places[index] + (index in plan.per_call and not own)
        planned = own and index in plan.sizes and not options.get("pin_memory") and str(options["device"]) != "meta"
        if count > 1 or (planned and not count and (storage.node, storage.element) in used):
            raise fault(
                f"plan: {storage.name} has {'memory twice' if count else 'no memory'}",
                expected="one of: a region, a place in an arena, a new allocation at every call",
            )


def _check_workspace(arena: ArenaPlan, items: Sequence[_Placed], position: Mapping[Node, int]) -> None:
    """What an operator may have while it runs has to be free then, and the program's at some time: else it is not
    looked whether somebody else has it."""
    footprint = arena.footprint  # what is looked at
    for node, spans in arena.workspace.items():
        step = position[node]
        live = [item for item in items if item.begin <= step < item.end]
        for low, high in spans:
            for other in live:
                if low < other.high and other.low < high:
                    raise fault(
                        f"plan: workspace of {node.name} overlaps {other.name} at step {step}, {line_of(node)}",
                        expected="bytes that nobody has while it runs",
                        got=f"bytes [{low}, {high}) and [{other.low}, {other.high})",
                    )
            if not any(begin <= low and high <= stop for begin, stop in footprint):
                raise fault(
                    f"plan: workspace of {node.name} is not the program's",
                    expected="bytes in which the program has storages at other steps",
                    got=f"bytes [{low}, {high})",
                )


def _size_there(
    memory: Accesses,
    storage: Storage,
    plan: MemoryPlan,
    numbers: Mapping[Node, Any],
    offset: int,
    available: int,
    alignment: int,
    where: str,
) -> int:
    """Bytes that are accessed of a storage, which has to lie within an arena or region."""
    made = storage.origin is Origin.EXTERN
    size = _returned(storage) if made else _needed(memory.graph, storage.node, numbers)
    known = plan.sizes.get(storage.index, 0)
    size = known if size is None else size
    if size > known:
        raise fault(f"plan: {storage.name} is too small", expected=f"{size} bytes", got=f"{known} bytes")
    if offset % alignment:
        raise fault(f"plan: {storage.name} is misaligned", expected=f"a multiple of {alignment}", got=str(offset))
    if offset < 0 or offset + size > available:
        raise fault(
            f"plan: {storage.name} lies outside of its {where}",
            expected=f"bytes within [0, {available})",
            got=f"[{offset}, {offset + size})",
        )
    return size


def _check_regions(
    memory: Accesses,
    schedule: Sequence[Node],
    spans: Mapping[Root, tuple[int, int]],
    facts: StorageFacts,
    plan: MemoryPlan,
    numbers: Mapping[Node, Any],
    handed_out: Collection[Root],
) -> None:
    """What lies in a region is named in its steps only, by nobody who may keep it, and overlaps nothing there."""
    regions: dict[Root, Region] = {}
    placed: dict[int, list[_Placed]] = defaultdict(list)
    for region in plan.regions:
        for index, offset in region.offsets.items():
            storage = facts.storages[index]
            root = (storage.node, storage.element)
            allocated = storage.origin is Origin.ALLOCATION
            if not allocated or root in handed_out or index in plan.location or root in regions:
                raise fault(
                    f"plan: {storage.name} has memory in steps {region.begin} to {region.end - 1} only",
                    expected="an allocation that is not handed out, in one region",
                    got="an output" if root in handed_out else "another place, too" if allocated else "no allocation",
                )
            regions[root] = region
            size = _size_there(memory, storage, plan, numbers, offset, region.size, _REGION_ALIGNMENT, "region")
            if size and root in spans:
                placed[id(region)].append(_Placed(storage.name, offset, offset + size, *spans[root]))
    for items in placed.values():
        _check_overlap(items, schedule)
    for step, node in enumerate(schedule if regions else ()):
        named = regions.keys() & (memory.touched(node) | memory.roots(node))
        for root in named if not only_computes(node) else ():
            raise fault(
                f"plan: {name_of(root)} has memory in steps {regions[root].begin} to {regions[root].end - 1} only",
                expected=f"memory that {line_of(node)} may keep",
                got="a region",
            )
        for root in named:
            if not regions[root].begin <= step < regions[root].end:
                raise fault(
                    f"plan: {name_of(root)} has no memory at step {step}, {line_of(node)}",
                    expected="memory in the steps that name it",
                    got=f"memory in steps {regions[root].begin} to {regions[root].end - 1}",
                )
    for node in memory.graph.nodes if regions else ():
        if counts_from_storage(node) or control_flow_of(node) is not None:
            for root in memory.roots_in((node.args, node.kwargs)) & regions.keys():
                if any(regions[root].offsets.values()):
                    raise fault(
                        f"plan: {name_of(root)} is in a region with others",
                        expected="a region of its own",
                        got=f"an operand of {line_of(node)}, which may count from the start of the storage",
                    )


def _others(
    memory: Accesses,
    taken: Sequence[Taken],
    spans: Mapping[Root, tuple[int, int]],
    handed_out: Collection[Root],
    end: int,
) -> Iterator[_Placed]:
    """What other recordings have in an arena: for the whole call, or until the last use of what is given away."""
    for one in taken:
        roots = {root for node in one.nodes for root in memory.roots(node)}
        stays = not roots or not roots.isdisjoint(handed_out)
        stop = end if stays else max(spans.get(root, (0, 0))[1] for root in roots)
        name = "another program's output"
        if roots:
            name += f", here {name_of(min(roots, key=str))}"
        if stop:
            yield _Placed(name, one.low, one.high, 0, stop, planned=False)


@dataclass(frozen=True)
class _Placed:
    """Bytes ``[low, high)`` of an arena, live in steps ``[begin, end)``.

    Attributes:
        planned: whether this plan put it there; what others have is where it is.
    """

    name: str
    low: int
    high: int
    begin: int
    end: int
    planned: bool = True


def _check_overlap(items: list[_Placed], schedule: Sequence[Node] = ()) -> None:
    live: list[_Placed] = []
    for item in sorted(items, key=lambda item: item.begin):
        live = [other for other in live if other.end > item.begin]
        for other in live:
            if item.low < other.high and other.low < item.high and (item.planned or other.planned):
                line = f", {line_of(schedule[item.begin])}" if item.begin < len(schedule) else ""
                raise fault(
                    f"plan: {other.name} and {item.name} overlap at step {item.begin}{line}",
                    expected="storages that are live at one time to be apart",
                    got=f"bytes [{other.low}, {other.high}) and [{item.low}, {item.high})",
                )
        live.append(item)


def _spans(memory: Accesses, schedule: Sequence[Node]) -> dict[Root, tuple[int, int]]:
    spans: dict[Root, tuple[int, int]] = {}
    for step, node in enumerate(schedule):
        if not memory.works(node):
            continue  # a view or a size touches no bytes
        for root in memory.touched(node):
            spans[root] = (spans.get(root, (step, step))[0], step + 1)
    return spans


def _needed(graph: Graph, root: Node, numbers: Mapping[Node, Any]) -> int | None:
    """Bytes of ``root``'s storage that its own layout and views of it reach; None where sizes are unknown."""
    if root.op != "call_function":
        return None

    def number(value: Any) -> Any:
        return torch.fx.map_arg(value, numbers.get)

    size, stride = number(root.args[0]), number(root.args[1])
    dtype = root.kwargs["dtype"]
    needed = _reach(size, stride, 0) * dtype.itemsize  # type: ignore[union-attr]
    for node in graph.nodes:
        if node.target is reinterpret and node.args[0] is root:
            size, stride, offset = number(node.args[1]), number(node.args[2]), number(node.args[3])
            if None in (*size, *stride, offset):
                continue
            needed = max(needed, _reach(size, stride, offset) * dtype.itemsize)  # type: ignore[union-attr]
    return needed


def _returned(storage: Storage) -> int | None:
    """Bytes of what an operator returns; None where sizes are unknown."""
    nbytes = storage.value.untyped_storage().nbytes()
    return nbytes if isinstance(nbytes, int) else None


def _reach(size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    if any(extent == 0 for extent in size):
        return 0
    return offset + 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))


def _output_nodes(graph: Graph) -> list[Node]:
    return next(node for node in reversed(graph.nodes) if node.op == "output").all_input_nodes
