"""Rewrite: what branches and loops allocate is allocated outside of them, where the memory plan sees it.

::

    def body(i, x):                                   memory, a, b = empty(64), empty(...), empty(...)
        t = empty_strided(...)                        def body(i, x, a, b, memory):
        y = empty_strided(...)                            t = reinterpret(memory, ...)
        launch k0(x, t)                        ->         launch k0(x, t)
        launch k1(t, x, y)                                launch k1(t, x, a)
        return i + 1, y                                   return i + 1, a, b, a
    while_loop(condition, body, (i, x))               while_loop(condition, body, (i, x, a, b), (memory,))

Temporaries of a branch, or of an iteration, lie in one buffer: those that are in use at one time next to each other,
those of different branches over each other. Branches write their results to one place, which is read in place of
them. A loop writes what it carries to two places in turn.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...host_graph.control_flow import ControlFlow, control_flow_of, switch
from ...host_graph.nodes import (
    Kind,
    by_name,
    is_work,
    kind_of,
    only_computes,
    output_node,
    output_values,
    reinterpret,
)
from ...host_graph.sizes import storage_bytes
from ...host_graph.storages import StorageFacts
from ...packing import Buffer, plan_memory
from ...packing.lifetimes import Lifetimes
from ..analysis.aliasing import analyse_storages, looks_at_storage

# Bytes: what a place of any type begins at a multiple of.
_ALIGNMENT = 64


@dataclass(frozen=True)
class BodyMemory:
    """Where the allocations of a branch's or a loop's subgraphs are to lie.

    Attributes:
        offsets: for each subgraph, the byte at which each temporary begins, by name.
        size: bytes of the buffer that they lie in.
        results: by position of a branch's result, the allocation that it is, for each subgraph.
        alternating: by position of what a loop carries, the allocation of the body that it becomes.
    """

    offsets: Sequence[Mapping[str, int]]
    size: int
    results: Mapping[int, Sequence[str]]
    alternating: Mapping[int, str]


def place_bodies(gm: GraphModule, alternates: bool) -> GraphModule:
    """Move the allocations of branches and loops out of them, in place.

    Args:
        alternates: whether what a loop carries may lie at another address after each iteration.
    """
    _place_in(gm, alternates, Counter(_called(gm)))
    return gm


def _called(gm: GraphModule) -> Iterator[GraphModule]:
    """The subgraphs that a graph, or one of them, calls: each as often as there is a call."""
    for node in gm.graph.nodes:
        for subgraph in flow.subgraphs if (flow := control_flow_of(node)) is not None else ():
            yield subgraph
            yield from _called(subgraph)


def _place_in(gm: GraphModule, alternates: bool, calls: Counter[GraphModule]) -> None:
    for node in list(gm.graph.nodes):
        if (flow := control_flow_of(node)) is None or any(calls[subgraph] > 1 for subgraph in flow.subgraphs):
            continue
        for subgraph in flow.subgraphs:
            _place_in(subgraph, alternates, calls)
        memory = body_memory(node, flow, alternates)
        if memory.size or memory.results or memory.alternating:
            _Move(node, flow).apply(memory)
            gm.recompile()


def body_memory(node: Node, flow: ControlFlow, alternates: bool) -> BodyMemory:
    """Decide where the allocations of a branch's or a loop's subgraphs lie."""
    bodies = [_Body.of(subgraph) for subgraph in flow.subgraphs]
    devices = {str(one.kwargs["device"]) for body in bodies for one in body.allocations.values()}
    offsets, size = [dict[str, int]() for _ in bodies], 0
    if len(devices) == 1:
        for number, body in enumerate(bodies):
            placement = plan_memory(body.temporaries(returns=body.gm in flow.returning), _ALIGNMENT)
            offsets[number], size = dict(placement.offsets), max(size, placement.size)
    results, alternating = dict[int, Sequence[str]](), dict[int, str]()
    for position, value in enumerate(node.meta["val"]):
        made = [body.result(position, value) for body in bodies if body.gm in flow.returning]
        if any(one is None for one in made):
            continue
        if node.target is switch:
            results[position] = [str(one) for one in made]
        elif alternates and node.args[4:] != (True,) and all(body.forgets(position) for body in bodies):
            alternating[position] = str(made[0])
    return BodyMemory(offsets, size, results, alternating)


@dataclass(frozen=True)
class _Body:
    """A subgraph with its allocations that can be moved out of it, by storage."""

    gm: GraphModule
    facts: StorageFacts
    work: Sequence[Node]
    allocations: Mapping[int, Node]

    @classmethod
    def of(cls, gm: GraphModule) -> _Body:
        facts, work = analyse_storages(gm), [node for node in gm.graph.nodes if is_work(node)]
        stays = frozenset[int]().union(*(facts.touched(node) for node in work if _needs_its_own_storage(facts, node)))
        used, nodes = facts.named_in(work), by_name(gm)
        found = {storage.index: nodes[storage.node] for storage in facts.storages if storage.index in used - stays}
        return cls(gm, facts, work, {index: node for index, node in found.items() if _is_fixed(node)})

    def temporaries(self, returns: bool) -> list[Buffer]:
        """The allocations that are gone when the subgraph ends.

        Args:
            returns: whether what it returns stays; a condition is looked at, and gone.
        """
        lifetimes = Lifetimes.of(self.facts.named_in([node]) for node in self.work)
        handed_out = self.facts.handed_out
        buffers = []
        for index, node in self.allocations.items():
            if returns and index in handed_out:
                continue
            end = len(self.work) if index in handed_out else lifetimes[index].stop
            buffers.append(Buffer(node.name, _nbytes(node), lifetimes[index].start, end))
        return buffers

    def result(self, position: int, value: Any) -> str | None:
        """The allocation that the subgraph returns at a position, and nowhere else."""
        returned = output_values(self.gm)
        node = returned[position]
        if not isinstance(node, Node) or node not in self.allocations.values() or not _same_layout(node, value):
            return None
        mine = self.facts.of(node)
        others = (other for p, other in enumerate(returned) if p != position and isinstance(other, Node))
        return node.name if all(mine.isdisjoint(self.facts.of(other)) for other in others) else None

    def forgets(self, position: int) -> bool:
        """Whether the value carried at a position is dead once its iteration has ended: the next may overwrite it."""
        operand = self.gm.graph.find_nodes(op="placeholder")[position]
        keeps = (node for node in self.work if not only_computes(node))
        return self.facts.of(operand).isdisjoint(self.facts.handed_out.union(*map(self.facts.touched, keeps)))


def _needs_its_own_storage(facts: StorageFacts, node: Node) -> bool:
    """Whether a node may keep what it is given, or look at what else lies in its storage."""
    return not only_computes(node) or looks_at_storage(node, facts)


def _is_fixed(node: Node) -> bool:
    """Whether a node allocates memory of a size that is the same at every call, where others can lie, too."""
    if kind_of(node) is not Kind.ALLOCATION or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    args, options = list[Any](node.args[:2]), node.kwargs
    numbers = [number for numbers in args for number in numbers]
    ordinary = not options.get("pin_memory") and str(options.get("device")) != "meta"
    return ordinary and all(type(number) is int for number in numbers)


def _same_layout(node: Node, value: Any) -> bool:
    mine = node.meta["val"]
    return (
        isinstance(value, torch.Tensor)
        and all(type(number) is int for number in (*value.size(), *value.stride()))
        and mine.dtype == value.dtype
        and mine.device == value.device
        and tuple(mine.size()) == tuple(value.size())
        and tuple(mine.stride()) == tuple(value.stride())
    )


def _nbytes(node: Node) -> int:
    size, stride, *_ = node.args
    return storage_bytes(size, stride, node.kwargs["dtype"])  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Move:
    """The change of one branch or loop."""

    node: Node
    flow: ControlFlow

    def apply(self, memory: BodyMemory) -> None:
        if memory.results:
            self._share_results(memory.results)
        if memory.alternating:
            self._alternate(memory.alternating)
        if memory.size:
            self._place(memory.offsets, memory.size)
        for gm in self.flow.subgraphs:
            gm.recompile()

    def _share_results(self, results: Mapping[int, Sequence[str]]) -> None:
        for position, names in results.items():
            made = [by_name(gm)[name] for gm, name in zip(self.flow.subgraphs, names, strict=True)]
            outside = self._allocate(made[0], f"{self.node.name}_result_{position}")
            for inner, allocation in zip(self._pass(outside), made, strict=True):
                _replace(allocation, inner)
            for user in list(self.node.users):
                if user.target is operator.getitem and user.args[1] == position:
                    user.replace_all_uses_with(outside)
                    user.graph.erase_node(user)

    def _alternate(self, alternating: Mapping[int, str]) -> None:
        _, body = self.flow.subgraphs
        for position, name in alternating.items():
            allocation = by_name(body)[name]
            places = [self._allocate(allocation, f"{self.node.name}_place_{position}_{which}") for which in "ab"]
            first, second = (self._carry(place)[1] for place in places)
            _replace(allocation, first)
            output = output_node(body)
            output.args = ([*output.args[0], second, first],)  # type: ignore[misc]
            self.node.meta["val"] = [*self.node.meta["val"], *(place.meta["val"] for place in places)]

    def _place(self, offsets: Sequence[Mapping[str, int]], size: int) -> None:
        placed = zip(self.flow.subgraphs, offsets, strict=True)
        some = next(by_name(gm)[name] for gm, names in placed for name in names)
        size = -(-size // _ALIGNMENT) * _ALIGNMENT  # whole elements of any type
        memory = self._allocate(some, f"{self.node.name}_memory", size)
        for gm, inner, names in zip(self.flow.subgraphs, self._pass(memory), offsets, strict=True):
            nodes, of_type = by_name(gm), {torch.uint8: inner}
            for name, offset in names.items():
                allocation = nodes[name]
                dtype: Any = allocation.kwargs["dtype"]
                with gm.graph.inserting_after(inner):
                    if dtype not in of_type:
                        of_type[dtype] = _call(gm, torch.ops.aten.view.dtype, (inner, dtype))
                with gm.graph.inserting_before(allocation):
                    layout = (*allocation.args[:2], offset // dtype.itemsize)
                    _replace(allocation, _call(gm, reinterpret, (of_type[dtype], *layout)))

    def _allocate(self, like: Node, name: str, size: int | None = None) -> Node:
        """An allocation outside, like one inside; of bytes, if a size is given."""
        with self.node.graph.inserting_before(self.node):
            args: Any = like.args[:2] if size is None else ((size,), (1,))
            options: dict[str, Any] = {**like.kwargs, "dtype": like.kwargs["dtype"] if size is None else torch.uint8}
            node = self.node.graph.create_node("call_function", torch.empty_strided, args, options, name=name)
        value: torch.Tensor = like.meta["val"]
        node.meta["val"] = value.new_empty_strided(*args, dtype=options["dtype"])
        if "call" in like.meta:
            node.meta["call"] = like.meta["call"]
        return node

    def _pass(self, operand: Node) -> list[Node]:
        """Pass an operand to all subgraphs, as the last one; returns what it is there."""
        which = 1 if self.node.target is switch else 3
        args = list(self.node.args) if len(self.node.args) > which else [*self.node.args, ()]
        args[which] = (*args[which], operand)  # type: ignore[misc]
        self.node.args = tuple(args)
        return [_add_input(gm, operand) for gm in self.flow.subgraphs]

    def _carry(self, operand: Node) -> list[Node]:
        """Have a loop carry one operand more; returns what it is in the condition, and in the body."""
        condition, body, carried, *rest = self.node.args
        self.node.args = (condition, body, (*carried, operand), *rest)  # type: ignore[misc]
        return [_add_input(gm, operand, len(carried)) for gm in self.flow.subgraphs]  # type: ignore[arg-type]


def _add_input(gm: GraphModule, operand: Node, position: int | None = None) -> Node:
    """Add an input, by default as the last one."""
    inputs = gm.graph.find_nodes(op="placeholder")
    others = (node for node in gm.graph.nodes if node.op != "placeholder")
    at_the_end = position is None or position == len(inputs)
    with gm.graph.inserting_before(next(others) if at_the_end else inputs[position or 0]):
        inner = gm.graph.placeholder(operand.name)
    inner.meta["val"] = operand.meta["val"]
    return inner


def _call(gm: GraphModule, function: Any, args: tuple[Any, ...]) -> Node:
    node = gm.graph.call_function(function, args)
    node.meta["val"] = function(*torch.fx.map_arg(args, lambda arg: arg.meta["val"]))
    return node


def _replace(allocation: Node, value: Node) -> None:
    for key in ("stack_trace", "uninitialised"):
        if key in allocation.meta:
            value.meta.setdefault(key, allocation.meta[key])
    allocation.replace_all_uses_with(value)
    allocation.graph.erase_node(allocation)
