"""ANALYSE: builds the dependency graph, which says what order the nodes of a program must keep."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule, Node

from ...host_graph.nodes import Kind, communicates, kind_of, schema_of
from ...host_graph.storages import StorageFacts
from .aliasing import overlap_groups

if TYPE_CHECKING:
    import networkx as nx


def build_dependency_graph(gm: GraphModule, facts: StorageFacts, apart_on: str = "") -> nx.DiGraph:
    """Build the DAG of host-graph nodes whose every topological order computes the same numbers.

    Edges carry ``kind``, one rule each:

    ====== =========================================================================
    data   a node uses another's value
    raw    it reads a storage after the last write to it
    waw    it writes a storage after the last write to it
    war    it writes a storage after reads of it
    order  random numbers are drawn, and effects happen, in program order
    check  it uses a result that an assert before it checks, by itself or for its size
    ====== =========================================================================

    Inputs on one device count as one storage, since they may overlap at a call; on devices of the type ``apart_on``
    they do not.
    """
    import networkx as nx  # takes a tenth of a second; a program from a cache needs no dependency graph

    graph = nx.DiGraph()
    last_write: dict[int, Node] = {}
    reads_since: dict[int, list[Node]] = defaultdict(list)
    last_in_order: dict[str, Node] = {}
    checks, groups = _Checks(), overlap_groups(gm, facts, apart_on)

    def with_groups(storages: frozenset[int]) -> frozenset[int]:
        return storages.union(groups[index] for index in storages if index in groups)

    def edge(before: Node, after: Node, kind: str) -> None:
        if before is not after and not graph.has_edge(before, after):
            graph.add_edge(before, after, kind=kind)

    for node in gm.graph.nodes:
        graph.add_node(node)
        for operand in node.all_input_nodes:
            edge(operand, node, "data")
        for check in checks.before(node):
            edge(check, node, "check")
        writes = with_groups(facts.writes(node))
        for storage in with_groups(facts.reads(node)):
            if storage in last_write:
                edge(last_write[storage], node, "raw")
            if storage not in writes:
                reads_since[storage].append(node)
        for storage in writes:
            if storage in last_write:
                edge(last_write[storage], node, "waw")
            for reader in reads_since.pop(storage, ()):
                edge(reader, node, "war")
            last_write[storage] = node
        for chain in _ordered_effects(node, facts):
            if chain in last_in_order:
                edge(last_in_order[chain], node, "order")
            last_in_order[chain] = node
    return graph


class _Checks:
    """The asserts so far, by the work whose results they check."""

    def __init__(self) -> None:
        self._of: dict[Node, list[Node]] = defaultdict(list)
        self._made_by: dict[Node, frozenset[Node]] = {}  # the work that views, sizes and allocations are made of

    def before(self, node: Node) -> list[Node]:
        """The asserts that the next node has to follow."""
        results = frozenset[Node]().union(*(self._made_by[operand] for operand in node.all_input_nodes))
        is_work = kind_of(node) in (Kind.LAUNCH, Kind.EXTERN)
        self._made_by[node] = frozenset({node}) if is_work else results
        if kind_of(node) is Kind.CHECK:
            for result in results:
                self._of[result].append(node)
        return [check for result in results for check in self._of[result]] if is_work else []


def _ordered_effects(node: Node, facts: StorageFacts) -> list[str]:
    """The chains of effects that a node belongs to. They order nodes that no data flow connects."""
    if kind_of(node) is not Kind.EXTERN:
        return []
    overload = schema_of(node)
    if overload is None:
        return ["random", "effects"]  # nothing is declared: it may have both
    chains = []
    if torch.Tag.nondeterministic_seeded in overload.tags:
        chains.append("random")
    silent = not overload._schema.returns and not facts.writes(node)
    if silent or "effect" in node.meta or communicates(node):
        chains.append("effects")
    return chains
