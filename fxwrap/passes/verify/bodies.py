"""CHECK: proves that branches and loops may use the memory that they were given for what they allocate.

It is about the bytes only: the subgraphs are what they were. In each, what lies in shared bytes must not be in use at
one time, and must be nobody else's; what is returned must lie where it is read afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...host_graph.control_flow import switch
from ...host_graph.nodes import is_work, output_node, reinterpret
from .accesses import CALL_SUBGRAPHS, Accesses, Root, called, counts_from_storage, fault, may_keep_operands, name_of
from .memory import Interval, check_overlap, live_ranges, reach

# Bytes.
_ALIGNMENT = 64


def verify_bodies(gm: GraphModule) -> None:
    """Prove that what branches and loops allocate may lie where the graph says, in subgraphs, too.

    Raises:
        PlanError: naming the allocation.
    """
    calling = [node for node in gm.graph.nodes if node.target in CALL_SUBGRAPHS]
    if not calling:
        return
    outside = Accesses(gm.graph)
    for node in calling:
        _verify_own(node, outside)
        for number, subgraph in enumerate(called(node)):
            _Body(node, number, subgraph).verify()
            verify_bodies(subgraph)


def _verify_own(node: Node, outside: Accesses) -> None:
    """Check that each place, and the memory of temporaries, is an allocation that has no other use."""
    taken, buffers = set(outside.roots_in(node.args)), outside.roots_in(node.kwargs.get("temporaries"))
    places: Any = node.kwargs.get("results", ())
    own = [outside.roots(place) for several in places for place in several]
    for roots in (*own, *(frozenset({root}) for root in buffers)):
        if not taken.isdisjoint(roots) or [maker.target for maker, _ in roots] != [torch.empty_strided]:
            _refuse(node, roots, "an allocation that has no other use", "an operand, or memory that is given twice")
        taken |= roots
    for other in outside.graph.nodes:
        if is_work(other) and other is not node and not buffers.isdisjoint(outside.touched(other)):
            _refuse(node, buffers, "memory that nothing else uses", f"an operand of {other.name}")


def _refuse(node: Node, roots: Any, expected: str, got: str) -> None:
    names = ", ".join(sorted(map(name_of, roots)))
    raise fault(f"{node.name}: {names} cannot lie where it is to lie", expected=expected, got=got)


class _Body:
    """A subgraph of a branch or a loop.

    Args:
        number: its position among the node's subgraphs.
    """

    def __init__(self, node: Node, number: int, gm: GraphModule) -> None:
        self._node, self._graph, self._inside = node, gm.graph, Accesses(gm.graph)
        self._loops, views = node.target is not switch, node.kwargs.get("temporaries")
        self._views: Mapping[str, Node] = views[number] if views else {}  # type: ignore[assignment,index,call-overload]
        self._returns = not self._loops or number == 1  # a condition returns whether to go on
        self._returned: Any = output_node(gm).args[0]
        places: Any = node.kwargs.get("results", ())
        self._places = {position: several for position, several in enumerate(places) if several}

    def verify(self) -> None:
        nodes, work = {node.name: node for node in self._graph.nodes}, list(filter(is_work, self._graph.nodes))
        spans, returned = live_ranges(self._inside, work, ()), self._inside.roots_in(self._returned)
        shared = frozenset[Root]((nodes[name], None) for name in self._views)
        intervals = list[Interval]()
        for name, view in self._views.items():
            (low, high), root = self._bytes(nodes[name], view), (nodes[name], None)
            begin, stop = spans.get(root, (0, 0))
            if begin < stop:
                intervals.append(Interval(name, low, high, begin, len(work) if root in returned else stop))
        check_overlap(intervals, work)
        if self._returns and (roots := shared & returned):
            _refuse(self._node, roots, "a place of its own", "a result among temporaries")
        placed = self._verify_results() if self._returns else shared
        # What the iterations that follow overwrite.
        inputs = self._graph.find_nodes(op="placeholder") if self._loops else []
        ended = self._inside.roots_in([inputs[position] for position in self._places if self._loops])
        if roots := ended & returned:
            _refuse(self._node, roots, "nobody to read it after its iteration", "what is returned")
        for node in self._graph.nodes:
            named = self._inside.touched(node) | self._inside.roots(node)
            if may_keep_operands(node) and (roots := named & (shared | placed | ended)):
                _refuse(self._node, roots, f"memory that {node.name} may keep", "bytes that are written again")
            if counts_from_storage(node) and (roots := named & shared):
                _refuse(self._node, roots, f"a storage of its own, for {node.name}", "a part of a buffer")

    def _verify_results(self) -> frozenset[Root]:
        """Check where results lie; returns their storages inside."""
        for position, several in self._places.items():
            made, roots = self._returned[position], self._inside.roots_in(self._returned[position])
            if len(several) != 1 + self._loops or not all(_is_like(made, place) for place in several):
                _refuse(self._node, roots, "an allocation, and places like it", str(several))
            others = self._inside.roots_in([value for p, value in enumerate(self._returned) if p != position])
            if not roots.isdisjoint(others):
                _refuse(self._node, roots, "to be returned once", "a result twice")
        return self._inside.roots_in([self._returned[position] for position in self._places])

    def _bytes(self, allocation: Node, view: Any) -> tuple[int, int]:
        """The bytes of its buffer that a temporary is to lie in."""
        base, size, stride, offset = view.args if view.target is reinterpret else (view, (), (), 0)
        memory, dtype = base.args if base.target is torch.ops.aten.view.dtype else (base, base.kwargs.get("dtype"))
        low, high = (n * dtype.itemsize for n in (offset, offset + reach(size, stride, 0)))
        layout, ((end,), _) = [list(size), list(stride), {**memory.kwargs, "dtype": dtype}], memory.args
        wanted = [*map(list, allocation.args[:2]), dict(allocation.kwargs)]  # type: ignore[arg-type]
        if layout != wanted or low % _ALIGNMENT or low < 0 or high > end:
            _refuse(self._node, [(allocation, None)], f"its layout within {end} bytes", f"{layout}, [{low}, {high})")
        return low, high


def _is_like(made: Any, place: Node) -> bool:
    is_allocation = isinstance(made, Node) and made.target is torch.empty_strided
    return is_allocation and (made.args[:2], made.kwargs) == (place.args[:2], place.kwargs)
