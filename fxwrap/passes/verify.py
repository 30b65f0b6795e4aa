"""CHECK: prove a schedule and a memory plan safe, from the host graph alone.

Shares no code with the planner or the dependency pass: aliasing comes from a union of what views declare and
what the operators' fake results show, accesses from walking the graph, overlap from a sweep over steps.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import PlanError
from ..host_graph import (
    ControlFlow,
    Kernel,
    Kind,
    control_flow_of,
    counts_from_storage,
    is_symbolic_value,
    kind_of,
    launch,
    only_computes,
    reinterpret,
)
from ..listing import line_of
from ..plan import ArenaPlan, MemoryPlan, Origin, Region, Storage, StorageFacts, Taken

# A storage: who made it, and which of its results it is (None for an only one).
_Root = tuple[Node, int | None]

_fault = functools.partial(PlanError, remedy="this is a bug in fxwrap; please report the graph")

# Bytes: wide vector loads on a CPU want a cache line.
_REGION_ALIGNMENT = 64
_COMMUNICATION = ("c10d", "_c10d_functional", "_dtensor", "symm_mem")
_WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors")
_RECEIVERS = ("_c10d_functional::irecv", "_c10d_functional::batch_p2p_ops")
_SHARES = (reinterpret, operator.getitem, torch.ops.aten.view.dtype, torch.ops.aten.as_strided.default)


def verify_schedule(gm: GraphModule, schedule: Sequence[Node]) -> None:
    """Prove that running ``schedule`` computes what the graph in program order computes.

    Raises:
        PlanError: naming the two nodes that stand in the wrong order, or the node that is missing or doubled.
    """
    memory = _Memory(gm.graph)
    position = {node: step for step, node in enumerate(schedule)}
    required = [node for node in gm.graph.nodes if memory.works(node)]
    for node in required:
        if node not in position:
            raise _fault(f"schedule: {node.name} never runs", expected="every launch and extern call once")
    if len(position) != len(schedule):
        doubled = next(node for node in position if list(schedule).count(node) > 1)
        raise _fault(f"schedule: {doubled.name} runs twice", expected="every launch and extern call once")
    for node in schedule:
        for source in memory.sources(node, set(position)):
            if position[source] >= position[node]:
                _wrong_order(source, node, position, f"{node.name} uses the value of {source.name}")
    for chain in memory.ordered(required):
        for before, after in itertools.pairwise(chain):
            if position[before] >= position[after]:
                _wrong_order(before, after, position, "random numbers and effects keep program order")
    for root, accesses in memory.accesses(required).items():
        # Program order: reads between two writes form a group; no access may cross a write.
        last_writer: Node | None = None
        group: list[Node] = []
        for node, writes in accesses:
            step = position[node]
            if last_writer is not None and step <= position[last_writer]:
                _wrong_order(last_writer, node, position, f"{last_writer.name} writes {_name(root)} first")
            if writes:
                for reader in group:
                    if position[reader] >= step:
                        _wrong_order(reader, node, position, f"{reader.name} reads {_name(root)} first")
                last_writer, group = node, []
            else:
                group.append(node)


def _wrong_order(before: Node, after: Node, position: Mapping[Node, int], why: str) -> None:
    raise _fault(
        f"schedule: {after.name} runs before {before.name}",
        expected=f"{before.name} first, because {why}",
        got=f"steps {position[before]} ({before.name}) and {position[after]} ({after.name})",
    )


def verify_memory(
    gm: GraphModule,
    schedule: Sequence[Node],
    facts: StorageFacts,
    plan: MemoryPlan,
    numbers: Mapping[Node, Any],
) -> None:
    """Prove that no two storages that are live at one time share a byte of an arena.

    Of ``facts`` only the numbering of storages is used, to read the plan.

    Raises:
        PlanError: naming the two storages, the step and the byte ranges; or the storage that is misaligned,
            outside of its arena, or smaller than what is accessed, or one that a communication works on beyond
            the program.
    """
    memory = _Memory(gm.graph)
    if memory.in_flight:
        names = ", ".join(sorted(map(_name, memory.in_flight)))
        raise PlanError(
            f"plan: a communication on {names} is under way beyond the program",
            expected="every collective to be waited for in the graph that begins it",
        )
    spans = _spans(memory, schedule)
    position = {node: step for step, node in enumerate(schedule)}
    end = len(schedule) + 1
    handed_out = {root for node in _output_nodes(gm.graph) for root in memory.roots(node)}
    written = {root for node in schedule if memory.works(node) for root in memory.written(node)}
    _check_regions(memory, schedule, spans, facts, plan, numbers, handed_out)
    _check_homes(facts, plan, spans.keys() | handed_out)
    placed: dict[torch.device, list[_Placed]] = defaultdict(list)
    for storage in facts.storages:
        if storage.index not in plan.location:
            continue
        device, offset = plan.location[storage.index]
        arena = plan.arenas[device]
        size = _size_there(memory, storage, plan, numbers, offset, arena.placement.size, arena.alignment, "arena")
        name, root = storage.name, (storage.node, storage.element)
        begin, stop = spans.get(root, (0, 0))
        if storage.origin is Origin.EXTERN:
            begin = position[storage.node]
            stop = max(stop, begin + 1)
        if storage.node.op == "placeholder":
            begin = 0  # filled before the first step
            stop = end if root in written else max(stop, 1)
        if root in handed_out:
            stop = end  # the caller reads it afterwards
        if size and begin < stop:
            placed[device].append(_Placed(name, offset, offset + size, begin, stop))
    for device, items in placed.items():
        others = list(_others(memory, plan.arenas[device].taken, spans, handed_out, end))
        _check_overlap([*items, *others], schedule)
        _check_scratch(plan.arenas[device], [*items, *others], position)


def _check_homes(facts: StorageFacts, plan: MemoryPlan, used: Collection[_Root]) -> None:
    """Memory that is used and of which the size is known is in one place."""
    places = Counter([*plan.location, *plan.per_call, *(i for region in plan.regions for i in region.offsets)])
    for storage in facts.storages:
        index, own, options = storage.index, storage.origin is Origin.ALLOCATION, storage.node.kwargs
        # Whoever brings a storage into being brings memory, too.
        count = places[index] + (index in plan.per_call and not own)
        planned = own and index in plan.sizes and not options.get("pin_memory") and str(options["device"]) != "meta"
        if count > 1 or (planned and not count and (storage.node, storage.element) in used):
            raise _fault(
                f"plan: {storage.name} has {'memory twice' if count else 'no memory'}",
                expected="one of: a region, a place in an arena, a new allocation at every call",
            )


def _check_scratch(arena: ArenaPlan, items: Sequence[_Placed], position: Mapping[Node, int]) -> None:
    """What an operator may have while it runs has to be free then, and the program's at some time: else it is not
    looked whether somebody else has it."""
    footprint = arena.footprint  # what is looked at
    for node, spans in arena.scratch.items():
        step = position[node]
        live = [item for item in items if item.begin <= step < item.end]
        for low, high in spans:
            for other in live:
                if low < other.high and other.low < high:
                    raise _fault(
                        f"plan: scratch of {node.name} overlaps {other.name} at step {step}, {line_of(node)}",
                        expected="bytes that nobody has while it runs",
                        got=f"bytes [{low}, {high}) and [{other.low}, {other.high})",
                    )
            if not any(begin <= low and high <= stop for begin, stop in footprint):
                raise _fault(
                    f"plan: scratch of {node.name} is not the program's",
                    expected="bytes in which the program has storages at other steps",
                    got=f"bytes [{low}, {high})",
                )


def _size_there(
    memory: _Memory,
    storage: Storage,
    plan: MemoryPlan,
    numbers: Mapping[Node, Any],
    offset: int,
    available: int,
    alignment: int,
    where: str,
) -> int:
    """Bytes that are accessed of a storage, which has to lie within an arena or region."""
    made = storage.origin is Origin.EXTERN
    size = _returned(storage) if made else _needed(memory.graph, storage.node, numbers)
    known = plan.sizes.get(storage.index, 0)
    size = known if size is None else size
    if size > known:
        raise _fault(f"plan: {storage.name} is too small", expected=f"{size} bytes", got=f"{known} bytes")
    if offset % alignment:
        raise _fault(f"plan: {storage.name} is misaligned", expected=f"a multiple of {alignment}", got=str(offset))
    if offset < 0 or offset + size > available:
        raise _fault(
            f"plan: {storage.name} lies outside of its {where}",
            expected=f"bytes within [0, {available})",
            got=f"[{offset}, {offset + size})",
        )
    return size


def _check_regions(
    memory: _Memory,
    schedule: Sequence[Node],
    spans: Mapping[_Root, tuple[int, int]],
    facts: StorageFacts,
    plan: MemoryPlan,
    numbers: Mapping[Node, Any],
    handed_out: Collection[_Root],
) -> None:
    """What lies in a region is named in its steps only, by nobody who may keep it, and overlaps nothing there."""
    regions: dict[_Root, Region] = {}
    placed: dict[int, list[_Placed]] = defaultdict(list)
    for region in plan.regions:
        for index, offset in region.offsets.items():
            storage = facts.storages[index]
            root = (storage.node, storage.element)
            allocated = storage.origin is Origin.ALLOCATION
            if not allocated or root in handed_out or index in plan.location or root in regions:
                raise _fault(
                    f"plan: {storage.name} has memory in steps {region.begin} to {region.end - 1} only",
                    expected="an allocation that is not handed out, in one region",
                    got="an output" if root in handed_out else "another place, too" if allocated else "no allocation",
                )
            regions[root] = region
            size = _size_there(memory, storage, plan, numbers, offset, region.size, _REGION_ALIGNMENT, "region")
            if size and root in spans:
                placed[id(region)].append(_Placed(storage.name, offset, offset + size, *spans[root]))
    for items in placed.values():
        _check_overlap(items, schedule)
    for step, node in enumerate(schedule if regions else ()):
        named = regions.keys() & (memory.touched(node) | memory.roots(node))
        for root in named if not only_computes(node) else ():
            raise _fault(
                f"plan: {_name(root)} has memory in steps {regions[root].begin} to {regions[root].end - 1} only",
                expected=f"memory that {line_of(node)} may keep",
                got="a region",
            )
        for root in named:
            if not regions[root].begin <= step < regions[root].end:
                raise _fault(
                    f"plan: {_name(root)} has no memory at step {step}, {line_of(node)}",
                    expected="memory in the steps that name it",
                    got=f"memory in steps {regions[root].begin} to {regions[root].end - 1}",
                )
    for node in memory.graph.nodes if regions else ():
        if counts_from_storage(node) or control_flow_of(node) is not None:
            for root in memory.roots_in((node.args, node.kwargs)) & regions.keys():
                if any(regions[root].offsets.values()):
                    raise _fault(
                        f"plan: {_name(root)} is in a region with others",
                        expected="a region of its own",
                        got=f"an operand of {line_of(node)}, which may count from the start of the storage",
                    )


def _others(
    memory: _Memory,
    taken: Sequence[Taken],
    spans: Mapping[_Root, tuple[int, int]],
    handed_out: Collection[_Root],
    end: int,
) -> Iterator[_Placed]:
    """What other recordings have in an arena: for the whole call, or until the last use of what is given away."""
    for one in taken:
        roots = {root for node in one.nodes for root in memory.roots(node)}
        stays = not roots or not roots.isdisjoint(handed_out)
        stop = end if stays else max(spans.get(root, (0, 0))[1] for root in roots)
        name = f"another program's output, here {_name(min(roots, key=str))}" if roots else "another program's output"
        if stop:
            yield _Placed(name, one.low, one.high, 0, stop, planned=False)


@dataclass(frozen=True)
class _Placed:
    """Bytes ``[low, high)`` of an arena, live in steps ``[begin, end)``.

    Attributes:
        planned: whether this plan put it there; what others have is where it is.
    """

    name: str
    low: int
    high: int
    begin: int
    end: int
    planned: bool = True


def _check_overlap(items: list[_Placed], schedule: Sequence[Node] = ()) -> None:
    live: list[_Placed] = []
    for item in sorted(items, key=lambda item: item.begin):
        live = [other for other in live if other.end > item.begin]
        for other in live:
            if item.low < other.high and other.low < item.high and (item.planned or other.planned):
                line = f", {line_of(schedule[item.begin])}" if item.begin < len(schedule) else ""
                raise _fault(
                    f"plan: {other.name} and {item.name} overlap at step {item.begin}{line}",
                    expected="storages that are live at one time to be apart",
                    got=f"bytes [{other.low}, {other.high}) and [{item.low}, {item.high})",
                )
        live.append(item)


def _name(root: _Root) -> str:
    node, element = root
    return node.name if element is None else f"{node.name}[{element}]"


def _spans(memory: _Memory, schedule: Sequence[Node]) -> dict[_Root, tuple[int, int]]:
    spans: dict[_Root, tuple[int, int]] = {}
    for step, node in enumerate(schedule):
        if not memory.works(node):
            continue  # a view or a size touches no bytes
        for root in memory.touched(node):
            spans[root] = (spans.get(root, (step, step))[0], step + 1)
    return spans


def _needed(graph: Graph, root: Node, numbers: Mapping[Node, Any]) -> int | None:
    """Bytes of ``root``'s storage that its own layout and views of it reach; None where sizes are unknown."""
    if root.op != "call_function":
        return None

    def number(value: Any) -> Any:
        return torch.fx.map_arg(value, numbers.get)

    size, stride = number(root.args[0]), number(root.args[1])
    dtype = root.kwargs["dtype"]
    needed = _reach(size, stride, 0) * dtype.itemsize  # type: ignore[union-attr]
    for node in graph.nodes:
        if node.target is reinterpret and node.args[0] is root:
            size, stride, offset = number(node.args[1]), number(node.args[2]), number(node.args[3])
            if None in (*size, *stride, offset):
                continue
            needed = max(needed, _reach(size, stride, offset) * dtype.itemsize)  # type: ignore[union-attr]
    return needed


def _returned(storage: Storage) -> int | None:
    """Bytes of what an operator returns; None where sizes are unknown."""
    nbytes = storage.value.untyped_storage().nbytes()
    return nbytes if isinstance(nbytes, int) else None


def _reach(size: Sequence[int], stride: Sequence[int], offset: int) -> int:
    if any(extent == 0 for extent in size):
        return 0
    return offset + 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))


def _output_nodes(graph: Graph) -> list[Node]:
    return next(node for node in reversed(graph.nodes) if node.op == "output").all_input_nodes


@dataclass
class _Memory:
    """Aliasing and accesses, worked out from the graph. A storage is known by who made it."""

    graph: Graph
    _roots: dict[Node, frozenset[_Root]] = field(default_factory=dict)
    _elements: dict[Node, list[frozenset[_Root]]] = field(default_factory=dict)
    # What communications read that are over with a wait, and what some still work on at the end, or did before.
    _lent: dict[Node, frozenset[_Root]] = field(default_factory=dict)
    in_flight: set[_Root] = field(default_factory=set)

    def __post_init__(self) -> None:
        by_storage: dict[int, frozenset[_Root]] = {}
        attributes: dict[Any, Node] = {}
        for node in self.graph.nodes:
            owner = attributes.setdefault(node.target, node) if node.op == "get_attr" else node
            self._roots[node] = self._roots_of(owner, by_storage) if owner is node else self._roots[owner]
            elements = self._elements.get(node)
            for position, key in _fake_storages(node.meta.get("val")):
                roots = elements[position] if elements and position is not None else self._roots[node]
                by_storage[key] = by_storage.get(key, frozenset()) | roots
        self._follow_communications()

    def _follow_communications(self) -> None:
        """From its begin until somebody waits, a communication reads what it was given and fills what it returns
        or writes."""
        given: dict[_Root, frozenset[_Root]] = {}
        for node in self.graph.nodes:
            name = _qualified_name(node)
            if name.split("::")[0] not in _COMMUNICATION:
                continue
            operands = self.roots_in((node.args, node.kwargs))
            if name in _WAITS:
                known = [given[root] for root in operands if root in given]
                self._lent[node] = frozenset().union(*known)
                self.in_flight -= operands
                if not known:
                    self.in_flight |= {root for root in operands if root[0].op == "placeholder"}
                continue
            for root in self.written(node) or self.roots(node):
                given[root] = operands
                if name.startswith("_c10d_functional::"):
                    self.in_flight.add(root)

    def _roots_of(self, node: Node, by_storage: Mapping[int, frozenset[_Root]]) -> frozenset[_Root]:
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
        if (flow := control_flow_of(node)) is not None:
            elements = [
                frozenset({(node, position)}) | roots for position, roots in enumerate(self._handed_back(flow))
            ]
            self._elements[node] = elements
            return frozenset().union(*elements)
        schema = _schema(node)
        if _qualified_name(node) in _WAITS:
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
            roots |= self.roots_in((node.args, node.kwargs))  # a sparse tensor holds what it was made of
        for _, key in _fake_storages(val):
            roots |= by_storage.get(key, frozenset())
        return roots

    def _declared_aliases(self, node: Node, schema: Any) -> frozenset[_Root]:
        if schema is None or _qualified_name(node) in _RECEIVERS:
            undeclared = self.works(node) and node.target is not launch
            return self.roots_in((node.args, node.kwargs)) if undeclared else frozenset()
        labels = {label for r in schema.returns if r.alias_info for label in r.alias_info.before_set}
        shared: frozenset[_Root] = frozenset()
        for argument, value in _pairs(schema, node):
            info = argument.alias_info
            if info is not None and (labels & set(info.before_set) or "*" in info.after_set):
                shared |= self.roots_in(value)
        return shared

    def roots(self, node: Node) -> frozenset[_Root]:
        return self._roots.get(node, frozenset())

    def ordered(self, work: Sequence[Node]) -> list[list[Node]]:
        """Nodes that must keep program order although no memory joins them: random draws, and effects."""
        random: list[Node] = []
        effects: list[Node] = []
        for node in work:
            if node.target is launch:
                continue
            schema, overload = _schema(node), node.target
            tags = overload.tags if isinstance(overload, torch._ops.OpOverload) else ()
            if schema is None or torch.Tag.nondeterministic_seeded in tags:
                random.append(node)
            communicates = _qualified_name(node).split("::")[0] in _COMMUNICATION
            declared = communicates or "effect" in node.meta
            if schema is None or declared or not (schema.returns or self.written(node)):
                effects.append(node)
        return [random, effects]

    def roots_in(self, value: Any) -> frozenset[_Root]:
        found: set[_Root] = set()

        def note(node: Node) -> Node:
            found.update(self.roots(node))
            return node

        torch.fx.map_arg(value, note)
        return frozenset(found)

    def works(self, node: Node) -> bool:
        return kind_of(node) in (Kind.LAUNCH, Kind.EXTERN)

    def sources(self, node: Node, scheduled: set[Node]) -> set[Node]:
        """The scheduled nodes whose values ``node`` uses, seen through views and arithmetic."""
        found: set[Node] = set()
        todo = list(node.all_input_nodes)
        while todo:
            operand = todo.pop()
            if operand in scheduled:
                found.add(operand)
            else:
                todo.extend(operand.all_input_nodes)
        return found

    def touched(self, node: Node) -> frozenset[_Root]:
        """The storages that a node reads or writes, or that a communication it waits for does."""
        return self.roots_in((node.args, node.kwargs)) | self._lent.get(node, frozenset())

    def accesses(self, work: Sequence[Node]) -> dict[_Root, list[tuple[Node, bool]]]:
        """For each storage, who touches it in program order, and whether they write."""
        found: dict[_Root, list[tuple[Node, bool]]] = defaultdict(list)
        for node in work:
            written = self.written(node)
            for root in self.touched(node):
                found[root].append((node, root in written))
        return found

    def written(self, node: Node) -> frozenset[_Root]:
        if node.target is launch:
            kernel = getattr(self.graph.owning_module, str(node.args[0].target))  # type: ignore[union-attr]
            assert isinstance(kernel, Kernel)
            return self.roots_in([node.args[1 + position] for position in kernel.writes])
        if (flow := control_flow_of(node)) is not None:
            return self._written_by(flow)
        schema, name = _schema(node), _qualified_name(node)
        if schema is None or name in _WAITS or name in _RECEIVERS:
            return self.roots_in((node.args, node.kwargs))
        return frozenset().union(
            *(
                self.roots_in(value)
                for argument, value in _pairs(schema, node)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
        )

    # -- subgraphs: what they do to their inputs, they do to the operands of the node that calls them ----

    def _written_by(self, flow: ControlFlow) -> frozenset[_Root]:
        found: frozenset[_Root] = frozenset()
        for subgraph in flow.subgraphs:
            inner = _Memory(subgraph.graph)
            work = [node for node in subgraph.graph.nodes if inner.works(node)]
            written = frozenset().union(*map(inner.written, work))
            found |= self._outside(written, subgraph, flow)
        # From one iteration to the next values change places.
        return self.roots_in(flow.operands) if found and flow.repeats else found

    def _handed_back(self, flow: ControlFlow) -> list[frozenset[_Root]]:
        """For each result, the operands that it may be, or may be a view of."""
        found: list[frozenset[_Root]] = []
        for subgraph in flow.subgraphs:
            inner = _Memory(subgraph.graph)
            (results,) = next(node for node in reversed(subgraph.graph.nodes) if node.op == "output").args
            for position, result in enumerate(results):  # type: ignore[union-attr,arg-type]
                found += [frozenset()] * (position + 1 - len(found))
                found[position] |= self._outside(inner.roots_in(result), subgraph, flow)
        if flow.repeats and any(found):
            return [self.roots_in(flow.operands)] * len(found)
        return found

    def _outside(self, roots: frozenset[_Root], subgraph: GraphModule, flow: ControlFlow) -> frozenset[_Root]:
        placeholders = [node for node in subgraph.graph.nodes if node.op == "placeholder"]
        found = (self.roots_in(flow.operands[placeholders.index(n)]) for n, _ in roots if n.op == "placeholder")
        return frozenset().union(*found)


def _schema(node: Node) -> Any:
    overload = node.target if isinstance(node.target, torch._ops.OpOverload) else node.meta.get("op_overload")
    return overload._schema if overload is not None else None


def _qualified_name(node: Node) -> str:
    schema = _schema(node)
    return schema.name if schema is not None else ""


def _pairs(schema: Any, node: Node) -> list[tuple[Any, Any]]:
    named = {argument.name: argument for argument in schema.arguments}
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    pairs = list(zip(positional, node.args, strict=False))
    return pairs + [(named[name], value) for name, value in node.kwargs.items() if name in named]


def _fake_storages(val: Any) -> list[tuple[int | None, int]]:
    """(position in a tuple, storage) of the tensors in a fake value."""
    whole = not isinstance(val, (tuple, list))
    found: list[tuple[int | None, int]] = []
    for position, value in enumerate((val,) if whole else val):
        if isinstance(value, torch.Tensor):
            try:
                found.append((None if whole else position, value.untyped_storage()._cdata))
            except (NotImplementedError, RuntimeError):
                continue
    return found
