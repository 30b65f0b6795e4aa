"""Runs a program step by step; the eager run has each storage in memory that the checker knows."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import CheckError
from ...graphs.copies import all_bytes, bytes_of
from ...graphs.record.flat import FlatBuilder
from ...graphs.record.placed_results import PlacedResults
from ...host_graph.nodes import Kind, constants, effective_users, kind_of, operator_name
from ...host_graph.storages import Origin
from ...host_graph.tensors import reach, tensor_like, tensor_over, tensors_in
from ...host_graph.user_code import user_line
from ...packing.lifetimes import Lifetimes
from ...plan import Cut, Home, MemoryPlan, Partition, ProgramPlan

# Bytes before and after each storage: a multiple of every alignment.
_GUARD = 512
# Bytes of uninitialised memory: as floating-point numbers NaN, or small numbers.
NAN, ODD = 0xFF, 0xAB


class Run:
    """A run of a program step by step. What its steps make lies in registers, or stays where it is at every call.

    Attributes:
        plan: has a partition for each step.
        registers, values: the register of each value, and what the registers hold.
        fixed: values that are the same at every call.
    """

    def __init__(
        self, plan: ProgramPlan, registers: Mapping[Node, int], values: list[Any], fixed: Mapping[Node, Any]
    ) -> None:
        self.plan, self.facts = plan, plan.facts
        self.registers, self.values, self._fixed = registers, values, fixed

    def begin(self, step: int) -> None:
        """Called before a step."""

    def run(self, step: int) -> None:
        """Run a step."""
        raise NotImplementedError

    def end(self, step: int) -> None:
        """Called after a step."""

    def tensors(self, index: int) -> list[torch.Tensor]:
        """The tensors over a storage at this moment; empty if it has no value."""
        storage, maker = self.facts.storages[index], self.plan.maker(index)
        value = self.values[self.registers[maker]] if maker in self.registers else None
        made = storage.result_in(self._fixed.get(maker, value))
        return [tensor for tensor in tensors_in(made) if tensor.numel() and tensor.untyped_storage().nbytes()]


class _Unchecked(FlatBuilder):
    """Builds steps without asserts: the program runs them itself, and they may need numbers that nobody keeps."""

    def check(self, node: Node) -> None:
        """Appends nothing."""


class Walk(Run):
    """An eager run of the schedule on inputs that are its own: the steps of the line, with memory of the checker's.

    ::

        for step, node in enumerate(walk.schedule):
            walk.begin(step)
            walk.run(step)
            walk.end(step)         # drops values that no later step reads
        walk.finish()

    Args:
        inputs: the list is emptied.
        calls: functions to call in place of a node's own.

    Attributes:
        work: the nodes of each step.
        schedule: the node that a step is named by.
        first, last: the steps in which a storage is first and last named, by index; an output's last one is the end.
        results: the places of operators' results.
    """

    def __init__(
        self,
        plan: ProgramPlan,
        symbol_values: Mapping[Node, Any],
        inputs: list[Any],
        memory: OwnMemory,
        calls: Mapping[Node, Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        plan, facts = in_single_steps(plan), plan.facts
        self.work = [plan.work_in(partition) for partition in plan.partitions]
        # A partition that ``compile_partition`` replaced is one step, named by its last node.
        self.schedule = [work[-1 if step in plan.compiled else 0] for step, work in enumerate(self.work)]
        self.end_step = len(self.schedule)
        lifetimes = Lifetimes.of(map(facts.named_in, self.work))
        self.first = {index: steps.start for index, steps in lifetimes.items()}
        self.last = {index: steps[-1] for index, steps in lifetimes.items()}
        inputs_written = facts.all_written() & facts.behind(plan.placeholders)
        self.last.update(dict.fromkeys(facts.handed_out | inputs_written, self.end_step))
        self._made = [_made_in(plan, step, work, self.first) for step, work in enumerate(self.work)]
        nodes = (*plan.placeholders, *(node for made in self._made for node in made))
        registers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        super().__init__(plan, registers, [*inputs, *[None] * (len(registers) - len(inputs))], {})
        inputs.clear()
        self._ending: dict[int, list[int]] = defaultdict(list)
        for index, step in self.last.items():
            self._ending[step].append(index)
        # Values by the storages that they live in, to be let go of with the last of these.
        self._goes: dict[int, list[int]] = defaultdict(list)
        for node, number in registers.items():
            if known := [self.last[index] for index in facts.of(node) if index in self.last]:
                self._goes[max(known)].append(number)
        self.memory, self.results = memory, PlacedResults()
        self._bound = {**constants(plan.graph), **symbol_values}
        self._calls: dict[Node, Callable[..., Any]] = dict(calls)
        for node in filter(lambda node: kind_of(node) is Kind.ALLOCATION, nodes):
            (index,) = facts.of(node)
            self._calls[node] = functools.partial(memory.tensor, index)
        self._seen: dict[int, list[StorageWeakRef]] = defaultdict(list)
        self._note(facts.behind(plan.placeholders))

    def named(self, step: int) -> frozenset[int]:
        return self.facts.named_in(self.work[step])

    def reads(self, step: int) -> frozenset[int]:
        return frozenset().union(*map(self.facts.reads, self.work[step]))

    def changes(self, step: int) -> frozenset[int]:
        """Storages that a step writes or makes."""
        return frozenset().union(*(self.facts.writes(node) | self.facts.of(node) for node in self.work[step]))

    def begin(self, step: int) -> None:
        self.memory.begin(self, step)

    def run(self, step: int) -> None:
        copies = self.results.result_copies(self.work[step], set())
        builder = _Unchecked(self._bound, self.registers, post_processing=copies, calls=self._calls)
        builder.append_partition(self.plan, self.plan.partitions[step], self._made[step])
        builder.build().run(self.values)
        self._note(index for index in self.named(step) if self.first[index] == step)

    def _note(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._seen[index] += (StorageWeakRef(tensor.untyped_storage()) for tensor in self.tensors(index))

    def end(self, step: int) -> None:
        for number in self._goes[step]:
            self.values[number] = None
        self.memory.end(self, step)

    def ending(self, step: int) -> Sequence[int]:
        """Storages that no later step names."""
        return self._ending[step]

    def finish(self) -> list[int]:
        """Drop all values; returns the storages that are live nevertheless."""
        self.values.clear()
        self.memory.end(self, self.end_step)
        for again in (False, True):
            kept = [index for index, seen in self._seen.items() if not all(reference.expired() for reference in seen)]
            if kept and not again:
                gc.collect()  # a cycle of Python objects may hold them
        return kept


def fault_at(node: Node | None, name: str, subject: str, **texts: str) -> CheckError:
    """A fault that was found at a node, if that is known."""
    operator, line = (operator_name(node), user_line(node)) if node is not None else ("", "")
    return CheckError(subject, fault=name, operator=operator, line=line, **texts)


def in_single_steps(plan: ProgramPlan) -> ProgramPlan:
    """The same schedule with a partition for each step."""
    partitions, compiled = list[Partition](), {}
    for partition in plan.partitions:
        groups: list[list[Node]] = []
        for node in plan.work_in(partition):
            if groups and (kind_of(node) is Kind.CHECK or partition.index in plan.compiled):
                groups[-1].append(node)
            elif kind_of(node) is not Kind.SYMBOLIC or effective_users(node):  # others are made for asserts alone
                groups.append([node])
        for group in groups:
            names, index = tuple(node.name for node in group), len(partitions)
            if partition.index in plan.compiled:
                compiled[index] = plan.compiled[partition.index]
            partitions.append(dataclasses.replace(partition, index=index, nodes=names))
    cut: Cut = dataclasses.replace(plan.cut, partitions=tuple(partitions))
    return dataclasses.replace(plan, cut=cut, compiled=compiled)


def _made_in(plan: ProgramPlan, step: int, work: Sequence[Node], first: Mapping[int, int]) -> list[Node]:
    """The values that a step makes and others may use, with the allocations that it is the first to need."""
    signature = plan.compiled.get(step)
    made = work if signature is None else [plan.nodes[name] for name in signature.outputs]
    needed = plan.facts.named_in(work) - (signature.temporaries if signature is not None else frozenset())
    makers = (plan.maker(index) for index in sorted(needed) if first[index] == step)
    values = (
        *(node for node in made if effective_users(node)),
        *(n for n in makers if kind_of(n) is Kind.ALLOCATION),
    )
    return [node for node in dict.fromkeys(values) if kind_of(node) is not Kind.CHECK]


def block(nbytes: int, device: torch.device, fill: int) -> tuple[torch.Tensor, torch.UntypedStorage]:
    """Memory with guards around it: all of it, and what is inside."""
    whole = torch.full((nbytes + 2 * _GUARD,), ODD, dtype=torch.uint8, device=device)
    if not nbytes:
        return whole, torch.UntypedStorage(0, device=device)
    inside = slice(_GUARD, _GUARD + nbytes)
    whole[inside].fill_(fill)
    return whole, whole.untyped_storage()[inside]  # type: ignore[return-value]


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

    def tensor(self, index: int, size: Sequence[int], stride: Sequence[int], **options: Any) -> torch.Tensor:
        """What an allocation of the program makes."""
        dtype, device = options["dtype"], torch.device(options["device"])
        if options.get("pin_memory") or device.type == "meta":
            return torch.empty_strided(size, stride, **options)
        nbytes = reach(torch.empty_strided(size, stride, dtype=dtype, device="meta"))
        return tensor_over(self.allocate(index, nbytes, device), tuple(size), tuple(stride), dtype)

    def allocate(self, index: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        self._blocks[index], storage = block(nbytes, device, self.fill)
        return storage

    def begin(self, walk: Walk, step: int) -> None:
        """Called before a step; memory is allocated when it is needed."""

    def end(self, walk: Walk, step: int) -> None:
        for index in walk.named(step) if step < walk.end_step else ():
            if index in self._blocks and (where := guards_changed(self._blocks[index])):
                name = walk.facts.storages[index].name
                raise fault_at(
                    walk.schedule[step],
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
            device = self.plan.regions[place.region].device
            if storage.origin is Origin.EXTERN:
                there = self.allocate(storage.index, self.plan.sizes[storage.index], device)
                walk.results.add(maker, storage.element, there)
            elif storage.origin is Origin.INPUT:
                value = walk.values[number := walk.registers[maker]]
                if isinstance(value, torch.Tensor):
                    there = self.allocate(storage.index, reach(value), device)
                    walk.values[number] = static = tensor_like(value, there)
                    if value.numel():
                        bytes_of(static).copy_(bytes_of(value))

    def allocate(self, index: int, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        place = self.plan.places[index]
        if place.home is not Home.REGION:
            return super().allocate(index, nbytes, device)
        region = self.plan.regions[place.region]
        if place.region not in self._regions:
            _, self._regions[place.region] = block(region.size, region.device, self.fill)
        if not nbytes:
            return torch.UntypedStorage(0, device=region.device)
        return self._regions[place.region][place.offset : place.offset + nbytes]  # type: ignore[return-value]

    def begin(self, walk: Walk, step: int) -> None:
        """Fill storages whose life begins at this step, as uninitialised memory."""
        self._poison(walk, (index for index in walk.named(step) if walk.first[index] == step), Origin.INPUT)

    def end(self, walk: Walk, step: int) -> None:
        if step < walk.end_step:  # what the program writes of its inputs is live until the end
            self._poison(walk, walk.ending(step))

    def _poison(self, walk: Walk, indices: Iterable[int], but: Origin | None = None) -> None:
        for index in indices:
            place, nbytes = self.plan.places[index], self.plan.sizes.get(index, 0)
            if place.home is Home.REGION and nbytes and walk.facts.storages[index].origin is not but:
                device = self.plan.regions[place.region].device
                all_bytes(self.allocate(index, nbytes, device)).fill_(self.fill)
