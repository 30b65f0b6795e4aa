"""Live ranges, and offsets in one arena: no overlap, no bit more than needed where that can be had.

The drawings show an arena: steps go to the right, bytes go up, one row is 64 bytes (the alignment on a CPU).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import (
    ALWAYS_EAGER,
    CPU,
    PROPERTY,
    GraphMaker,
    Recipe,
    aten,
    build,
    by_name,
    check_calls,
    collectives,
    halve,
    recipes,
)
from torch.fx import GraphModule, Node

from fxwrap.compiler import CompileRequest, compile_host_graph
from fxwrap.host_graph import Kind, kind_of
from fxwrap.options import Options
from fxwrap.passes.memory_planning import live_ranges, output_storages, plan_memory, plan_program
from fxwrap.passes.symbols import storage_bytes
from fxwrap.plan import Buffer, MemoryPlan, Placement, ProgramPlan

# -- the stand-alone planner --------------------------------------------------------------------------------


def aligned(size: int, alignment: int) -> int:
    return (size + alignment - 1) // alignment * alignment


def check_placement(buffers: Sequence[Buffer], placement: Placement, alignment: int) -> None:
    """Every promise of ``plan_memory``, worked out step by step, the slow and obvious way."""
    assert set(placement.offsets) == {buffer.name for buffer in buffers}
    heaviest = 0
    for step in sorted({buffer.begin for buffer in buffers}):
        live = [buffer for buffer in buffers if buffer.begin <= step < buffer.end]
        heaviest = max(heaviest, sum(aligned(buffer.size, alignment) for buffer in live))
        # Sorted by offset, each must end before the next begins. One of no bytes is nowhere.
        spans = sorted((placement.offsets[b.name], placement.offsets[b.name] + b.size) for b in live if b.size)
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(spans)), f"overlap at step {step}"
    for buffer in buffers:
        offset = placement.offsets[buffer.name]
        assert offset >= 0 and offset % alignment == 0
        assert offset + buffer.size <= placement.size
    assert placement.lower_bound == heaviest
    assert heaviest <= placement.size <= sum(aligned(buffer.size, alignment) for buffer in buffers)


@st.composite
def buffer_lists(draw: st.DrawFn) -> list[Buffer]:
    ranges = st.tuples(st.integers(0, 20), st.integers(1, 8), st.integers(0, 500))
    return [
        Buffer(f"b{i}", size, begin, begin + length)
        for i, (begin, length, size) in enumerate(draw(st.lists(ranges, max_size=25)))
    ]


@PROPERTY
@given(buffer_lists(), st.sampled_from([1, 3, 64, 512]), st.sampled_from([None, 0.0]))
def test_placements_keep_their_promises(buffers: list[Buffer], alignment: int, budget_s: float | None) -> None:
    """Also when there is no time to try more than one order."""
    check_placement(buffers, plan_memory(buffers, alignment, budget_s), alignment)


@PROPERTY
@given(buffer_lists())
def test_the_same_buffers_get_the_same_places(buffers: list[Buffer]) -> None:
    assert plan_memory(buffers) == plan_memory(iter(buffers))


def test_first_fit_reaches_the_lower_bound() -> None:
    """
    ::

        in the order given                        largest first: a and d, then b and c into what is left

        320 |       d d d d
        256 |       d d d d
        192 | b b b b                             192 | b b b b c c c       size = lower bound = 192
        128 | a a a                               128 | a a a d d d d
         64 | a a a   c c c                        64 | a a a d d d d
          0 +--------------                         0 +--------------
              0 1 2 3 4 5 6                             0 1 2 3 4 5 6
    """
    buffers = [Buffer("a", 128, 0, 3), Buffer("b", 64, 0, 4), Buffer("c", 64, 4, 7), Buffer("d", 128, 3, 7)]
    placement = plan_memory(buffers, alignment=64)
    check_placement(buffers, placement, 64)
    assert placement.size == placement.lower_bound == 192
    assert placement.offsets == {"a": 0, "b": 128, "c": 128, "d": 0}


def test_another_order_is_tried_when_largest_first_is_not_the_best() -> None:
    """
    ::

        largest first                             a later order (a budget of no time stops after the first)

        256 |     b b
        192 | d d d                               192 |   c b b
        128 |   c   a a                           128 |   c   a a
         64 |   c   a a                            64 | d d d a a
          0 +----------                             0 +----------
              0 1 2 3 4                                 0 1 2 3 4
    """
    buffers = [Buffer("a", 128, 3, 5), Buffer("b", 64, 2, 4), Buffer("c", 128, 1, 2), Buffer("d", 64, 0, 3)]
    hurried = plan_memory(buffers, 64, budget_s=0.0)
    assert (hurried.size, hurried.offsets) == (256, {"a": 0, "b": 192, "c": 0, "d": 128})
    patient = plan_memory(buffers, 64)
    assert (patient.size, patient.offsets) == (192, {"a": 0, "b": 128, "c": 64, "d": 0})


def test_a_range_ends_before_its_end() -> None:
    """
    ::

         64 | a a a b b b         a is live in steps 0, 1, 2 and b begins in step 3: they never meet
          0 +------------
              0 1 2 3 4 5
    """
    placement = plan_memory([Buffer("a", 64, 0, 3), Buffer("b", 64, 3, 6)])
    assert (placement.offsets, placement.size, placement.lower_bound) == ({"a": 0, "b": 0}, 64, 64)
    placement = plan_memory([Buffer("a", 64, 0, 4), Buffer("b", 64, 3, 6)])
    assert (sorted(placement.offsets.values()), placement.size, placement.lower_bound) == ([0, 64], 128, 128)


def test_sizes_are_counted_in_units_of_the_alignment() -> None:
    placement = plan_memory([Buffer("a", 1, 0, 1), Buffer("b", 65, 0, 1)], alignment=64)
    assert (placement.size, placement.lower_bound) == (192, 192)
    assert placement.offsets == {"b": 0, "a": 128}


def test_nothing_takes_nothing() -> None:
    assert plan_memory([]) == Placement({}, 0, 0)
    assert plan_memory([Buffer("empty", 0, 0, 1)]) == Placement({"empty": 0}, 0, 0)


@pytest.mark.parametrize(
    ("buffers", "alignment", "message"),
    [
        ([Buffer("a", -1, 0, 1)], 64, "'a' needs size >= 0"),
        ([Buffer("a", 8, 2, 2)], 64, "'a' needs .* begin < end"),
        ([Buffer("a", 8, 3, 2)], 64, "'a' needs .* begin < end"),
        ([Buffer("a", 8, 0, 1), Buffer("a", 8, 1, 2)], 64, "'a' is given twice"),
        ([Buffer("a", 8, 0, 1)], 0, "alignment must be at least 1 byte, got 0"),
    ],
    ids=["negative size", "empty range", "reversed range", "doubled name", "no alignment"],
)
def test_what_cannot_be_placed_is_refused_by_name(buffers: list[Buffer], alignment: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_memory(buffers, alignment)


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
    return compile_host_graph(gm, CompileRequest(options=Options(eager_ops=tuple(eager_ops)))).plan


def offsets_by_name(plan: ProgramPlan, memory: MemoryPlan) -> Mapping[str, int]:
    return {plan.facts.storages[index].name: offset for index, (_, offset) in memory.location.items()}


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
        128 |     b1 b1                            k0     x      b0
         64 | b0 b0 b2 b2                          k1     b0     b1
          0 +----------------                      k2     b1     b2
              k0 k1 k2 k3                          k3     b2     b3: the output, in memory of its own
    """
    maker, gm = chain(4)
    program = compile_host_graph(gm, CompileRequest())
    memory = plan_program(program.plan, {}, {})
    nodes = by_name(gm)
    of = program.plan.facts.of
    assert {n: live_ranges(program.plan)[min(of[nodes[n]])] for n in ("b0", "b1", "b2", "b3")} == {
        "b0": (0, 2), "b1": (1, 3), "b2": (2, 4), "b3": (3, 4),
    }  # fmt: skip
    assert offsets_by_name(program.plan, memory) == {"b0": 0, "b1": 64, "b2": 0}
    assert memory.apart == of[nodes["b3"]]
    assert (memory.size, memory.lower_bound, memory.plain) == (128, 128, 192)
    check_calls(gm, maker.inputs, program, [False, False, False, True, False])


def test_views_keep_their_memory_alive() -> None:
    """
    ::

        128 |          c  c
         64 | a  a  a  a              v is a view of a, so a must stay until r, which reads v
          0 +----------------
              k0 k1 k2 r
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
    program = compile_host_graph(gm, CompileRequest())
    memory = plan_program(program.plan, {}, {})
    placed = offsets_by_name(program.plan, memory)
    assert len({placed["a"], placed["b"], placed["c"]}) == 3
    assert memory.size == memory.lower_bound == 192
    check_calls(gm, maker.inputs, program, [False, False, False, True, False])


def test_outputs_have_memory_of_their_own() -> None:
    """Whether they are handed out whole, as a view, or through an operator that returns its operand."""
    maker = GraphMaker()
    x = maker.input("x")
    buffers = [maker.allocate(name=name) for name in ("whole", "viewed", "updated", "inner")]
    for buffer in buffers:
        maker.launch("mix", x, x, buffer)
    whole, viewed, updated, _ = buffers
    gm = maker.finish([whole, maker.view(viewed, (4,), (1,), 4), maker.extern(aten.add_.Tensor, updated, x), x])
    plan = program_plan(gm)
    memory = plan_program(plan, {}, {})
    assert {plan.facts.storages[index].name for index in memory.apart} == {"whole", "viewed", "updated"}
    assert set(offsets_by_name(plan, memory)) == {"inner"}
    assert output_storages(plan) == memory.apart


def test_what_operators_allocate_is_outside_of_the_plan() -> None:
    maker = GraphMaker()
    s = maker.extern(aten.sin.default, maker.input("x"))
    b, out = maker.allocate(name="b"), maker.allocate(name="out")
    maker.launch("mix", s, s, b)
    maker.launch("mix", b, b, out)
    plan = program_plan(maker.finish([out]))
    assert set(offsets_by_name(plan, plan_program(plan, {}, {}))) == {"b"}


def test_memory_nobody_touches_and_pinned_memory_is_not_placed() -> None:
    maker = GraphMaker()
    x, out = maker.input("x"), maker.allocate(name="out")
    maker.allocate(name="idle")
    pinned = maker.allocate(name="pinned")
    pinned.kwargs = {**pinned.kwargs, "pin_memory": True}
    maker.launch("mix", x, x, pinned)
    maker.launch("mix", pinned, pinned, out)
    plan = program_plan(maker.finish([out]))
    memory = plan_program(plan, {}, {})
    assert not memory.location
    names = {plan.facts.storages[index].name for index in memory.sizes}
    assert names == {"idle", "pinned", "out"}, "sizes are known all the same"


def test_memory_whose_size_only_data_decides_is_allocated_when_it_is_known() -> None:
    maker = GraphMaker()
    x, n = maker.input("x"), maker.input("n", (), torch.int64)
    size = maker.integer(n, name="size")
    some = maker.allocate(name="some")
    some.args = ((size,), (1,))
    maker.launch("mix", x, x, some)
    out = maker.allocate(name="out")
    maker.launch("mix", some, some, out)
    gm = maker.finish([out])
    program = compile_host_graph(gm, CompileRequest())
    memory = plan_program(program.plan, {}, {})
    assert not memory.location
    assert {program.plan.facts.storages[index].name for index in memory.sizes} == {"out"}
    check_calls(gm, maker.inputs, program, [False, False, True, False])


def test_an_input_copied_to_the_arena_stays_for_the_whole_call() -> None:
    """
    ::

        192 |    b1 b1              x is filled before the first step, and copied back after the last
        128 | b0 b0                 if something updated it
         64 | x  x  x  x
          0 +------------
              k0 k1 k2 (after)
    """
    _, gm = chain(3)
    plan = program_plan(gm)
    x = by_name(gm)["x"]
    memory = plan_program(plan, {}, {x: (CPU, 64)})
    arena = memory.arenas[CPU]
    assert arena.buffers["x"] == Buffer("x", 64, 0, 4)
    assert len(set(offsets_by_name(plan, memory).values())) == 3
    assert memory.size == 192
    check_placement(list(arena.buffers.values()), arena.placement, arena.alignment)


def accesses_by_hand(plan: ProgramPlan) -> dict[Node, tuple[int, int]]:
    """First and last step that works on each allocation, by following values from argument to argument."""
    returns_its_operand = (
        aten.add_.Tensor,
        aten.copy_.default,
        aten.split.Tensor,
        halve,
        collectives.all_reduce_.default,
        collectives.wait_tensor.default,
    )
    gathers = (collectives.all_gather_into_tensor.default, collectives.all_gather_into_tensor_coalesced.default)
    made_of: dict[Node, set[Node]] = {}
    for node in plan.graph.graph.nodes:
        if kind_of(node) is Kind.ALLOCATION:
            made_of[node] = {node}
        elif kind_of(node) is Kind.VIEW or node.target in returns_its_operand:
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
    memory = plan_program(plan, {}, {node: (CPU, 256) for node in inputs} if places else {})
    expected = accesses_by_hand(plan)
    returned = {plan.facts.storages[index].node for index in memory.apart}
    arena = memory.arenas.get(CPU)
    placed = dict(arena.buffers) if arena is not None else {}
    for node in inputs:
        if places:
            assert placed.pop(node.name) == Buffer(node.name, 256, 0, len(plan.schedule) + 1)
    assert placed == {
        node.name: Buffer(node.name, 4 * torch.Size(node.args[0]).numel(), first, last + 1)
        for node, (first, last) in expected.items()
        if node not in returned
    }
    if arena is not None:
        check_placement(list(arena.buffers.values()), arena.placement, arena.alignment)
        assert arena.plain == sum(aligned(buffer.size, 64) for buffer in arena.buffers.values())


def test_sizes_in_symbols_are_planned_for_the_numbers_at_hand() -> None:
    """The same program, planned for two batch sizes: ``b`` has ``4 * s`` elements."""
    maker = GraphMaker(values=False)
    s, x = maker.graph.placeholder("s"), maker.input("x")
    s.meta["val"] = 2  # tells that it is a number
    length = maker.extern(_times_four, s, name="length")
    length.meta["kind"] = Kind.SYMBOLIC
    b, out = maker.allocate(name="b"), maker.allocate(name="out")
    b.args = ((length,), (1,))
    maker.launch("mix", x, x, b)
    maker.launch("mix", b, b, out)
    plan = program_plan(maker.finish([out]))
    small, large = (plan_program(plan, {s: size, length: 4 * size}, {}) for size in (2, 100))
    assert [memory.arenas[CPU].buffers["b"].size for memory in (small, large)] == [32, 1600]
    assert replace(small.arenas[CPU].buffers["b"], size=1600) == large.arenas[CPU].buffers["b"]


def _times_four(value: int) -> int:
    return 4 * value
