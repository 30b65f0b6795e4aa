"""The verifier on random programs: it accepts every plan, and rejects every plan with one fault planted in it.

Whether a fault does harm is told by an oracle (``memory_oracle.py``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from memory_oracle import (
    ALIGNMENT,
    Case,
    memory_of,
    random_case,
)
from placements import aligned, changed, located, moved
from random_graphs import (
    RandomGraph,
    expected_of,
    run_schedule,
    same,
)
from torch.fx import GraphModule, Node

from fxwrap.errors import PlanError
from fxwrap.host_graph.nodes import Kind
from fxwrap.host_graph.storages import Origin, StorageFacts
from fxwrap.packing import Reserved
from fxwrap.passes.analysis.aliasing import _Analysis
from fxwrap.passes.memory.planner import plan_pair, plan_program
from fxwrap.passes.verify import verify_schedule
from fxwrap.plan import MemoryPlan, PlacementHint

# -- what is sound is accepted ------------------------------------------------------------------------------


# pytest -m sweep tests/passes/verify/test_verify_random.py
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.sweep)])
def test_every_plan_is_accepted(count: int) -> None:
    """With and without places and bytes that others have; also where memory comes and goes with each call."""
    around: Counter[str] = Counter()
    for seed in range(count):
        draw = random.Random(seed)
        case = random_case(draw)
        memory = case.plan_with()
        assert not case.collision(case.plan.facts, memory), f"seed {seed}"
        case.verify(memory)
        calls = plan_program(case.calls_again())
        assert not calls.arenas
        assert not case.collision(case.plan.facts, calls), f"seed {seed}"
        case.verify(calls)
        around["regions"] += bool(calls.regions)
        given = [one for one in case.reserved if one.nodes]
        around["places"] += bool(case.places)
        around["reserved"] += len(case.reserved) > len(given)
        around["donated"] += bool(given)
        around["used again after"] += any(again(case, memory, one) for one in given)
        around["outputs"] += bool(memory.outputs)
    print(f"\naccepted: {2 * count} plans, {dict(around)}")
    kinds = "places", "reserved", "donated", "used again after", "outputs", "regions"
    assert all(around[kind] >= count // 12 for kind in kinds)


def again(case: Case, memory: MemoryPlan, reserved: Reserved) -> bool:
    """Whether something lies in bytes that were donated."""
    spans = [(offset, offset + memory.sizes[index]) for index, offset in located(memory).items()]
    return any(low < reserved.high and reserved.low < high for low, high in spans)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.sweep)])
def test_plans_for_two_programs_are_accepted_and_followed(count: int) -> None:
    """The second gets some outputs of the first, which nobody else has; others are held all the time.

    ::

        first       second
        s s s s s s|s s .         s is saved: free after its last use in the second
        . . h h h h|h h h         h is held
    """
    reused = 0
    for seed in range(count):
        draw = random.Random(seed)
        first, second = random_case(draw), random_case(draw)
        first, second = replace(first, reserved=()), replace(second, reserved=())
        free = [n for n in second.graph.gm.graph.nodes if n.op == "placeholder" and n.name not in second.places]
        lasting = sorted(first.plan_with().outputs)
        saved_as = {index: [free.pop().name] for index in lasting if free and draw.random() < 0.8}
        own, others = plan_pair(first.planned(), second.planned(), saved_as)
        memory = plan_program(first.planned(), hint=own)
        assert placed(first, memory) == by_storage(own), f"seed {seed}"
        assert not first.collision(first.plan.facts, memory), f"seed {seed}"
        first.verify(memory)
        spans = {index: located(memory)[index] for index in lasting}
        reserved = tuple(
            Reserved(low, low + memory.sizes[index], nodes=tuple(saved_as.get(index, ())))
            for index, low in spans.items()
        )
        second = replace(second, reserved=reserved)
        later = plan_program(second.planned(), {torch.device("cpu"): reserved}, others)
        assert placed(second, later) == by_storage(others), f"seed {seed}"
        assert not second.collision(second.plan.facts, later), f"seed {seed}"
        second.verify(later)
        reused += any(again(second, later, one) for one in reserved if one.nodes)
    print(f"\npairs: {count}, of which {reused} use the bytes of saved tensors again")
    assert reused >= count // 10


def placed(case: Case, memory: MemoryPlan) -> dict[str, int]:
    return {case.plan.facts.storages[index].name: offset for index, offset in located(memory).items()}


def by_storage(hint: PlacementHint) -> dict[str, int]:
    return {name: offset for placement in hint.values() for name, offset in placement.offsets.items()}


# -- one fault ----------------------------------------------------------------------------------------------
# Each function yields plans with a fault, the facts to read them with, and what the verifier has to say. Where the
# message is "overlap", the oracle tells whether there is one.


Faulty = Iterator[tuple[MemoryPlan, StorageFacts, str]]


def shifted(memory: MemoryPlan, index: int, offset: int, roomy: bool = True) -> MemoryPlan:
    if roomy:  # so that nothing else is wrong
        memory = changed(memory, size=max(memory.size, offset + memory.sizes[index]))
    return moved(memory, {index: offset})


def shifted_onto_another(case: Case, memory: MemoryPlan, draw: random.Random) -> Faulty:
    """A storage at an offset where it shares a byte or more with one that is live at the same time."""
    storages = case.plan.facts.storages
    pairs = [
        (one, two)
        for one in located(memory)
        for two in located(memory)
        if one != two and set(case.life(memory_of(storages[one]))) & set(case.life(memory_of(storages[two])))
    ]
    for one, two in draw.sample(pairs, min(3, len(pairs))):
        low, high = located(memory)[two], located(memory)[two] + memory.sizes[two]
        least = max(0, low - memory.sizes[one] + 1)
        offsets = range(aligned(least, ALIGNMENT), high, ALIGNMENT)
        if offsets:
            yield shifted(memory, one, draw.choice(offsets)), case.plan.facts, "overlap"


def last_use_missing(case: Case, memory: MemoryPlan, draw: random.Random) -> Faulty:
    """Planned as if the last node that works on a storage did not."""
    facts = case.plan.facts
    for index in located(memory):
        last = next((node.name for node in reversed(case.plan.schedule) if index in facts.touched(node)), None)
        if last is not None:
            read = {**facts.read, last: facts.read.get(last, frozenset()) - {index}}
            written = {**facts.written, last: facts.written.get(last, frozenset()) - {index}}
            values = {**facts.values, last: facts.values.get(last, frozenset()) - {index}}
            wrong = replace(facts, read=read, written=written, values=values)
            yield case.plan_with(wrong), wrong, "overlap"


class _Forgetful(_Analysis):
    """Takes one node's value for memory of its own."""

    def __init__(self, gm: GraphModule, missed: Node) -> None:
        super().__init__(gm)
        self._missed = missed

    def _visit(self, node: Node, kind: Kind) -> None:
        super()._visit(node, kind)
        if node is self._missed:
            self.of[node] = self._new(node, Origin.EXTERN)
            self.elements.pop(node, None)


def missed_alias(case: Case, memory: MemoryPlan, draw: random.Random) -> Faulty:
    """Planned as if a view, or what an operator returns of its operand, had memory of its own."""
    planned = {memory_of(case.plan.facts.storages[index]) for index in located(memory)}
    made = {node for node, _ in planned}
    aliases = [n for n, found in case.seen.of.items() if n.name not in made and found & planned]
    for node in draw.sample(aliases, min(6, len(aliases))):
        wrong = _Forgetful(case.plan.graph, node).run()
        yield case.plan_with(wrong), wrong, "overlap"


def onto_reserved_bytes(case: Case, memory: MemoryPlan, draw: random.Random) -> Faulty:
    """A storage in bytes that another program's output has, before that is free."""
    for index in located(memory):
        life = set(case.life(memory_of(case.plan.facts.storages[index])))
        others = [one for one in case.reserved if life & set(case.life_of(one))]
        if others:
            one = draw.choice(others)
            offset = draw.randrange(one.low, aligned(one.high, ALIGNMENT), ALIGNMENT)
            yield shifted(memory, index, offset), case.plan.facts, "overlap"


def output_cut_at_its_last_use(case: Case, memory: MemoryPlan, draw: random.Random) -> Faulty:
    """Planned as if the caller did not get one of the outputs."""
    facts = case.plan.facts
    output = next(node for node in case.plan.graph.graph.nodes if node.op == "output")
    for index in sorted(frozenset().union(*(facts.of(n) for n in output.all_input_nodes))):
        if index in located(memory):
            names = {n.name for n in output.all_input_nodes}
            of = {n: found - {index} if n in names else found for n, found in facts.values.items()}
            wrong = replace(facts, values=of, handed_out=facts.handed_out - {index})
            yield case.plan_with(wrong), wrong, "overlap"


def write_not_copied_back(case: Case, memory: MemoryPlan, draw: random.Random) -> Faulty:
    for name in memory.copied_back:
        yield replace(memory, copied_back=memory.copied_back - {name}), case.plan.facts, "is lost"


def misaligned(case: Case, memory: MemoryPlan, draw: random.Random) -> Faulty:
    for index in draw.sample(sorted(located(memory)), min(2, len(located(memory)))):
        above = aligned(memory.size, ALIGNMENT) + 1024
        yield shifted(memory, index, above + draw.randint(1, ALIGNMENT - 1)), case.plan.facts, "is misaligned"


def outside_of_the_arena(case: Case, memory: MemoryPlan, draw: random.Random) -> Faulty:
    top = memory.size // ALIGNMENT * ALIGNMENT
    for index in draw.sample(sorted(located(memory)), min(2, len(located(memory)))):
        offset = draw.choice([-ALIGNMENT, top, top + ALIGNMENT])
        yield shifted(memory, index, offset, roomy=False), case.plan.facts, "lies outside of its arena"


def too_small(case: Case, memory: MemoryPlan, draw: random.Random) -> Faulty:
    """For the layout that a storage was allocated with, and views reach as far."""
    for index, nbytes in memory.sizes.items():
        if index in located(memory) and case.plan.facts.storages[index].origin is Origin.ALLOCATION:
            sizes = {**memory.sizes, index: nbytes - draw.randint(1, nbytes)}
            yield replace(memory, sizes=sizes), case.plan.facts, "is too small"


FAULTS: tuple[Callable[[Case, MemoryPlan, random.Random], Faulty], ...] = (
    shifted_onto_another,
    last_use_missing,
    missed_alias,
    onto_reserved_bytes,
    output_cut_at_its_last_use,
    write_not_copied_back,
    misaligned,
    outside_of_the_arena,
    too_small,
)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.sweep)])
def test_every_plan_with_a_fault_is_rejected(count: int) -> None:
    """And a plan in which a fault did no harm is accepted."""
    planted, harmful = Counter[str](), Counter[str]()
    for seed in range(count):
        draw = random.Random(seed)
        case = random_case(draw)
        memory = case.plan_with()
        if not located(memory):
            continue
        for fault in FAULTS:
            for faulty, facts, expected in fault(case, memory, draw):
                planted[fault.__name__] += 1
                message = "has no memory" if expected == "overlap" and case.homeless(facts, faulty) else expected
                if message == "overlap" and case.loses_a_write(facts, faulty):
                    message = "is lost"  # found first
                harm = message if message != "overlap" else case.collision(facts, faulty)
                where = f"seed {seed}, {fault.__name__}: {harm}"
                if not harm:
                    case.verify(faulty, facts)
                    continue
                harmful[fault.__name__] += 1
                try:
                    case.verify(faulty, facts)
                except PlanError as error:
                    assert message in str(error), where
                else:
                    pytest.fail(f"missed: {where}")
    for fault in FAULTS:
        print(f"\n{fault.__name__}: {planted[fault.__name__]} planted, {harmful[fault.__name__]} harmful", end="")
    print("\nmissed: 0")
    for fault in FAULTS:
        assert harmful[fault.__name__] >= count // 10, fault.__name__


def wrong_facts(case: Case, draw: random.Random) -> Iterator[tuple[str, StorageFacts]]:
    """What a pass would say that misses a last use, an alias, or that the caller gets something."""
    facts = case.plan.facts
    made = [s.index for s in facts.storages if s.origin is Origin.ALLOCATION]
    for index in made:
        last = next((node.name for node in reversed(case.plan.schedule) if index in facts.touched(node)), None)
        if last is not None:
            of = {**facts.values, last: facts.values.get(last, frozenset()) - {index}}
            read = {**facts.read, last: facts.read.get(last, frozenset()) - {index}}
            written = {**facts.written, last: facts.written.get(last, frozenset()) - {index}}
            yield "last use", replace(facts, values=of, read=read, written=written)
    planned = {memory_of(facts.storages[index]) for index in made}
    aliases = [n for n, found in case.seen.of.items() if (n.name, None) not in planned and found & planned]
    for node in draw.sample(aliases, min(6, len(aliases))):
        yield "alias", _Forgetful(case.plan.graph, node).run()
    outputs = next(node for node in case.plan.graph.graph.nodes if node.op == "output").all_input_nodes
    output = {node.name for node in outputs}
    for index in sorted(facts.behind(outputs).intersection(made)):
        of = {name: found - {index} if name in output else found for name, found in facts.values.items()}
        yield "output", replace(facts, values=of, handed_out=facts.handed_out - {index})


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.sweep)])
def test_every_plan_with_a_fault_is_rejected_where_memory_comes_and_goes(count: int) -> None:
    """Regions are there for too few steps, hold what the caller gets, or two that need the same bytes."""
    planted, harmful = Counter[str](), Counter[str]()
    for seed in range(count):
        draw = random.Random(seed)
        case = random_case(draw)
        for what, facts in wrong_facts(case, draw):
            memory = plan_program(case.calls_again(facts))
            planted[what] += 1
            lost, overlap = case.lost(facts, memory), case.collision(facts, memory)
            where = f"seed {seed}, {what}: {lost or overlap}"
            if not lost and not overlap:
                case.verify(memory, facts)
                continue
            harmful[what] += 1
            harmful["overlap"] += bool(overlap)
            try:
                case.verify(memory, facts)
            except PlanError as error:
                assert any(text in str(error) for text in ("overlap", "has no memory", "has memory in steps")), where
            else:
                pytest.fail(f"missed: {where}")
    print(f"\nplanted: {dict(planted)}, harmful: {dict(harmful)}, missed: 0")
    assert len(harmful) == 4 and all(found >= count // 10 for found in harmful.values())


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.sweep)])
def test_every_schedule_that_computes_something_else_is_rejected(count: int) -> None:
    """Two nodes change places; whether they depend on each other is seen by running the graph in that order."""
    swapped = harmful = 0
    for seed in range(count):
        draw = random.Random(seed)
        case = random_case(draw)
        gm, schedule = case.plan.graph, case.plan.schedule
        pairs = [(i, j) for j in range(len(schedule)) for i in range(j)]
        for i, j in draw.sample(pairs, min(6, len(pairs))):
            order = list(schedule)
            order[i], order[j] = order[j], order[i]
            swapped += 1
            if computes_the_same(gm, case.graph, order, seed):
                continue
            harmful += 1
            with pytest.raises(PlanError, match="runs before"):
                verify_schedule(gm, order)
    print(f"\nschedules: {swapped} swapped, {harmful} harmful, missed: 0")
    assert harmful >= count


def computes_the_same(gm: GraphModule, graph: RandomGraph, order: Sequence[Node], seed: int) -> bool:
    inputs = graph.inputs(seed)
    expected = expected_of(gm, inputs, seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)  # then what is allocated is NaN until it is written
    try:
        outputs = run_schedule(gm, order, inputs)
    except (AssertionError, RuntimeError):  # a value was used before it was there
        return False
    finally:
        torch.use_deterministic_algorithms(False)
    return same([*outputs, *inputs], expected)
