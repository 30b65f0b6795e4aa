"""Live ranges, and offsets in one arena: no overlap, no bit more than needed where that can be had.

The drawings show an arena: steps go to the right, bytes go up, one row is 64 bytes (the alignment on a CPU).
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placements import aligned, buffers_of, check_placement, located, placement_of, tiling
from random_graphs import (
    ALWAYS_EAGER,
    CPU,
    PROPERTY,
    GraphMaker,
    Recipe,
    aten,
    build,
    check_calls,
    collectives,
    compile_request,
    halve,
    kernel,
    recipes,
)
from torch.fx import GraphModule, Node

from fxwrap.errors import PlanError
from fxwrap.host_graph.nodes import Kind, kind_of, output_node
from fxwrap.host_graph.sizes import storage_bytes
from fxwrap.options import Options
from fxwrap.packing import Buffer, Reserved
from fxwrap.passes.memory.planner import Prediction, plan_program, predict_memory
from fxwrap.passes.verify import verify_memory
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import InputFacts, MemoryPlan, ProgramPlan, Region, SizedProgram


@pytest.mark.parametrize(
    ("size", "stride", "elements"),
    [
        ((), (), 1),
        ((5,), (1,), 5),
        ((2, 3), (3, 1), 6),
        ((2, 3), (4, 1), 7),
        ((4, 0), (1, 1), 0),
        ((3, 4), (0, 1), 4),
    ],
    ids=["scalar", "vector", "dense", "padded rows", "empty", "repeated rows"],
)
def test_bytes_are_counted_up_to_the_last_element(
    size: tuple[int, ...], stride: tuple[int, ...], elements: int
) -> None:
    assert storage_bytes(size, stride, torch.float32) == 4 * elements
    assert torch.empty_strided(size, stride).untyped_storage().nbytes() == 4 * elements


# -- the plan of a program ----------------------------------------------------------------------------------


def program_plan(gm: GraphModule, eager_ops: Sequence[str] = ALWAYS_EAGER) -> ProgramPlan:
    return compile_host_graph(gm, compile_request(options=Options(eager_ops=tuple(eager_ops)))).plan


def offsets_by_name(plan: ProgramPlan, memory: MemoryPlan) -> Mapping[str, int]:
    return {plan.facts.storages[index].name: offset for index, offset in located(memory).items()}


def chain(length: int) -> tuple[GraphMaker, GraphModule]:
    """``x -> k0 -> b0 -> k1 -> b1 -> ...``; the last buffer is the output."""
    maker = GraphMaker()
    value = maker.input("x")
    for i in range(length):
        out = maker.allocate((4, 4), name=f"b{i}")
        maker.launch("mix", value, value, out, name=f"k{i}")
        value = out
    return maker, maker.finish([value])


def test_a_chain_takes_two_places() -> None:
    """
    ::

        bytes                                     step   reads  writes
        128 | b0 b0 b2 b2                          k0     x      b0
         64 |    b1 b1 b3 b3                       k1     b0     b1
          0 +---------------                       k2     b1     b2
              k0 k1 k2 k3 (after)                  k3     b2     b3: the output, which the caller gets
    """
    maker, gm = chain(4)
    program = compile_host_graph(gm, compile_request())
    memory = plan_program(SizedProgram(program.plan, {}, {}))
    of = program.plan.facts.values
    assert {n: program.plan.lifetimes[min(of[n])] for n in ("b0", "b1", "b2", "b3")} == {
        "b0": range(2), "b1": range(1, 3), "b2": range(2, 4), "b3": range(3, 4),
    }  # fmt: skip
    assert offsets_by_name(program.plan, memory) == {"b0": 64, "b1": 0, "b2": 64, "b3": 0}
    assert memory.outputs == of["b3"]
    assert buffers_of(SizedProgram(program.plan, {}, {}))["b3"] == Buffer("b3", 64, 3, 5)
    assert (memory.size, memory.lower_bound, memory.plain) == (128, 128, 256)
    check_calls(gm, maker.inputs, program, [False, False, False, True, False])


def test_views_keep_their_memory_alive() -> None:
    """
    ::

        192 |    b  b  out out
        128 |       c  c
         64 | a  a  a  a              v is a view of a, so a must stay until r, which reads v
          0 +-----------------
              k0 k1 k2 r (after)
    """
    maker = GraphMaker()
    x = maker.input("x")
    a, b, c, out = (maker.allocate(name=name) for name in ("a", "b", "c", "out"))
    maker.launch("mix", x, x, a, name="k0")
    v = maker.view(maker.view(a, (16,), (1,)), (4, 4), (1, 4), name="v")
    maker.launch("mix", x, x, b, name="k1")
    maker.launch("mix", b, x, c, name="k2")
    maker.launch("mix", c, v, out, name="r")
    gm = maker.finish([out])
    program = compile_host_graph(gm, compile_request())
    memory = plan_program(SizedProgram(program.plan, {}, {}))
    placed = offsets_by_name(program.plan, memory)
    assert placed == {"a": 0, "b": 128, "c": 64, "out": 128}
    assert memory.size == memory.lower_bound == 192
    check_calls(gm, maker.inputs, program, [False, False, False, True, False])


def test_outputs_live_on_after_the_program() -> None:
    """Whether they are handed out whole, as a view, or through an operator that returns its operand.

    ::

        256 |          i          i: inner, which nobody gets
        192 |       u  u  u  u
        128 |    v  v  v  v  v
         64 | w  w  w  w  w  w
          0 +-----------------
              0  1  2  3  a  (after)
    """
    maker = GraphMaker()
    x = maker.input("x")
    buffers = [maker.allocate(name=name) for name in ("whole", "viewed", "updated", "inner")]
    for buffer in buffers:
        maker.launch("mix", x, x, buffer)
    whole, viewed, updated, _ = buffers
    gm = maker.finish([whole, maker.view(viewed, (4,), (1,), 4), maker.extern(aten.add_.Tensor, updated, x), x])
    plan = program_plan(gm)
    memory = plan_program(SizedProgram(plan, {}, {}))
    assert {plan.facts.storages[index].name for index in memory.outputs} == {"whole", "viewed", "updated"}
    assert offsets_by_name(plan, memory) == {"whole": 0, "viewed": 64, "updated": 128, "inner": 192}
    assert buffers_of(SizedProgram(plan, {}, {})) == {
        "whole": Buffer("whole", 64, 0, 6), "viewed": Buffer("viewed", 64, 1, 6),
        "updated": Buffer("updated", 64, 2, 6), "inner": Buffer("inner", 64, 3, 4),
    }  # fmt: skip


def test_what_operators_allocate_is_outside_of_the_plan() -> None:
    maker = GraphMaker()
    s = maker.extern(aten.sin.default, maker.input("x"))
    b, out = maker.allocate(name="b"), maker.allocate(name="out")
    maker.launch("mix", s, s, b)
    maker.launch("mix", b, b, out)
    plan = program_plan(maker.finish([out]))
    assert set(offsets_by_name(plan, plan_program(SizedProgram(plan, {}, {})))) == {"b", "out"}


def test_memory_nobody_touches_and_pinned_memory_is_not_placed() -> None:
    maker = GraphMaker()
    x, out = maker.input("x"), maker.allocate(name="out")
    maker.allocate(name="idle")
    pinned = maker.allocate(name="pinned")
    pinned.kwargs = {**pinned.kwargs, "pin_memory": True}
    maker.launch("mix", x, x, pinned)
    maker.launch("mix", pinned, pinned, out)
    plan = program_plan(maker.finish([out]))
    memory = plan_program(SizedProgram(plan, {}, {}))
    assert set(offsets_by_name(plan, memory)) == {"out"}
    names = {plan.facts.storages[index].name for index in memory.sizes}
    assert names == {"idle", "pinned", "out"}, "sizes are known all the same"


def test_memory_of_data_dependent_size_is_allocated_when_it_is_known() -> None:
    maker = GraphMaker()
    x, n = maker.input("x"), maker.input("n", (), torch.int64)
    size = maker.integer(n, name="size")
    some = maker.allocate(name="some")
    some.args = ((size,), (1,))
    maker.launch("mix", x, x, some)
    out = maker.allocate(name="out")
    maker.launch("mix", some, some, out)
    gm = maker.finish([out])
    program = compile_host_graph(gm, compile_request())
    memory = plan_program(SizedProgram(program.plan, {}, {}))
    assert set(offsets_by_name(program.plan, memory)) == {"out"}
    assert {program.plan.facts.storages[index].name for index in memory.sizes} == {"out"}
    check_calls(gm, maker.inputs, program, [False, False, True, False])


def test_an_inputs_place_is_free_after_its_last_use() -> None:
    """
    ::

        128 | x  b1 b1              x is filled before the first step
         64 | b0 b0 b2 b2
          0 +------------
              k0 k1 k2 (after)
    """
    _, gm = chain(3)
    plan = program_plan(gm)
    planned = SizedProgram(plan, {}, {"x": (CPU, 64)})
    memory, buffers = plan_program(planned), buffers_of(planned)
    assert buffers["x"] == Buffer("x", 64, 0, 1)
    assert offsets_by_name(plan, memory) == {"x": 64, "b0": 0, "b1": 64, "b2": 0}
    assert memory.size == memory.lower_bound == 128
    check_placement(list(buffers.values()), placement_of(memory, plan), memory.regions[0].alignment)


@pytest.mark.parametrize("caller", ["keeps it", "donates it", "donates it, and gets it back"])
def test_a_place_whose_bytes_go_back_to_the_caller_stays_for_the_whole_call(caller: str) -> None:
    """
    ::

        192 |    b1 b1              x is copied back after the last step
        128 | b0 b0 b2 b2
         64 | x  x  x  x
          0 +------------
              k0 k1 k2 (after)

    A donated input that the program writes is copied back only if the caller gets it back; else its place ends with
    its last use. One that the caller gets back unwritten is the caller's own tensor: no copy of it is needed.
    """
    maker = GraphMaker()
    value = x = maker.input("x")
    maker.launch("update", x, x, name="w")
    for i in range(3):
        out = maker.allocate((4, 4), name=f"b{i}")
        maker.launch("mix", value, value, out, name=f"k{i}")
        value = out
    outputs = [value, maker.view(x, (4,), (1,))] if caller.endswith("back") else [value]
    donated = frozenset() if caller == "keeps it" else frozenset({0})
    plan = replace(program_plan(maker.finish(outputs)), inputs=InputFacts(donated=donated))
    planned = SizedProgram(plan, {}, {"x": (CPU, 64)})
    memory, buffers = plan_program(planned), buffers_of(planned)
    stays = caller != "donates it"
    assert memory.copied_back == ({"x"} if stays else set())
    assert buffers["x"] == Buffer("x", 64, 0, len(plan.schedule) + 1 if stays else 2)
    assert memory.size == memory.lower_bound == (192 if stays else 128)
    check_placement(list(buffers.values()), placement_of(memory, plan), memory.regions[0].alignment)
    names = ["x"] if donated else []
    verify_memory(plan.graph, plan.schedule, plan.facts, memory, {}, donated=names)
    if stays:
        with pytest.raises(PlanError, match="what is written to the static buffer of x is lost"):
            lost = replace(memory, copied_back=frozenset())
            verify_memory(plan.graph, plan.schedule, plan.facts, lost, {}, donated=names)


def test_bytes_that_others_have_are_left_alone_unless_donated() -> None:
    """
    ::

        t1: an output of another program, donated as x          t0: one that somebody holds

        192 | b0 b0 b2 b2
        128 | t1 b1 b1                  x is read for the last time in k0
         64 | t0 t0 t0 t0
          0 +------------
              k0 k1 k2 (after)
    """
    _, gm = chain(3)
    plan = program_plan(gm)
    reserved = [Reserved(0, 64), Reserved(64, 128, nodes=("x",))]
    memory = plan_program(SizedProgram(plan, {}, {}), {torch.device("cpu"): reserved})
    assert offsets_by_name(plan, memory) == {"b0": 128, "b1": 64, "b2": 128}
    assert memory.size == memory.lower_bound == 192
    assert [(one.low, one.high, one.nodes) for one in memory.regions[0].reserved] == [(0, 64, ()), (64, 128, ("x",))]
    held = plan_program(SizedProgram(plan, {}, {}), {torch.device("cpu"): [Reserved(0, 64), Reserved(64, 128)]})
    assert held.size == held.lower_bound == 256
    assert min(offsets_by_name(plan, held).values()) == 128


RETURNS_ITS_OPERAND = (
    aten.add_.Tensor,
    aten.copy_.default,
    aten.split.Tensor,
    halve,
    collectives.all_reduce_.default,
    collectives.wait_tensor.default,
)


def results_by_hand(plan: ProgramPlan) -> dict[str, Buffer]:
    """What captured operators return and the caller gets: it is copied to the plan."""
    made: dict[Node, frozenset[str]] = {}
    found: dict[str, Buffer] = {}
    in_communication: frozenset[str] = frozenset()
    for node in plan.graph.graph.nodes:
        first = node.args[0] if node.args else None
        of_several = getattr(first, "target", None) in (aten.split_copy.Tensor, aten.var_mean.correction)
        if node.target in (aten.sin.default, aten.rand.default) or of_several:
            maker, name = (first, f"{first.name}[{node.args[1]}]") if of_several else (node, node.name)
            made[node] = frozenset({name})
            if "val" in node.meta:
                nbytes, end = 4 * node.meta["val"].numel(), len(plan.schedule) + 1
                found[name] = Buffer(name, nbytes, plan.schedule.index(maker), end)
        elif kind_of(node) is Kind.VIEW or node.target in RETURNS_ITS_OPERAND:
            made[node] = made.get(first, frozenset())
        if getattr(node.target, "namespace", "") == "_c10d_functional":
            in_communication = in_communication.union(*(made.get(operand, ()) for operand in node.all_input_nodes))
    returned = frozenset[str]().union(*(made.get(node, ()) for node in output_node(plan.graph).all_input_nodes))
    return {name: buffer for name, buffer in found.items() if name in returned - in_communication}


def accesses_by_hand(plan: ProgramPlan) -> dict[Node, tuple[int, int]]:
    """First and last step that works on each allocation or input, by following values from argument to argument."""
    gathers = (collectives.all_gather_into_tensor.default, collectives.all_gather_into_tensor_coalesced.default)
    made_of: dict[Node, set[Node]] = {}
    for node in plan.graph.graph.nodes:
        if kind_of(node) in (Kind.ALLOCATION, Kind.PLACEHOLDER):
            made_of[node] = {node}
        elif kind_of(node) is Kind.VIEW or node.target in RETURNS_ITS_OPERAND:
            made_of[node] = set(made_of.get(node.args[0], ()))
    found: dict[Node, tuple[int, int]] = {}
    for step, node in enumerate(plan.schedule):
        operands = node.all_input_nodes
        if node.target is collectives.wait_tensor.default:
            begun = operands[0].args[0] if operands[0].target is operator.getitem else operands[0]
            if begun.target in gathers:  # which read what they were given until now
                operands = operands + begun.all_input_nodes
        for operand in operands:
            for memory in made_of.get(operand, ()):
                found[memory] = (found.get(memory, (step, step))[0], step)
    return found


@PROPERTY
@given(recipes(), st.booleans())
def test_plans_of_random_graphs(recipe: Recipe, places: bool) -> None:
    """Buffers are live from their first to their last use, sized as torch sizes them, and placed without overlap."""
    gm = build(recipe).gm
    plan = program_plan(gm)
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    planned = SizedProgram(plan, {}, {node.name: (CPU, 256) for node in inputs} if places else {})
    memory = plan_program(planned)
    expected, end = accesses_by_hand(plan), len(plan.schedule) + 1
    returned = {plan.maker(index) for index in memory.outputs}
    buffers = buffers_of(planned)
    placed = dict(buffers)
    written = frozenset[int]().union(*plan.facts.written.values())
    for node in inputs:
        if places:
            place = placed.pop(node.name)
            assert (place.size, place.begin) == (256, 0)
            assert place.end == (end if plan.facts.of(node) <= written else expected.get(node, (0, 0))[1] + 1)
    assert not memory.per_call and len(memory.regions) == bool(buffers)
    assert placed == {
        node.name: Buffer(
            node.name, 4 * torch.Size(node.args[0]).numel(), first, end if node in returned else last + 1
        )
        for node, (first, last) in expected.items()
        if kind_of(node) is Kind.ALLOCATION
    } | results_by_hand(plan)
    if buffers:
        check_placement(list(buffers.values()), placement_of(memory, plan), memory.regions[0].alignment)
        assert memory.plain == sum(aligned(buffer.size, 64) for buffer in buffers.values())


def test_an_arena_is_there_all_the_time() -> None:
    """And what operators allocate themselves comes on top, where addresses are frozen: 320 + 256 bytes.

    ::

        arena    . s s s
                 a a . .
                 a a . o        a, b: 256 bytes, s, o: 64
        beside   . . b b
    """
    memory, predicted, _ = _beside_an_operator(frozen=True)
    assert (memory.size, memory.peak, memory.lower_bound, memory.plain) == (320, 320, 320, 384)
    assert all(region.arena for region in memory.regions) and not memory.per_call
    assert (predicted.arena, predicted.operators, predicted.outside, predicted.total) == (320, 256, 256, 576)


def test_memory_comes_and_goes_with_each_call() -> None:
    """Where a graph calls again there is no arena; no more is taken than is alive in step 3, 384 bytes.

    ::

        region   a a . .
        region   . s s s        one region for both would be there in step 3, too: 576 bytes
        new      . . . o        the caller gets it
        operator . . b b
    """
    memory, predicted, index = _beside_an_operator(frozen=False)
    assert not memory.arenas and memory.size == 0
    assert memory.regions == (Region(CPU, 0, 2, 256, 64), Region(CPU, 1, 4, 64, 64))
    assert [memory.inside(region) for region in memory.regions] == [{index["a"]: 0}, {index["s"]: 0}]
    assert memory.per_call == memory.outputs == {index["out"]}
    assert memory.sizes == {index["a"]: 256, index["s"]: 64, index["out"]: 64}
    assert (memory.peak, memory.lower_bound, memory.plain) == (320, 320, 384)
    assert (predicted.arena, predicted.operators, predicted.outside) == (0, 256, 384)
    assert (predicted.total, predicted.outputs) == (384, 64)


def _beside_an_operator(frozen: bool) -> tuple[MemoryPlan, Prediction, dict[str, int]]:
    maker = GraphMaker()
    x, y = maker.input("x"), maker.input("y", (16, 4))
    a, s, out = maker.allocate((16, 4), name="a"), maker.allocate(name="s"), maker.allocate(name="out")
    maker.launch("mix", x, x, a)
    maker.launch("mix", a, a, s)
    b = maker.extern(aten.cumsum.default, y, 0, name="b")
    maker.launch("mix", s, b, out)
    plan = program_plan(maker.finish([out]))
    planned = SizedProgram(plan, {}, {}, frozen)
    memory = plan_program(planned)
    verify_memory(plan.graph, plan.schedule, plan.facts, memory, {})
    (predicted,) = predict_memory([planned], {})
    return memory, predicted, {storage.name: storage.index for storage in plan.facts.storages}


def test_what_somebody_may_keep_is_allocated_at_every_call() -> None:
    """What a custom operator gets, what the caller gets, and what has no place of its own: idle and pinned memory."""
    maker = GraphMaker()
    x = maker.input("x")
    a, b, pinned, out = (maker.allocate(name=name) for name in ("a", "b", "pinned", "out"))
    maker.allocate(name="idle")
    pinned.kwargs = {**pinned.kwargs, "pin_memory": True}
    maker.launch("mix", x, x, a)
    maker.launch("mix", a, a, b)
    k = maker.extern(torch.ops.fxwrap_planning.double.default, maker.view(b, (16,), (1,)), name="k")
    maker.launch("mix", k, k, pinned)
    maker.launch("mix", pinned, k, out)
    plan = program_plan(maker.finish([maker.view(out, (4,), (1,), 4)]))
    memory = plan_program(SizedProgram(plan, {}, {}, frozen=False))
    verify_memory(plan.graph, plan.schedule, plan.facts, memory, {})
    index = {storage.name: storage.index for storage in plan.facts.storages}
    assert memory.regions == (Region(CPU, 0, 2, 64, 64),) and memory.inside(memory.regions[0]) == {index["a"]: 0}
    assert memory.per_call == {index[name] for name in ("b", "pinned", "idle", "out")}
    assert memory.outputs == {index["out"]}


def test_what_eager_work_returns_is_copied_into_the_arena() -> None:
    """Where addresses are frozen captured work reads it there: 256 bytes, and 256 beside it for the result itself.

    ::

        arena    . o              arena    b b o
        beside   b b       ->     beside   b . .
    """
    maker = GraphMaker()
    x, y = maker.input("x"), maker.input("y", (16, 4))
    out = maker.allocate(name="out")
    b = maker.extern(aten.cumsum.default, y, 0, name="b")
    maker.launch("mix", x, b, out)
    gm = maker.finish([out])
    captured, eager = program_plan(gm), program_plan(gm, ("aten::cumsum",))
    for planned, inside, beside in (
        (SizedProgram(captured, {}, {}), 64, 256),
        (SizedProgram(eager, {}, {}), 64 + 256, 256),
    ):
        (predicted,) = predict_memory([planned], {})
        assert (predicted.arena, predicted.operators, predicted.total) == (inside, beside, inside + beside)
        memory = plan_program(planned)
        assert memory.size == memory.peak == inside
        verify_memory(gm, planned.plan.schedule, planned.plan.facts, memory, {})


def test_what_eager_work_returns_is_read_where_it_is() -> None:
    """Where addresses are not frozen: nothing is copied, 64 bytes for out and 256 for b."""
    maker = GraphMaker()
    x, y = maker.input("x"), maker.input("y", (16, 4))
    out = maker.allocate(name="out")
    maker.launch("mix", x, maker.extern(aten.cumsum.default, y, 0, name="b"), out)
    gm = maker.finish([out])
    for eager_ops in ALWAYS_EAGER, ("aten::cumsum",):
        planned = SizedProgram(program_plan(gm, eager_ops), {}, {}, frozen=False)
        (predicted,) = predict_memory([planned], {})
        assert (predicted.arena, predicted.operators, predicted.total) == (0, 256, 64 + 256)
        assert plan_program(planned).peak == 64


def test_outputs_are_what_the_caller_gets() -> None:
    """Neither the buffer of a mutated input, which lives to the end, nor the static copy of an eager result."""
    maker = GraphMaker()
    x, y, out = maker.input("x"), maker.input("y"), maker.allocate(name="out")
    sort = maker.extern(aten.sort.default, y, name="sort")
    values, again = (maker.getitem(sort, 0) for _ in range(2))  # handed out twice: the plan has no place for it
    maker.launch("mix", values, values, x)
    maker.launch("mix", x, values, out)
    plan = program_plan(maker.finish([out, values, again]), ("aten::sort",))
    (predicted,) = predict_memory([SizedProgram(plan, {}, {"x": (CPU, 64)})], {})
    assert (predicted.arena, predicted.outputs) == (128, 2 * 64)
    workspace = plan.workspace["sort"]
    assert predicted.outside == 64 + 128 + 64 + workspace, "values and indices, and the copy that the launches read"


def test_what_only_eager_work_reads_is_new_at_every_call() -> None:
    """The caller gets it, too: nothing is copied."""
    maker = GraphMaker()
    y = maker.input("y", (16, 4))
    b = maker.extern(aten.cumsum.default, y, 0, name="b")
    gm = maker.finish([b, maker.extern(aten.flip.default, b, [0], name="c")])
    plan = program_plan(gm, ("aten::cumsum", "aten::flip"))
    assert not located(plan_program(SizedProgram(plan, {}, {})))


@torch.library.custom_op("fxwrap_planning::double", mutates_args=())
def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


_double.register_fake(torch.empty_like)


def test_sizes_in_symbols_are_planned_for_the_numbers_at_hand() -> None:
    """The same program, planned for two batch sizes: ``b`` has ``16 * s`` elements."""
    maker = GraphMaker(values=False)
    s, x = maker.graph.placeholder("s"), maker.input("x")
    s.meta["val"] = 2  # tells that it is a number
    length = maker.extern(_times_sixteen, s, name="length")
    length.meta["kind"] = Kind.SYMBOLIC
    b, out = maker.allocate(name="b"), maker.allocate(name="out")
    b.args = ((length,), (1,))
    maker.launch("mix", x, x, b)
    maker.launch("mix", b, b, out)
    plan = program_plan(maker.finish([out]))
    small, large = (buffers_of(SizedProgram(plan, {s: size, length: 16 * size}, {})) for size in (2, 100))
    assert [buffers["b"].size for buffers in (small, large)] == [128, 6400]
    assert replace(small["b"], size=6400) == large["b"]


def _times_sixteen(value: int) -> int:
    return 16 * value


# -- the same plan on every machine -------------------------------------------------------------------------


def program_of(buffers: Sequence[Buffer]) -> GraphModule:
    """A program in which a step touches what begins and what ends there."""
    maker = GraphMaker()
    maker.input("x")
    made: dict[str, Node] = {}
    for step in range(max(b.end for b in buffers)):
        begun, over = [b for b in buffers if b.begin == step], [b for b in buffers if b.end == step + 1]
        made |= {b.name: maker.allocate((b.size, 16), name=b.name) for b in begun}  # rows of 64 bytes
        names = dict.fromkeys(b.name for b in [*begun, *over])
        writes = tuple(range(len(begun)))
        maker.launch(kernel(f"step{step}", lambda *args: None, writes), *map(made.__getitem__, names))
    return maker.finish([])


@pytest.mark.parametrize("frozen", [True, False], ids=["arena", "regions"])
def test_a_graph_gets_the_same_plan_on_any_machine(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast its clock runs, and whether it has a compiler; also where no quick order is the best."""
    for seed in (55828, 0, 1, 2):
        gm = program_of(tiling(random.Random(seed), 28, 10, 12))
        planned = SizedProgram(program_plan(gm), {}, {}, frozen=frozen)
        expected = plan_program(planned), predict_memory([planned], {})
        with monkeypatch.context() as other:
            readings = itertools.count(step=1000.0)
            for clock in ("monotonic", "perf_counter", "time", "process_time", "thread_time"):
                other.setattr(time, clock, functools.partial(next, readings))
            other.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("planning has started a process"))
            assert (plan_program(planned), predict_memory([planned], {})) == expected
