"""CHECK: proves that two host graphs compute the same, by value numbering.

Both graphs are run in their own order on *terms* in place of bytes. Every storage holds a term: what it held at
first, or which node wrote it, of what. Equal terms are equal bytes: a kernel or a pure operator computes the same of
the same, wherever its buffers lie and however often it runs. What does not (atomic adds) runs as often as before.
The graphs compute the same if the terms of what they return, and of what their inputs hold at the end, are equal, and
the effects are the same in the same order.

The method is value numbering (Cocke and Schwartz, "Programming Languages and Their Compilers", 1970), over storages.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...host_graph.nodes import check, is_work, require
from .accesses import Accesses, Root, fault, may_differ_again, may_keep_operands, qualified_name

# It computes its result from what all processes have. It may run more often than before, and elsewhere: all processes
# have the same graph, and run it alike.
_GATHER = "_c10d_functional::all_gather_into_tensor"
_WAIT = "_c10d_functional::wait_tensor"

# A number that stands for bytes, or for a value that a node returns.
Term = int


class Terms:
    """Gives equal terms to what is made alike. Both graphs use one table."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, Term] = {}

    def of(self, *parts: Hashable) -> Term:
        return self._numbers.setdefault(parts, len(self._numbers))


def verify_same_results(before: GraphModule, after: GraphModule, apart_on: str = "") -> None:
    """Prove that ``after`` computes what ``before`` computes.

    Args:
        apart_on: the type of the device whose inputs do not overlap at any call; empty for none.

    Raises:
        PlanError: naming the result, the input or the effect that differs.
    """
    terms = Terms()
    first, second = (_Run(gm, terms, apart_on) for gm in (before, after))
    pairs: tuple[tuple[str, Mapping[str, Term], Mapping[str, Term]], ...] = (
        ("returns", first.returned, second.returned),
        ("leaves in an input", first.left, second.left),
        ("checks", first.checked, second.checked),
    )
    for what, expected, got in pairs:
        for name, term in expected.items():
            if got.get(name) != term:
                raise fault(f"repeated work: what the graph {what}, {name}, is another value", expected="the same")
    for chain, effects in first.effects.items():
        for effect, other in itertools.zip_longest(effects, second.effects[chain], fillvalue=("nothing", -1)):
            if effect[1] != other[1]:
                raise fault(
                    f"repeated work: {other[0]} runs where {effect[0]} ran, in the chain of {chain}",
                    expected="each random draw, communication and other effect once, in order",
                )
    if first.as_often != second.as_often:
        raise fault(
            "repeated work: an operator that is not torch's, or a kernel with atomic adds, runs more or less often",
            expected="as before",
        )


class _Run:
    """A graph that was run on terms.

    Attributes:
        returned: the terms of the results, by position.
        left: what the inputs hold at the end, by position of the input.
        checked: the terms of all asserts.
        effects: by chain ("random numbers", "effects"), the nodes in it with their terms, in order.
        as_often: how often operators that are not torch's ran, and what gives other bits again, by term.
    """

    def __init__(self, gm: GraphModule, terms: Terms, apart_on: str) -> None:
        self._gm, self._terms, self._memory = gm, terms, Accesses(gm.graph)
        self._position = {node: place for place, node in enumerate(gm.graph.nodes)}
        self._values: dict[Node, Term] = {}  # what a node returns, apart from bytes
        self._held: dict[Root, Term] = {}  # what each storage holds
        self._groups: dict[Root, str] = {}  # the device of an input that may overlap others there
        self._written: dict[str, Term] = {}  # by device, the last write to any such input
        self.effects: dict[str, list[tuple[str, Term]]] = {"random numbers": [], "effects": []}
        self.as_often = Counter[Term]()
        self.checked: dict[str, Term] = {}
        inputs = gm.graph.find_nodes(op="placeholder")
        for position, node in enumerate(inputs):
            self._values[node] = terms.of("input", position)
            for root in self._memory.roots(node):
                self._held[root] = terms.of("held by input", position)
                device = getattr(node.meta.get("val"), "device", None)
                if device is not None and device.type != apart_on:
                    self._groups[root] = str(device)
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(gm)
                self._values[node] = terms.of("constant", id(value))
                for root in self._memory.roots(node):
                    self._held.setdefault(root, terms.of("held by constant", id(value)))
            elif node.op == "call_function":
                self._call(node)
        values = gm.graph.find_nodes(op="output")[0].args[0]
        results = values if isinstance(values, (list, tuple)) else [values]
        self.returned = {f"result {n}": self._of(value) for n, value in enumerate(results)}
        self.left = {
            f"input {n}": self._terms.of(*sorted(self._content(root) for root in self._memory.roots(node)))
            for n, node in enumerate(inputs)
        }

    def _content(self, root: Root) -> Term:
        """What a storage holds; of an input, also which writes to inputs it may have seen."""
        # What nothing has written yet is nothing in particular: no program depends on it.
        held = self._held.get(root, self._terms.of("nothing"))
        device = self._groups.get(root)
        return held if device is None else self._terms.of("in group", held, self._written.get(device, -1))

    def _of(self, value: Any) -> Term:
        """The term of an argument, with the bytes of the tensors in it."""
        if isinstance(value, Node):
            content = sorted(self._content(root) for root in self._memory.roots(value))
            return self._terms.of("value", self._values[value], *content)
        if isinstance(value, (tuple, list)):
            return self._terms.of("sequence", *map(self._of, value))
        if isinstance(value, dict):
            return self._terms.of("mapping", *((str(key), self._of(item)) for key, item in value.items()))
        if isinstance(value, slice):
            return self._terms.of("slice", *map(self._of, (value.start, value.stop, value.step)))
        try:
            return self._terms.of("plain", str(type(value)), value)
        except TypeError:  # it cannot be hashed
            return self._terms.of("plain", str(type(value)), repr(value))

    def _call(self, node: Node) -> None:
        target: Hashable = node.target
        if not is_work(node):
            # An allocation, a view, arithmetic, an assert: no bytes are read, except by arithmetic on data.
            operands = self._shape_of(node.args), self._shape_of(node.kwargs)
            self._values[node] = self._terms.of("made", target, *operands)
            if node.target in (check, require) or getattr(node.target, "__name__", "").startswith("assert"):
                self.checked[node.name] = self._values[node]
            return
        arguments = (self._of(node.args), self._of(node.kwargs), self._sharing(node))
        call = self._terms.of("call", target, *arguments, self._of(node.meta.get("op_overload")))
        gathers = self._gathers(node)
        if not gathers and (chains := self._chains(node)):
            call = self._terms.of("effect", *((chain, len(self.effects[chain])) for chain in chains), call)
            for chain in chains:
                self.effects[chain].append((node.name, call))
        elif (not gathers and may_keep_operands(node)) or may_differ_again(node):
            self.as_often[call] += 1
        roots = self._order(node)
        self._values[node] = self._terms.of("returned", call)
        for root in self._memory.written(node):
            self._held[root] = self._terms.of("written", call, roots.get(root, -1))
            if root in self._groups:
                self._written[self._groups[root]] = call
        for root in self._memory.roots(node):
            maker, element = root
            if maker is node:
                self._held[root] = self._terms.of("result", call, element)

    def _gathers(self, node: Node) -> bool:
        """Whether a node begins or ends a gathering."""
        if qualified_name(node) == _WAIT:
            return all(qualified_name(maker) == _GATHER for maker, _ in self._memory.roots_in(node.args))
        return qualified_name(node) == _GATHER

    def _chains(self, node: Node) -> list[str]:
        """The chains whose order a node keeps."""
        ordered = zip(self.effects, self._memory.ordered([node]), strict=True)
        return [chain for chain, nodes in ordered if nodes]

    def _shape_of(self, value: Any) -> Term:
        """The term of an argument without the bytes behind it."""
        if isinstance(value, Node):
            return self._terms.of("shape", self._values[value])
        if isinstance(value, (tuple, list)):
            return self._terms.of("shapes", *map(self._shape_of, value))
        if isinstance(value, dict):
            return self._terms.of("shapes by name", *((str(k), self._shape_of(item)) for k, item in value.items()))
        return self._of(value)

    def _order(self, node: Node) -> dict[Root, int]:
        """A number for each storage behind the operands, in the order of the first operand that lies in it."""
        order: dict[Root, int] = {}
        for operand in _nodes_in((node.args, node.kwargs)):
            for root in sorted(self._memory.roots(operand), key=lambda root: (self._position[root[0]], root[1] or 0)):
                order.setdefault(root, len(order))
        return order

    def _sharing(self, node: Node) -> Term:
        """Which operands lie in one storage: a kernel that writes what it reads is another than one that does not."""
        order = self._order(node)
        operands = _nodes_in((node.args, node.kwargs))
        return self._terms.of(
            "sharing", *(tuple(sorted(order[root] for root in self._memory.roots(operand))) for operand in operands)
        )


def _nodes_in(value: Any) -> list[Node]:
    found: list[Node] = []

    def note(node: Node) -> Node:
        found.append(node)
        return node

    torch.fx.map_arg(value, note)
    return found
