"""Results that operators allocate themselves, where addresses are frozen: which the plan can place, which are copied.

What is allocated while a graph is captured comes from the pool of the graphs, where a later capture is given whatever
an earlier one has freed. One recording works there on bytes that may be the result of another: nobody may have that
after the call. So a captured program hands out memory of the plan, which is watched, and shared like any other: the
result itself, where the device's allocator can be told where to put it, or a copy.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from ..host_graph import Kind, communicates, kind_of, only_computes, output_node
from ..plan import Origin, Storage, StorageFacts


def own_results(
    gm: GraphModule, facts: StorageFacts, captured: Collection[Node], placed: Collection[int] = ()
) -> bool:
    """Copy results of captured operators that the caller gets to allocations, in place; whether there were any.

    ::

        buf0 = aten.convolution(x, w, ...)          buf0 = aten.convolution(x, w, ...)
        launch relu(buf0, buf1)                     own = empty_strided(...)
        return buf1, buf0                   ->      aten.copy_(own, buf0)
                                                    launch relu(own, buf1)
                                                    return buf1, own

    A result stays where it is if it is ``placed`` by the plan (storage indices), if only data decides its layout, if
    it may be memory of somebody else's, or if a communication fills it.
    """
    numbers = _Numbers(gm)
    found = False
    for value in results_to_own(facts, gm, captured):
        if facts.of[value] <= frozenset(placed):
            continue
        fake: Any = value.meta["val"]
        size, stride = numbers.of(fake.size(), value), numbers.of(fake.stride(), value)
        # Memory of its own, which the verifier sees: two that share a fake storage share a real one for it.
        place = fake.new_empty_strided(fake.size(), fake.stride())
        if size is None or stride is None:
            continue
        found = True
        with gm.graph.inserting_after(value):
            own = gm.graph.call_function(
                torch.empty_strided, (size, stride), {"dtype": fake.dtype, "device": fake.device}
            )
        with gm.graph.inserting_after(own):
            copy = gm.graph.call_function(torch.ops.aten.copy_.default, (own, value))
        for node in (own, copy):
            node.meta = {key: meta for key, meta in value.meta.items() if key == "stack_trace"}
            node.meta["val"] = place
        for user in list(value.users):
            # Asserts are on what the operator returned.
            if user is not copy and kind_of(user) is not Kind.CHECK:
                user.replace_input_with(value, own)
    if found:
        gm.recompile()
    return found


def results_to_own(facts: StorageFacts, gm: GraphModule, captured: Collection[Node]) -> list[Node]:
    """Values in memory that captured operators allocate and that the caller gets."""
    handed_out = facts.behind(output_node(gm).all_input_nodes)
    found = (_only_value(facts, facts.storages[index]) for index in sorted(handed_out))
    return [value for value in found if value is not None and _operator_of(value) in captured]


def placeable_results(
    facts: StorageFacts, gm: GraphModule, device: torch.device, captured: Collection[Node]
) -> dict[int, int]:
    """Bytes of what operators return that the plan can have a place for, by storage.

    Custom operators may keep what they return, which a graph cannot notice: captured ones are missing. So is what
    only data decides, and what depends on symbols.
    """
    handed_out = facts.behind(output_node(gm).all_input_nodes)
    # What a communication fills is there before and after its call.
    begun = frozenset[Node]().union(*facts.ends.values(), facts.ends)
    lent = facts.named_in(begun)
    found = {}
    for storage in facts.storages:
        node = storage.node
        if storage.origin is not Origin.EXTERN or storage.index in lent or kind_of(node) is not Kind.EXTERN:
            continue
        if node in captured and not only_computes(node):
            continue
        if any(facts.of.get(value) != {storage.index} for value in _values(node, storage.element)):
            continue  # it may be memory of somebody else's
        if storage.index in handed_out and _only_value(facts, storage) is None:
            continue
        value = storage.value
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device == device:
            nbytes: Any = value.untyped_storage().nbytes()
            if isinstance(nbytes, int) and nbytes:
                found[storage.index] = nbytes
    return found


def _only_value(facts: StorageFacts, storage: Storage) -> Node | None:
    """The one node whose value is an operator's result, if that is a plain tensor in memory of its own."""
    if storage.origin is not Origin.EXTERN or communicates(storage.node):
        return None  # there is nothing to copy until somebody has waited
    values = list(_values(storage.node, storage.element))
    fake = values[0].meta.get("val") if len(values) == 1 and facts.of.get(values[0]) == {storage.index} else None
    plain = isinstance(fake, torch.Tensor) and fake.layout is torch.strided and not (fake.is_conj() or fake.is_neg())
    return values[0] if plain else None


def _operator_of(value: Node) -> Node:
    return value.args[0] if value.target is operator.getitem else value  # type: ignore[return-value]


def _values(node: Node, element: int | None) -> Iterator[Node]:
    """The nodes whose value is a result: the call itself, or what takes it out of a tuple."""
    if element is None:
        yield node
    else:
        yield from (user for user in node.users if user.target is operator.getitem and user.args[1] == element)


class _Numbers:
    """Nodes for symbolic sizes."""

    def __init__(self, gm: GraphModule) -> None:
        self._graph = gm.graph
        self._position = {node: position for position, node in enumerate(gm.graph.nodes)}
        self._known: dict[Any, Node] = {}
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and kind_of(node) in (Kind.PLACEHOLDER, Kind.SYMBOLIC):
                self._known.setdefault(value.node.expr, node)

    def of(self, sizes: Sequence[Any], where: Node) -> tuple[Any, ...] | None:
        """Numbers and nodes for sizes, to be used behind ``where``; None if there is nothing to make one from, as
        where only data decides."""
        found = tuple(size if isinstance(size, int) else self._value(size.node.expr, where) for size in sizes)
        return None if None in found else found

    def _value(self, expression: Any, where: Node) -> Any:
        if isinstance(expression, sympy.Integer):
            return int(expression)
        known = self._known.get(expression)
        if known is not None and self._position.get(known, -1) < self._position[where]:
            return known
        function = {sympy.Add: operator.add, sympy.Mul: operator.mul}.get(type(expression))
        if function is None:
            return None
        values = [self._value(part, where) for part in expression.args]
        if None in values:
            return None

        def call(one: Any, other: Any) -> Node:
            with self._graph.inserting_before(where):
                node = self._graph.call_function(function, (one, other))
            node.meta["val"] = function(*(v.meta["val"] if isinstance(v, Node) else v for v in (one, other)))
            return node

        return functools.reduce(call, values)
