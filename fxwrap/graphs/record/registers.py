"""Registers: the list of values that change from call to call.

The parts of a replay read and write it. It holds the inputs first, then results that one partition makes and another
reads. Everything else is bound: it is the same at every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from ...host_graph.nodes import effective_users, output_node, reinterpret
from ...host_graph.storages import Origin
from ...packing.lifetimes import Lifetimes
from ...plan import MemoryPlan, ProgramPlan


@dataclass(frozen=True)
class Registers:
    """The registers of one recording: inputs, then values that are used outside of the partition that makes them.

    Attributes:
        by_node: the register of each value.
        stores: the values that a partition stores, by its index.
        complete: the same values, by the partition after which they are complete. A communication may fill a value
            after the partition that stores it.
        last_reader: the last partition that reads a value, for values that the caller does not get. It empties the
            register, so that memory is freed early. Empty where addresses are frozen.
    """

    by_node: Mapping[Node, int]
    stores: Mapping[int, list[Node]]
    complete: Mapping[int, list[Node]]
    last_reader: Mapping[Node, int]

    @classmethod
    def of(cls, plan: ProgramPlan, memory: MemoryPlan, frozen: bool) -> Registers:
        by_node = {node: position for position, node in enumerate(plan.placeholders)}
        stores: dict[int, list[Node]] = {}
        complete: dict[int, list[Node]] = {}
        per_call = _allocated_per_call(plan, memory)
        producer = {node: p.index for p in plan.partitions for node in plan.work_in(p)}
        producer.update({node: index for index, nodes in per_call.items() for node in nodes})
        # Allocated for the recording: tensors over them are the same at every call.
        known = memory.sizes.keys() - memory.per_call
        bound = {plan.maker(i) for i in known if plan.facts.storages[i].origin is Origin.ALLOCATION}
        views = _returned_views(plan, per_call, producer)
        for partition in plan.partitions:
            made_here = {view for view, index in views.items() if index == partition.index}
            for node in (*plan.work_in(partition), *per_call.get(partition.index, ())):
                users = effective_users(node, made_here)
                leaves = any(producer.get(user) != partition.index for user in users)
                if leaves and node not in bound:
                    by_node[node] = len(by_node)
                    stores.setdefault(partition.index, []).append(node)
                    complete.setdefault(_complete_after(plan, node, producer), []).append(node)
        for view, index in views.items():
            by_node[view] = len(by_node)
            stores.setdefault(index, []).append(view)
        last_reader = {} if frozen else _last_readers(plan, by_node, producer)
        return cls(by_node, stores, complete, last_reader)


def _allocated_per_call(plan: ProgramPlan, memory: MemoryPlan) -> dict[int, list[Node]]:
    """Allocations that are made at each call, by the first partition that uses them."""
    lifetimes = Lifetimes.of(plan.facts.named_in(plan.work_in(partition)) for partition in plan.partitions)
    allocations: dict[int, list[Node]] = {}
    for index in sorted(memory.per_call & lifetimes.keys()):
        allocations.setdefault(lifetimes[index].start, []).append(plan.maker(index))
    return allocations


def _returned_views(
    plan: ProgramPlan, per_call: Mapping[int, list[Node]], producer: Mapping[Node, int]
) -> dict[Node, int]:
    """Returned views of per-call allocations that work also reads, each with the first partition that reads it."""
    views = {}
    allocated = {node for nodes in per_call.values() for node in nodes}
    for view in output_node(plan.graph).all_input_nodes:
        if view.target is reinterpret and view.args[0] in allocated:
            users = [producer[user] for user in effective_users(view) if user in producer]
            if users and not plan.compiled.keys() & users:
                views[view] = min(users)
    return views


def _last_readers(plan: ProgramPlan, by_node: Mapping[Node, int], producer: Mapping[Node, int]) -> dict[Node, int]:
    last_readers = {}
    facts = plan.facts
    waits = {begun: producer[wait] for wait, over in plan.awaited.items() for begun in over}
    for node in by_node:
        if node.op == "placeholder" and facts.of(node) & facts.handed_out:
            continue  # an output may alias this input
        users = effective_users(node)
        # The operands of a communication live until its wait.
        readers = [producer.get(user) for user in users] + [waits[user] for user in users if user in waits]
        if readers and None not in readers:  # None: the caller gets it
            last_readers[node] = max(reader for reader in readers if reader is not None)
    return last_readers


def _complete_after(plan: ProgramPlan, node: Node, producer: Mapping[Node, int]) -> int:
    """The partition after which a value is complete: its own, or that of a later wait which fills it."""
    facts, last = plan.facts, producer[node]
    storages = facts.of(node)
    waits = {wait: over for wait, over in plan.awaited.items() if facts.writes(wait) & storages}
    while later := [
        producer[wait]
        for wait, over in waits.items()
        if producer[wait] > last and any(producer[begun] <= last for begun in over)
    ]:
        last = max(later)
    return last
