"""PLAN: works out the memory that a program needs at concrete sizes.

That is: which storages are live in which steps, their sizes, and whether the plan or an operator allocates them.
"""

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
        unplanned: memory of known size that operators allocate themselves, by device: results with the storage's
            index, workspace with None.
        unknown: steps in which memory of unknown size is in use, too: data-dependent results, and workspace that was
            not measured at these sizes.
        sizes: bytes of every storage that an allocation node makes or the plan places, if its size is known.
        outputs: storages that the caller gets: of allocation nodes, and results of operators that the plan places.
        handed_out: storages that the caller gets, or gets back.
        copied_back: see ``MemoryPlan``.
        ranges: the steps ``[begin, end)`` in which a storage is touched, by storage.
        temporaries: allocated storages of known size that are never live after a call, in the steps that name them;
            none where addresses are frozen.
        unshared: temporaries that need a region of their own (``_counted_from`` has the reasons).
        donated: inputs that are freed after their last use.
        copies: bytes that are copied because eager work returns them and captured work reads them.
        end: the end of live ranges that outlast the call; the step ``end - 1`` is the time after the last node.
    """

    facts: StorageFacts
    planned: Mapping[torch.device, list[tuple[int, Buffer]]]
    unplanned: Mapping[torch.device, list[tuple[int | None, Buffer]]]
    unknown: frozenset[int]
    sizes: Mapping[int, int]
    outputs: frozenset[int]
    handed_out: frozenset[int]
    copied_back: frozenset[str]
    ranges: Mapping[int, tuple[int, int]]
    temporaries: Mapping[int, Buffer]
    unshared: frozenset[int]
    donated: Sequence[Buffer]
    copies: int
    end: int

    def is_output(self, index: int | None) -> bool:
        """Whether the caller gets a storage that the program allocates."""
        return index in self.handed_out and self.facts.storages[index].origin in (Origin.ALLOCATION, Origin.EXTERN)

    def end_of(self, names: Iterable[str]) -> int:
        """The step after the last use of these inputs, which are another program's output: from then on the program
        may overwrite its bytes.

        It is ``end`` if ``names`` is empty, or if the program returns the output itself.
        """
        indices = self.facts.behind_named(names)
        if not indices or indices & self.handed_out:
            return self.end
        return max(self.ranges.get(index, (0, 0))[1] for index in indices)

    @classmethod
    def of(cls, sized: SizedProgram) -> Requirements:
        """The requirements of a program. They are computed once, and cached as long as ``sized`` lives."""
        if sized not in _CACHE:
            _CACHE[sized] = cls._of(sized)
        return _CACHE[sized]

    @classmethod
    def _of(cls, sized: SizedProgram) -> Requirements:
        program = sized.program
        _check_communications(program.facts)
        ranges, results, handed_out = live_ranges(program), _placed_results(sized), _handed_out(program)
        outputs = output_storages(program) | (handed_out & results.keys())
        copied_back, end = _copied_back(sized, handed_out), len(program.schedule) + 1
        sizes, buffers = _planned_buffers(sized, ranges, results, copied_back, outputs, end)
        placed = {index for on_device in buffers.values() for index, _ in on_device}
        symbols = symbols_at(sized.symbol_values)
        results_at = _sizes_of_results(program, symbols)
        workspace = _workspace_at(program, symbols)
        unplanned = _unplanned(sized, ranges, handed_out, end, placed, results_at, workspace)
        unknown = _unknown_steps(program, ranges, {**sizes, **results_at}, workspace)
        temporaries = {
            index: Buffer(program.facts.storages[index].name, sizes[index], *steps)
            for index, steps in (_temporaries(program).items() if not sized.frozen else ())
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
            copied_back=copied_back,
            ranges=ranges,
            temporaries=temporaries,
            unshared=_counted_from(program) & temporaries.keys() if temporaries else frozenset(),
            donated=_donated(sized, ranges, handed_out, end),
            copies=_copies(program, placed, results_at) if sized.frozen else 0,
            end=end,
        )


_CACHE = weakref.WeakKeyDictionary[SizedProgram, Requirements]()


def _check_communications(facts: StorageFacts) -> None:
    if facts.in_flight:
        # Between calls other programs use the arena. And inputs or outputs would be copied before the communication
        # is complete.
        names = sorted(facts.storages[index].name for index in facts.in_flight)
        raise PlanError(
            f"a communication on {', '.join(names)} is in flight when a call begins or ends",
            expected="every collective to be waited for in the graph that begins it",
            remedy="wait for it inside of the compiled region, with wait_tensor",
        )


def _planned_buffers(
    sized: SizedProgram,
    ranges: Mapping[int, tuple[int, int]],
    results: Mapping[int, int],
    copied_back: frozenset[str],
    outputs: frozenset[int],
    end: int,
) -> tuple[dict[int, int], dict[torch.device, list[tuple[int, Buffer]]]]:
    """The sizes of all allocations of known size, and the storages that the plan places, by device.

    Args:
        results: bytes of operators' results that the plan places, by storage.
    """
    program = sized.program
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
            layout = concrete(node.args[:2], sized.symbol_values)
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
        elif storage.node in sized.input_buffers:
            device, sizes[storage.index] = sized.input_buffers[storage.node]
            # Filled before the first step.
            begin, stop = 0, end if storage.node in copied_back else last
        elif storage.index in results:
            device, sizes[storage.index] = program.device, results[storage.index]
            begin = step_of[node]
            stop = end if storage.index in outputs else max(last, begin + 1)
        else:
            continue
        buffer = Buffer(storage.name, sizes[storage.index], begin, stop)
        buffers[device].append((storage.index, buffer))
    return sizes, buffers


def _copied_back(sized: SizedProgram, handed_out: frozenset[int]) -> frozenset[str]:
    """Inputs with a static buffer that the program writes, where the caller still has the input or gets it back."""
    facts, placeholders = sized.program.facts, sized.program.placeholders
    written, donated = facts.all_written(), {placeholders[position].name for position in sized.program.donated}

    def is_seen(name: str) -> bool:
        return name not in donated or not handed_out.isdisjoint(facts.behind_named([name]))

    return frozenset(n for n in sized.input_buffers if facts.behind_named([n]) & written and is_seen(n))


def live_ranges(program: ProgramPlan) -> dict[int, tuple[int, int]]:
    """``[first step that touches a storage, last step + 1)``, in steps of the schedule.

    A step is one work node. A view touches no storage; the nodes that use it do. A partition that
    ``compile_partition`` replaced may work in any order: what it touches is live during all of it.
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
    """Bytes of storages at the sizes that a program was compiled for; those of data-dependent size are missing."""
    sizes, nodes = {}, by_name(gm)
    for storage in facts.storages:
        value = storage.value(nodes[storage.node])
        if value is not None and (layout := hinted_layout(value)) is not None:
            sizes[storage.index] = storage_bytes(*layout, value.dtype)
    return sizes


def inner_storages(gm: GraphModule, facts: StorageFacts) -> frozenset[int]:
    """Storages whose live range depends on the order of nodes: the program allocates and does not return them."""
    handed_out = facts.behind(output_node(gm).all_input_nodes)
    return frozenset(
        storage.index
        for storage in facts.storages
        if storage.origin in (Origin.ALLOCATION, Origin.EXTERN) and storage.index not in handed_out
    )


def output_storages(program: ProgramPlan) -> frozenset[int]:
    """Storages of allocation nodes that the caller gets."""
    storages = program.facts.storages
    return frozenset(index for index in _handed_out(program) if storages[index].origin is Origin.ALLOCATION)


def _placed_results(sized: SizedProgram) -> dict[int, int]:
    """Bytes of the operators' results that are copied to planned memory, by storage.

    These are results of eager work that device graphs read, and results of captured work that the caller gets.
    """
    program = sized.program
    if not sized.frozen:
        return {}
    work = set(program.schedule) - program.replaced_work
    captured = program.captured_work - program.replaced_work
    read_by_graphs, handed_out = program.facts.named_in(captured), _handed_out(program)
    results = placeable_results(program.facts, program.graph, program.device, sized.symbol_values)
    placed = {}
    for index, nbytes in results.items():
        node = program.maker(index)
        if node not in work or program.verdicts[node.name].data_dependent:
            continue
        if index in (handed_out if node in captured else read_by_graphs):
            placed[index] = nbytes
    return placed


def _sizes_of_results(program: ProgramPlan, symbols: Mapping[Any, int]) -> dict[int, int]:
    """Bytes of the results that operators allocate, by storage; those of data-dependent size are missing."""
    sizes = {}
    for storage in program.facts.storages:
        if storage.origin is Origin.EXTERN:
            value = storage.value(program.nodes[storage.node])
            if value is not None and (layout := layout_at(value, symbols)) is not None:
                sizes[storage.index] = storage_bytes(*layout, value.dtype)
    return sizes


def _workspace_at(program: ProgramPlan, symbols: Mapping[Any, int]) -> dict[str, int]:
    """Bytes of workspace by node, where it is known.

    Workspace was measured at the sizes that the program was compiled for. At other sizes it is unknown.
    """
    extern = [node for node in program.schedule if kind_of(node) is Kind.EXTERN]
    without = {node.name: 0 for node in extern if needs_no_workspace(node)}
    measured = [node.name for node in extern if node.name in program.workspace and same_layouts(node, symbols)]
    return {**without, **{name: program.workspace[name] for name in measured}}


def _unplanned(
    sized: SizedProgram,
    ranges: Mapping[int, tuple[int, int]],
    handed_out: frozenset[int],
    end: int,
    placed: Collection[int],
    sizes: Mapping[int, int],
    workspace: Mapping[str, int],
) -> dict[torch.device, list[tuple[int | None, Buffer]]]:
    """Memory that operators allocate themselves: workspace, and results from their call to their last use.

    A result that is copied to planned memory is freed when it has been copied.

    Args:
        sizes: bytes of results, by storage.
        workspace: bytes, by node.
    """
    program = sized.program
    steps = {node.name: step for step, node in enumerate(program.schedule)}
    unplanned: dict[torch.device, list[tuple[int | None, Buffer]]] = defaultdict(list)
    for name, nbytes in workspace.items():
        if nbytes:
            buffer = Buffer(f"{name} workspace", nbytes, steps[name], steps[name] + 1)
            unplanned[program.device].append((None, buffer))
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
            if storage.index in placed:
                stop = begin + 1
            else:
                stop = end if storage.index in handed_out else max(last, begin + 1)
            unplanned[value.device].append((storage.index, Buffer(storage.name, sizes[storage.index], begin, stop)))
    return unplanned


def _unknown_steps(
    program: ProgramPlan,
    ranges: Mapping[int, tuple[int, int]],
    sizes: Mapping[int, int],
    workspace: Mapping[str, int],
) -> frozenset[int]:
    """Steps with library calls of unknown workspace, or with storages of unknown size."""
    steps = {
        step
        for step, node in enumerate(program.schedule)
        if kind_of(node) is Kind.EXTERN and node.name not in workspace
    }
    for storage in program.facts.storages:
        if storage.origin in (Origin.ALLOCATION, Origin.EXTERN) and storage.index not in sizes:
            steps.update(range(*ranges.get(storage.index, (0, 0))))
    return frozenset(steps)


def _copies(program: ProgramPlan, placed: Collection[int], sizes: Mapping[int, int]) -> int:
    """Bytes of the unplanned results of eager work that device graphs read: they are copied to static buffers."""
    eager, copied = set(program.schedule) - program.captured_work, 0
    for index in program.facts.named_in(program.captured_work).difference(placed):
        node = program.maker(index)
        if node in eager and not program.verdicts[node.name].data_dependent:
            copied += sizes.get(index, 0)
    return copied


def _donated(
    sized: SizedProgram, ranges: Mapping[int, tuple[int, int]], handed_out: frozenset[int], end: int
) -> list[Buffer]:
    """Inputs whose memory is freed after their last use, because the caller keeps no reference.

    Several inputs may share one storage. An input that is never used is freed with the call.
    """
    buffers = []
    for nbytes, nodes in sized.donated:
        indices = sized.program.facts.behind_named(nodes)
        if indices.isdisjoint(handed_out):
            stop = max((ranges.get(index, (0, end))[1] for index in indices), default=end)
            buffers.append(Buffer(nodes[0], nbytes, 0, stop))
    return buffers


def _temporaries(program: ProgramPlan) -> dict[int, tuple[int, int]]:
    """Allocated storages that are never live after a call, and the steps in which they are named."""
    steps: dict[int, tuple[int, int]] = {}
    retained = set(program.facts.named_in(program.replaced_work))
    retained |= _handed_out(program)
    retained |= {s.index for s in program.facts.storages if s.origin is not Origin.ALLOCATION}
    for step, node in enumerate(program.schedule):
        named = program.facts.named_in([node])
        steps.update({index: (steps.get(index, (step, step))[0], step + 1) for index in named})
        if not only_computes(node):
            retained |= named
    return {index: span for index, span in steps.items() if index not in retained}


def _counted_from(program: ProgramPlan) -> frozenset[int]:
    """Storages that must not share memory with others.

    An operator may count elements from the start of the storage, or take two values in one storage for views of one
    tensor. What control flow takes may be used so in a branch.
    """
    facts = program.facts
    nodes = [n for n in program.graph.graph.nodes if counts_from_storage(n) or control_flow_of(n) is not None]
    # Decompositions check whether two of their results, or a result and an operand, are views of one tensor.
    asks = [n for n in program.schedule if kind_of(n) is Kind.EXTERN and len(facts.writes(n)) > 1]
    asks += [n for n in program.schedule if "linalg" in operator_name(n)]
    counted = facts.behind(operand for node in nodes for operand in node.all_input_nodes)
    return counted.union(*(facts.touched(node) for node in asks))


def _handed_out(program: ProgramPlan) -> frozenset[int]:
    """Storages that the caller gets, or gets back."""
    return program.facts.behind(output_node(program.graph).all_input_nodes)
