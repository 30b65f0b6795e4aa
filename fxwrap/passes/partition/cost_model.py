"""COST MODEL: a partition is captured only where a replay is estimated to be cheaper than its calls."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from ...devices import CaptureCost
from ...host_graph.control_flow import control_flow_of
from ...host_graph.nodes import Kind, is_work, kind_of
from ...host_graph.storages import Origin
from ...plan import CaptureBenefit, NodeVerdict, Partition, ProgramPlan, Verdict


def apply_cost_model(
    plan: ProgramPlan,
    cost: CaptureCost,
    sizes: Mapping[int, int],
    capture: str = "auto",
    min_launches: int = 1,
) -> ProgramPlan:
    """Make captured partitions eager whose capture does not pay, and join neighbours that are both eager then.

    ::

        ( a ) [ b ] ( c )      becomes      ( a b c )      if a call of b costs less than its replay and copies

    A capture saves the host's time for launches and library calls. It costs the replay, and copies of inputs and of
    results of eager partitions to where the device graph reads them. Inputs that stay in place, as AOTAutograd says,
    are read there. An input of several partitions is copied once, and counts for the first.

    Args:
        sizes: bytes of storages at the sizes the program was compiled for.
        capture: "auto" for the estimate, "always" for all that can be captured, "never" for none.
        min_launches: launches and library calls that a captured partition has at least.
    """
    moving = _without_fixed_address(plan)
    paid: frozenset[int] = frozenset()
    judged: list[Partition] = []
    for partition in plan.partitions:
        if partition.verdict is Verdict.EAGER:
            judged.append(partition)
            continue
        touched = frozenset[int]().union(*map(plan.facts.touched, plan.work_in(partition)))
        copied = (moving & touched) - paid
        calls = issued(plan.work_in(partition))
        benefit = CaptureBenefit(
            saved=calls[Kind.LAUNCH] * cost.launch + calls[Kind.EXTERN] * cost.extern,
            replay=cost.replay,
            copies=len(copied) * cost.copy + sum(sizes.get(index, 0) for index in copied) / cost.bytes,
        )
        reason = _too_little(calls.total(), benefit, capture, min_launches)
        if reason:
            changes: dict[str, Any] = {"verdict": Verdict.EAGER, "reason": reason, "device": torch.device("cpu")}
        else:
            changes = {}
            paid |= copied
        judged.append(dataclasses.replace(partition, benefit=benefit, **changes))
    verdicts = dict(plan.verdicts)
    for partition in judged:
        for node in partition.nodes:
            if verdicts[node].verdict is not partition.verdict:
                verdicts[node] = NodeVerdict(partition.verdict, partition.reason, remedy=_REMEDY)
    return dataclasses.replace(plan, verdicts=verdicts, cut=dataclasses.replace(plan.cut, partitions=_joined(judged)))


_REMEDY = "capture='always' and min_launches=1 capture it all the same"


def issued(nodes: Iterable[Node]) -> Counter[Kind]:
    """How many launches and library calls the host issues for nodes.

    A branch or a loop counts as a call, in which the host waits for what decides; in addition count its largest
    branch, or one iteration and two conditions.
    """
    counts = Counter[Kind]()
    for node in nodes:
        counts[kind_of(node)] += 1
        if (flow := control_flow_of(node)) is not None:
            inside = [issued(filter(is_work, body.graph.nodes)) for body in flow.subgraphs]
            largest, *others = sorted(inside, key=lambda counted: -counted.total())
            counts += sum(others, largest + inside[0]) if flow.repeats else largest
    return counts


def _too_little(calls: int, benefit: CaptureBenefit, capture: str, min_launches: int) -> str:
    """Why a partition runs eagerly though it could be captured; empty if it is captured."""
    if capture == "never":
        return "capture='never'"
    if calls < min_launches:
        return f"{calls} calls are fewer than min_launches={min_launches}"
    if capture == "auto" and not benefit.pays:
        return f"a capture does not pay: it {benefit}"
    return ""


def _without_fixed_address(plan: ProgramPlan) -> frozenset[int]:
    """Storages whose address changes between calls: inputs that are not static, and results of eager operators."""
    static = {plan.placeholders[position].name for position in plan.inputs.static}
    return frozenset(
        storage.index
        for storage in plan.facts.storages
        if (storage.origin is Origin.INPUT and storage.node not in static)
        or (storage.origin is Origin.EXTERN and plan.verdicts[storage.node].verdict is Verdict.EAGER)
    )


def _joined(partitions: Sequence[Partition]) -> tuple[Partition, ...]:
    """Join neighbours with the same verdict."""
    joined: list[Partition] = []
    for verdict, group in itertools.groupby(partitions, lambda partition: partition.verdict):
        parts = list(group)
        reasons = dict.fromkeys(part.reason for part in parts if part.reason)
        joined.append(
            Partition(
                len(joined),
                verdict,
                tuple(node for part in parts for node in part.nodes),
                "; ".join(reasons),
                parts[0].device,
                sum(part.launches for part in parts),
                sum(part.externs for part in parts),
                parts[0].benefit,
            )
        )
    return tuple(joined)
