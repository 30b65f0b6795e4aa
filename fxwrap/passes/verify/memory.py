"""CHECK: proves a memory plan safe, from the host graph alone. A sweep over steps finds overlaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...errors import PlanError
from ...host_graph.listing import line_of
from ...host_graph.nodes import is_work, output_node, reinterpret
from ...host_graph.storages import Origin, Storage, StorageFacts
from ...plan import Home, MemoryPlan, Place, Region, Reserved
from .accesses import Accesses, Root, counts_from_storage, fault, may_keep_operands, name_of

# Bytes.
_ALIGNMENT = 64


def verify_memory(
    gm: GraphModule,
    schedule: Sequence[Node],
    facts: StorageFacts,
    plan: MemoryPlan,
    symbol_values: Mapping[Node, Any],
    replaced_groups: Sequence[Sequence[str]] = (),
    donated: Collection[str] = (),
    workspace: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Prove that no two storages that are live at the same time share a byte of an arena.

    The same of workspace, which is live while its call runs. And that what is written to an input's static buffer is
    copied to the caller's tensor, if anybody reads it there.

    ``facts`` only identifies the storages of the plan. Aliasing and accesses are derived again from the graph.

    Args:
        replaced_groups: groups of nodes that ``compile_partition`` replaced by one call; they may work in any order.
        donated: inputs that the caller does not read after the call, unless it gets them back.
        workspace: bytes of workspace in an arena of each call that allocates at planned addresses, by node.

    Raises:
        PlanError: two live storages overlap (the error names them, the step, the bytes); a storage is misaligned,
            out of bounds or too small; workspace has no place; a call allocates at the address of an arena's block;
            a write to an input is lost; or a communication is in flight at the program's begin or end.
    """
    accesses = Accesses(gm.graph)
    _check_communications(accesses)
    spans = live_ranges(accesses, schedule, replaced_groups)
    nodes = {node.name: node for node in gm.graph.nodes}
    position = {node.name: step for step, node in enumerate(schedule)}
    end = len(schedule) + 1
    handed_out = {root for node in output_node(gm).all_input_nodes for root in accesses.roots(node)}
    written = {root for node in schedule if is_work(node) for root in accesses.written(node)}
    intervals: dict[int, list[Interval]] = defaultdict(list)
    in_call_regions: dict[Root, Place] = {}
    for storage, place in zip(facts.storages, plan.places, strict=True):
        maker = nodes[storage.node]
        root = (maker, storage.element)
        _check_home(storage, maker, place, plan, root in handed_out, root in spans)
        if place.home is not Home.REGION:
            continue
        region = plan.regions[place.region]
        size = _check_bounds(storage, maker, plan, symbol_values, place.offset, region)
        begin, stop = spans.get(root, (0, 0))
        if not region.arena:
            in_call_regions[root] = place
        elif storage.origin is Origin.EXTERN:
            if storage.node in workspace:
                _check_not_first(storage.name, place.offset)
            begin = position[storage.node]
            stop = max(stop, begin + 1)
        elif maker.op == "placeholder":
            begin = 0  # filled before the first step
            stop = end if storage.node in plan.copied_back else max(stop, 1)
            if root in written and (root in handed_out or storage.node not in donated):
                _check_copied_back(storage, plan)
        if root in handed_out and maker.op != "placeholder":
            stop = end  # the caller reads it afterwards
        if size and begin < stop:
            intervals[place.region].append(Interval(storage.name, place.offset, place.offset + size, begin, stop))
    for node, nbytes in workspace.items():
        if not nbytes:
            continue
        number, interval = _workspace(node, nbytes, position[node], plan)
        intervals[number].append(interval)
    for number, region in enumerate(plan.regions):
        others = list(_live_outputs_of_others(accesses, nodes, region.reserved, spans, handed_out, end))
        check_overlap([*intervals[number], *others], schedule)
    _check_steps(accesses, schedule, in_call_regions, plan)


def _workspace(node: str, nbytes: int, step: int, plan: MemoryPlan) -> tuple[int, Interval]:
    """The region of a call's workspace, and its bytes there. Raises unless it has a place within an arena."""
    name, place = f"{node} workspace", plan.workspaces.get(node)
    if place is None or place.nbytes < nbytes:
        got = "none" if place is None else f"{place.nbytes} bytes"
        raise fault(f"plan: {name} is too small", expected=f"{nbytes} bytes", got=got)
    region = plan.regions[place.region]
    _check_span(name, place.offset, nbytes, region, region.alignment)
    _check_not_first(name, place.offset)
    if not region.arena:
        raise fault(f"plan: {name} has no memory", expected="bytes of an arena", got="a region")
    return place.region, Interval(name, place.offset, place.offset + place.nbytes, step, step + 1)


def _check_copied_back(storage: Storage, plan: MemoryPlan) -> None:
    if storage.node not in plan.copied_back:
        raise fault(
            f"plan: what is written to the static buffer of {storage.name} is lost",
            expected="a copy to the caller's tensor after the call",
            got="an input that the caller reads afterwards, and no copy",
        )


def _check_communications(accesses: Accesses) -> None:
    if accesses.in_flight:
        names = ", ".join(sorted(map(name_of, accesses.in_flight)))
        raise PlanError(
            f"plan: a communication on {names} is in flight when a call begins or ends",
            expected="every collective to be waited for in the graph that begins it",
        )


_HOMES = {
    Origin.INPUT: (Home.INPUT, Home.REGION),
    Origin.CONSTANT: (Home.CONSTANT,),
    Origin.ALLOCATION: (Home.REGION, Home.CALL, Home.RECORDING),
    Origin.EXTERN: (Home.OPERATOR, Home.REGION),
}


def _check_home(storage: Storage, maker: Node, place: Place, plan: MemoryPlan, handed_out: bool, used: bool) -> None:
    """Check that a storage has a home that its origin allows.

    A storage in a per-call region must be an allocation that is not handed out.
    """
    planned = not maker.kwargs.get("pin_memory") and str(maker.kwargs.get("device")) != "meta"
    # A number that the caller gets has memory of the recording's own, which nothing shares.
    apart = handed_out and storage.origin is Origin.ALLOCATION and all(extent == 1 for extent in maker.args[0])  # type: ignore[union-attr]
    forgotten = place.home is Home.RECORDING and planned and (used or handed_out) and not apart
    if place.home not in _HOMES[storage.origin] or forgotten:
        raise fault(
            f"plan: {storage.name} has no memory",
            expected=" or ".join(home.value for home in _HOMES[storage.origin]),
            got=place.home.value,
        )
    if place.home is not Home.REGION or (region := plan.regions[place.region]).arena:
        return
    if storage.origin is not Origin.ALLOCATION or handed_out:
        raise fault(
            f"plan: {storage.name} has memory in steps {region.begin} to {region.end - 1} only",
            expected="an allocation that is not handed out",
            got="an output" if handed_out else "no allocation",
        )


def _check_bounds(
    storage: Storage, maker: Node, plan: MemoryPlan, symbol_values: Mapping[Node, Any], offset: int, region: Region
) -> int:
    """Bytes of a storage that are accessed. Raises unless it is aligned and lies within its region."""
    returned = storage.origin is Origin.EXTERN
    size = _bytes_returned(storage, maker) if returned else _bytes_reached(maker, symbol_values)
    planned = plan.sizes.get(storage.index, 0)
    size = planned if size is None else size
    # Wide vector loads on a CPU want a cache line.
    alignment = region.alignment if region.arena else max(region.alignment, _ALIGNMENT)
    if size > planned:
        raise fault(f"plan: {storage.name} is too small", expected=f"{size} bytes", got=f"{planned} bytes")
    _check_span(storage.name, offset, size, region, alignment)
    return size


def _check_span(name: str, offset: int, size: int, region: Region, alignment: int) -> None:
    if offset % alignment:
        raise fault(f"plan: {name} is misaligned", expected=f"a multiple of {alignment}", got=str(offset))
    if offset < 0 or offset + size > region.size:
        raise fault(
            f"plan: {name} lies outside of its {'arena' if region.arena else 'region'}",
            expected=f"bytes within [0, {region.size})",
            got=f"[{offset}, {offset + size})",
        )


def _check_not_first(name: str, offset: int) -> None:
    """An allocator finds its blocks by their addresses: two with one address would be taken for each other."""
    if not offset:
        raise fault(f"plan: {name} has the address of its arena's block", expected="another offset", got="0")


def _check_steps(
    accesses: Accesses, schedule: Sequence[Node], placed: Mapping[Root, Place], plan: MemoryPlan
) -> None:
    """Check that storages in per-call regions are named in the region's steps, by nodes that cannot keep them."""
    regions = {root: plan.regions[place.region] for root, place in placed.items()}
    for step, node in enumerate(schedule if regions else ()):
        named = regions.keys() & (accesses.touched(node) | accesses.roots(node))
        for root in named if may_keep_operands(node) else ():
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
    shared = {place.region for place in placed.values() if place.offset}
    for node in accesses.graph.nodes if shared else ():
        if counts_from_storage(node):
            for root in accesses.roots_in((node.args, node.kwargs)) & regions.keys():
                if placed[root].region in shared:
                    raise fault(
                        f"plan: {name_of(root)} is in a region with others",
                        expected="a region of its own",
                        got=f"an operand of {line_of(node)}, which may count from the start of the storage",
                    )


def _live_outputs_of_others(
    accesses: Accesses,
    nodes: Mapping[str, Node],
    reserved: Sequence[Reserved],
    spans: Mapping[Root, tuple[int, int]],
    handed_out: Collection[Root],
    end: int,
) -> Iterator[Interval]:
    """The live outputs of other recordings in an arena.

    An output that the program gets as a donated input is live until its last use here, any other for the whole call.
    """
    for interval in reserved:
        roots = {root for name in interval.nodes for root in accesses.roots(nodes[name])}
        stays = not roots or not roots.isdisjoint(handed_out)
        stop = end if stays else max(spans.get(root, (0, 0))[1] for root in roots)
        name = "another program's output"
        if roots:
            name += f", here {name_of(min(roots, key=str))}"
        if stop:
            yield Interval(name, interval.low, interval.high, 0, stop, planned=False)


@dataclass(frozen=True)
class Interval:
    """Bytes ``[low, high)`` of an arena, live in steps ``[begin, end)``.

    Attributes:
        planned: whether this plan chose its offset.
    """

    name: str
    low: int
    high: int
    begin: int
    end: int
    planned: bool = True


def check_overlap(items: list[Interval], schedule: Sequence[Node]) -> None:
    live: list[Interval] = []
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


def live_ranges(
    accesses: Accesses, schedule: Sequence[Node], replaced_groups: Sequence[Sequence[str]]
) -> dict[Root, tuple[int, int]]:
    steps = {node.name: step for step, node in enumerate(schedule)}
    calls = {name: (steps[names[0]], steps[names[-1]] + 1) for names in replaced_groups for name in names}
    spans: dict[Root, tuple[int, int]] = {}
    for step, node in enumerate(schedule):
        if not is_work(node):
            continue  # a view or a size touches no bytes
        begin, end = calls.get(node.name, (step, step + 1))
        for root in accesses.touched(node):
            first, last = spans.get(root, (begin, end))
            spans[root] = min(first, begin), max(last, end)
    return spans


def _bytes_reached(root: Node, symbol_values: Mapping[Node, Any]) -> int | None:
    """Bytes of ``root``'s storage that it and views of it reach; None where sizes are unknown."""
    if root.op != "call_function":
        return None

    def number(value: Any) -> Any:
        return torch.fx.map_arg(value, symbol_values.get)

    size, stride = number(root.args[0]), number(root.args[1])
    dtype = root.kwargs["dtype"]
    needed = reach(size, stride, 0) * dtype.itemsize  # type: ignore[union-attr]
    for node in root.users:
        if node.target is reinterpret and node.args[0] is root:
            size, stride, offset = number(node.args[1]), number(node.args[2]), number(node.args[3])
            if None in (*size, *stride, offset):
                continue
            needed = max(needed, reach(size, stride, offset) * dtype.itemsize)  # type: ignore[union-attr]
    return needed


def _bytes_returned(storage: Storage, maker: Node) -> int | None:
    """Bytes of what an operator returns; None where sizes are unknown."""
    value = storage.value(maker)
    nbytes = None if value is None else value.untyped_storage().nbytes()
    return nbytes if isinstance(nbytes, int) else None


def reach(size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    if any(extent == 0 for extent in size):
        return 0
    return offset + 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
