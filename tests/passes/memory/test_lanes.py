"""Lanes: which work runs at the same time over one memory plan, and what the verifier refuses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import all_in_lanes
from hypothesis import given
from random_graphs import (
    PROPERTY,
    GraphMaker,
    Recipe,
    aten,
    build,
    compile_request,
    expected_of,
    kernel,
    random_recipe,
    recipes,
    run_schedule,
    same,
)
from torch.fx import GraphModule, Node

from fxwrap.clocks import needed_waits
from fxwrap.errors import PlanError
from fxwrap.host_graph.nodes import is_work, only_computes
from fxwrap.options import Options
from fxwrap.passes.memory.lanes import _Layouts
from fxwrap.passes.verify import verify_lanes, verify_schedule
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import Lanes, MemoryPlan, ProgramPlan, SizedProgram


@pytest.fixture(autouse=True)
def everything_may_run_beside() -> Iterator[None]:
    """Kernels of these tests are written in Python, and take no time."""

    def may_run_beside(self: _Layouts, node: Node) -> bool:
        return is_work(node) and only_computes(node)

    with all_in_lanes(), mock.patch.object(_Layouts, "may_run_beside", may_run_beside):
        yield


def planned(gm: GraphModule, lanes: int = 2, **options: Any) -> tuple[ProgramPlan, MemoryPlan]:
    program = compile_host_graph(gm, compile_request(options=Options(**options)))
    sized = SizedProgram(program.plan, {}, {}, frozen=False, lanes=lanes)
    return program.plan, program.planner.plan_memory(sized)


def picture(lanes: Lanes) -> str:
    """The lanes, a line for each; what a node waits for is in brackets."""
    rows = []
    for lane in range(lanes.count):
        cells = []
        for name, own in lanes.lane_of.items():
            waits = f"({' '.join(lanes.waits_for[name])})" if name in lanes.waits_for else ""
            cells.append(f"{name}{waits}" if own == lane else "." * len(f"{name}{waits}"))
        rows.append(" ".join(cells))
    return "\n".join(rows)


def two_chains() -> GraphModule:
    """``x -> a0 -> a1``, ``x -> b0 -> b1``, and both together."""
    maker = GraphMaker()
    x, ends = maker.input("x"), []
    for chain in "ab":
        value = x
        for i in range(2):
            out = maker.allocate(name=f"{chain}_{i}")
            maker.launch("mix", value, value, out, name=f"{chain}{i}")
            value = out
        ends.append(value)
    out = maker.allocate(name="out")
    maker.launch("mix", *ends, out, name="both")
    return maker.finish([out])


def test_chains_run_beside_each_other() -> None:
    """
    ::

        x -> a0 -> a1 -> both           lane 0   a0 a1 .. .. both        which waits for b1
        x -> b0 -> b1 ----^             lane 1   .. .. b0 b1
    """
    _, memory = planned(two_chains())
    (lanes,) = memory.lanes
    assert picture(lanes) == "a0 a1 .. .. both(b1)\n.. .. b0 b1 ........"


def test_storages_in_the_same_bytes_are_used_one_after_the_other() -> None:
    """
    ::

        bytes   128 |        b_1             a_0 and b_0 lie in the same bytes, if no more may be taken than one after
                 64 |    a_1                 the other: the chain of b waits for that of a, and nothing is gained
                  0 | a_0    b_0
    """
    with mock.patch("fxwrap.pipeline.NEGLIGIBLE", 0):
        _, tight = planned(two_chains(), peak_budget=1.0)
        _, loose = planned(two_chains(), peak_budget=3.0)
    sizes = [sum(region.size for region in plan.regions) for plan in (tight, plan_of_one_lane(two_chains()), loose)]
    assert sizes == [192, 192, 256]
    assert not tight.lanes and len(loose.lanes) == 1


def plan_of_one_lane(gm: GraphModule) -> MemoryPlan:
    return planned(gm, lanes=1)[1]


def test_one_lane_is_the_plan_without_lanes() -> None:
    assert not plan_of_one_lane(two_chains()).lanes


def test_waits_that_others_imply_are_left_out() -> None:
    """
    ::

        lane 0   a     c           d needs a and c: it waits for c alone, which comes after a
        lane 1      b     d        c needs b
    """
    assert list(needed_waits([0, 1, 0, 1], [(), (), (0, 1), (0, 2)])) == [(), (), (1,), (2,)]


def in_some_order(memory: MemoryPlan, schedule: Sequence[Node], draw: random.Random) -> list[Node]:
    """The schedule as threads may run it: any lane goes on that does not wait."""
    order, at = list[Node](), 0
    for lanes in memory.lanes:
        names = list(lanes.lane_of)
        begin = next(step for step, node in enumerate(schedule) if node.name == names[0])
        order += schedule[at:begin]
        at = begin + len(names)
        left = {lane: [n for n in schedule[begin:at] if lanes.lane_of[n.name] == lane] for lane in range(lanes.count)}
        ended = set[str]()
        while any(left.values()):
            ready = [own for own in left.values() if own and ended.issuperset(lanes.waits_for.get(own[0].name, ()))]
            node = draw.choice(ready).pop(0)
            ended.add(node.name)
            order.append(node)
    return [*order, *schedule[at:]]


@PROPERTY
@given(recipes(30))
def test_every_order_of_lanes_computes_the_same_in_the_same_memory(recipe: Recipe) -> None:
    graph = build(recipe)
    program = compile_host_graph(graph.gm, compile_request(options=graph.options))
    plan = program.plan
    expected = expected_of(plan.graph, graph.inputs(0), 0)
    for count in (2, 3):
        memory = program.planner.plan_memory(SizedProgram(plan, {}, {}, frozen=False, lanes=count))
        for seed in range(3):
            order = in_some_order(memory, plan.schedule, random.Random(seed))
            verify_schedule(plan.graph, order)
            torch.manual_seed(0)
            inputs = graph.inputs(0)
            assert same([*run_schedule(plan.graph, order, inputs), *inputs], expected)
            for region in memory.regions:
                _check_apart(plan, memory, order, region)


def test_random_programs_have_lanes() -> None:
    """Otherwise the property would say nothing."""
    waits = 0
    for seed in range(40):
        graph = build(random_recipe(random.Random(seed), 30))
        program = compile_host_graph(graph.gm, compile_request(options=graph.options))
        memory = program.planner.plan_memory(SizedProgram(program.plan, {}, {}, frozen=False, lanes=2))
        waits += sum(len(lanes.waits_for) for lanes in memory.lanes)
    assert waits > 10


def _check_apart(plan: ProgramPlan, memory: MemoryPlan, order: Sequence[Node], region: Any) -> None:
    """No two storages of a region share bytes while both are in use."""
    inside, used = memory.inside(region), dict[int, tuple[int, int]]()
    for step, node in enumerate(order):
        for index in plan.facts.touched(node) & inside.keys():
            used[index] = used.get(index, (step, step))[0], step
    spans = [(inside[i], inside[i] + memory.sizes[i], *used[i]) for i in used]
    for n, (low, high, first, last) in enumerate(spans):
        for other_low, other_high, begin, end in spans[n + 1 :]:
            assert high <= other_low or other_high <= low or last < begin or end < first


# -- planted faults -------------------------------------------------------------------------------------------


def refused(plan: ProgramPlan, memory: MemoryPlan, because: str) -> None:
    with pytest.raises(PlanError, match=because):
        verify_lanes(plan.graph, plan.schedule, plan.facts, memory)


def test_a_wait_that_is_dropped_is_found() -> None:
    plan, memory = planned(two_chains())
    (lanes,) = memory.lanes
    refused(plan, replace(memory, lanes=(replace(lanes, waits_for={}),)), "both may run while b1 does")


def test_a_wait_for_what_comes_later_is_found() -> None:
    """It could wait forever."""
    plan, memory = planned(two_chains())
    (lanes,) = memory.lanes
    waits = {**lanes.waits_for, "a0": ("b1",)}
    refused(plan, replace(memory, lanes=(replace(lanes, waits_for=waits),)), "a0 waits for what comes later")


def test_lanes_over_shared_bytes_are_found() -> None:
    """Lanes of a larger plan over the memory of one lane."""
    plan, memory = planned(two_chains())
    one = plan_of_one_lane(plan.graph)
    refused(plan, replace(one, lanes=memory.lanes), "share bytes")


def test_random_numbers_keep_their_order() -> None:
    maker = GraphMaker()
    outs = [maker.extern(aten.rand.default, (4, 4), name=f"r{i}") for i in range(2)]
    gm = maker.finish(outs)
    plan, memory = planned(gm)
    lanes = Lanes({"r0": 0, "r1": 1})
    refused(plan, replace(memory, lanes=(lanes,)), "random numbers and effects keep program order")


def test_a_kernel_with_threads_of_its_own_is_found() -> None:
    maker = GraphMaker()
    x = maker.input("x")
    own = kernel("own_threads", lambda a, b, out: torch.add(a, b, out=out), (2,))
    own.source = "#pragma omp parallel num_threads(2)"
    outs = [maker.allocate(name=f"o{i}") for i in range(2)]
    for i, out in enumerate(outs):
        maker.launch(own, x, x, out, name=f"k{i}")
    with pytest.raises(PlanError, match="k0 runs beside other work"):
        planned(maker.finish(outs))


def test_work_that_is_no_part_of_the_schedule_is_found() -> None:
    plan, memory = planned(two_chains())
    refused(plan, replace(memory, lanes=(Lanes({"a0": 0, "b1": 1}),)), "no part of the schedule")
