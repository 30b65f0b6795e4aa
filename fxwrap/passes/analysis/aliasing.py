"""ANALYSE: finds out which values share memory, and which nodes read and write it."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...host_graph.control_flow import ControlFlow, control_flow_of
from ...host_graph.nodes import (
    Kernel,
    Kind,
    communicates,
    counts_from_storage,
    kernel_of,
    kind_of,
    must_be_awaited,
    nodes_in,
    operator_name,
    output_values,
    receives,
    schema_of,
    waits,
)
from ...host_graph.storages import Origin, Storage, StorageFacts

_NONE: frozenset[int] = frozenset()


def analyse_storages(gm: GraphModule) -> StorageFacts:
    """Compute alias and mutation facts at storage level.

    Facts come from declarations: kernel signatures and operator schemas. A callable without a schema counts as one
    that writes all its tensor operands and returns views of them.
    """
    return _Analysis(gm).run()


def overlap_groups(gm: GraphModule, facts: StorageFacts, apart_on: str = "") -> Mapping[int, int]:
    """Groups of inputs that may overlap at a call: all inputs on a device, if one of them is written.

    No guard ensures that inputs that did not overlap when the program was compiled do not overlap at a call. Program
    order, in which Inductor's wrapper runs, defines the result of such a call.

    Args:
        apart_on: the type of the device whose inputs are known not to overlap; empty for none.

    Returns:
        The number of its group, below zero, by storage.
    """
    written = facts.all_written()
    on_device: dict[str, set[int]] = defaultdict(set)
    for node in gm.graph.nodes:
        if kind_of(node) is Kind.PLACEHOLDER and isinstance(val := node.meta.get("val"), torch.Tensor):
            on_device[str(val.device)] |= facts.of(node) if val.device.type != apart_on else _NONE
    groups = [group for group in on_device.values() if group & written]
    return {index: -1 - number for number, group in enumerate(groups) for index in group}


class _Analysis:
    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.storages: list[Storage] = []
        self.of: dict[Node, frozenset[int]] = {}
        self.elements: dict[Node, dict[int, frozenset[int]]] = {}
        self.constants: dict[str, Node] = {}  # the first node that reads an attribute
        self.reads: dict[Node, frozenset[int]] = {}
        self.writes: dict[Node, frozenset[int]] = {}
        self.ends: dict[Node, frozenset[Node]] = {}
        self.under_way: dict[int, frozenset[Node]] = {}  # the last communications that fill each storage
        self.not_awaited: frozenset[int] = _NONE
        self.begun_before: frozenset[int] = _NONE

    def run(self) -> StorageFacts:
        for node in self.gm.graph.nodes:
            self._visit(node, kind_of(node))
        return StorageFacts(
            tuple(self.storages),
            _by_name(self.of),
            _by_name(self.reads),
            _by_name(self.writes),
            {node.name: frozenset(begun.name for begun in ended) for node, ended in self.ends.items()},
            in_flight=self.not_awaited | self.begun_before,
            handed_out=self._storages_in(output_values(self.gm)),
        )

    def _visit(self, node: Node, kind: Kind) -> None:
        if kind is Kind.PLACEHOLDER:
            if not isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat)):
                self.of[node] = self._new(node, Origin.INPUT)
        elif kind is Kind.CONSTANT:
            # Kernels and subgraphs are no memory; a torchbind object is state of its own.
            if not isinstance(operator.attrgetter(str(node.target))(self.gm), (Kernel, torch.nn.Module)):
                first = self.constants.setdefault(str(node.target), node)
                self.of[node] = self.of[first] if first in self.of else self._new(node, Origin.CONSTANT)
        elif kind is Kind.ALLOCATION:
            self.of[node] = self._new(node, Origin.ALLOCATION)
        elif kind is Kind.VIEW:
            self._visit_view(node)
        elif kind is Kind.LAUNCH:
            self._visit_launch(node)
        elif kind is Kind.EXTERN:
            self._visit_extern(node)

    def _new(self, node: Node, origin: Origin, element: int | None = None) -> frozenset[int]:
        storage = Storage(len(self.storages), origin, node.name, element)
        self.storages.append(storage)
        return frozenset({storage.index})

    def _storages_in(self, value: Any) -> frozenset[int]:
        return _NONE.union(*(self.of.get(node, _NONE) for node in nodes_in(value)))

    def _visit_view(self, node: Node) -> None:
        base, *rest = node.args
        if node.target is operator.getitem and isinstance(base, Node) and base in self.elements:
            elements = self.elements[base]
            index = rest[0]
            self.of[node] = elements[index] if index in elements else self.of[base]  # type: ignore[index]
        else:
            self.of[node] = self._storages_in(base)
            if isinstance(base, Node) and base in self.elements:
                self.elements[node] = self.elements[base]

    def _visit_launch(self, node: Node) -> None:
        kernel = kernel_of(node)
        args = node.args[1:]
        positions = range(len(args)) if kernel is None else kernel.writes
        self.reads[node] = self._storages_in(args)
        self.writes[node] = self._storages_in([args[position] for position in positions])

    def _visit_extern(self, node: Node) -> None:
        self.reads[node] = self._storages_in((node.args, node.kwargs))
        schema = schema_of(node)
        if waits(node):
            self._visit_wait(node)
        elif schema is None or receives(node):
            self._visit_undeclared(node)
        else:
            self._visit_declared(node, schema._schema)
        if communicates(node) and not waits(node):
            filled = self.writes[node] or self.of.get(node, _NONE)
            self.under_way.update(dict.fromkeys(filled, frozenset({node})))
            if must_be_awaited(node):
                self.not_awaited |= filled

    def _visit_wait(self, node: Node) -> None:
        (operand,) = (*node.args, *node.kwargs.values())
        filled = self.reads[node]
        ended = frozenset[Node]().union(*(self.under_way.get(index, ()) for index in filled))
        self.of[node] = self.writes[node] = filled
        if isinstance(operand, (tuple, list)):
            self.elements[node] = {i: self._storages_in(item) for i, item in enumerate(operand)}
        self.reads[node] = filled.union(*(self.reads[begun] for begun in ended))
        self.ends[node] = ended
        self.not_awaited -= filled
        if not ended:
            self.begun_before |= {index for index in filled if self.storages[index].origin is Origin.INPUT}

    def _visit_declared(self, node: Node, schema: Any) -> None:
        written: frozenset[int] = _NONE
        inside_lists: frozenset[int] = _NONE
        returned: dict[str, frozenset[int]] = {}
        for argument, value in bound_arguments(schema, node):
            if argument.alias_info is None:
                continue
            storages = self._storages_in(value)
            if argument.alias_info.is_write:
                written |= storages
            for label in (*argument.alias_info.before_set, *argument.alias_info.after_set):
                returned[label] = returned.get(label, _NONE) | storages
            if "*" in argument.alias_info.after_set:
                # Views of the argument come back inside a list, which carries no label of its own.
                inside_lists |= storages
        self.writes[node] = written
        if inside_lists:
            self.of[node] = inside_lists
        else:
            self._visit_results(node, schema.returns, returned)

    def _visit_results(self, node: Node, returns: Any, returned: dict[str, frozenset[int]]) -> None:
        val = node.meta.get("val")
        aliased = [
            _NONE.union(*(returned.get(label, _NONE) for label in declared.alias_info.before_set))
            if declared.alias_info is not None
            else _NONE
            for declared in returns
        ]
        if len(returns) == 1:
            if aliased[0]:
                self.of[node] = aliased[0]
            elif isinstance(val, (tuple, list)):
                self.elements[node] = {i: self._new(node, Origin.EXTERN, i) for i in range(len(val))}
                self.of[node] = _NONE.union(*self.elements[node].values())
            elif _may_be_tensor(returns[0]):
                # A sparse tensor holds the indices and values that it was made of.
                made_of = _NONE if getattr(val, "layout", torch.strided) is torch.strided else self.reads[node]
                self.of[node] = self._new(node, Origin.EXTERN) | made_of
        elif returns:
            self.elements[node] = {
                i: aliased[i] or (self._new(node, Origin.EXTERN, i) if _may_be_tensor(declared) else _NONE)
                for i, declared in enumerate(returns)
            }
            self.of[node] = _NONE.union(*self.elements[node].values())

    def _visit_undeclared(self, node: Node) -> None:
        if (flow := control_flow_of(node)) is not None:
            self._visit_control_flow(node, flow)
            return
        target = node.target
        if isinstance(target, torch._ops.OpOverloadPacket):
            schemas = [getattr(target, name)._schema for name in target.overloads()]
            written = _NONE
            aliases = False
            for schema in schemas:
                aliases |= any(declared.alias_info is not None for declared in schema.returns)
                for argument, value in bound_arguments(schema, node):
                    if argument.alias_info is not None and argument.alias_info.is_write:
                        written |= self._storages_in(value)
            self.writes[node] = written
            fresh = self._new(node, Origin.EXTERN)
            self.of[node] = fresh | self.reads[node] if aliases else fresh
            return
        self.writes[node] = self.reads[node]
        self.of[node] = self.reads[node] | self._new(node, Origin.EXTERN)

    def _visit_control_flow(self, node: Node, flow: ControlFlow) -> None:
        """A branch or a loop writes and returns those of its operands that its subgraphs write and return.

        And it writes the memory that it is given for what they allocate. Where all that they return at a position are
        operands or lie there, nothing is made, except by a loop without any iteration: it copies what is asked of it.
        """
        written, returned = set[int](), defaultdict[int, set[int]](set)  # positions of operands; of each result
        # Positions of results that may be none of the operands.
        made = {p for user in node.users if flow.repeats for p in _asked_by(user, len(node.meta["val"]))}
        for subgraph in flow.subgraphs:
            facts = analyse_storages(subgraph)
            position = {operand.name: p for p, operand in enumerate(subgraph.graph.find_nodes(op="placeholder"))}
            inside = {s.index: position[s.node] for s in facts.storages if s.node in position}
            written |= {inside[index] for index in facts.all_written() if index in inside}
            for p, value in enumerate(output_values(subgraph) if subgraph in flow.returning else ()):
                storages = facts.of(value) if isinstance(value, Node) else _NONE
                returned[p] |= {inside[index] for index in storages if index in inside}
                if not storages <= inside.keys() and not flow.results[p]:
                    made.add(p)
        # What may lie at each position: in the next iteration, what the body has returned there.
        found = {p: {p} for p in range(len(flow.operands))}
        for _ in flow.operands if flow.repeats else ():
            for p, sources in returned.items():
                found[p] = found[p].union(*(found[source] for source in sources))

        def behind(positions: Iterable[int]) -> frozenset[int]:
            return self._storages_in([flow.operands[q] for p in positions for q in found[p]])

        self.writes[node] = behind(written) | self._storages_in(node.kwargs)
        self.elements[node] = {
            p: behind(ps)
            | self._storages_in(flow.results[p])
            | (self._new(node, Origin.EXTERN, p) if p in made else _NONE)
            for p, ps in returned.items()
        }
        self.of[node] = _NONE.union(*self.elements[node].values())


def _asked_by(user: Node, count: int) -> Iterable[Any]:
    """Which of so many results a user takes."""
    return user.args[1:] if user.target is operator.getitem else range(count)


def looks_at_storage(node: Node, facts: StorageFacts) -> bool:
    """Whether an operand must be alone in its storage, because of a node, or of one in its branches or its loop.

    An operator may count elements from the start of the storage (``as_strided``). Decompositions check whether two of
    their results, or a result and an operand, are views of one tensor.
    """
    if (flow := control_flow_of(node)) is not None:
        subgraphs = [(gm, analyse_storages(gm)) for gm in flow.subgraphs]
        return any(looks_at_storage(inner, facts) for gm, facts in subgraphs for inner in gm.graph.nodes)
    asks = kind_of(node) is Kind.EXTERN and (len(facts.writes(node)) > 1 or "linalg" in operator_name(node))
    return asks or counts_from_storage(node)


def bound_arguments(schema: Any, node: Node) -> Iterator[tuple[Any, Any]]:
    """The schema's arguments that a call passes, each with the value."""
    for position, argument in enumerate(schema.arguments):
        if argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]
        elif position < len(node.args) and not argument.kwarg_only:
            yield argument, node.args[position]


def _by_name(storages_of: dict[Node, frozenset[int]]) -> dict[str, frozenset[int]]:
    return {node.name: storages for node, storages in storages_of.items()}


def _may_be_tensor(declared: Any) -> bool:
    return "Tensor" in str(declared.type) or "Future" in str(declared.type)
