"""CHECK: aliasing and accesses, derived from the graph without any code of ``passes/analysis``.

Aliasing is the union of what views declare and what the fake values of operators' results show.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...errors import PlanError
from ...host_graph.control_flow import switch, while_loop
from ...host_graph.nodes import (
    Kernel,
    aligned,
    is_symbolic_value,
    is_work,
    launch,
    output_node,
    reinterpret,
)

# A storage: the node that makes it, and the position of its result; None for the only one.
Root = tuple[Node, int | None]
# By storage, the nodes that touch it in program order, and whether each writes it.
AccessesByRoot = dict[Root, list[tuple[Node, bool]]]

fault = functools.partial(PlanError, remedy="this is a bug in fxwrap; please report the graph")

_COMMUNICATION = ("c10d", "_c10d_functional", "_dtensor", "symm_mem")
_COMPUTING = ("aten", "mkldnn", "onednn")
_WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors")
_RECEIVERS = ("_c10d_functional::irecv", "_c10d_functional::batch_p2p_ops")
# Operators whose kernels on accelerators may add with atomics.
_ADDING = ("index_add", "index_put", "index_reduce", "scatter", "put", "bincount", "histc")
# They run subgraphs: what one of these does to its inputs, it does to the operands of the node.
CALL_SUBGRAPHS = (switch, while_loop)
_SHARES = (reinterpret, aligned, operator.getitem, torch.ops.aten.view.dtype, torch.ops.aten.as_strided.default)


def name_of(root: Root) -> str:
    node, element = root
    return node.name if element is None else f"{node.name}[{element}]"


@dataclass
class Accesses:
    """Aliasing and accesses of a graph. A storage is identified by its root: the node that makes it.

    Attributes:
        in_flight: storages that a communication fills when the program ends, or when it began.
    """

    graph: Graph
    _roots: dict[Node, frozenset[Root]] = field(default_factory=dict)
    _elements: dict[Node, list[frozenset[Root]]] = field(default_factory=dict)
    # For each wait: what the communications that it ends have read.
    _in_communication: dict[Node, frozenset[Root]] = field(default_factory=dict)
    in_flight: set[Root] = field(default_factory=set)

    def __post_init__(self) -> None:
        by_storage: dict[int, frozenset[Root]] = {}
        attributes: dict[Any, Node] = {}
        for node in self.graph.nodes:
            owner = attributes.setdefault(node.target, node) if node.op == "get_attr" else node
            self._roots[node] = self._roots_of(owner, by_storage) if owner is node else self._roots[owner]
            elements = self._elements.get(node)
            for position, key in _fake_storages(node.meta.get("val")):
                roots = elements[position] if elements and position is not None else self._roots[node]
                by_storage.setdefault(key, roots)  # of the first alone: two views are not views of each other
        self._follow_communications()

    def _follow_communications(self) -> None:
        """A communication reads its operands and fills its results from its call to the wait for it."""
        operands_of: dict[Root, frozenset[Root]] = {}
        for node in self.graph.nodes:
            name = qualified_name(node)
            if name.split("::")[0] not in _COMMUNICATION:
                continue
            operands = self.roots_in((node.args, node.kwargs))
            if name in _WAITS:
                ended = [operands_of[root] for root in operands if root in operands_of]
                self._in_communication[node] = frozenset().union(*ended)
                self.in_flight -= operands
                if not ended:
                    self.in_flight |= {root for root in operands if root[0].op == "placeholder"}
                continue
            for root in self.written(node) or self.roots(node):
                operands_of[root] = operands
                if name.startswith("_c10d_functional::"):
                    self.in_flight.add(root)

    def _roots_of(self, node: Node, by_storage: Mapping[int, frozenset[Root]]) -> frozenset[Root]:
        if is_symbolic_value(node.meta.get("val")):
            return frozenset()  # a number is no memory
        if node.target in _SHARES:
            base = node.args[0]
            if not isinstance(base, Node):
                return frozenset()
            if node.target is operator.getitem and base in self._elements:
                index = node.args[1]
                elements = self._elements[base]
                if isinstance(index, int) and -len(elements) <= index < len(elements):
                    return elements[index]
            return self._roots.get(base, frozenset())
        if node.target in CALL_SUBGRAPHS:
            _, returned = self._run_subgraphs(node)
            elements = [frozenset({(node, position)}) | roots for position, roots in enumerate(returned)]
            self._elements[node] = elements
            return frozenset().union(*elements)
        schema = _schema(node)
        if qualified_name(node) in _WAITS:
            operand = (*node.args, *node.kwargs.values())[0]
            if isinstance(operand, (tuple, list)):
                self._elements[node] = [self.roots_in(item) for item in operand]
            return self.roots_in(operand)
        shared = self._declared_aliases(node, schema)
        val = node.meta.get("val")
        count = len(val) if isinstance(val, (tuple, list)) else len(schema.returns) if schema is not None else 1
        if (count > 1 or isinstance(val, (tuple, list))) and not shared:
            # Results of one operator are storages of their own, unless their fake values say otherwise.
            elements = [frozenset({(node, position)}) for position in range(count)]
            for position, key in _fake_storages(val):
                if position is not None:
                    elements[position] |= by_storage.get(key, frozenset())
            self._elements[node] = elements
            return frozenset().union(*elements)
        roots = frozenset({(node, None)}) | shared
        if isinstance(val, torch.Tensor) and val.layout is not torch.strided:
            roots |= self.roots_in((node.args, node.kwargs))  # a sparse tensor holds its operands
        for _, key in _fake_storages(val):
            roots |= by_storage.get(key, frozenset())
        return roots

    def _declared_aliases(self, node: Node, schema: Any) -> frozenset[Root]:
        if schema is None or qualified_name(node) in _RECEIVERS:
            undeclared = is_work(node) and node.target is not launch
            return self.roots_in((node.args, node.kwargs)) if undeclared else frozenset()
        labels = {label for r in schema.returns if r.alias_info for label in r.alias_info.before_set}
        shared: frozenset[Root] = frozenset()
        for argument, value in _pairs(schema, node):
            info = argument.alias_info
            if info is not None and (labels & set(info.before_set) or "*" in info.after_set):
                shared |= self.roots_in(value)
        return shared

    def roots(self, node: Node) -> frozenset[Root]:
        return self._roots.get(node, frozenset())

    def ordered(self, work: Sequence[Node]) -> list[list[Node]]:
        """Chains of nodes that keep program order although they share no memory: random draws, and effects."""
        random: list[Node] = []
        effects: list[Node] = []
        for node in work:
            if node.target is launch:
                continue
            schema = _schema(node)
            if schema is None or _draws(schema, node):
                random.append(node)
            communicates = qualified_name(node).split("::")[0] in _COMMUNICATION
            declared = communicates or "effect" in node.meta
            if schema is None or declared or not (schema.returns or self.written(node)):
                effects.append(node)
        return [random, effects]

    def roots_in(self, value: Any) -> frozenset[Root]:
        roots: set[Root] = set()

        def note(node: Node) -> Node:
            roots.update(self.roots(node))
            return node

        torch.fx.map_arg(value, note)
        return frozenset(roots)

    def sources(self, node: Node, scheduled: set[Node]) -> set[Node]:
        """The scheduled nodes whose values ``node`` uses, directly or through views and arithmetic."""
        sources: set[Node] = set()
        todo = list(node.all_input_nodes)
        while todo:
            operand = todo.pop()
            if operand in scheduled:
                sources.add(operand)
            else:
                todo.extend(operand.all_input_nodes)
        return sources

    def touched(self, node: Node) -> frozenset[Root]:
        """The storages that a node, or a communication that it waits for, reads or writes."""
        return self.roots_in((node.args, node.kwargs)) | self._in_communication.get(node, frozenset())

    def accesses(self, work: Sequence[Node]) -> AccessesByRoot:
        accesses: AccessesByRoot = defaultdict(list)
        for node in work:
            written = self.written(node)
            for root in self.touched(node):
                accesses[root].append((node, root in written))
        return accesses

    def accesses_to_inputs(self, work: Sequence[Node]) -> dict[str, list[tuple[Node, bool]]]:
        """For each device, the nodes that touch any of the inputs there, which may overlap; as ``accesses``."""
        accesses: dict[str, list[tuple[Node, bool]]] = defaultdict(list)
        device_of = {
            node: str(node.meta["val"].device)
            for node in self.graph.nodes
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
        }
        for node in work:
            written = {device_of[maker] for maker, _ in self.written(node) if maker in device_of}
            for device in {device_of[maker] for maker, _ in self.touched(node) if maker in device_of} | written:
                accesses[device].append((node, device in written))
        return accesses

    def written(self, node: Node) -> frozenset[Root]:
        if node.target is launch:
            kernel = getattr(self.graph.owning_module, str(node.args[0].target))  # type: ignore[union-attr]
            assert isinstance(kernel, Kernel)
            return self.roots_in([node.args[1 + position] for position in kernel.writes])
        if node.target in CALL_SUBGRAPHS:
            return self._run_subgraphs(node)[0]
        schema, name = _schema(node), qualified_name(node)
        if schema is None or name in _WAITS or name in _RECEIVERS:
            return self.roots_in((node.args, node.kwargs))
        return frozenset().union(
            *(
                self.roots_in(value)
                for argument, value in _pairs(schema, node)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
        )

    def _run_subgraphs(self, node: Node) -> tuple[frozenset[Root], list[frozenset[Root]]]:
        """The storages that a node's subgraphs write, and for each result those that it may lie in.

        These are operands, and memory that the node is given for what its subgraphs allocate. A loop is run until its
        operands lie in no storage more, after one iteration or another.
        """
        operands = [self.roots_in(operand) for operand in _operands(node)]
        loops, own = node.target is while_loop, self.roots_in(node.kwargs)
        places: Any = node.kwargs.get("results", ())
        while True:
            written, returned = own, list(map(self.roots_in, places))
            for number, subgraph in enumerate(called(node)):
                inner = Accesses(subgraph.graph)
                given = dict(zip(subgraph.graph.find_nodes(op="placeholder"), operands, strict=True))
                work = filter(is_work, subgraph.graph.nodes)
                written |= _outside(frozenset[Root]().union(*map(inner.written, work)), given)
                if loops and number == 0:
                    continue  # a condition returns whether to go on
                (results,) = output_node(subgraph).args
                lying = [_outside(inner.roots_in(result), given) for result in results]  # type: ignore[union-attr,arg-type]
                returned = _joined(returned, lying)
            following = _joined(operands, returned)
            if not loops or following == operands:
                return written, returned
            operands = following


def _joined(first: Sequence[frozenset[Root]], second: Sequence[frozenset[Root]]) -> list[frozenset[Root]]:
    """Position by position; the shorter one has nothing at the end."""
    nothing: frozenset[Root] = frozenset()
    return [a | b for a, b in itertools.zip_longest(first, second, fillvalue=nothing)]


def _outside(roots: frozenset[Root], given: Mapping[Node, frozenset[Root]]) -> frozenset[Root]:
    """Storages of a subgraph as those that its inputs lie in."""
    return frozenset[Root]().union(*(given.get(node, frozenset()) for node, _ in roots))


def called(node: Node) -> list[GraphModule]:
    """The subgraphs that a node may call; of a loop, its condition and its body."""
    targets = (str(arg.target) for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr")
    found = [operator.attrgetter(target)(node.graph.owning_module) for target in targets]
    return [value for value in found if isinstance(value, GraphModule)]


def _operands(node: Node) -> tuple[Any, ...]:
    """What each of them is called with, by position."""
    several = (arg for arg in node.args if isinstance(arg, (tuple, list)))
    return tuple(value for values in several for value in values)


def counts_from_storage(node: Node) -> bool:
    """Whether a call, or one in its subgraphs, addresses elements from the start of an operand's storage."""
    if node.target in CALL_SUBGRAPHS:
        return any(counts_from_storage(inner) for gm in called(node) for inner in gm.graph.nodes)
    schema = _schema(node)
    pairs = _pairs(schema, node) if schema is not None else ()
    return any(argument.name == "storage_offset" and value is not None for argument, value in pairs)


def may_keep_operands(node: Node) -> bool:
    """Whether a node runs foreign code, which may keep a reference to what it is given."""
    if node.target in CALL_SUBGRAPHS:
        return any(may_keep_operands(inner) for gm in called(node) for inner in gm.graph.nodes)
    foreign = qualified_name(node).split("::")[0] not in _COMPUTING
    return is_work(node) and node.target is not launch and foreign


def has_parallel_region(node: Node) -> bool:
    """Whether a node is a kernel of the CPU that works on several threads by itself."""
    if node.target is not launch:
        return False
    kernel = operator.attrgetter(str(node.args[0].target))(node.graph.owning_module)  # type: ignore[union-attr]
    return "#pragma omp parallel" in kernel.source


def may_differ_again(node: Node) -> bool:
    """Whether a second run on the same bytes may give other bits, because threads add in any order."""
    if node.target is launch:
        kernel = operator.attrgetter(str(node.args[0].target))(node.graph.owning_module)  # type: ignore[union-attr]
        return not kernel.same_bits_again
    if node.target in CALL_SUBGRAPHS:
        return any(may_differ_again(inner) for gm in called(node) for inner in gm.graph.nodes)
    operands = [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]
    devices = {val.device.type for val in operands if isinstance(val, torch.Tensor)}
    name = qualified_name(node).split("::")[-1].lstrip("_")
    return bool(devices - {"cpu", "meta"}) and (name.startswith(_ADDING) or name.endswith("_backward"))


def _schema(node: Node) -> Any:
    overload = node.target if isinstance(node.target, torch._ops.OpOverload) else node.meta.get("op_overload")
    return overload._schema if overload is not None else None


def qualified_name(node: Node) -> str:
    schema = _schema(node)
    return schema.name if schema is not None else ""


def _pairs(schema: Any, node: Node) -> list[tuple[Any, Any]]:
    named = {argument.name: argument for argument in schema.arguments}
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    pairs = list(zip(positional, node.args, strict=False))
    return pairs + [(named[name], value) for name, value in node.kwargs.items() if name in named]


def _draws(schema: Any, node: Node) -> bool:
    """Whether an operator draws random numbers: attention is tagged so for its dropout, which may be none."""
    overload = node.target if isinstance(node.target, torch._ops.OpOverload) else node.meta.get("op_overload")
    if torch.Tag.nondeterministic_seeded not in getattr(overload, "tags", ()):
        return False
    given = {argument.name: value for argument, value in _pairs(schema, node)}
    rates = [given.get(a.name, a.default_value) for a in schema.arguments if a.name == "dropout_p"]
    return rates != [0]


def _fake_storages(val: Any) -> list[tuple[int | None, int]]:
    """The tensors in a fake value: position in the tuple (None for a tensor alone), and storage."""
    whole = not isinstance(val, (tuple, list))
    storages: list[tuple[int | None, int]] = []
    for position, value in enumerate((val,) if whole else val):
        if isinstance(value, torch.Tensor):
            try:
                storages.append((None if whole else position, value.untyped_storage()._cdata))
            except (NotImplementedError, RuntimeError):
                continue
    return storages
