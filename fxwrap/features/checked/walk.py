"""Runs a program's schedule node by node, each storage in memory that the checker knows."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import CheckError
from ...graphs.copies import all_bytes, bytes_of
from ...graphs.record.flat import flat_subgraph
from ...graphs.record.placed_results import PlacedResults
from ...host_graph.control_flow import control_flow_of
from ...host_graph.nodes import (
    Kind,
    constants,
    kernel_of,
    kind_of,
    only_computes,
    operator_name,
)
from ...host_graph.storages import Origin
from ...host_graph.tensors import reach, tensor_like, tensor_over, tensors_in
from ...host_graph.user_code import user_line
from ...packing.lifetimes import Lifetimes
from ...plan import Home, MemoryPlan, ProgramPlan

# Bytes before and after each storage: a multiple of every alignment.
_GUARD = 512
# Bytes of uninitialised memory: as floating-point numbers NaN, or small numbers.
NAN, ODD = 0xFF, 0xAB


class Walk:
    """One run of the schedule, on inputs that are its own.

    ::

        for step, node in enumerate(walk.schedule):
            walk.begin(step)
            walk.run(step)
            walk.end(step)         # drops values that no later step reads
        walk.outputs()

    Attributes:
        schedule: a partition that ``compile_partition`` replaced is one step, named by its last node.
        first, last: the steps in which a storage is first and last named, by index; an output's last one is the end.
    """

    def __init__(
        self, plan: ProgramPlan, symbol_values: Mapping[Node, Any], inputs: list[Any], memory: OwnMemory
    ) -> None:
        self.plan, self.facts, self.memory = plan, plan.facts, memory
        self.placeholders = plan.placeholders
        self._known: dict[Node, Any] = {**constants(plan.graph), **symbol_values}
        self.values: dict[Node, Any] = dict(zip(self.placeholders, inputs, strict=True))
        inputs.clear()
        self._compiled = {plan.work_in(p)[-1]: p for p in plan.partitions if p.index in plan.compiled}
        inside = {n for p in self._compiled.values() for n in plan.work_in(p)[:-1]}
        self.schedule = [node for node in plan.schedule if node not in inside]
        self._subgraphs: dict[GraphModule, Callable[..., Any]] = {}
        self.end_step = len(self.schedule)
        lifetimes = Lifetimes.of(map(self.named, self.schedule))
        self.first = {index: steps.start for index, steps in lifetimes.items()}
        self.last = {index: steps[-1] for index, steps in lifetimes.items()}
        inputs_written = self.facts.all_written() & self.facts.behind(self.placeholders)
        self.last.update(dict.fromkeys(self.facts.handed_out | inputs_written, self.end_step))
        self._ending: dict[int, list[int]] = defaultdict(list)
        for index, step in self.last.items():
            self._ending[step].append(index)
        # Values by the storages that they live in, to be let go of with the last of these.
        self._goes: dict[int, list[Node]] = defaultdict(list)
        for node in plan.graph.graph.nodes:
            known = [self.last[index] for index in self.facts.of(node) if index in self.last]
            if known and node.op != "get_attr":
                self._goes[max(known)].append(node)
        self.results = PlacedResults()
        self._seen: dict[int, list[StorageWeakRef]] = defaultdict(list)
        for node in self.placeholders:
            self._note(self.facts.of(node))

    def nodes_of(self, node: Node) -> Sequence[Node]:
        """What a step runs."""
        return self.plan.work_in(self._compiled[node]) if node in self._compiled else (node,)

    def named(self, node: Node) -> frozenset[int]:
        return self.facts.named_in(self.nodes_of(node))

    def reads(self, node: Node) -> frozenset[int]:
        return frozenset().union(*map(self.facts.reads, self.nodes_of(node)))

    def changes(self, node: Node) -> frozenset[int]:
        """Storages that a step writes or makes."""
        return frozenset().union(*(self.facts.writes(work) | self.facts.of(work) for work in self.nodes_of(node)))

    def begin(self, step: int) -> None:
        self.memory.begin(self, step)

    def run(self, step: int, call: Callable[..., Any] | None = None) -> None:
        """Run a step.

        Args:
            call: what operators are called with: ``(operator, *args, **kwargs)``.
        """
        node = self.schedule[step]
        partition = self._compiled.get(node)
        if partition is not None:
            signature = self.plan.compiled[partition.index]
            inputs = [self.value(self.plan.nodes[name]) for name in signature.inputs]
            results = getattr(self.plan.graph, signature.target)(*inputs)
            self.values.update(zip((self.plan.nodes[name] for name in signature.outputs), results, strict=True))
            return
        if kind_of(node) is Kind.CHECK:
            return
        if kind_of(node) is Kind.ALLOCATION:  # one of data-dependent size
            self.value(node)
            return
        copy = self.results.result_copies([node], set()).get(node)
        made = self._call(node, call)
        self.values[node] = copy([made]) if copy is not None else made
        del made
        self._note(self.facts.of(node))

    def _note(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._seen[index] += (StorageWeakRef(tensor.untyped_storage()) for tensor in self.tensors(index))

    def end(self, step: int) -> None:
        for node in self._goes.get(step, ()):
            self.values.pop(node, None)
        self.memory.end(self, step)

    def ending(self, step: int) -> Sequence[int]:
        """Storages that no later step names."""
        return self._ending.get(step, ())

    def finish(self) -> list[int]:
        """Drop all values; returns the storages that are live nevertheless."""
        self.values.clear()
        self.memory.end(self, self.end_step)
        for again in (False, True):
            kept = [index for index, seen in self._seen.items() if not all(reference.expired() for reference in seen)]
            if kept and not again:
                gc.collect()  # a cycle of Python objects may hold them
        return kept

    def _call(self, node: Node, call: Callable[..., Any] | None = None) -> Any:
        kwargs = dict(node.kwargs)
        if control_flow_of(node) is not None:
            kwargs.pop("temporaries", None)  # they lie in memory of their own here: nobody writes to this one
        args, kwargs = torch.fx.map_arg((node.args, kwargs), self.value)
        kernel = kernel_of(node)
        if kernel is not None:
            return kernel.call(*args[1:])
        if call is not None and isinstance(node.target, torch._ops.OpOverload):
            return call(node.target, *args, **kwargs)
        return node.meta.get("call", node.target)(*args, **kwargs)

    def value(self, node: Node) -> Any:
        if node in self.values:
            return self.values[node]
        if node in self._known:
            value = self._known[node]
            return self._flat(value) if isinstance(value, GraphModule) else value
        if kind_of(node) is Kind.ALLOCATION:
            self.values[node] = self._allocate(node)
            self._note(self.facts.of(node))
            return self.values[node]
        if kind_of(node) not in (Kind.VIEW, Kind.SYMBOLIC):
            raise AssertionError(f"{node.name} is used before it has run")
        return self._call(node)  # made again wherever it is used

    def _flat(self, gm: GraphModule) -> Callable[..., Any]:
        if gm not in self._subgraphs:
            self._subgraphs[gm] = flat_subgraph(gm)
        return self._subgraphs[gm]

    def _allocate(self, node: Node) -> torch.Tensor:
        laid_out: Any = torch.fx.map_arg(node.args[:2], self.value)
        size, stride = laid_out
        options: Any = node.kwargs
        (index,) = self.facts.of(node)
        meta = torch.empty_strided(size, stride, dtype=options["dtype"], device="meta")
        if options.get("pin_memory") or str(options.get("device")) == "meta":
            return torch.empty_strided(size, stride, **options)
        storage = self.memory.allocate(self, index, reach(meta))
        return tensor_over(storage, tuple(size), tuple(stride), options["dtype"])

    def tensors(self, index: int) -> list[torch.Tensor]:
        """The tensors over a storage now; empty if it has no value."""
        value = self.facts.storages[index].result_in(self.values.get(self.plan.maker(index)))
        return [tensor for tensor in tensors_in(value) if tensor.numel()]

    def device_of(self, index: int) -> torch.device:
        device = self.plan.maker(index).kwargs.get("device", self.plan.device)
        return torch.device(device)  # type: ignore[arg-type]

    def fault(self, node: Node | None, name: str, subject: str, **texts: str) -> CheckError:
        operator, line = (operator_name(node), user_line(node)) if node is not None else ("", "")
        return CheckError(subject, fault=name, operator=operator, line=line, **texts)


def block(nbytes: int, device: torch.device, fill: int) -> tuple[torch.Tensor, torch.UntypedStorage]:
    """Memory with guards around it: all of it, and what is inside."""
    whole = torch.full((nbytes + 2 * _GUARD,), ODD, dtype=torch.uint8, device=device)
    if whole.device.type == "cpu" and (off := -whole.data_ptr() % 64):
        whole = torch.full((nbytes + 2 * _GUARD + 64,), ODD, dtype=torch.uint8)[off : off + nbytes + 2 * _GUARD]
    low = whole.storage_offset() + _GUARD
    inside = whole.untyped_storage()[low : low + nbytes] if nbytes else torch.UntypedStorage(0, device=whole.device)
    if nbytes:
        whole[_GUARD : _GUARD + nbytes].fill_(fill)
    return whole, inside  # type: ignore[return-value]


def guards_changed(whole: torch.Tensor) -> str:
    """Where bytes around a storage have changed; empty if they have not."""
    for name, guard in (("before", whole[:_GUARD]), ("after", whole[-_GUARD:])):
        changed = guard.ne(ODD)
        if bool(changed.any()):
            where = changed.nonzero().flatten()
            at = _GUARD - int(where[-1]) if name == "before" else int(where[0]) + 1
            return f"{len(where)} byte(s) {name} it, {at} from its {'start' if name == 'before' else 'end'}"
    return ""


class OwnMemory:
    """The memory of a walk: each storage has memory of its own, with guards around it.

    Args:
        fill: the byte in uninitialised memory.
    """

    def __init__(self, fill: int = NAN) -> None:
        self.fill = fill
        self._blocks: dict[int, torch.Tensor] = {}

    def allocate(self, walk: Walk, index: int, nbytes: int) -> torch.UntypedStorage:
        self._blocks[index], storage = block(nbytes, walk.device_of(index), self.fill)
        return storage

    def begin(self, walk: Walk, step: int) -> None:
        """Called before a step; memory is allocated when it is needed."""

    def end(self, walk: Walk, step: int) -> None:
        node = walk.schedule[step] if step < walk.end_step else None
        for index in walk.named(node) if node is not None else ():
            if index in self._blocks and (where := guards_changed(self._blocks[index])):
                name = walk.facts.storages[index].name
                raise walk.fault(
                    node,
                    "writes outside of a storage",
                    f"bytes next to {name} have changed",
                    expected="an operator to write its operands, and nothing beside them",
                    got=where,
                    remedy="look at the bounds of what it writes: elsewhere these bytes are another tensor's",
                )
        for index in walk.ending(step):
            self._blocks.pop(index, None)


class PlannedMemory(OwnMemory):
    """Storages lie where a memory plan says, in memory of its own. Bytes without a live storage hold ``ODD``."""

    def __init__(self, plan: MemoryPlan) -> None:
        super().__init__(ODD)
        self.plan = plan
        self._regions: dict[int, torch.UntypedStorage] = {}

    def lay_out(self, walk: Walk) -> None:
        """Have inputs that have a static buffer lie there, and results of operators in their places."""
        for storage, place in zip(walk.facts.storages, self.plan.places, strict=True):
            maker = walk.plan.maker(storage.index)
            if place.home is not Home.REGION:
                continue
            if storage.origin is Origin.EXTERN:
                there = self.allocate(walk, storage.index, self.plan.sizes[storage.index])
                walk.results.add(maker, storage.element, there)
            elif storage.origin is Origin.INPUT and isinstance(value := walk.values[maker], torch.Tensor):
                there = self.allocate(walk, storage.index, reach(value))
                static = tensor_like(value, there)
                if value.numel():
                    bytes_of(static).copy_(bytes_of(value))
                walk.values[maker] = static

    def allocate(self, walk: Walk, index: int, nbytes: int) -> torch.UntypedStorage:
        place = self.plan.places[index]
        if place.home is not Home.REGION:
            return super().allocate(walk, index, nbytes)
        region = self.plan.regions[place.region]
        if place.region not in self._regions:
            _, self._regions[place.region] = block(region.size, region.device, self.fill)
        if not nbytes:
            return torch.UntypedStorage(0, device=region.device)
        return self._regions[place.region][place.offset : place.offset + nbytes]  # type: ignore[return-value]

    def begin(self, walk: Walk, step: int) -> None:
        """Fill storages whose life begins at this step, as uninitialised memory."""
        for index in walk.named(walk.schedule[step]):
            if walk.first[index] == step and self._is_planned(walk, index):
                self._poison(walk, index)

    def end(self, walk: Walk, step: int) -> None:
        for index in walk.ending(step) if step < walk.end_step else ():
            if self._is_planned(walk, index, inputs=True):
                self._poison(walk, index)

    def _is_planned(self, walk: Walk, index: int, inputs: bool = False) -> bool:
        """Whether a storage lies in a region, and shall hold nothing when it is not alive."""
        storage = walk.facts.storages[index]
        if self.plan.places[index].home is not Home.REGION:
            return False
        return storage.origin is not Origin.INPUT or (inputs and index not in walk.facts.all_written())

    def _poison(self, walk: Walk, index: int) -> None:
        nbytes = self.plan.sizes.get(index, 0)
        if nbytes:
            all_bytes(self.allocate(walk, index, nbytes)).fill_(self.fill)

    def over(self, index: int) -> list[int]:
        """The storages that share bytes with one, by the plan."""
        mine = self.plan.places[index]
        low, high = mine.offset, mine.offset + self.plan.sizes.get(index, 0)
        return [
            other
            for other, place in enumerate(self.plan.places)
            if other != index
            and (place.home, place.region) == (Home.REGION, mine.region)
            and place.offset < high
            and low < place.offset + self.plan.sizes.get(other, 0)
        ]


def may_keep(walk: Walk, index: int) -> list[Node]:
    """The operators that got or made a storage, and that may keep a reference to it."""
    nodes = [node for step in walk.schedule for node in walk.nodes_of(step)]
    given = [node for node in nodes if index in walk.facts.touched(node) | walk.facts.of(node)]
    return [node for node in given if not only_computes(node)]
