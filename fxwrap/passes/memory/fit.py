"""PLAN: makes a program fit into a limit of bytes, by order and by repeated work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.utils.flop_counter import flop_registry

from ...host_graph.nodes import Kind, draws_numbers, kind_of, only_computes, same_bits_again, schema_of
from ...host_graph.sizes import hint, hinted_layout
from ...host_graph.storages import StorageFacts
from ...limit import Limit, Repeated, does_not_fit
from ...plan import Partition, ProgramPlan, Verdict
from ..analysis.aliasing import analyse_storages, overlap_groups
from .order import reordered
from .rebuilt import Rebuilt
from .rematerialise import rematerialise
from .timeline import Costs, Timeline

if TYPE_CHECKING:
    import networkx as nx

# Operations that take as long as moving a byte.
_OPERATIONS_PER_BYTE = 8
# For an operator without a formula: the operator whose formula is used, and a factor on its result. The exponentials
# between attention's products are in no formula; 6 is from benchmarks/memory_limit.py.
_COUNTED_AS: Mapping[Any, tuple[Any, int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        torch.ops.aten._scaled_dot_product_flash_attention,
        6,
    )
}


def fit_memory(plan: ProgramPlan, dependencies: nx.DiGraph, sizes: Mapping[int, int], limit: Limit) -> ProgramPlan:
    """Change a plan so that a call takes no more than a limit; a plan that does already is returned as it is.

    Repeating work is tried in two orders: the present one and that of ``order.reordered``, which may be the better
    one for it even if its own peak is higher. Of those that fit, the one that costs less is taken.

    Args:
        sizes: bytes of storages.

    Raises:
        MemoryLimitError: it cannot; the error says with how many bytes it could.
    """
    most = limit.nbytes - limit.overhead
    if timeline_of(plan, sizes, limit.workspace, limit.given).peak <= most:
        return plan
    orders = plan, reordered(plan, dependencies, sizes)
    fitting = [rematerialise(timeline_of(order, sizes, limit.workspace, limit.given), most) for order in orders]
    best = min(fitting, key=lambda timeline: (max(timeline.peak, most), timeline.work))
    if best.peak > most:
        raise does_not_fit(limit.nbytes, best.peak + limit.overhead)
    return _with_runs(plan, best)


def timeline_of(
    plan: ProgramPlan,
    sizes: Mapping[int, int],
    workspace: Mapping[str, int] = MappingProxyType({}),
    given: Mapping[str, int] = MappingProxyType({}),
) -> Timeline:
    """The schedule of a plan, with the memory that it uses at these sizes of storages.

    Args:
        workspace: bytes of workspace at these sizes by node, where that of the plan does not hold.
        given: see ``Limit``.
    """
    facts, captured = plan.facts, (p.index for p in plan.partitions if p.verdict is Verdict.CAPTURED)
    saved = {index: nbytes for name, nbytes in given.items() for index in facts.behind_named([name])}
    made = facts.made()
    costs = Costs(
        sizes={**saved, **{index: nbytes for index, nbytes in sizes.items() if index in made}},
        workspace={plan.nodes[name]: nbytes for name, nbytes in {**plan.workspace, **workspace}.items()},
        work={node: work_of(node, facts, sizes) for node in plan.schedule}.__getitem__,
        pure=is_pure,
        stays=facts.handed_out,
        captured=frozenset(captured),
        given=frozenset(saved) - facts.handed_out,
    )
    groups = overlap_groups(plan.graph, facts, plan.device.type if plan.inputs.apart else "")
    return Timeline.of([plan.work_in(partition) for partition in plan.partitions], facts, costs, groups)


def is_pure(node: Node) -> bool:
    """Whether a node may run twice: it computes the same bits of what it reads, and draws no random numbers.

    A kernel draws from a seed that it reads: it draws the same again. Atomic adds do not give the same bits again.
    """
    if not same_bits_again(node):
        return False
    if kind_of(node) is Kind.LAUNCH:
        return True
    computes = schema_of(node) is not None and only_computes(node) and "effect" not in node.meta
    return computes and not draws_numbers(node)


def repeated_in(timeline: Timeline, rebuilt: Rebuilt) -> tuple[Repeated, ...]:
    """The runs of a timeline that run again, by the names that they have in its graph."""
    return tuple(
        Repeated(name, run.node.name, sum(map(timeline.size, run.makes)), timeline.costs.work(run.node))
        for run, name in zip(timeline.runs, rebuilt.names, strict=True)
        if run.is_again
    )


def work_of(node: Node, facts: StorageFacts, sizes: Mapping[int, int]) -> int:
    """What a run of a node costs, in bytes moved: those that it touches, and operations by torch's own formulas."""
    moved = sum(sizes.get(index, 0) for index in facts.touched(node) | facts.of(node))
    overload = schema_of(node)
    packet = overload.overloadpacket if overload is not None else None
    counted_as, times = _COUNTED_AS.get(packet, (packet, 1))
    if (count := flop_registry.get(counted_as)) is None:
        return moved
    shapes = torch.fx.map_arg((node.args, node.kwargs), lambda operand: _shape(operand.meta.get("val")))
    try:
        operations = int(count(*shapes[0], **shapes[1], out_val=_shape(node.meta.get("val"))))  # type: ignore[index,arg-type]
    except (TypeError, ValueError, RuntimeError, AssertionError):
        return moved
    return moved + times * operations // _OPERATIONS_PER_BYTE


def _shape(value: Any) -> Any:
    """The sizes that a value was compiled for, in place of a tensor: symbols in a formula would become guards."""
    if isinstance(value, (tuple, list)):
        return [_shape(one) for one in value]
    if isinstance(value, torch.SymInt):
        return hint(value)
    layout = hinted_layout(value)
    return value if layout is None else layout[0]


def _with_runs(plan: ProgramPlan, timeline: Timeline) -> ProgramPlan:
    """The plan of the graph in which the runs of a timeline are nodes."""
    runs = timeline.runs
    rebuilt = Rebuilt(plan.graph, plan.facts, runs)
    names: list[list[str]] = [[] for _ in plan.partitions]
    for run, name in zip(runs, rebuilt.names, strict=True):
        names[run.partition].append(name)
    originals = {name: node.name for name, node in rebuilt.originals.items()}
    partitions = tuple(_with_nodes(one, own, rebuilt) for one, own in zip(plan.partitions, names, strict=True))
    return replace(
        plan,
        graph=rebuilt.module,
        facts=analyse_storages(rebuilt.module),
        verdicts={name: plan.verdicts[original] for name, original in originals.items()},
        cut=replace(plan.cut, partitions=partitions),
        workspace={n: plan.workspace[original] for n, original in originals.items() if original in plan.workspace},
        repeated=plan.repeated + repeated_in(timeline, rebuilt),
    )


def _with_nodes(partition: Partition, names: Sequence[str], rebuilt: Rebuilt) -> Partition:
    kinds = Counter(kind_of(rebuilt.originals[name]) for name in names)
    return replace(partition, nodes=tuple(names), launches=kinds[Kind.LAUNCH], externs=kinds[Kind.EXTERN])
