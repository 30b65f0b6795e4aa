"""Registers: where values lie that change between calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from ...host_graph.nodes import effective_users, output_node, reinterpret
from ...plan import MemoryPlan, Origin, ProgramPlan


@dataclass(frozen=True)
class Registers:
    """First the inputs, then the values that leave the partition which makes them.

    Attributes:
        by_node: register by value.
        stores: values that a partition stores, by its index.
        complete: the same values, by the partition after which they are there: a communication may fill one beyond
            the end of its own.
        last_reader: for values that nobody reads after the calls, the last partition that does. There the register is
            emptied, so that memory is freed as soon as can be; none where addresses are frozen.
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
    found: dict[int, list[Node]] = {}
    seen: set[int] = set()
    for partition in plan.partitions:
        named = plan.facts.named_in(plan.work_in(partition))
        for index in sorted((named & memory.per_call) - seen):
            found.setdefault(partition.index, []).append(plan.maker(index))
        seen |= named
    return found


def _returned_views(
    plan: ProgramPlan, per_call: Mapping[int, list[Node]], producer: Mapping[Node, int]
) -> dict[Node, int]:
    """Views of what is allocated per call that the caller gets and that work needs, too: by partition."""
    found = {}
    allocated = {node for nodes in per_call.values() for node in nodes}
    for view in output_node(plan.graph).all_input_nodes:
        if view.target is reinterpret and view.args[0] in allocated:
            users = [producer[user] for user in effective_users(view) if user in producer]
            if users and not plan.compiled.keys() & users:
                found[view] = min(users)
    return found


def _last_readers(plan: ProgramPlan, by_node: Mapping[Node, int], producer: Mapping[Node, int]) -> dict[Node, int]:
    found = {}
    facts = plan.facts
    returned = facts.behind(output_node(plan.graph).all_input_nodes)
    waits = {one: producer[wait] for wait, over in plan.awaited.items() for one in over}
    for node in by_node:
        if node.op == "placeholder" and facts.of(node) & returned:
            continue  # an output may alias this input
        users = effective_users(node)
        # What a communication was given lives until somebody has waited for it.
        readers = [producer.get(user) for user in users] + [waits[user] for user in users if user in waits]
        if readers and None not in readers:  # None: the caller gets it
            found[node] = max(reader for reader in readers if reader is not None)
    return found


def _complete_after(plan: ProgramPlan, node: Node, producer: Mapping[Node, int]) -> int:
    facts, last = plan.facts, producer[node]
    storages = facts.of(node)
    waits = {wait: over for wait, over in plan.awaited.items() if facts.writes(wait) & storages}
    while later := [
        producer[wait]
        for wait, over in waits.items()
        if producer[wait] > last and any(producer[one] <= last for one in over)
    ]:
        last = max(later)
    return last
