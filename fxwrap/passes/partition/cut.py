"""CUT: orders the work and cuts it into as few captured partitions as dependencies and memory allow."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from ...host_graph.nodes import Kind, is_work, kind_of, operator_name
from ...host_graph.storages import StorageFacts
from ...host_graph.user_code import user_line
from ...packing.lifetimes import Lifetimes
from ...plan import Cut, NodeVerdict, Partition, Verdict

if TYPE_CHECKING:
    import networkx as nx

# Bytes by which the peak may rise in any case, whatever the budget says.
NEGLIGIBLE = 1 << 20


def cut(
    dependencies: nx.DiGraph,
    verdicts: Mapping[str, NodeVerdict],
    device: torch.device,
    facts: StorageFacts | None = None,
    sizes: Mapping[int, int] | None = None,
    peak_budget: float = 1.1,
    negligible: int = NEGLIGIBLE,
) -> Cut:
    """Order the work and group it into partitions, with the fewest captured ones.

    ::

        a (captured)   b (eager)   c (captured)    ->    [a c] [b]        a, b, c depend on nothing

    Partitions run in numbered order, and their verdicts (captured, eager) alternate. The number of a node's partition
    is its level. Levels of one verdict are all even or all odd. The least level of a node is the largest number of
    verdict changes on a path to it, counted from the verdict of level 0; the greatest is counted back from the last
    level in the same way, on paths through its users. Every choice between the two that keeps the dependencies gives
    the same, fewest partitions. Three are tried (each node early, each late, late where memory grows), and program
    order if it has as few. The lowest peak of memory wins. If that is above the budget, program order is split into
    2, 4, 8, ... pieces, each cut by itself, until the peak fits; the last resort is program order itself. Nodes of a
    partition keep program order.

    Apart from sorting, the time is linear in nodes and dependencies without pieces; each number takes one more pass.

    Args:
        facts: what each node reads and writes.
        sizes: bytes of the allocated storages that the program does not return; without them memory is ignored.
        peak_budget, negligible: the allowed ratio of the peak to that of program order, and bytes that it may rise by
            in any case.
    """
    work = _Work.of(dependencies, verdicts)
    fewest = work.grouped(_fewest(work, range(len(work))))
    chosen, in_order = fewest, work.grouped(work.program_order())
    peak = order_peak = 0
    if sizes and facts is not None:
        # Nodes in no partition are not counted as uses.
        used = [
            [index for index in facts.touched(node) if index in sizes] if verdict is not None else []
            for node, verdict in zip(work.nodes, work.verdict_at, strict=True)
        ]

        def peak_of(groups: Groups) -> int:
            return Lifetimes.of(used[i] for _, group in groups for i in group).peak(sizes)

        order_peak = peak_of(in_order)
        equal = [work.grouped(levels) for levels in _equally_few(work, _growth(Lifetimes.of(used), sizes))]
        if len(in_order) == len(fewest):
            equal.append(in_order)
        chosen = min(equal, key=peak_of)
        allowed = max(peak_budget * order_peak, order_peak + negligible)
        pieces = 1
        while (peak := peak_of(chosen)) > allowed and chosen is not in_order:
            pieces *= 2
            chosen = work.grouped(_in_pieces(work, pieces)) if pieces < len(work) else in_order
    partitions = tuple(
        _partition(index, verdict, tuple(work.nodes[i] for i in group), verdicts, device)
        for index, (verdict, group) in enumerate(chosen)
    )
    return Cut(partitions, _captured(fewest), _captured(chosen), _captured(in_order), peak, order_peak, peak_budget)


Groups = list[tuple[Verdict, list[int]]]


def _captured(groups: Groups) -> int:
    return sum(verdict is Verdict.CAPTURED for verdict, _ in groups)


@dataclass(frozen=True)
class _Work:
    """The nodes in program order, their verdicts, and the positions of the nodes that each depends on.

    Views have no verdict here and are in no partition; nor sizes, allocations, elements of tuples that are not eager.
    """

    nodes: list[Node]
    verdict_at: list[Verdict | None]
    before: list[list[int]]

    def __len__(self) -> int:
        return len(self.nodes)

    @classmethod
    def of(cls, dependencies: nx.DiGraph, verdicts: Mapping[str, NodeVerdict]) -> _Work:
        nodes = _in_order(dependencies)
        position = {node: index for index, node in enumerate(nodes)}
        verdict_at = [
            verdict if is_work(node) or (verdict is Verdict.EAGER and not _is_made_again(node)) else None
            for node in nodes
            for verdict in (verdicts[node.name].verdict,)
        ]
        before: list[list[int]] = [[] for _ in nodes]
        for source, user in dependencies.edges:
            before[position[user]].append(position[source])
        return cls(nodes, verdict_at, before)

    def program_order(self) -> list[int]:
        """The level of each node if nothing is reordered."""
        levels, level, last = [], 0, None
        for verdict in self.verdict_at:
            if verdict is not None:
                level += last is not None and verdict is not last
                last = verdict
            levels.append(level)
        return levels

    def grouped(self, levels: Sequence[int]) -> Groups:
        """Group nodes by level; adjacent groups with the same verdict are merged."""
        groups: Groups = []
        by_level = sorted((level, i) for i, level in enumerate(levels) if self.verdict_at[i] is not None)
        for _, i in by_level:
            verdict = self.verdict_at[i]
            assert verdict is not None
            if not groups or groups[-1][0] is not verdict:
                groups.append((verdict, []))
            groups[-1][1].append(i)
        return groups


def _is_made_again(node: Node) -> bool:
    """Whether a node is made again wherever it is used: a view, unless it takes an element out of a tuple."""
    return kind_of(node) is Kind.VIEW and node.target is not operator.getitem


def _in_order(dependencies: nx.DiGraph) -> list[Node]:
    """The nodes in the order in which the dependency graph lists them, unless a dependency forbids it."""
    import networkx as nx  # takes a tenth of a second; a program from a cache needs no dependency graph

    position = {node: index for index, node in enumerate(dependencies)}
    return list(nx.lexicographical_topological_sort(dependencies, key=position.__getitem__))


def _earliest(work: _Work, piece: Iterable[int], first: Verdict) -> dict[int, int]:
    """The least level of each node of a piece if level 0 has the verdict ``first``.

    Even levels have that verdict, odd ones the other. Dependencies on other pieces do not count: those run before.
    """
    levels: dict[int, int] = {}
    for i in piece:
        level = 0
        for source in work.before[i]:
            if levels.get(source, 0) > level:
                level = levels[source]
        verdict = work.verdict_at[i]
        if verdict is not None:
            level += (level % 2 == 0) is not (verdict is first)
        levels[i] = level
    return levels


def _fewest(work: _Work, piece: range) -> list[int]:
    """The levels of a piece.

    The verdict of level 0 is the one that gives fewer captured partitions; if both give as many, fewer in all.
    """
    best: tuple[tuple[int, int], list[int]] | None = None
    for first in Verdict:
        levels = _earliest(work, piece, first)
        used = {levels[i] for i in piece if work.verdict_at[i] is not None}
        captured = sum((level % 2 == 0) is (first is Verdict.CAPTURED) for level in used)
        cost = (captured, len(used))
        if best is None or cost < best[0]:
            best = cost, [levels[i] for i in piece]
    assert best is not None
    return best[1]


def _in_pieces(work: _Work, pieces: int) -> list[int]:
    """The level of each node if program order is split into at most ``pieces`` equal pieces, each cut by itself."""
    levels, base, size = list[int](), 0, -(-len(work) // pieces)
    for begin in range(0, len(work), size):
        piece = _fewest(work, range(begin, min(begin + size, len(work))))
        levels += [base + level for level in piece]
        base += max(piece) + 1
    return levels


def _growth(lifetimes: Lifetimes, sizes: Mapping[int, int]) -> Mapping[int, int]:
    """Bytes of storages that are first used at each step, less those that are last used there."""
    growth = Counter[int]()
    for index, steps in lifetimes.items():
        growth[steps.start] += sizes[index]
        growth[steps[-1]] -= sizes[index]
    return growth


def _equally_few(work: _Work, growth: Mapping[int, int]) -> Iterable[list[int]]:
    """Cuts with the fewest partitions: all nodes early; all late; late only those that make memory grow."""
    early = _fewest(work, range(len(work)))
    yield early
    yield _later(work, early, [True] * len(work))
    yield _later(work, early, [growth[i] > 0 for i in range(len(work))])


def _later(work: _Work, early: Sequence[int], late: Sequence[bool]) -> list[int]:
    """Move each node marked ``late`` to the latest partition of its verdict that is not after any of its users."""
    last = max(
        (level for level, verdict in zip(early, work.verdict_at, strict=True) if verdict is not None), default=0
    )
    levels, limits = list(early), [last] * len(work)
    for i in range(len(work) - 1, -1, -1):
        if work.verdict_at[i] is None:
            levels[i] = limits[i]  # in no partition: it passes on its users' limit
        elif late[i]:
            levels[i] = limits[i] - (limits[i] - early[i]) % 2  # one less if the limit's level has the other verdict
        for source in work.before[i]:
            limits[source] = min(limits[source], levels[i])
    return levels


def _partition(
    index: int,
    verdict: Verdict,
    nodes: tuple[Node, ...],
    verdicts: Mapping[str, NodeVerdict],
    device: torch.device,
) -> Partition:
    kinds = Counter(kind_of(node) for node in nodes)
    reasons: dict[str, None] = {}
    if verdict is Verdict.EAGER:
        for node in nodes:
            if is_work(node):
                where = user_line(node)
                text = f"{operator_name(node)}: {verdicts[node.name].reason}"
                reasons[f"{text} ({where})" if where else text] = None
    return Partition(
        index,
        verdict,
        tuple(node.name for node in nodes),
        "; ".join(reasons),
        device if verdict is Verdict.CAPTURED else torch.device("cpu"),
        kinds[Kind.LAUNCH],
        kinds[Kind.EXTERN],
    )
