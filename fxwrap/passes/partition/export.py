"""Exports a partition as a GraphModule with a signature, which can be printed, run, or given to another compiler."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.fx import Graph, GraphModule, Node

from ...host_graph.nodes import Kind, checks_on, effective_users, is_symbolic_value, kind_of
from ...host_graph.storages import Origin
from ...plan import Partition, PartitionGraph, PartitionSignature, ProgramPlan


class PartitionFunction(Protocol):
    """The replacement of a partition: it takes the partition's inputs and returns its outputs, in order."""

    def __call__(self, *inputs: object) -> Sequence[object]: ...


CompilePartition = Callable[[PartitionGraph], PartitionFunction | None]


def replace_partitions(plan: ProgramPlan, compile_partition: CompilePartition | None) -> ProgramPlan:
    """Let ``compile_partition`` replace partitions. A replacement is stored as an attribute of the graph."""
    if compile_partition is None:
        return plan
    compiled = dict[int, PartitionSignature]()
    for partition in plan.partitions:
        graph = partition_graph(plan, partition)
        if (function := compile_partition(graph)) is not None:
            target = next(name for n in itertools.count() if not hasattr(plan.graph, name := f"compiled_{n}"))
            setattr(plan.graph, target, function)
            compiled[partition.index] = dataclasses.replace(graph.signature, target=target)
    return dataclasses.replace(plan, compiled=compiled)


def partition_graph(plan: ProgramPlan, partition: Partition) -> PartitionGraph:
    """Cut a partition out of its host graph.

    ::

        buf0 = allocate(...)              buf0 = input            read outside, too: an input, which is written
        buf1 = allocate(...)              buf1 = allocate(...)    lives and dies inside
        launch(k, x, buf1)       ->       launch(k, x, buf1)
        y = mm(buf1, w)                   y = mm(buf1, w)
        launch(l, y, buf0)                launch(l, y, buf0)
        z = y.item()  (elsewhere)         return (y,)

    Views are made again inside; sizes come in as numbers.
    """
    cutter = _Cutter(plan, partition)
    return PartitionGraph(cutter.module(), cutter.signature(), partition)


class _Cutter:
    def __init__(self, plan: ProgramPlan, partition: Partition) -> None:
        self.plan, self.partition = plan, partition
        self.nodes = plan.work_in(partition)
        self.inside = set(self.nodes)
        self.temporaries = self._temporaries()
        self.outputs = [n for n in self.nodes if not effective_users(n) <= self.inside]
        self.inputs: list[Node] = []
        self._checks = {node: self._checks_after(node) for node in self.nodes}
        seen: set[Node] = set()
        for node in self.nodes:
            for user in (node, *self._checks[node]):
                self._collect(user, seen)

    def _temporaries(self) -> frozenset[int]:
        """Allocated storages that no node outside touches, and that the program does not return."""
        facts, inside = self.plan.facts, set(self.partition.nodes)
        outside = [facts.touched(node) for node in self.plan.schedule if node not in self.inside]
        touched = frozenset().union(*(facts.touched(node) for node in self.inside))
        return frozenset(
            index
            for index in touched.difference(facts.handed_out, *outside)
            if facts.storages[index].origin is Origin.ALLOCATION and facts.storages[index].node not in inside
        )

    def _is_remade(self, node: Node) -> bool:
        kind = kind_of(node)
        if kind is Kind.ALLOCATION:
            return self.plan.facts.of(node) <= self.temporaries
        if kind is not Kind.VIEW or not isinstance(node.args[0], Node):
            return False
        # An element of a tuple that is made outside is an input; other views are made again.
        base = node.args[0]
        return base in self.inside or _is_tensor(base)

    def _checks_after(self, node: Node) -> list[Node]:
        """The asserts on a value that this partition makes. They become part of it."""

        def comes_along(arg: Node) -> bool:
            return arg in self.inside or self._is_remade(arg) or is_symbolic_value(arg.meta.get("val"))

        return [check for check in checks_on([node]) if all(map(comes_along, check.all_input_nodes))]

    def _collect(self, node: Node, seen: set[Node]) -> None:
        for arg in node.all_input_nodes:
            if arg in seen or arg in self.inside or kind_of(arg) is Kind.CONSTANT:
                continue
            seen.add(arg)
            if self._is_remade(arg):
                self._collect(arg, seen)
            else:
                self.inputs.append(arg)

    def module(self) -> GraphModule:
        graph = Graph()
        copies: dict[Node, Node] = {}
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)

        def copied(node: Node) -> Node:
            if node not in copies:
                copies[node] = graph.node_copy(node, copied)
            return copies[node]

        for node in self.nodes:
            copied(node)
            for check in self._checks[node]:
                copied(check)
        graph.output(tuple(copies[node] for node in self.outputs))
        return GraphModule(self.plan.graph, graph, f"Partition{self.partition.index}")

    def signature(self) -> PartitionSignature:
        facts = self.plan.facts
        written = frozenset().union(*(facts.writes(node) for node in self.inside))
        return PartitionSignature(
            tuple(node.name for node in self.inputs),
            tuple(node.name for node in self.outputs),
            tuple(i for i, node in enumerate(self.inputs) if facts.of(node) & written),
            tuple(i for i, node in enumerate(self.inputs) if is_symbolic_value(node.meta.get("val"))),
            self.temporaries,
        )


def _is_tensor(node: Node) -> bool:
    val = node.meta.get("val")
    return val is None or isinstance(val, torch.Tensor)
