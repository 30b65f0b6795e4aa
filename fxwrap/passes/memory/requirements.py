"""The memory that a program needs: which storages are alive in which steps, and who allocates them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from ...errors import PlanError
from ...host_graph.nodes import (
    Kind,
    by_name,
    control_flow_of,
    counts_from_storage,
    kind_of,
    only_computes,
    operator_name,
    output_node,
)
from ...host_graph.sizes import concrete, hinted_layout, layout_at, storage_bytes, symbols_at
from ...packing import Buffer
from ...plan import Origin, ProgramPlan, SizedProgram, StorageFacts
from .operator_results import placeable_results
from .workspace import needs_no_workspace, same_layouts


@dataclass(frozen=True)
class Requirements:
    """The memory that a program needs at concrete sizes.

    Attributes:
        planned: storages that the plan places, by device, each with its index.
        unplanned: what operators allocate themselves, as far as its size is known: by device, with the storage's
            index, or None for workspace.
        unknown: steps in which memory of unknown size is taken, too: data-dependent, or workspace that was not
            measured at these sizes.
        temporaries: allocated storages of known size that are never live after a call, in the steps that name them;
            none where addresses are frozen.
        apart: temporaries that need a region of their own: an operator counts from the start of their storage.
        donated: inputs that are freed after their last use.
        copies: bytes of the copies of what eager work returns and captured work reads.
        end: a step after the last; what is alive then is alive after the call.
    """

    facts: StorageFacts
    planned: Mapping[torch.device, list[tuple[int, Buffer]]]
    unplanned: Mapping[torch.device, list[tuple[int | None, Buffer]]]
    unknown: frozenset[int]
    sizes: Mapping[int, int]
    outputs: frozenset[int]
    handed_out: frozenset[int]
    ranges: Mapping[int, tuple[int, int]]
    temporaries: Mapping[int, Buffer]
    apart: frozenset[int]
    donated: Sequence[Buffer]
    copies: int
    end: int

    def is_output(self, index: int | None) -> bool:
        """Whether the caller gets a storage that the program allocates."""
        return index in self.handed_out and self.facts.storages[index].origin in (Origin.ALLOCATION, Origin.EXTERN)

    def end_of(self, names: Iterable[str]) -> int:
        """The first step in which the program may overwrite another program's output, which it gets as these inputs.

        An output that it does not get, or hands out itself, lives on.
        """
        indices = self.facts.behind_named(names)
        if not indices or indices & self.handed_out:
            return self.end
        return max(self.ranges.get(index, (0, 0))[1] for index in indices)

    @classmethod
    def of(cls, planned: SizedProgram) -> Requirements:
        """Found once, as long as ``planned`` lives."""
        if planned not in _KNOWN:
            _KNOWN[planned] = cls._of(planned)
        return _KNOWN[planned]

    @classmethod
    def _of(cls, planned: SizedProgram) -> Requirements:
        program = planned.program
        _check_communications(program.facts)
        ranges, results, handed_out = live_ranges(program), _placed_results(planned), _handed_out(program)
        outputs = output_storages(program) | (handed_out & results.keys())
        end = len(program.schedule) + 1
        sizes, buffers = _planned_buffers(planned, ranges, results, handed_out, outputs, end)
        placed = {index for on_device in buffers.values() for index, _ in on_device}
        symbols = symbols_at(planned.symbol_values)
        results_at = _sizes_of_results(program, symbols)
        workspace = _workspace_at(program, symbols)
        unplanned = _unplanned(planned, ranges, handed_out, end, placed, results_at, workspace)
        unknown = _unknown_steps(program, ranges, {**sizes, **results_at}, workspace)
        temporaries = {
            index: Buffer(program.facts.storages[index].name, sizes[index], *steps)
            for index, steps in (_temporaries(program).items() if not planned.frozen else ())
            if index in placed
        }
        return cls(
            facts=program.facts,
            planned=buffers,
            unplanned=unplanned,
            unknown=unknown,
            sizes=sizes,
            outputs=outputs,
            handed_out=handed_out,
            ranges=ranges,
            temporaries=temporaries,
            apart=_counted_from(program) & temporaries.keys() if temporaries else frozenset(),
            donated=_donated(planned, ranges, handed_out, end),
            copies=_copies(program, placed, results_at) if planned.frozen else 0,
            end=end,
        )


_KNOWN = weakref.WeakKeyDictionary[SizedProgram, Requirements]()


def _check_communications(facts: StorageFacts) -> None:
    if facts.in_flight:
        # Others use an arena between calls; and an input or output would be copied before it is complete.
        names = sorted(facts.storages[index].name for index in facts.in_flight)
        raise PlanError(
            f"a communication on {', '.join(names)} is in flight when a call begins or ends",
            expected="every collective to be waited for in the graph that begins it",
            remedy="wait for it inside of the compiled region, with wait_tensor",
        )


def _planned_buffers(
    planned: SizedProgram,
    ranges: Mapping[int, tuple[int, int]],
    results: Mapping[int, int],
    handed_out: frozenset[int],
    outputs: frozenset[int],
    end: int,
) -> tuple[dict[int, int], dict[torch.device, list[tuple[int, Buffer]]]]:
    """The storages that the plan places, by device. Also the sizes of all allocations that are known.

    Args:
        results: bytes of operators' results that the plan places, by storage.
    """
    program = planned.program
    written = program.facts.all_written()
    step_of = {node: step for step, node in enumerate(program.schedule)}
    sizes: dict[int, int] = {}
    buffers: dict[torch.device, list[tuple[int, Buffer]]] = defaultdict(list)
    in_compiled = frozenset().union(*(signature.temporaries for signature in program.compiled.values()))
    for storage in program.facts.storages:
        node = program.nodes[storage.node]
        if storage.index in in_compiled:
            continue  # the compiled partition allocates it itself
        first, last = ranges.get(storage.index, (0, 1))
        if storage.origin is Origin.ALLOCATION:
            layout = concrete(node.args[:2], planned.symbol_values)
            if layout is None:
                continue  # its size is data-dependent: allocated when it is known
            kwargs: Mapping[str, Any] = node.kwargs
            sizes[storage.index] = storage_bytes(layout[0], layout[1], kwargs["dtype"])
            device = kwargs["device"]
            if (
                kwargs.get("pin_memory")
                or device.type == "meta"
                or not (storage.index in ranges or storage.index in outputs)
            ):
                continue
            begin, stop = first, end if storage.index in outputs else last
        elif storage.node in planned.input_buffers:
            device, sizes[storage.index] = planned.input_buffers[storage.node]
            # Filled before the first step; a mutated one is copied back after the last.
            begin, stop = 0, end if storage.index in written | handed_out else last
        elif storage.index in results:
            device, sizes[storage.index] = program.device, results[storage.index]
            begin = step_of[node]
            stop = end if storage.index in outputs else max(last, begin + 1)
        else:
            continue
        buffer = Buffer(storage.name, sizes[storage.index], begin, stop)
        buffers[device].append((storage.index, buffer))
    return sizes, buffers


def live_ranges(program: ProgramPlan) -> dict[int, tuple[int, int]]:
    """``[first step that touches a storage, last step + 1)``, in steps of the schedule.

    A step is one work node. Views do not touch storage; what they are used for does. A partition that
    ``compile_partition`` replaced may do its work in any order: what it touches is there all the time.
    """
    ranges: dict[int, tuple[int, int]] = {}
    for step, node in enumerate(program.schedule):
        for index in program.facts.touched(node):
            begin, _ = ranges.get(index, (step, step))
            ranges[index] = (begin, step + 1)
    steps = {node.name: step for step, node in enumerate(program.schedule)} if program.compiled else {}
    for partition in program.partitions:
        if partition.index in program.compiled:
            first, last = steps[partition.nodes[0]], steps[partition.nodes[-1]]
            for index in frozenset().union(*map(program.facts.touched, program.work_in(partition))):
                begin, end = ranges[index]
                ranges[index] = min(begin, first), max(end, last + 1)
    return ranges


def hinted_sizes(gm: GraphModule, facts: StorageFacts) -> dict[int, int]:
    """Bytes of storages at the sizes a program was compiled for; data-dependent ones are missing."""
    sizes, nodes = {}, by_name(gm)
    for storage in facts.storages:
        value = storage.value(nodes[storage.node])
        if value is not None and (layout := hinted_layout(value)) is not None:
            sizes[storage.index] = storage_bytes(*layout, value.dtype)
    return sizes


def inner_storages(gm: GraphModule, facts: StorageFacts) -> frozenset[int]:
    """Storages whose lives depend on the order of nodes: allocated in the program, and not handed out."""
    handed_out = facts.behind(output_node(gm).all_input_nodes)
    return frozenset(
        storage.index
        for storage in facts.storages
        if storage.origin in (Origin.ALLOCATION, Origin.EXTERN) and storage.index not in handed_out
    )


def output_storages(program: ProgramPlan) -> frozenset[int]:
    """Allocated storages that values handed to the caller live in."""
    storages = program.facts.storages
    return frozenset(index for index in _handed_out(program) if storages[index].origin is Origin.ALLOCATION)


def _placed_results(planned: SizedProgram) -> dict[int, int]:
    """Bytes of the results of operators that are copied to places in the plan, by storage.

    These are results of eager work that graphs read, and results of captured work that the caller gets.
    """
    program = planned.program
    if not planned.frozen:
        return {}
    work = set(program.schedule) - program.replaced_work
    captured = program.captured_work - program.replaced_work
    read_by_graphs, handed_out = program.facts.named_in(captured), _handed_out(program)
    results = placeable_results(program.facts, program.graph, program.device, planned.symbol_values)
    placed = {}
    for index, nbytes in results.items():
        node = program.maker(index)
        if node not in work or program.verdicts[node.name].data_dependent:
            continue
        if index in (handed_out if node in captured else read_by_graphs):
            placed[index] = nbytes
    return placed


def _sizes_of_results(program: ProgramPlan, symbols: Mapping[Any, int]) -> dict[int, int]:
    """Bytes of what operators allocate for their results, by storage; data-dependent ones are missing."""
    sizes = {}
    for storage in program.facts.storages:
        if storage.origin is Origin.EXTERN:
            value = storage.value(program.nodes[storage.node])
            if value is not None and (layout := layout_at(value, symbols)) is not None:
                sizes[storage.index] = storage_bytes(*layout, value.dtype)
    return sizes


def _workspace_at(program: ProgramPlan, symbols: Mapping[Any, int]) -> dict[str, int]:
    """Bytes of workspace, by node, where it is known: it was measured at the sizes that the program was compiled for,
    and is another one at others."""
    extern = [node for node in program.schedule if kind_of(node) is Kind.EXTERN]
    without = {node.name: 0 for node in extern if needs_no_workspace(node)}
    alike = [node.name for node in extern if node.name in program.workspace and same_layouts(node, symbols)]
    return {**without, **{name: program.workspace[name] for name in alike}}


def _unplanned(
    planned: SizedProgram,
    ranges: Mapping[int, tuple[int, int]],
    handed_out: frozenset[int],
    end: int,
    placed: Collection[int],
    sizes: Mapping[int, int],
    workspace: Mapping[str, int],
) -> dict[torch.device, list[tuple[int | None, Buffer]]]:
    """What operators allocate themselves: results, from the call that makes them to the last use, and workspace.

    A result that is copied to its place in the plan lives until the end of its partition.

    Args:
        sizes: bytes of results, by storage.
        workspace: bytes, by node.
    """
    program = planned.program
    steps = {node.name: step for step, node in enumerate(program.schedule)}
    unplanned: dict[torch.device, list[tuple[int | None, Buffer]]] = defaultdict(list)
    for name, nbytes in workspace.items():
        if nbytes:
            buffer = Buffer(f"{name} workspace", nbytes, steps[name], steps[name] + 1)
            unplanned[program.device].append((None, buffer))
    ends = {name: steps[partition.nodes[-1]] + 1 for partition in program.partitions for name in partition.nodes}
    for storage in program.facts.storages:
        value = storage.value(program.nodes[storage.node])
        if (
            storage.origin is Origin.EXTERN
            and storage.node in steps
            and sizes.get(storage.index)
            and value is not None
        ):
            begin = steps[storage.node]
            _, last = ranges.get(storage.index, (begin, begin + 1))
            stop = end if storage.index in handed_out else max(last, begin + 1)
            if storage.index in placed:
                stop = ends[storage.node]
            unplanned[value.device].append((storage.index, Buffer(storage.name, sizes[storage.index], begin, stop)))
    return unplanned


def _unknown_steps(
    program: ProgramPlan,
    ranges: Mapping[int, tuple[int, int]],
    sizes: Mapping[int, int],
    workspace: Mapping[str, int],
) -> frozenset[int]:
    """Steps with library calls whose workspace is not known, or with storages whose sizes are not."""
    found = {
        step
        for step, node in enumerate(program.schedule)
        if kind_of(node) is Kind.EXTERN and node.name not in workspace
    }
    for storage in program.facts.storages:
        if storage.origin in (Origin.ALLOCATION, Origin.EXTERN) and storage.index not in sizes:
            found.update(range(*ranges.get(storage.index, (0, 0))))
    return frozenset(found)


def _copies(program: ProgramPlan, placed: Collection[int], sizes: Mapping[int, int]) -> int:
    """Bytes of the results of eager work that graphs read and that are not planned: copied to static buffers."""
    eager, copied = set(program.schedule) - program.captured_work, 0
    for index in program.facts.named_in(program.captured_work).difference(placed):
        node = program.maker(index)
        if node in eager and not program.verdicts[node.name].data_dependent:
            copied += sizes.get(index, 0)
    return copied


def _donated(
    planned: SizedProgram, ranges: Mapping[int, tuple[int, int]], handed_out: frozenset[int], end: int
) -> list[Buffer]:
    """Inputs whose memory is freed after their last use, since the caller keeps no reference. Several may share one
    storage; one that is never used is freed with the call."""
    buffers = []
    for nbytes, nodes in planned.donated:
        indices = planned.program.facts.behind_named(nodes)
        if indices.isdisjoint(handed_out):
            stop = max((ranges.get(index, (0, end))[1] for index in indices), default=end)
            buffers.append(Buffer(nodes[0], nbytes, 0, stop))
    return buffers


def _temporaries(program: ProgramPlan) -> dict[int, tuple[int, int]]:
    """Allocated storages that are never live after a call, and the steps in which they are named."""
    steps: dict[int, tuple[int, int]] = {}
    kept = set(program.facts.named_in(program.replaced_work))
    kept |= _handed_out(program) | {s.index for s in program.facts.storages if s.origin is not Origin.ALLOCATION}
    for step, node in enumerate(program.schedule):
        named = program.facts.named_in([node])
        steps.update({index: (steps.get(index, (step, step))[0], step + 1) for index in named})
        if not only_computes(node):
            kept |= named
    return {index: span for index, span in steps.items() if index not in kept}


def _counted_from(program: ProgramPlan) -> frozenset[int]:
    """Storages whose start an operator may count from, and those that it may take for one if they share memory."""
    facts = program.facts
    nodes = [n for n in program.graph.graph.nodes if counts_from_storage(n) or control_flow_of(n) is not None]
    # Decompositions ask whether their results, or a result and an operand, are views of one tensor.
    asks = [n for n in program.schedule if kind_of(n) is Kind.EXTERN and len(facts.writes(n)) > 1]
    asks += [n for n in program.schedule if "linalg" in operator_name(n)]
    counted = facts.behind(operand for node in nodes for operand in node.all_input_nodes)
    return counted.union(*(facts.touched(node) for node in asks))


def _handed_out(program: ProgramPlan) -> frozenset[int]:
    """Storages that the caller gets, or gets back."""
    return program.facts.behind(output_node(program.graph).all_input_nodes)
