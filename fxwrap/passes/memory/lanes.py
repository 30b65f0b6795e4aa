"""PLAN: decides which work of a call may run at the same time, on threads of the CPU (``plan.Lanes``).

The dependencies are those of the graph and those of bytes: of two storages that share some, the second is written
when nobody uses the first any more. So the memory plan decides how much can run at the same time, and is made for it:
storages stay longer where that takes little memory (``planner.plan_program``).

A list schedule (Graham 1966) over counted costs: in the order of the schedule each node goes to the lane in which it
ends first.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ...clocks import needed_waits
from ...host_graph.nodes import Kind, checks_layout, draws_numbers, kernel_of, kind_of, nodes_in, schema_of
from ...host_graph.sizes import layout_at, symbols_at
from ...packing import Buffer
from ...plan import Home, Lanes, MemoryPlan, ProgramPlan, SizedProgram, Verdict
from .fit import work_of
from .order import work_before

if TYPE_CHECKING:
    import networkx as nx

# Microseconds: what a kernel and a call of an operator take at least, a product without the dispatcher, an edge
# between lanes, and the beginning and the end of lanes. Bytes of a microsecond, from memory in a cache.
_LAUNCH, _CALL, _PRODUCT, _EDGE, _FORK = 0.08, 2.5, 0.3, 1.0, 8.0
_BYTES = 10_000
# Lanes have to take less than this part of the time without them: two virtual cores of one machine may be one core's.
# (A GRU of 16 steps, estimated at 0.6, took 1.03 of one lane in lanes; the recommender, at 0.6, 0.75.)
_WORTH = 0.65
# ATen gives more elements to several threads, which is another way to round, or to place vectors (at::internal).
_FEW_ELEMENTS = 32768
# Multiply-adds, and elements of a result: ``Product`` in native/products.h.
_SMALL_PRODUCT = 1 << 18
# Operators whose kernels compute each row, or each element, by itself. Others may add in parts, a part to a thread.
_BY_ROW = (
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    "aten::embedding",
    "aten::gather",
    "aten::index_select",
    "aten::cat",
    "aten::index",
    "aten::slice_scatter",
    "aten::fill_",
    "aten::copy_",
)
_PRODUCTS = (torch.ops.aten.mm.out, torch.ops.aten.addmm.out)


@dataclass(frozen=True)
class Piece:
    """Consecutive nodes of the schedule that may run beside each other, as far as they depend on each other.

    Attributes:
        begin, end: steps ``[begin, end)`` of the schedule.
        before: for each node, the positions in the piece of those that the graph has run before it.
        cost: of each node, in microseconds.
    """

    begin: int
    end: int
    before: Sequence[frozenset[int]]
    cost: Sequence[float]


def pieces_of(sized: SizedProgram, dependencies: Callable[[], nx.DiGraph], sizes: Mapping[int, int]) -> list[Piece]:
    """The pieces of a schedule in which there is work for two lanes.

    Args:
        dependencies: of the program's graph. A program that a cache has, and in which there is too little work for
            lanes, needs none.
        sizes: bytes of the program's storages.
    """
    plan, found = sized.plan, list[Piece]()
    layouts = _Layouts(symbols_at(sized.symbol_values))
    before: Mapping[Node, Collection[Node]] | None = None
    for begin, end in _runs(plan, layouts):
        nodes = plan.schedule[begin:end]
        cost = [_cost(node, work_of(node, plan.facts, sizes)) for node in nodes]
        if not _pays(cost, sum(cost) / 2):
            continue
        if before is None:
            before = work_before(plan, dependencies())
        place = {node: n for n, node in enumerate(nodes)}
        own = [frozenset(place[source] for source in before[node] if source in place) for node in nodes]
        if _pays(cost, _longest_chain(own, cost)):
            found.append(Piece(begin, end, own, cost))
    return found


def _runs(plan: ProgramPlan, layouts: _Layouts) -> Iterator[tuple[int, int]]:
    """Steps ``[begin, end)`` of captured work that may run beside other work."""
    step = 0
    for partition in plan.partitions:
        nodes = plan.work_in(partition)
        whole = partition.verdict is Verdict.CAPTURED and partition.index not in plan.compiled
        for may, group in itertools.groupby(map(layouts.may_run_beside, nodes) if whole else [False] * len(nodes)):
            length = len(list(group))
            if may and length > 1:
                yield step, step + length
            step += length


@dataclass(frozen=True)
class _Layouts:
    """Which nodes may run beside others at one set of sizes.

    Attributes:
        symbols: the sizes, by symbol.
    """

    symbols: Mapping[Any, int]

    def may_run_beside(self, node: Node) -> bool:
        """Whether a node computes the same bits on a thread beside others.

        A parallel region inside of another one has one thread, and with another number of threads a kernel may round
        otherwise. So work that has one of its own runs alone; it has all threads for itself then.
        """
        if (kernel := kernel_of(node)) is not None:
            return kernel.address is not None and bool(kernel.source) and "omp parallel" not in kernel.source
        overload = schema_of(node)
        if kind_of(node) is not Kind.EXTERN or overload is None:
            return checks_layout(node)
        made = node.meta.get("val")
        values = [*(arg.meta.get("val") for arg in nodes_in((node.args, node.kwargs))), *_several(made)]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        layouts = [layout_at(value, self.symbols) for value in tensors]
        if None in layouts or any(value.device.type != "cpu" for value in tensors):
            return False
        if overload in _PRODUCTS:
            return all(value.dtype in (torch.float32, torch.float64) for value in tensors) and self._is_small(node)
        by_itself = overload._schema.name in _BY_ROW or torch.Tag.pointwise in overload.tags
        drawn = draws_numbers(node) or "effect" in node.meta
        return by_itself and not drawn and all(math.prod(size) < _FEW_ELEMENTS for size, _ in layouts)  # type: ignore[misc]

    def _is_small(self, product: Node) -> bool:
        """Whether the helper library multiplies, at these sizes, without the dispatcher."""
        first, out = (layout_at(one.meta["val"], self.symbols) for one in (product.args[-2], product.kwargs["out"]))  # type: ignore[union-attr]
        elements = math.prod(out[0])  # type: ignore[index]
        return 0 < elements < _FEW_ELEMENTS and 0 < first[0][1] * elements <= _SMALL_PRODUCT  # type: ignore[index]


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else [value]


def _cost(node: Node, moved: int) -> float:
    """Microseconds, counted."""
    if kind_of(node) is Kind.CHECK:
        return 0.0
    least = _LAUNCH if kernel_of(node) is not None else _PRODUCT if schema_of(node) in _PRODUCTS else _CALL
    return least + moved / _BYTES


def _pays(cost: Sequence[float], beside: float) -> bool:
    """Whether work should run in lanes, if that takes so long."""
    return beside + _FORK < _WORTH * sum(cost)


def _longest_chain(before: Sequence[Collection[int]], cost: Sequence[float]) -> float:
    ends = list[float]()
    for own, takes in zip(before, cost, strict=True):
        ends.append(takes + max((ends[source] for source in own), default=0.0))
    return max(ends)


def stretched(buffer: Buffer, pieces: Sequence[Piece], steps: int) -> Buffer:
    """A buffer that exists up to so many steps longer, in the piece in which it is used last.

    ::

        piece      0  1  2  3  4  5
        buffer     .  x  x  .  .  .     ->     .  x  x  x  x  .     for two steps

    Nothing else lies in its bytes in these steps, so that they may run beside its last use.
    """
    at = bisect_right(pieces, buffer.end - 1, key=lambda piece: piece.begin) - 1
    if at < 0 or not buffer.begin < buffer.end <= pieces[at].end:
        return buffer
    return replace(buffer, end=min(buffer.end + steps, pieces[at].end))


def choose_lanes(
    plan: ProgramPlan, memory: MemoryPlan, pieces: Sequence[Piece], count: int
) -> tuple[tuple[Lanes, ...], Sequence[range]]:
    """The lanes of each piece that takes less time with them.

    Args:
        memory: what lies where.
        count: the most lanes.

    Returns:
        The lanes; and for each step of the schedule, the steps that may run while it does.
    """
    chosen, beside = list[Lanes](), [range(step, step + 1) for step in range(len(plan.schedule))]
    bytes_of = _bytes_by_region(plan, memory)
    for piece in pieces:
        nodes = plan.schedule[piece.begin : piece.end]
        before = [set(own) for own in piece.before]
        for first, second in _in_one_place(plan, nodes, bytes_of):
            before[second].add(first)
        lanes, end = _scheduled(before, piece.cost, count)
        if max(lanes) == 0 or not _pays(piece.cost, end):
            continue
        waits = list(needed_waits(lanes, before))
        chosen.append(
            Lanes(
                {node.name: lane for node, lane in zip(nodes, lanes, strict=True)},
                {nodes[n].name: tuple(nodes[other].name for other in own) for n, own in enumerate(waits) if own},
                serial=sum(piece.cost),
                beside=end,
            )
        )
        for n, steps in enumerate(_beside(lanes, waits)):
            beside[piece.begin + n] = range(piece.begin + steps.start, piece.begin + steps.stop)
    return tuple(chosen), beside


def _scheduled(before: Sequence[Collection[int]], cost: Sequence[float], count: int) -> tuple[list[int], float]:
    """The lane of each node, and when the last one ends."""
    free, ends, lanes = [0.0] * count, list[float](), list[int]()
    for own, takes in zip(before, cost, strict=True):

        def start(lane: int, own: Collection[int] = own) -> float:
            reached = (ends[source] + _EDGE * (lanes[source] != lane) for source in own)
            return max(free[lane], *reached, 0.0)

        # Of lanes in which it begins at one time, that with the least idle time before it.
        lane = min(range(count), key=lambda lane: (start(lane), -free[lane], lane))
        lanes.append(lane)
        free[lane] = start(lane) + takes
        ends.append(free[lane])
    return lanes, max(free)


def _bytes_by_region(plan: ProgramPlan, memory: MemoryPlan) -> Mapping[int, tuple[int, int, int]]:
    """The region and the bytes of each storage that lies in one, by storage."""
    return {
        index: (place.region, place.offset, place.offset + memory.sizes[index])
        for index, place in enumerate(memory.places)
        if place.home is Home.REGION and memory.sizes[index]
    }


def _in_one_place(
    plan: ProgramPlan, nodes: Sequence[Node], bytes_of: Mapping[int, tuple[int, int, int]]
) -> Iterator[tuple[int, int]]:
    """Nodes that use a storage, each with the one that is the first to use another in the same bytes."""
    users, found = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for n, node in enumerate(nodes):
        for index in plan.facts.touched(node) & bytes_of.keys():
            region, low, high = bytes_of[index]
            if index not in users:
                earlier = found[region]
                for other in [one for one in earlier if bytes_of[one][1] < high and low < bytes_of[one][2]]:
                    yield from ((user, n) for user in users[other])
                    if low <= bytes_of[other][1] and bytes_of[other][2] <= high:
                        earlier.remove(other)  # what comes later comes after this storage
                earlier.append(index)
            users[index].append(n)


def _beside(lanes: Sequence[int], waits: Sequence[Sequence[int]]) -> list[range]:
    """For each member of lanes, the first and the last that may run at the same time, as a range around it."""
    count, members = max(lanes) + 1, len(lanes)
    by_lane = [[n for n, lane in enumerate(lanes) if lane == of] for of in range(count)]
    clocks, latest = list[list[int]](), [[-1] * count for _ in range(count)]  # the last member of each lane before
    for n, lane in enumerate(lanes):
        clock = list(latest[lane])
        for other in waits[n]:
            clock = list(map(max, clock, clocks[other]))
        clocks.append([n if own == lane else last for own, last in enumerate(clock)])
        latest[lane] = clocks[-1]
    # Of lane ``of``, the first member that ``n`` does not come after, and the first that comes after ``n``.
    first, last = [n for n in range(members)], [n for n in range(members)]
    for of, own in enumerate(by_lane):
        for lane in range(count):
            if lane == of:
                continue
            reached = [clocks[n][of] for n in by_lane[lane]]  # grows along the lane
            for m in own:
                at = bisect_left(reached, m)  # the first of ``lane`` that comes after m
                if at:
                    last[m] = max(last[m], by_lane[lane][at - 1])
            for n, before in zip(by_lane[lane], reached, strict=True):
                at = bisect_right(own, before)
                if at < len(own):
                    first[n] = min(first[n], own[at])
    return [range(low, high + 1) for low, high in zip(first, last, strict=True)]
