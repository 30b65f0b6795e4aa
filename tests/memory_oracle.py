"""Random programs with memory plans, and an oracle that shares nothing with planner, passes and verifier.

It runs the graph, sees which values share memory and who works on it, and then goes through a plan step by step and
byte by byte.
"""

from __future__ import annotations

import operator
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from placements import aligned, located
from random_graphs import (
    CPU,
    RandomGraph,
    build,
    collectives,
    compile_request,
    random_recipe,
)
from torch.fx import GraphModule, Node

from fxwrap.host_graph.nodes import Kind, kind_of, launch, reinterpret
from fxwrap.host_graph.storages import Origin, Storage, StorageFacts
from fxwrap.packing import Reserved
from fxwrap.passes.memory.planner import plan_program
from fxwrap.passes.verify import verify_memory
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import MemoryPlan, ProgramPlan, SizedProgram

ALIGNMENT = 64
PLACE = 256  # bytes that every place has

# By the node that first had it, and which of its results, where there are several.
Memory = tuple[str, "int | None"]


# -- the oracle ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Observed:
    """What a run of a graph shows.

    Attributes:
        of: the memory that each node's value lies in.
        touched: the memory that each node reads or writes; for one that waits, what the communication did, too.
        mutated: inputs that were written.
        nbytes: of memory that is no input's.
    """

    of: Mapping[Node, frozenset[Memory]]
    touched: Mapping[Node, frozenset[Memory]]
    mutated: frozenset[Memory]
    nbytes: Mapping[Memory, int]

    @classmethod
    def of_run(cls, gm: GraphModule, inputs: Sequence[torch.Tensor]) -> Observed:
        given = iter(inputs)
        values: dict[Node, Any] = {}  # all are kept, so that no address is used twice
        first: dict[int, Memory] = {}
        of: dict[Node, frozenset[Memory]] = {}
        touched: dict[Node, frozenset[Memory]] = {}
        in_flight: dict[Memory, frozenset[Memory]] = defaultdict(frozenset)
        versions: dict[Node, int] = {}
        reduced: set[Memory] = set()
        nbytes: dict[Memory, int] = {}
        for node in gm.graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                values[node] = next(given)
                versions[node] = values[node]._version
            elif node.op == "get_attr":
                values[node] = getattr(gm, str(node.target))
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            found = set()
            for element, tensor in tensors_in(values[node]):
                storage = tensor.untyped_storage()
                memory = first.setdefault(storage.data_ptr(), (node.name, element))
                found.add(memory)
                if memory == (node.name, element) and node.op == "call_function":
                    nbytes[memory] = storage.nbytes()
            of[node] = frozenset(found)
            if node.op != "call_function" or node.target in (reinterpret, operator.getitem):
                continue
            worked_on = frozenset[Memory]().union(*(of[arg] for arg in node.all_input_nodes))
            if node.target is collectives.wait_tensor.default:
                worked_on = worked_on.union(*(in_flight.pop(memory, frozenset()) for memory in worked_on))
            elif getattr(node.target, "namespace", "") == "_c10d_functional":
                for memory in of[node]:
                    in_flight[memory] |= worked_on
                if node.target is collectives.all_reduce_.default:
                    reduced |= worked_on
            touched[node] = worked_on
        changed = {(node.name, None) for node, version in versions.items() if values[node]._version != version}
        given_names = {node.name for node in versions}
        return cls(of, touched, frozenset(changed | {one for one in reduced if one[0] in given_names}), nbytes)


def tensors_in(value: Any) -> list[tuple[int | None, torch.Tensor]]:
    """With positions, where there are several."""
    items = list(enumerate(value)) if isinstance(value, (tuple, list)) else [(None, value)]
    return [(element, item) for element, item in items if isinstance(item, torch.Tensor)]


@dataclass(frozen=True)
class Case:
    """A program, what is around it, and what a run of it shows."""

    graph: RandomGraph
    plan: ProgramPlan
    seen: Observed
    places: Mapping[str, tuple[torch.device, int]]
    reserved: tuple[Reserved, ...]

    @cached_property
    def end(self) -> int:
        return len(self.plan.schedule) + 1

    @cached_property
    def handed_out(self) -> frozenset[Memory]:
        output = next(node for node in self.plan.graph.graph.nodes if node.op == "output")
        return frozenset[Memory]().union(*(self.seen.of[node] for node in output.all_input_nodes))

    @cached_property
    def uses(self) -> Mapping[Memory, list[int]]:
        """The steps at which memory is worked on, or made by an operator."""
        found: dict[Memory, list[int]] = defaultdict(list)
        for step, node in enumerate(self.plan.schedule):
            made = {memory for memory in self.seen.of.get(node, ()) if memory[0] == node.name}
            for memory in made | self.seen.touched.get(node, frozenset()):
                found[memory].append(step)
        return found

    def life(self, memory: Memory) -> range:
        """The steps during which memory may not be touched by others."""
        steps = self.uses.get(memory, [])
        stays = memory in self.handed_out
        if self.plan.nodes[memory[0]].op == "placeholder":
            # What is written goes back to the caller's tensor, and that is what a caller gets of an input.
            return range(0, self.end if memory in self.seen.mutated else max([*steps, 0]) + 1)
        if not steps:
            return range(0, self.end if stays else 0)
        return range(steps[0], self.end if stays else steps[-1] + 1)

    def life_of(self, reserved: Reserved) -> range:
        given = [(name, None) for name in reserved.nodes]
        if not given or self.handed_out.intersection(given):
            return range(0, self.end)
        return range(0, max([-1, *(step for memory in given for step in self.uses.get(memory, []))]) + 1)

    def nbytes(self, memory: Memory) -> int:
        return self.seen.nbytes.get(memory, PLACE)

    def collision(self, facts: StorageFacts, memory: MemoryPlan) -> str:
        """The first byte that two have in the same step, found by looking at each; empty if there is none."""

        def span(index: int, offset: int) -> tuple[str, range, range]:
            storage = facts.storages[index]
            one = memory_of(storage)
            return storage.name, self.life(one), range(offset, offset + self.nbytes(one))

        spans = [span(index, offset) for index, offset in located(memory).items()]
        spans += [(f"reserved from {one.low}", self.life_of(one), range(one.low, one.high)) for one in self.reserved]
        regions = [[span(*item) for item in memory.inside(one).items()] for one in memory.regions if not one.arena]
        for step in range(self.end):
            for space in (spans, *regions):
                owner: dict[int, str] = {}
                for name, life, bytes_ in space:
                    if step not in life:
                        continue
                    for byte in bytes_:
                        if owner.setdefault(byte, name) != name:
                            return f"{owner[byte]} and {name} at step {step}, byte {byte}"
        return ""

    def homeless(self, facts: StorageFacts, memory: MemoryPlan) -> bool:
        """Whether the program's own memory that is used is nowhere in an arena."""
        own = {s.index: memory_of(s) for s in facts.storages if s.origin is Origin.ALLOCATION}
        return any(self.life(own[i]) for i in memory.sizes if i in own and i not in located(memory))

    def loses_a_write(self, facts: StorageFacts, memory: MemoryPlan) -> bool:
        """Whether an input that has a place was written, and the place is not copied back."""
        placed = {facts.storages[index].node for index in located(memory)}
        return any(name in placed - memory.copied_back for name, _ in self.seen.mutated)

    def planned(self, facts: StorageFacts | None = None) -> SizedProgram:
        return SizedProgram(replace(self.plan, facts=facts or self.plan.facts), {}, self.places)

    def lost(self, facts: StorageFacts, memory: MemoryPlan) -> str:
        """Memory in a region that somebody works on, or has, while the region is not there; empty if all is well.

        The caller has it, or an operator that is not torch's own: it may keep its operands.
        """
        own = {n for n in self.seen.touched if n.target is launch or getattr(n.target, "namespace", "") == "aten"}
        kept = frozenset[Memory]().union(*(self.seen.touched[node] for node in self.seen.touched.keys() - own))
        for region in (one for one in memory.regions if not one.arena):
            for index in memory.inside(region):
                one = memory_of(facts.storages[index])
                if one in self.handed_out | kept or not set(self.life(one)) <= set(range(region.begin, region.end)):
                    return f"{facts.storages[index].name}, in steps {region.begin} to {region.end - 1}"
        return ""

    @property
    def calls(self) -> list[str]:
        """The library calls of its schedule."""
        return [node.name for node in self.plan.schedule if kind_of(node) is Kind.EXTERN]

    def calls_again(
        self,
        facts: StorageFacts | None = None,
        donated: Sequence[tuple[int, tuple[str, ...]]] = (),
        workspace: Mapping[str, int] | None = None,
    ) -> SizedProgram:
        """Where no address is frozen: there are no places, and no arena that others have outputs in.

        Args:
            workspace: bytes that library calls are known to take; None: none of them takes any.
        """
        known = dict.fromkeys(self.calls, 0) if workspace is None else workspace
        plan = replace(self.plan, facts=facts or self.plan.facts, workspace=known)
        return SizedProgram(plan, {}, {}, frozen=False, donated=tuple(donated))

    def plan_with(self, facts: StorageFacts | None = None) -> MemoryPlan:
        return plan_program(self.planned(facts), {torch.device("cpu"): self.reserved})

    def verify(self, memory: MemoryPlan, facts: StorageFacts | None = None) -> None:
        verify_memory(self.plan.graph, self.plan.schedule, facts or self.plan.facts, memory, {})


def memory_of(storage: Storage) -> Memory:
    return storage.node, storage.element


def random_case(draw: random.Random, most_steps: int = 20, values: bool | None = None) -> Case:
    recipe = random_recipe(draw, most_steps)
    more = tuple(draw.randrange(41) for _ in range(draw.choice([0, 0, 3, 6])))
    values = recipe.values if values is None else values
    graph = build(replace(recipe, outputs=(*recipe.outputs, *more), values=values))
    plan = compile_host_graph(graph.gm, compile_request(graph.options)).plan
    inputs = [node for node in graph.gm.graph.nodes if node.op == "placeholder"]
    placed = [node for node in inputs if draw.random() < 0.4]
    seen = Observed.of_run(graph.gm, graph.inputs(0))
    given = [node for node in inputs if node not in placed]
    return Case(graph, plan, seen, {node.name: (CPU, PLACE) for node in placed}, tuple(random_reserved(draw, given)))


def random_reserved(draw: random.Random, given: list[Node]) -> Iterator[Reserved]:
    """Bytes that others have; some of them are donated inputs."""
    low = 0
    for _ in range(draw.randrange(4)):
        low += ALIGNMENT * draw.randrange(3)
        high = low + draw.randint(1, 600)
        count = min(len(given), draw.choice([0, 1, 1, 2]))
        yield Reserved(low, high, nodes=tuple(given.pop(draw.randrange(len(given))).name for _ in range(count)))
        low = aligned(high, ALIGNMENT)
