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
from torch.fx import GraphModule, Node

from ...errors import PlanError
from ...host_graph.nodes import (
    Kind,
    by_name,
    kind_of,
    only_computes,
)
from ...host_graph.sizes import concrete, hinted_layout, layout_at, storage_bytes, symbols_at
from ...host_graph.storages import Origin, StorageFacts
from ...packing import Buffer
from ...packing.allocators import BLOCK
from ...packing.lifetimes import Lifetimes
from ...plan import ProgramPlan, SizedProgram
from ..analysis.aliasing import looks_at_storage
from .operator_results import placeable_results
from .workspace import needs_no_workspace, same_layouts


@dataclass(frozen=True)
class Requirements:
    """The memory that a program needs at concrete sizes.

    It holds no node and no plan: they could keep alive the ``SizedProgram`` that is its weak key in the cache.

    Attributes:
        lifetimes: see ``ProgramPlan``.
        planned: what the plan places, by device: storages, each with its index, and workspace with None.
        unplanned: other memory of known size that operators allocate, by device: results with the storage's index,
            workspace with None.
        unknown: steps in which memory of unknown size is in use, too: data-dependent results, and workspace that was
            not measured at these sizes.
        unsized: the nodes that make storages of data-dependent size.
        unmeasured: library calls whose workspace at these sizes is not known; on accelerators, all.
        sizes: bytes of every storage that an allocation node makes or the plan places, if its size is known.
        outputs: storages that the caller gets: of allocation nodes, and results of operators that the plan places.
            (For ``is_new_output`` all results of operators count.)
        copied_back: see ``MemoryPlan``.
        region_storages: allocated storages of known size that are never live after a call, so that they may lie in a
            region; none where addresses are frozen.
        unshared: those of them that need a region of their own (``_must_not_share`` has the reasons).
        donated: inputs that are freed after their last use.
        own: bytes of a recording's own memory, outside of arenas: static buffers for results of eager work that
            device graphs read, and numbers that the caller gets (``ProgramPlan.numbers_returned``).
        end: the end of live ranges that outlast the call; the step ``end - 1`` is the time after the last node.
    """

    facts: StorageFacts
    lifetimes: Lifetimes
    planned: Mapping[torch.device, list[tuple[int | None, Buffer]]]
    unplanned: Mapping[torch.device, list[tuple[int | None, Buffer]]]
    unknown: frozenset[int]
    unsized: tuple[str, ...]
    unmeasured: tuple[str, ...]
    sizes: Mapping[int, int]
    outputs: frozenset[int]
    copied_back: frozenset[str]
    region_storages: Mapping[int, Buffer]
    unshared: frozenset[int]
    donated: Sequence[Buffer]
    own: int
    end: int

    @property
    def handed_out(self) -> frozenset[int]:
        return self.facts.handed_out

    def is_new_output(self, index: int | None) -> bool:
        """Whether the caller gets a storage that the program or one of its operators allocates."""
        return index in self.handed_out and self.facts.storages[index].origin in (Origin.ALLOCATION, Origin.EXTERN)

    def end_of(self, names: Iterable[str]) -> int:
        """The step after the last use of these inputs, which are another program's output: from then on the program
        may overwrite its bytes.

        It is ``end`` if ``names`` is empty, or if the program returns the output itself.
        """
        indices = self.facts.behind_named(names)
        if not indices or indices & self.handed_out:
            return self.end
        return max(self.lifetimes.get(index, range(0)).stop for index in indices)

    @classmethod
    def of(cls, sized: SizedProgram) -> Requirements:
        """The requirements of a program. They are computed once, and cached as long as ``sized`` lives."""
        if sized not in _CACHE:
            _CACHE[sized] = cls._of(sized)
        return _CACHE[sized]

    @classmethod
    def _of(cls, sized: SizedProgram) -> Requirements:
        program, facts = sized.plan, sized.plan.facts
        _check_communications(facts)
        symbols, own = symbols_at(sized.symbol_values), _results_at_their_places(sized)
        results = {**_copied_results(sized), **own}
        copied_back, end = _copied_back(sized), len(program.schedule) + 1
        outputs = frozenset(
            i for i in facts.handed_out if i in results or facts.storages[i].origin is Origin.ALLOCATION
        )
        numbers = program.numbers_returned if sized.frozen else frozenset[int]()
        sizes, buffers = _planned_buffers(sized, results, copied_back, outputs, numbers, end)
        placed = {index for on_device in buffers.values() for index, _ in on_device}
        results_at, known = _sizes_of_results(program, symbols), _workspace_at(program, symbols)
        known.update((step, 0) for step, node in enumerate(program.schedule) if node.name in sized.operators)
        workspace = {step: sized.workspace.get(program.schedule[step].name, n) for step, n in known.items()}
        region_storages = {} if sized.frozen else _region_storages(program, buffers)
        allocated = {index: nbytes for index, nbytes in results_at.items() if index not in own}
        return cls(
            facts=facts,
            lifetimes=program.lifetimes,
            planned=_with_workspace(sized, buffers),
            unplanned=_unplanned(program, end, placed, allocated, workspace),
            unknown=_unknown_steps(program, {**sizes, **results_at}, known),
            unsized=_unsized(program, {**sizes, **results_at}),
            unmeasured=tuple(program.schedule[step].name for step, nbytes in workspace.items() if nbytes is None),
            sizes=sizes,
            outputs=outputs,
            copied_back=copied_back,
            region_storages=region_storages,
            unshared=_must_not_share(program) & region_storages.keys() if region_storages else frozenset(),
            donated=_donated(sized, end),
            own=_copies(program, placed, results_at) + len(numbers) * BLOCK if sized.frozen else 0,
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
    results: Mapping[int, int],
    copied_back: frozenset[str],
    outputs: frozenset[int],
    apart: frozenset[int],
    end: int,
) -> tuple[dict[int, int], dict[torch.device, list[tuple[int, Buffer]]]]:
    """The sizes of all allocations of known size, and the storages that the plan places, by device.

    Args:
        results: bytes of results of operators that the plan places, by storage.
        apart: storages that have memory of their own.
    """
    program, lifetimes = sized.plan, sized.plan.lifetimes
    sizes: dict[int, int] = {}
    buffers: dict[torch.device, list[tuple[int, Buffer]]] = defaultdict(list)
    in_compiled = frozenset().union(*(signature.temporaries for signature in program.compiled.values()))
    for storage in program.facts.storages:
        node, index = program.nodes[storage.node], storage.index
        if index in in_compiled:
            continue  # the compiled partition allocates it itself
        if storage.origin is Origin.ALLOCATION:
            layout = concrete(node.args[:2], sized.symbol_values)
            if layout is None:
                continue  # its size is data-dependent: allocated when it is known
            kwargs: Mapping[str, Any] = node.kwargs
            sizes[index] = storage_bytes(layout[0], layout[1], kwargs["dtype"])
            device = kwargs["device"]
            is_used = index not in apart and (index in lifetimes or index in outputs)
            if kwargs.get("pin_memory") or device.type == "meta" or not is_used:
                continue
        elif storage.node in sized.input_buffers:
            device, sizes[index] = sized.input_buffers[storage.node]
        elif index in results:
            device, sizes[index] = program.device, results[index]
        else:
            continue
        steps = lifetimes.get(index, range(1))  # a result of an operator is named where it is made
        begin = 0 if storage.origin is Origin.INPUT else steps.start  # inputs are copied before the first step
        stays = index in outputs or storage.node in copied_back
        # An allocator finds its blocks by their addresses: no operator allocates at that of the arena's own block.
        first = BLOCK if storage.origin is Origin.EXTERN and storage.node in sized.operators else 0
        stop = end if stays else steps.stop
        buffers[device].append((index, Buffer(storage.name, sizes[index], begin, stop, first)))
    return sizes, buffers


def _copied_back(sized: SizedProgram) -> frozenset[str]:
    """Inputs with a static buffer that the program writes, where the caller still has the input or gets it back."""
    plan, facts = sized.plan, sized.plan.facts
    written, donated = facts.all_written(), {plan.placeholders[position].name for position in plan.inputs.donated}

    def is_seen(name: str) -> bool:
        return name not in donated or not facts.handed_out.isdisjoint(facts.behind_named([name]))

    return frozenset(n for n in sized.input_buffers if facts.behind_named([n]) & written and is_seen(n))


def expected_sizes(gm: GraphModule, facts: StorageFacts, symbols: Mapping[Any, int] | None = None) -> dict[int, int]:
    """Bytes of storages; those of data-dependent size are missing.

    Args:
        symbols: the sizes, by symbol; by default those that the program was compiled for.
    """
    sizes, nodes = {}, by_name(gm)
    for storage in facts.storages:
        value = storage.value(nodes[storage.node])
        layout = layout_at(value, symbols) if symbols else hinted_layout(value)
        if value is not None and layout is not None:
            sizes[storage.index] = storage_bytes(*layout, value.dtype)
    return sizes


def _results_at_their_places(sized: SizedProgram) -> dict[int, int]:
    """Bytes of the results that operators allocate at planned addresses, by storage."""
    made = ((storage, sized.operators.get(storage.node)) for storage in sized.plan.facts.storages)
    results = {s.index: own.bytes_of(s.element) for s, own in made if own is not None and s.origin is Origin.EXTERN}
    return {index: nbytes for index, nbytes in results.items() if nbytes}


def _with_workspace(
    sized: SizedProgram, buffers: Mapping[torch.device, Sequence[tuple[int, Buffer]]]
) -> dict[torch.device, list[tuple[int | None, Buffer]]]:
    """The buffers, and the workspace of operators that allocate at planned addresses."""
    planned: dict[torch.device, list[tuple[int | None, Buffer]]] = {d: list(items) for d, items in buffers.items()}
    for step, node in enumerate(sized.plan.schedule):
        own = sized.operators.get(node.name)
        if own is not None and own.workspace_bytes:
            buffer = Buffer(workspace_of(node.name), own.workspace_bytes, step, step + 1, BLOCK)
            planned.setdefault(sized.plan.device, []).append((None, buffer))
    return planned


_WORKSPACE = " workspace"


def workspace_of(node: str) -> str:
    """The name of the buffer for the workspace of a node."""
    return node + _WORKSPACE


def node_with(workspace: str) -> str:
    """The node whose workspace a buffer of this name is."""
    return workspace.removesuffix(_WORKSPACE)


def _copied_results(sized: SizedProgram) -> dict[int, int]:
    """Bytes of the operators' results that are copied to planned memory, by storage.

    These are results of eager work that device graphs read, and results of captured work that the caller gets.
    """
    program = sized.plan
    if not sized.frozen:
        return {}
    work = set(program.schedule) - program.replaced_work
    captured = program.captured_work - program.replaced_work
    read_by_graphs, handed_out = program.facts.named_in(captured), program.facts.handed_out
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


def _workspace_at(program: ProgramPlan, symbols: Mapping[Any, int]) -> dict[int, int | None]:
    """Bytes of workspace of each library call, by step; None where it is unknown.

    Workspace was measured at the sizes that the program was compiled for. At other sizes it is unknown.
    """

    def of_call(node: Node) -> int | None:
        if node.name in program.workspace and same_layouts(node, symbols):
            return program.workspace[node.name]
        return 0 if needs_no_workspace(node) else None

    return {step: of_call(node) for step, node in enumerate(program.schedule) if kind_of(node) is Kind.EXTERN}


def _unplanned(
    program: ProgramPlan,
    end: int,
    placed: Collection[int],
    sizes: Mapping[int, int],
    workspace: Mapping[int, int | None],
) -> dict[torch.device, list[tuple[int | None, Buffer]]]:
    """Memory that operators allocate themselves: workspace, and results from their call to their last use.

    A result that is copied to planned memory is freed when it has been copied.

    Args:
        sizes: bytes of results, by storage.
        workspace: bytes, by step.
    """
    facts, unplanned = program.facts, defaultdict[torch.device, list[tuple[int | None, Buffer]]](list)
    for step, nbytes in workspace.items():
        if nbytes:
            buffer = Buffer(workspace_of(program.schedule[step].name), nbytes, step, step + 1)
            unplanned[program.device].append((None, buffer))
    for index, nbytes in sizes.items():
        value, steps = facts.storages[index].value(program.maker(index)), program.lifetimes.get(index)
        if nbytes and value is not None and steps:
            begin, stop = steps.start, steps.stop
            if index in placed:
                stop = begin + 1
            elif index in facts.handed_out:
                stop = end
            unplanned[value.device].append((index, Buffer(facts.storages[index].name, nbytes, begin, stop)))
    return unplanned


def _unknown_steps(
    program: ProgramPlan, sizes: Mapping[int, int], workspace: Mapping[int, int | None]
) -> frozenset[int]:
    """Steps with library calls of unknown workspace, or with storages of unknown size."""
    steps = {step for step, nbytes in workspace.items() if nbytes is None}
    for storage in program.facts.storages:
        if storage.origin in (Origin.ALLOCATION, Origin.EXTERN) and storage.index not in sizes:
            steps.update(program.lifetimes.get(storage.index, ()))
    return frozenset(steps)


def _unsized(program: ProgramPlan, sizes: Mapping[int, int]) -> tuple[str, ...]:
    """The nodes that make storages of unknown size. (An operator may return None in place of a tensor.)"""
    made = (s for s in program.facts.storages if s.origin in (Origin.ALLOCATION, Origin.EXTERN))
    unknown = (s for s in made if s.index not in sizes and s.index in program.lifetimes)
    return tuple(dict.fromkeys(s.node for s in unknown if s.value(program.nodes[s.node]) is not None))


def _copies(program: ProgramPlan, placed: Collection[int], sizes: Mapping[int, int]) -> int:
    """Bytes of the unplanned results of eager work that device graphs read: they are copied to static buffers."""
    eager, copied = set(program.schedule) - program.captured_work, 0
    for index in program.facts.named_in(program.captured_work).difference(placed):
        node = program.maker(index)
        if node in eager and not program.verdicts[node.name].data_dependent:
            copied += sizes.get(index, 0)
    return copied


def _donated(sized: SizedProgram, end: int) -> list[Buffer]:
    """Inputs whose memory is freed after their last use, because the caller keeps no reference.

    Several inputs may share one storage. An input that is never used is freed with the call.
    """
    facts, lifetimes, buffers = sized.plan.facts, sized.plan.lifetimes, []
    for nbytes, nodes in sized.donated:
        indices = facts.behind_named(nodes)
        if indices.isdisjoint(facts.handed_out):
            stop = max((lifetimes.get(index, range(end)).stop for index in indices), default=end)
            buffers.append(Buffer(nodes[0], nbytes, 0, stop))
    return buffers


def _region_storages(
    program: ProgramPlan, planned: Mapping[torch.device, Iterable[tuple[int, Buffer]]]
) -> dict[int, Buffer]:
    """Allocated storages of a plan that are never live after a call."""
    facts, replaced = program.facts, program.replaced_work
    keep = (node for node in program.schedule if node in replaced or not only_computes(node))
    retained = facts.named_in(keep) | facts.handed_out
    buffers = {index: buffer for items in planned.values() for index, buffer in items}
    return {
        index: buffers[index]
        for index in program.lifetimes
        if index in buffers and index not in retained and facts.storages[index].origin is Origin.ALLOCATION
    }


def _must_not_share(program: ProgramPlan) -> frozenset[int]:
    """Storages that must not share memory with others, because of the operators that use them."""
    facts = program.facts
    nodes = [node for node in program.graph.graph.nodes if looks_at_storage(node, facts)]
    operands = facts.behind(operand for node in nodes for operand in node.all_input_nodes)
    return operands.union(*map(facts.touched, nodes))
