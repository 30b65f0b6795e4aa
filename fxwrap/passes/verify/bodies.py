"""CHECK: proves that a graph computes the same after the memory of its branches and loops was moved out of them.

Both graphs are laid out along paths: a path says which branch is taken, and how often a loop iterates, each time.
Such a graph has neither branches nor loops, and ``same_results`` compares the two. What the rewrite has placed in
memory of its own making is an allocation in it, a new one at each run of a subgraph; those that share bytes must not
be in use at one time.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...host_graph.control_flow import switch
from ...host_graph.graph_json import TensorLayout
from ...host_graph.nodes import check, is_work, output_node, reinterpret
from ...host_graph.stand_ins import StandIn, StorageStandIn
from .accesses import CALL_SUBGRAPHS, Accesses, called, fault
from .same_results import verify_same_results
from .schedule import verify_written

# What is carried may alternate between two places: with four iterations each is written twice.
_ITERATIONS = 4
# With as many paths as numbers of iterations, each loop iterates each number of times.
_PATHS = _ITERATIONS + 1


class SameBodies:
    """What a graph computes, unrolled along fixed paths. ``verify`` compares the rewritten graph with it."""

    def __init__(self, gm: GraphModule) -> None:
        self._names = frozenset(_names(gm))
        self._paths = [_Path(gm, number).gm for number in range(_PATHS)]

    def verify(self, gm: GraphModule) -> None:
        """Prove that ``gm`` computes the same.

        Raises:
            PlanError: naming what differs, or two places that share bytes.
        """
        for number, before in enumerate(self._paths):
            after = _Path(gm, number, self._names)
            after.verify_places()
            verify_same_results(before, after.gm)


def _names(gm: GraphModule) -> Iterator[str]:
    """The names of all nodes, in subgraphs, too."""
    for node in gm.graph.nodes:
        yield node.name
        for subgraph in called(node) if node.target in CALL_SUBGRAPHS else ():
            yield from _names(subgraph)


@dataclass(frozen=True)
class _Place:
    """Bytes ``[low, high)`` of a buffer, and the allocation that stands for them along a path."""

    buffer: Node
    low: int
    high: int
    node: Node


@dataclass
class _Scope:
    """One run of a graph: the values of its nodes, and its storages, by that of their fake values."""

    gm: GraphModule
    values: dict[Node, Any] = field(default_factory=dict)
    storages: dict[int, StorageStandIn] = field(default_factory=dict)
    depth: int = 0

    def mapped(self, value: Any) -> Any:
        """A value in which the values of nodes stand in their place."""
        found: Any = torch.fx.map_arg(value, self.values.__getitem__)
        return found


class _Path:
    """A graph along one path.

    Args:
        number: of the path. Decisions are the same in two graphs that ask for as many.
        known: names of the nodes that no rewrite has made; None if none has made any.
    """

    def __init__(self, gm: GraphModule, number: int, known: frozenset[str] | None = None) -> None:
        self._known, self._choices = known, itertools.count(number)
        self._decisions, self._storages = itertools.count(), itertools.count(1)
        self.gm = GraphModule({}, Graph())  # nobody calls it: it has no code
        self._graph = self.gm.graph
        self._attributes: dict[int, Node] = {}
        self._buffers: set[Node] = set()  # bytes with places in them
        self._memory_of: dict[Node, tuple[Node, int]] = {}  # of a place: the buffer, and where it begins in it
        self._after: dict[Node, Any] = {}  # by input that a rewrite has added: what it was after the last run
        self.places: list[_Place] = []
        scope = _Scope(gm)
        for node in gm.graph.find_nodes(op="placeholder"):
            scope.values[node] = self._copy(node, scope)
        self._graph.output(self._run(scope))

    def verify_places(self) -> None:
        """Check that places are written before they are read, and that no two share bytes at one time.

        Raises:
            PlanError: naming the two.
        """
        memory, work = Accesses(self.gm.graph), [node for node in self.gm.graph.nodes if is_work(node)]
        accesses, position = memory.accesses(work), {node: step for step, node in enumerate(work)}
        verify_written(memory, accesses)
        (output,) = self.gm.graph.find_nodes(op="output")
        returned = memory.roots_in(output.args)
        used = dict[Node, range]()
        for place in self.places:
            steps = [position[node] for node, _ in accesses.get((place.node, None), ())]
            end = len(work) if (place.node, None) in returned else max(steps, default=-1) + 1
            used[place.node] = range(min(steps, default=0), end)
        begun = list[_Place]()  # those that are in use
        for one in sorted(
            (place for place in self.places if used[place.node]), key=lambda place: used[place.node].start
        ):
            begun = [other for other in begun if used[other.node].stop > used[one.node].start]
            for other in begun:
                if one.buffer is other.buffer and max(one.low, other.low) < min(one.high, other.high):
                    raise fault(
                        f"branches and loops: {other.node.name} and {one.node.name} share bytes of {one.buffer.name}",
                        expected="places that are in use one after the other",
                        got=f"steps {used[other.node]} and {used[one.node]} of a path",
                    )
            begun.append(one)

    def _run(self, scope: _Scope) -> Any:
        """Append a graph whose inputs have values; returns what it returns."""
        for node in scope.gm.graph.nodes:
            if node.op == "call_function":
                scope.values[node] = self._call(node, scope)
            elif node.op == "get_attr":
                scope.values[node] = self._attribute(operator.attrgetter(str(node.target))(scope.gm), node)
        return scope.mapped(output_node(scope.gm).args[0])

    def _call(self, node: Node, scope: _Scope) -> Any:
        if node.target in CALL_SUBGRAPHS:
            return self._branch(node, scope) if node.target is switch else self._loop(node, scope)
        base = scope.values.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if node.target is operator.getitem and isinstance(base, (list, tuple)):
            return base[node.args[1]]  # type: ignore[index]
        if isinstance(base, Node) and base in self._buffers:
            return self._in_buffer(node, base, scope)
        copy = self._copy(node, scope)
        if self._is_made(node) and node.target is torch.empty_strided and _is_bytes(node):
            self._buffers.add(copy)
        return copy

    def _is_made(self, node: Node) -> bool:
        return self._known is not None and node.name not in self._known

    def _in_buffer(self, node: Node, buffer: Node, scope: _Scope) -> Node:
        """A node that lays a value out in a buffer."""
        if node.target is torch.ops.aten.view.dtype:
            return buffer
        if node.target is not reinterpret:
            raise fault(
                f"branches and loops: {node.name} uses {buffer.name}",
                expected="views of it with a type and an offset",
                got=str(node.target),
            )
        args: Any = node.args
        place = self._place(buffer, node, args[3] * node.meta["val"].dtype.itemsize)
        if _is_bytes(node):
            self._buffers.add(place)  # of what is inside
        return place

    def _place(self, buffer: Node, node: Node, low: int) -> Node:
        """An allocation that stands for a node's value, ``low`` bytes into a buffer."""
        value: torch.Tensor = node.meta["val"]
        options: Any = {"dtype": value.dtype, "device": value.device}
        layout = tuple(value.size()), tuple(value.stride())
        place = self._graph.create_node("call_function", torch.empty_strided, layout, options)
        place.meta = {**node.meta, "val": self._value(value, _Scope(node.graph.owning_module))}  # type: ignore[arg-type]
        elements = 1 + sum((n - 1) * step for n, step in zip(*layout, strict=True)) if value.numel() else 0
        self.places.append(_Place(buffer, low, low + elements * value.dtype.itemsize, place))
        self._memory_of[place] = buffer, low
        return place

    def _branch(self, node: Node, scope: _Scope) -> Any:
        selector, operands = scope.mapped(node.args[:2])
        branches = called(node)
        self._decided(selector)
        chosen = branches[next(self._choices) % len(branches)]
        returned = self._enter(chosen, operands, scope)
        # What the branch has written is read afterwards under the name of the place that it was given.
        inputs = chosen.graph.find_nodes(op="placeholder")
        for name, value in zip(node.args[1], inputs, strict=True):  # type: ignore[arg-type]
            if isinstance(name, Node) and value in self._after:
                scope.values[name] = self._after[value]
        return returned

    def _loop(self, node: Node, scope: _Scope) -> Any:
        condition, body = called(node)
        given, defaults = list[Any](scope.mapped(node.args[2:])), list[Any]([(), False])
        carried, additional, stacked = [*given, *defaults[len(given) - 1 :]]
        passes = list[Sequence[Any]]()
        for _ in range(next(self._choices) % (max(_ITERATIONS - scope.depth, 1) + 1)):
            self._decided(self._enter(condition, (*carried, *additional), scope)[0])
            carried = self._enter(body, (*carried, *additional), scope)
            passes.append(carried)
        self._decided(self._enter(condition, (*carried, *additional), scope)[0])
        if stacked:
            made: Sequence[Sequence[Any]] = passes or [carried]
            return [self._new(torch.ops.aten.stack.default, (list(each),)) for each in zip(*made, strict=True)]
        if passes:
            return carried
        asked = {user.args[1] for user in node.users if user.target is operator.getitem}
        copied = [position in asked and isinstance(value, Node) for position, value in enumerate(carried)]
        clone = torch.ops.aten.clone.default
        return [self._new(clone, (v,)) if copy else v for v, copy in zip(carried, copied, strict=True)]

    def _enter(self, gm: GraphModule, operands: Sequence[Any], scope: _Scope) -> Any:
        inner = _Scope(gm, depth=scope.depth + 1)
        for node, given in zip(gm.graph.find_nodes(op="placeholder"), operands, strict=True):
            placed = self._is_made(node) and given not in self._buffers
            buffer, low = self._memory_of.get(given, (given, 0))
            operand = self._place(buffer, node, low) if placed else given
            inner.values[node] = operand
            theirs, mine = node.meta.get("val"), operand.meta.get("val") if isinstance(operand, Node) else None
            if isinstance(theirs, torch.Tensor) and isinstance(mine, torch.Tensor):
                inner.storages[theirs.untyped_storage()._cdata] = mine.untyped_storage()  # type: ignore[assignment]
        returned = self._run(inner)
        made = (node for node in gm.graph.find_nodes(op="placeholder") if self._is_made(node))
        self._after.update((node, inner.values[node]) for node in made)
        return returned

    def _decided(self, value: Any) -> None:
        """What the host reads to decide has to be the same in both graphs."""
        if isinstance(value, Node):
            value = self._new(torch.ops.aten._local_scalar_dense.default, (value,))
        self._graph.create_node("call_function", check, (value,), name=f"decision_{next(self._decisions)}")

    def _new(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Node:
        return self._graph.call_function(function, args)

    def _copy(self, node: Node, scope: _Scope) -> Node:
        args, kwargs = scope.mapped((node.args, node.kwargs))
        copy = self._graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        copy.meta = {**node.meta, "val": self._value(node.meta.get("val"), scope)}
        return copy

    def _attribute(self, value: Any, node: Node) -> Any:
        if isinstance(value, GraphModule):
            return None
        if id(value) not in self._attributes:
            name = f"attribute_{len(self._attributes)}"
            setattr(self.gm, name, value)
            self._attributes[id(value)] = self._graph.create_node("get_attr", name)
            self._attributes[id(value)].meta = dict(node.meta)
        return self._attributes[id(value)]

    def _value(self, value: Any, scope: _Scope) -> Any:
        """A fake value whose storage is that of this run."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._value(one, scope) for one in value)
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        storage = value.untyped_storage()
        if storage._cdata not in scope.storages:
            scope.storages[storage._cdata] = StorageStandIn(-next(self._storages), storage.nbytes())
        mine = scope.storages[storage._cdata]
        place = value.storage_offset(), mine._cdata, mine.nbytes()
        return StandIn.of(
            TensorLayout(value.dtype, value.device, tuple(value.size()), tuple(value.stride()), *place), mine
        )


def _is_bytes(node: Node) -> bool:
    """Whether only subgraphs use what a node makes, which is bytes: they have places in it."""
    only = node.users and all(user.target in CALL_SUBGRAPHS for user in node.users)
    return bool(only) and node.meta["val"].dtype is torch.uint8
