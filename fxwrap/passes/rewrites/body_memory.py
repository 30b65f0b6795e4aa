"""Rewrite: gives branches and loops memory for what their subgraphs allocate, which the memory plan sees.

::

    def body(i, x):                                   memory, a, b = empty(64), empty(...), empty(...)
        t = empty_strided(...)                        v = reinterpret(memory, ...)
        y = empty_strided(...)                        while_loop(condition, body, (i, x),
        launch k0(x, t)                        ->                results=((), (a, b)), temporaries=({}, {"t": v}))
        launch k1(t, x, y)
        return i + 1, y
    while_loop(condition, body, (i, x))

The subgraphs stay as they are; several nodes may call one. Temporaries of a branch, or of an iteration, lie in one
buffer: those that are in use at one time next to each other, those of different branches over each other. Branches
write their results to one place, which is read in place of them. A loop writes what it carries to two places in
turn.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...host_graph.control_flow import control_flow_of, switch
from ...host_graph.nodes import (
    Kind,
    by_name,
    is_work,
    kind_of,
    only_computes,
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


def place_bodies(gm: GraphModule, alternates: bool) -> GraphModule:
    """Give branches and loops memory for what they allocate, in place.

    Args:
        alternates: whether what a loop carries may lie at another address after each iteration.
    """
    for node in list(gm.graph.nodes):
        if (flow := control_flow_of(node)) is None or "results" in node.kwargs:
            continue  # another node calls the subgraph that this is in
        for subgraph in flow.subgraphs:
            place_bodies(subgraph, alternates)
        bodies = [_Body.of(subgraph, subgraph in flow.returning) for subgraph in flow.subgraphs]
        places = tuple(_places(node, bodies, position, alternates) for position in range(len(node.meta["val"])))
        views = _views(node, bodies)
        if not any(places) and not any(views):
            continue
        node.kwargs = {**node.kwargs, "results": places, "temporaries": views}
        for user in list(node.users) if node.target is switch else ():
            if user.target is operator.getitem and (place := places[user.args[1]]):
                user.replace_all_uses_with(place[0])
                gm.graph.erase_node(user)
        gm.recompile()
    return gm


def _places(node: Node, bodies: Sequence[_Body], position: int, alternates: bool) -> tuple[Node, ...]:
    """Allocate where what branches return at a position lies, or what a loop carries; none if it cannot."""
    made = [body.result(position, node.meta["val"][position]) for body in bodies if body.returns]
    if made[0] is None or None in made:
        return ()
    if node.target is switch:
        return (_allocate(node, made[0], f"{node.name}_place_{position}"),)
    if not alternates or node.args[4:] == (True,) or not all(body.forgets(position) for body in bodies):
        return ()
    return tuple(_allocate(node, made[0], f"{node.name}_place_{position}_{which}") for which in "ab")


def _views(node: Node, bodies: Sequence[_Body]) -> tuple[dict[str, Node], ...]:
    """Allocate a buffer; for each subgraph, the views of it that its temporaries lie in, by name."""
    allocations = [one for body in bodies for one in body.allocations.values()]
    placements = [plan_memory(body.temporaries(), _ALIGNMENT) for body in bodies]
    size = max(placement.size for placement in placements)
    if not size or len({str(one.kwargs["device"]) for one in allocations}) > 1:
        return tuple({} for _ in bodies)
    size = -(-size // _ALIGNMENT) * _ALIGNMENT  # whole elements of any type
    of_type = {torch.uint8: _allocate(node, allocations[0], f"{node.name}_memory", size)}

    def view(allocation: Node, offset: int) -> Node:
        dtype: Any = allocation.kwargs["dtype"]
        if dtype not in of_type:
            of_type[dtype] = _call(node, torch.ops.aten.view.dtype, (of_type[torch.uint8], dtype))
        return _call(node, reinterpret, (of_type[dtype], *allocation.args[:2], offset // dtype.itemsize))

    offsets = [placement.offsets for placement in placements]
    of_bodies = [(by_name(body.gm), at) for body, at in zip(bodies, offsets, strict=True)]
    return tuple({name: view(nodes[name], offset) for name, offset in at.items()} for nodes, at in of_bodies)


@dataclass(frozen=True)
class _Body:
    """A subgraph with its allocations that can lie in memory from outside, by storage.

    Attributes:
        returns: whether what it returns stays; a condition is looked at, and gone.
    """

    gm: GraphModule
    returns: bool
    facts: StorageFacts
    work: Sequence[Node]
    allocations: Mapping[int, Node]

    @classmethod
    def of(cls, gm: GraphModule, returns: bool) -> _Body:
        facts, work = analyse_storages(gm), [node for node in gm.graph.nodes if is_work(node)]
        stays = frozenset[int]().union(*(facts.touched(node) for node in work if _needs_its_own_storage(facts, node)))
        used, nodes = facts.named_in(work), by_name(gm)
        found = {storage.index: nodes[storage.node] for storage in facts.storages if storage.index in used - stays}
        return cls(gm, returns, facts, work, {index: node for index, node in found.items() if _is_fixed(node)})

    def temporaries(self) -> list[Buffer]:
        """The allocations that are gone when the subgraph ends."""
        lifetimes = Lifetimes.of(self.facts.named_in([node]) for node in self.work)
        handed_out = self.facts.handed_out
        buffers = []
        for index, node in self.allocations.items():
            if self.returns and index in handed_out:
                continue
            end = len(self.work) if index in handed_out else lifetimes[index].stop
            buffers.append(Buffer(node.name, _nbytes(node), lifetimes[index].start, end))
        return buffers

    def result(self, position: int, value: Any) -> Node | None:
        """The allocation that the subgraph returns at a position, and nowhere else."""
        returned = output_values(self.gm)
        node = returned[position]
        if not isinstance(node, Node) or node not in self.allocations.values() or not _same_layout(node, value):
            return None
        mine = self.facts.of(node)
        others = (other for p, other in enumerate(returned) if p != position and isinstance(other, Node))
        return node if all(mine.isdisjoint(self.facts.of(other)) for other in others) else None

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


def _allocate(node: Node, like: Node, name: str, size: int | None = None) -> Node:
    """An allocation before a node, like one in its subgraphs; of bytes, if a size is given."""
    args: Any = like.args[:2] if size is None else ((size,), (1,))
    options: dict[str, Any] = {**like.kwargs, "dtype": like.kwargs["dtype"] if size is None else torch.uint8}
    with node.graph.inserting_before(node):
        made = node.graph.create_node("call_function", torch.empty_strided, args, options, name=name)
    value: torch.Tensor = like.meta["val"]
    made.meta["val"] = value.new_empty_strided(*args, dtype=options["dtype"])
    if "call" in like.meta:
        made.meta["call"] = like.meta["call"]
    return made


def _call(node: Node, function: Any, args: tuple[Any, ...]) -> Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(function, args)
    made.meta["val"] = function(*torch.fx.map_arg(args, lambda arg: arg.meta["val"]))
    return made
