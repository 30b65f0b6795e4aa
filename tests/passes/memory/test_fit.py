"""A program within a limit of bytes: order, repeated work, and the proof that the numbers stay the same.

::

    work                 in use                   work                 in use
    to_b                 a b                      to_b                 a b
    to_c                 a b c           ->       to_c                 a b c
    to_d                 a b c d                  to_d                 a   c d
    to_out (d, a)        a b   d out              to_out (d, a)        a     d out
    to_end (out, b)        b     out end          to_b_again (a)       a b     out
                                                  to_end (out, b)        b     out end
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conftest import Compiled
from lazy_group import LAZY_GROUP
from random_graphs import (
    GraphMaker,
    build,
    collectives,
    expected_of,
    random_recipe,
    run_schedule,
    same,
)
from torch.fx import GraphModule, Node

from fxwrap.errors import MemoryLimitError, PlanError
from fxwrap.host_graph.graph_json import TensorLayout
from fxwrap.host_graph.nodes import Kernel, by_name, draws_numbers, kernel_of
from fxwrap.host_graph.stand_ins import StandIns
from fxwrap.limit import Limit
from fxwrap.options import Options
from fxwrap.passes.analysis.dependencies import build_dependency_graph
from fxwrap.passes.memory.fit import fit_memory, is_pure, timeline_of
from fxwrap.passes.memory.order import least_memory
from fxwrap.passes.memory.rematerialise import rematerialise
from fxwrap.passes.memory.requirements import expected_sizes
from fxwrap.passes.memory.timeline import Timeline
from fxwrap.passes.verify import verify_same_results, verify_schedule
from fxwrap.pipeline import HostGraphPlanner
from fxwrap.plan import InputFacts, ProgramPlan

# Bytes of a buffer of 4 by 4 floats.
_ONE = 64
aten = torch.ops.aten


def plan_of(gm: GraphModule, options: Options | None = None, apart: bool = False) -> ProgramPlan:
    options = options or Options(capture="always")
    planner = HostGraphPlanner(gm, options)
    return planner.partition(InputFacts(apart=apart), {})


def fitted(plan: ProgramPlan, limit: int) -> ProgramPlan:
    dependencies = build_dependency_graph(plan.graph, plan.facts, "cpu" if plan.inputs.apart else "")
    return fit_memory(plan, dependencies, expected_sizes(plan.graph, plan.facts), Limit(limit))


def steps(plan: ProgramPlan) -> str:
    return " ".join(node.name for node in plan.schedule)


def chain(maker: GraphMaker) -> tuple[Node, dict[str, Node]]:
    """The graph of the drawing; each step is named after the buffer that it writes."""
    x, made = maker.input("x"), dict[str, Node]()

    def step(name: str, first: Node, second: Node) -> None:
        made[name] = maker.allocate(name=name)
        maker.launch("mix", first, second, made[name], name=f"to_{name}")

    step("a", x, x)
    step("b", made["a"], made["a"])
    step("c", made["b"], made["b"])
    step("d", made["c"], made["c"])
    step("out", made["d"], made["a"])
    return x, made


def assert_same_numbers(plan: ProgramPlan, before: GraphModule, inputs: Callable[[int], list[torch.Tensor]]) -> None:
    given = inputs(1)
    expected = expected_of(before, given, 1)
    torch.manual_seed(1)
    assert same([*run_schedule(plan.graph, plan.schedule, given), *given], expected)
    torch.manual_seed(1)
    again = inputs(1)
    assert same([*plan.graph(*again), *again], expected)


def test_what_is_idle_at_the_peak_is_made_again() -> None:
    maker = GraphMaker()
    _, made = chain(maker)
    gm = maker.finish([made["out"]])
    plan = plan_of(gm)
    assert timeline_of(plan, expected_sizes(gm, plan.facts)).peak == 3 * _ONE
    assert fitted(plan, 3 * _ONE) is plan
    with pytest.raises(MemoryLimitError, match=f"at least {3 * _ONE} bytes"):
        fitted(plan, 2 * _ONE)  # the last step alone needs three


def test_a_program_without_work_does_not_fit_where_nothing_is_left() -> None:
    """An arena and its static buffers may take all of a limit, and more: nothing is left for storages."""
    maker = GraphMaker()
    plan = plan_of(maker.finish([maker.input("x")]))
    assert not plan.schedule and fitted(plan, 0) is plan
    with pytest.raises(MemoryLimitError):
        fitted(plan, -1)


def test_it_is_made_again_of_what_is_still_there() -> None:
    maker = GraphMaker()
    _, made = chain(maker)
    made["end"] = maker.allocate(name="end")
    maker.launch("mix", made["out"], made["b"], made["end"], name="to_end")
    gm = maker.finish([made["end"]])
    plan = plan_of(gm)
    assert timeline_of(plan, expected_sizes(gm, plan.facts)).peak == 4 * _ONE
    better = fitted(plan, 3 * _ONE)
    assert steps(better) == "to_a to_b to_c to_d to_out to_b_again to_end"
    verify_same_results(gm, better.graph)
    assert_same_numbers(better, gm, maker.inputs)


def test_what_a_forward_has_saved_is_in_use_until_it_is_read_last() -> None:
    """
    ::

        to_a        a   saved         a backward has it from its begin
        to_b        a b saved         and its last use frees it
        to_out        b       out
    """
    maker = GraphMaker()
    x, saved = maker.input("x"), maker.input("saved")
    a, b, out = (maker.allocate(name=name) for name in ("a", "b", "out"))
    maker.launch("mix", x, x, a, name="to_a")
    maker.launch("mix", a, saved, b, name="to_b")
    maker.launch("mix", b, x, out, name="to_out")
    gm = maker.finish([out])
    plan = plan_of(gm)
    sizes = expected_sizes(gm, plan.facts)
    assert timeline_of(plan, sizes).in_use.tolist() == [_ONE, 2 * _ONE, 2 * _ONE]
    timeline = timeline_of(plan, sizes, given={"saved": _ONE})
    assert timeline.in_use.tolist() == [2 * _ONE, 3 * _ONE, 2 * _ONE]
    (storage,) = plan.facts.behind_named(["saved"])
    assert not timeline.is_made(storage)  # nothing makes it again
    to_b, to_out = timeline.runs[1:]
    later = timeline.repeated([to_b], to_out)  # which reads it again: it is in use for longer
    assert later.in_use.tolist() == [2 * _ONE, 3 * _ONE, 3 * _ONE, 2 * _ONE]


def test_what_is_made_beside_is_as_it_was_read() -> None:
    """A kernel that makes two values runs again for one of them. Where the other is read, all writes to it run again.

    ::

        pair      p q               pair      p q
        update      q               update      q
        to_c      p q c             to_c      p q c
        to_d, e     q c d e         to_d, e     q   d e
        to_out      q c   e out     pair      p q     e     r        r: q again, which c is made of
                                    update      q     e     r
                                    to_c      p q c   e     r
                                    to_out      q c   e out
    """
    maker = GraphMaker()
    x, made = maker.input("x"), {name: maker.allocate(name=name) for name in ("p", "q", "c")}
    maker.launch("pair", x, made["p"], made["q"], name="to_p_and_q")
    maker.launch("update", x, made["q"], name="to_q")
    maker.launch("mix", made["p"], made["q"], made["c"], name="to_c")
    made["d"] = maker.allocate((16, 4), name="d")
    made |= {name: maker.allocate(name=name) for name in ("e", "out")}
    for name, *operands in ("d", x, x), ("e", made["d"], x), ("out", made["c"], made["e"]):
        maker.launch("mix", *operands, made[name], name=f"to_{name}")
    gm = maker.finish([made["out"], made["q"]])
    plan = plan_of(gm)
    assert timeline_of(plan, expected_sizes(gm, plan.facts)).peak == 7 * _ONE
    better = fitted(plan, 6 * _ONE)
    assert "to_p_and_q_again to_q_again to_c_again to_out" in steps(better)
    verify_same_results(gm, better.graph)
    assert_same_numbers(better, gm, maker.inputs)


ATOMIC = {
    "cpp": "atomic_add(&out_ptr0[static_cast<int64_t>(x0)], static_cast<float>(tmp2));",
    "cpp vectors": "atomic_add_vec<float, 2, 1>(out_ptr0, index, value);",
    "cpp transposed": "transpose_mxn<float,true>(tmp0, 16L, out_ptr0, 64L, 16, 16);",
    "triton": "tl.atomic_add(out_ptr0 + (x0), tmp1, xmask, sem='relaxed')",
    "user's triton": "tl.atomic_max(out_ptr, value)",
    "scan": "triton_helpers.exclusive_scan_decoupled_lookback(ws_ptr, value, index, combine)",
    "cuda": "atomicAdd(&out[i], value);",
}


@pytest.mark.parametrize("language", ATOMIC)
def test_a_kernel_with_atomic_adds_is_not_made_again(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = GraphMaker()
    _, made = chain(maker)
    made["end"] = maker.allocate(name="end")
    maker.launch("mix", made["out"], made["b"], made["end"], name="to_end")
    gm = maker.finish([made["end"]])
    plan = plan_of(gm)
    (kernel,) = {kernel_of(node) for node in plan.schedule}
    assert kernel is not None and kernel.same_bits_again
    repeated = fitted(plan, 3 * _ONE)
    verify_same_results(gm, repeated.graph)
    monkeypatch.setattr(kernel, "source", ATOMIC[language])
    assert not kernel.same_bits_again and not any(map(is_pure, plan.schedule))
    with pytest.raises(MemoryLimitError):
        fitted(plan, 3 * _ONE)
    with pytest.raises(PlanError, match="atomic adds, runs more or less often"):
        verify_same_results(gm, repeated.graph)


@pytest.mark.parametrize(
    "text",
    [
        "'atomic_add_found': False",
        "std::atomic<int> inductor_cpu_integer_div_error{0};",
        "transpose_mxn<float,false>(tmp0, 16L, out_ptr0, 64L, 16, 16); if (true) {}",
        "tl.store(out_ptr0 + (x0), tmp1, xmask)",
    ],
)
def test_what_is_no_atomic_add(text: str) -> None:
    assert Kernel("kernel", "triton", text, torch.device("cpu"), print, ()).same_bits_again


@pytest.mark.compiler
def test_inductors_atomic_adds_are_seen() -> None:
    """With several threads; one thread adds in order."""

    def add(x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return x.index_add(0, index, values)

    seen = []
    for threads in (1, 4):
        torch._dynamo.reset()
        f = Compiled(add, compile_options={"options": {"cpp.threads": threads}})
        f(torch.zeros(64, 64), torch.arange(64) % 3, torch.randn(64, 64))
        kernels = [kernel for node in f.program.plan.schedule if (kernel := kernel_of(node)) is not None]
        seen.append(all(kernel.same_bits_again for kernel in kernels))
        assert kernels and seen[-1] == (not any("atomic_add" in kernel.source for kernel in kernels))
    assert seen == [True, False]


def test_a_chain_is_made_again() -> None:
    """What it was made of has been dropped, too: both are made again."""
    maker = GraphMaker()
    x, previous, made = maker.input("x"), None, dict[str, Node]()
    for name, rows in (("a", 4), ("b", 4), ("c", 32), ("d", 32), ("e", 4)):
        made[name] = maker.allocate((rows, 4), name=name)
        maker.launch("mix", previous or x, previous or x, made[name], name=f"to_{name}")
        previous = made[name]
    made["out"] = maker.allocate(name="out")
    maker.launch("mix", made["e"], made["b"], made["out"], name="to_out")
    gm = maker.finish([made["out"]])
    plan = plan_of(gm)
    assert timeline_of(plan, expected_sizes(gm, plan.facts)).peak == 17 * _ONE
    better = fitted(plan, 16 * _ONE)
    assert steps(better) == "to_a to_b to_c to_d to_e to_a_again to_b_again to_out"
    verify_same_results(gm, better.graph)
    assert_same_numbers(better, gm, maker.inputs)


def test_what_a_communication_reads_is_in_use_until_it_ends() -> None:
    """To make it again frees nothing at the peak, though a later step could read a copy.

    ::

        to_b   gather (b)   to_c to_d   to_out (d, b)   wait
        [ b                                                ]
    """
    maker = GraphMaker()
    x, made = maker.input("x"), dict[str, Node]()

    def step(name: str, first: Node, second: Node, rows: int = 4) -> None:
        made[name] = maker.allocate((rows, 4), name=name)
        maker.launch("mix", first, second, made[name], name=f"to_{name}")

    step("b", x, x)
    gathered = maker.extern(collectives.all_gather_into_tensor.default, made["b"], 2, LAZY_GROUP)
    step("c", x, x, 32)
    step("d", made["c"], made["c"], 32)
    step("out", made["d"], made["b"])
    gm = maker.finish([made["out"], maker.extern(collectives.wait_tensor.default, gathered)])
    plan = plan_of(gm)
    costs = replace(timeline_of(plan, expected_sizes(gm, plan.facts)).costs, captured=frozenset({0}))
    in_order = [node for node in gm.graph.nodes if node in plan.schedule]
    timeline = Timeline.of([in_order], plan.facts, costs, {})
    assert timeline.peak == (1 + 2 + 8 + 8) * _ONE
    assert rematerialise(timeline, 0).peak == (1 + 2 + 8 + 8) * _ONE


def test_a_graph_from_a_cache_is_planned_again() -> None:
    """Its values are stand-ins: what is made again lies in storages of its own there, too."""
    maker = GraphMaker()
    _, made = chain(maker)
    made["end"] = maker.allocate(name="end")
    maker.launch("mix", made["out"], made["b"], made["end"], name="to_end")
    gm, values = maker.finish([made["end"]]), StandIns()
    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            place = value.storage_offset(), value.untyped_storage()._cdata, value.untyped_storage().nbytes()
            layout = TensorLayout(value.dtype, value.device, tuple(value.size()), tuple(value.stride()), *place)
            node.meta["val"] = values.tensor(layout)
    better = fitted(plan_of(gm), 3 * _ONE)
    assert steps(better) == "to_a to_b to_c to_d to_out to_b_again to_end"
    verify_same_results(gm, better.graph)


def _made_again_after(name: str, plan: ProgramPlan) -> set[str]:
    """The nodes that run again after another, with the least memory."""
    runs = rematerialise(timeline_of(plan, expected_sizes(plan.graph, plan.facts)), 0).runs
    place = [run.node.name for run in runs].index(name)
    return {run.node.name for run in runs[place:] if run.is_again}


def test_nothing_is_made_again_of_what_was_written_meanwhile() -> None:
    maker = GraphMaker()
    x, made = chain(maker)
    maker.launch("update", made["c"], x, name="writes_x")
    made["end"] = maker.allocate(name="end")
    maker.launch("mix", made["out"], made["b"], made["end"], name="to_end")
    gm = maker.finish([made["end"]])
    assert _made_again_after("writes_x", plan_of(gm)) == set()


def test_inputs_that_may_overlap_are_one() -> None:
    """A write to one input may be a write to another, unless the caller promises that it is not."""
    maker = GraphMaker()
    x, other = maker.input("x"), maker.input("other")
    made = [maker.allocate((rows, 4), name=f"made{n}") for n, rows in enumerate((4, 40, 40, 4))]
    for n, buffer in enumerate(made):
        source = made[n - 1] if n else x
        maker.launch("mix", source, source, buffer, name=f"to_{n}")
    maker.launch("update", made[3], other, name="writes_other")
    end = maker.allocate(name="end")
    maker.launch("mix", made[3], made[0], end, name="to_end")
    gm = maker.finish([end])
    assert _made_again_after("writes_other", plan_of(gm)) == set()
    assert _made_again_after("writes_other", plan_of(gm, apart=True)) == {"to_0"}


def test_random_numbers_are_drawn_once() -> None:
    maker = GraphMaker()
    x = maker.input("x")
    drawn = maker.extern(aten.bernoulli.default, x, name="drawn")
    made = [drawn]
    for number in range(4):
        made.append(maker.allocate(name=f"made{number}"))
        maker.launch("mix", made[-2], made[-2], made[-1], name=f"to_{number}")
    end = maker.allocate(name="end")
    maker.launch("mix", made[-1], drawn, end, name="to_end")
    gm = maker.finish([end])
    plan = plan_of(gm)
    lowest = rematerialise(timeline_of(plan, expected_sizes(gm, plan.facts)), 0)
    assert not any(run.is_again and run.node is drawn for run in lowest.runs)


@pytest.mark.parametrize(("dropout", "again"), [(0.0, True), (0.5, False)])
def test_attention_draws_nothing_without_dropout(dropout: float, again: bool) -> None:
    """Its operator is tagged as one that draws, since it has an argument for dropout."""
    maker = GraphMaker()
    four = [maker.input(f"x{n}", (1, 1, 4, 4)) for n in range(3)]
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    made = maker.extern(attention, *four, dropout, name="attention")
    assert draws_numbers(made) is not again
    assert is_pure(made) is again


def like_training(draw: random.Random) -> tuple[GraphMaker, GraphModule]:
    """A forward chain whose values are used again in reverse, and updates of inputs between."""
    maker = GraphMaker()
    values = [maker.input("x")]
    inputs = [maker.input(f"p{n}") for n in range(3)]
    for _ in range(draw.randint(3, 20)):
        made = maker.allocate((draw.choice([4, 8, 40]), 4))
        maker.launch("mix", values[-1], draw.choice([*values, *inputs]), made)
        if draw.random() < 0.2:
            maker.launch("update", draw.choice(values), made)  # in place, before anything else reads it
        values.append(made)
    gradient = values[-1]
    for value in reversed(values):
        made = maker.allocate((4, 4))
        maker.launch("mix", gradient, value, made)
        gradient = made
        if draw.random() < 0.3:
            maker.launch("update", gradient, draw.choice(inputs))
    return maker, maker.finish([gradient, draw.choice(values[1:])])


def _checked(gm: GraphModule, inputs: Callable[[int], list[torch.Tensor]], draw: random.Random, apart: bool) -> bool:
    """Fit a graph into a random limit, and check what came out; returns whether work is repeated."""
    plan = plan_of(gm, apart=apart)
    timeline = timeline_of(plan, expected_sizes(gm, plan.facts))
    highest = timeline.peak
    limit = draw.randint(rematerialise(timeline, 0).peak, highest)
    better = fitted(plan, limit)
    apart_on = "cpu" if apart else ""
    assert timeline_of(better, expected_sizes(better.graph, better.facts)).peak <= limit
    verify_same_results(plan.graph, better.graph, apart_on)
    verify_schedule(better.graph, better.schedule, apart_on)
    assert_same_numbers(better, gm, inputs)
    return len(better.schedule) > len(plan.schedule)


# pytest -m sweep tests/passes/memory/test_fit.py
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.sweep)])
def test_random_graphs_with_random_limits(count: int) -> None:
    """The verifier accepts each, the peak is below the limit, and the numbers are the graph's."""
    repeated = 0
    for seed in range(count):
        draw = random.Random(seed)
        graph = build(random_recipe(draw, draw.choice([8, 20, 40, 70])))
        _checked(graph.gm, graph.inputs, draw, apart=False)
        maker, gm = like_training(draw)
        repeated += _checked(gm, maker.inputs, draw, apart=bool(seed % 2))
    assert repeated > count // 2


# -- the verifier finds what is planted ---------------------------------------------------------------------------


def _copied(gm: GraphModule) -> GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node, original in zip(graph.nodes, gm.graph.nodes, strict=True):
        node.meta = dict(original.meta)
    return GraphModule(gm, graph)


def _planted(plant: Callable[[dict[str, Node]], None], written: bool = False) -> tuple[GraphModule, GraphModule]:
    maker = GraphMaker()
    x, made = chain(maker)
    if written:
        maker.launch("update", made["out"], x, name="writes_x")
    drawn = maker.extern(aten.bernoulli.default, made["out"], name="drawn")
    gm = maker.finish([made["out"], drawn])
    faulty = _copied(gm)
    plant(by_name(faulty))
    return gm, faulty


def _of_what_was_written(nodes: dict[str, Node]) -> None:
    """A producer runs again after its input was written."""
    graph = nodes["x"].graph
    with graph.inserting_after(nodes["writes_x"]):
        again = graph.create_node("call_function", nodes["to_out"].target, nodes["to_a"].args)
    again.args = (*nodes["to_a"].args[:3], nodes["out"])


def _drawn_twice(nodes: dict[str, Node]) -> None:
    with nodes["x"].graph.inserting_before(nodes["drawn"]):
        nodes["x"].graph.node_copy(nodes["drawn"], lambda node: node)


def _dropped_too_early(nodes: dict[str, Node]) -> None:
    """The last step reads a buffer that something else has been written to."""
    nodes["to_d"].args = (*nodes["to_d"].args[:3], nodes["a"])
    nodes["to_out"].args = (nodes["to_out"].args[0], nodes["a"], nodes["a"], nodes["out"])


def _an_update_before_a_read(nodes: dict[str, Node]) -> None:
    nodes["x"].append(nodes["writes_x"])
    nodes["x"].append(nodes["kernel_update"])
    nodes["writes_x"].args = (nodes["kernel_update"], nodes["x"], nodes["x"])


def _a_step_is_lost(nodes: dict[str, Node]) -> None:
    nodes["x"].graph.erase_node(nodes["writes_x"])


@pytest.mark.parametrize(
    ("plant", "written"),
    [
        (_of_what_was_written, True),
        (_drawn_twice, False),
        (_dropped_too_early, False),
        (_an_update_before_a_read, True),
        (_a_step_is_lost, True),
    ],
)
def test_planted_faults(plant: Callable[[dict[str, Node]], None], written: bool) -> None:
    sound, faulty = _planted(plant, written)
    verify_same_results(sound, _copied(sound))
    with pytest.raises(PlanError, match="repeated work"):
        verify_same_results(sound, faulty)


def test_a_buffer_of_its_own_is_no_difference() -> None:
    """Two runs of a kernel in place of one that is kept: the terms are the same."""

    def plant(nodes: dict[str, Node]) -> None:
        graph = nodes["x"].graph
        with graph.inserting_before(nodes["to_out"]):
            buffer = graph.node_copy(nodes["a"], lambda node: node)
            del buffer.meta["val"]  # which says that it lies where the other does
            graph.create_node(
                "call_function", nodes["to_a"].target, (*nodes["to_a"].args[:3], buffer), name="to_a_again"
            )
        nodes["to_out"].args = (*nodes["to_out"].args[:2], buffer, nodes["out"])

    verify_same_results(*_planted(plant))


def test_views_of_one_buffer_may_be_made_in_another_order() -> None:
    """Each lies in the buffer, and neither in the other, whichever comes first."""
    maker = GraphMaker()
    x, buffer = maker.input("x"), maker.allocate(name="buffer")
    maker.launch("mix", x, x, buffer, name="to_buffer")
    halves = [maker.extern(aten.split.Tensor, buffer, 2, name=name) for name in ("first", "second")]
    parts = [maker.getitem(half, 0) for half in halves]
    maker.launch("update", x, parts[1], name="writes_second")
    gm = maker.finish([buffer, parts[0]])
    other = _copied(gm)
    nodes = by_name(other)
    nodes["first"].prepend(nodes["second"])
    other.recompile()
    verify_same_results(gm, other)


# -- order --------------------------------------------------------------------------------------------------------


def test_an_update_follows_its_gradient() -> None:
    """::

    program order   g1 g2 g3 | use g1 | use g2 | use g3        three buffers at one time
    chosen          g1 use g1 | g2 use g2 | g3 use g3          one
    """
    maker = GraphMaker()
    x = maker.input("x")
    parameters = [maker.input(f"p{n}") for n in range(3)]
    buffers = [maker.allocate(name=f"g{n}") for n in range(3)]
    for n, buffer in enumerate(buffers):
        maker.launch("mix", x, x, buffer, name=f"makes_g{n}")
    for n, buffer in enumerate(buffers):
        maker.launch("update", buffer, parameters[n], name=f"uses_g{n}")
    plan = plan_of(maker.finish([x]), Options(capture="always", inputs_apart=True), apart=True)
    assert steps(plan) == "makes_g0 uses_g0 makes_g1 uses_g1 makes_g2 uses_g2"
    assert steps(plan_of(plan.graph)).startswith("makes_g0 makes_g1 makes_g2")  # each may lie where x does


def test_an_order_keeps_dependencies_and_storages_that_stay() -> None:
    for seed in range(30):
        graph = build(random_recipe(random.Random(seed), 30))
        options = Options(capture="always", inputs_apart=True, eager_ops=graph.options.eager_ops)
        plan = plan_of(graph.gm, options, apart=True)
        verify_schedule(graph.gm, plan.schedule, "cpu")
        assert_same_numbers(plan, graph.gm, graph.inputs)


def test_an_empty_partition_has_an_order() -> None:
    plan = plan_of(GraphMaker().finish([]))
    assert least_memory((), {}, plan.facts, {}, (), ()) == []
