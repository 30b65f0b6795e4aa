"""The verifier: accepts what the passes decide, and catches every fault that is planted here.

A fault is planted in a decision (a schedule, a memory plan, a dependency graph), never in the verifier, and where it
changes numbers the test shows that it does.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import networkx as nx
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from placements import buffers_of, changed, located, moved, put
from random_graphs import (
    ALWAYS_EAGER,
    CPU,
    PROPERTY,
    GraphMaker,
    Recipe,
    aten,
    build,
    check_calls,
    compile_request,
    expected_of,
    recipes,
    reordered,
    run_schedule,
    same,
)
from torch.fx import GraphModule, Node

from fxwrap.errors import PlanError
from fxwrap.host_graph.nodes import is_work, reinterpret
from fxwrap.options import Options
from fxwrap.packing import Buffer, Reserved, plan_memory
from fxwrap.passes import verify
from fxwrap.passes.analysis.aliasing import analyse_storages
from fxwrap.passes.analysis.dependencies import build_dependency_graph
from fxwrap.passes.memory.planner import plan_program
from fxwrap.passes.partition.capturability import judge
from fxwrap.passes.partition.cut import cut
from fxwrap.passes.verify import verify_memory, verify_schedule
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import Home, InputFacts, MemoryPlan, Place, ProgramPlan, Region, SizedProgram


def planned(gm: GraphModule, dependencies: nx.DiGraph | None = None) -> ProgramPlan:
    """What ``compile_host_graph`` decides, without its checks, for any dependency graph."""
    facts = analyse_storages(gm)
    verdicts = judge(gm, ALWAYS_EAGER)
    found = cut(dependencies or build_dependency_graph(gm, facts), verdicts, CPU)
    return ProgramPlan(gm, facts, verdicts, found, CPU, InputFacts())


def verify_plan(plan: ProgramPlan, memory: MemoryPlan) -> None:
    verify_memory(plan.graph, plan.schedule, plan.facts, memory, {})


def work_order(schedule: Sequence[Node]) -> str:
    return " ".join(node.name for node in schedule)


# -- a graph to plant faults in -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sound:
    """
    ::

        192 | b0 b0 b0 b3 b3            x -> k0 -> b0 -> k1 -> b1 -> k2 -> b2 -> k3 -> b3 -> k4 -> out
        128 |    b1 b1 b1 out out       Every kernel also reads what the one before it read.
         64 |       b2 b2 b2            The caller gets out.
          0 +--------------------
              k0 k1 k2 k3 k4 (after)
    """

    maker: GraphMaker
    gm: GraphModule
    plan: ProgramPlan
    memory: MemoryPlan

    def index(self, name: str) -> int:
        return next(storage.index for storage in self.plan.facts.storages if storage.name == name)

    def at(self, name: str) -> int:
        return located(self.memory)[self.index(name)]

    def moved(self, name: str, offset: int) -> MemoryPlan:
        """The plan with one storage elsewhere."""
        return moved(self.memory, {self.index(name): offset})


@pytest.fixture
def sound() -> Sound:
    maker = GraphMaker()
    value = older = maker.input("x")
    for i in range(5):
        out = maker.allocate((4, 4), name=f"b{i}" if i < 4 else "out")
        maker.launch("mix", value, older, out, name=f"k{i}")
        older, value = value, out
    gm = maker.finish([value])
    plan = planned(gm)
    found = Sound(maker, gm, plan, plan_program(SizedProgram(plan, {}, {})))
    names = ("b0", "b1", "b2", "b3", "out")
    assert [found.at(name) for name in names] == [128, 64, 0, 128, 64]
    verify_schedule(gm, plan.schedule)
    verify_plan(plan, found.memory)
    return found


# -- faults in a memory plan --------------------------------------------------------------------------------


def _onto_a_neighbour(sound: Sound) -> MemoryPlan:
    return sound.moved("b1", sound.at("b0"))


def _into_a_neighbour(sound: Sound) -> MemoryPlan:
    """The last 4 bytes of b1 and the first of b0; both would be aligned if the alignment were 4."""
    low, high = sorted(("b0", "b1"), key=sound.at)
    return changed(sound.moved(high, sound.at(low) + 60), alignment=4)


def _shorter_life(sound: Sound) -> MemoryPlan:
    """The plan of a planner that forgot the last use of b0."""
    return _planned_as(sound, "b0", lambda buffer: replace(buffer, end=buffer.end - 1))


def _later_birth(sound: Sound) -> MemoryPlan:
    """The plan of a planner that forgot that b2 is written before it is read."""
    return _planned_as(sound, "b2", lambda buffer: replace(buffer, begin=buffer.begin + 1))


def _planned_as(sound: Sound, name: str, change: Callable[[Buffer], Buffer]) -> MemoryPlan:
    buffers = buffers_of(SizedProgram(sound.plan, {}, {}))
    placement = plan_memory([change(b) if b.name == name else b for b in buffers.values()], 64)
    offsets = {sound.index(name): offset for name, offset in placement.offsets.items()}
    return changed(moved(sound.memory, offsets), size=placement.size)


def _short_arena(sound: Sound) -> MemoryPlan:
    return changed(sound.memory, size=sound.memory.size - 1)


def _before_the_arena(sound: Sound) -> MemoryPlan:
    return sound.moved("b0", -64)


def _misaligned(sound: Sound) -> MemoryPlan:
    return changed(sound.moved("b0", 1024 + 4), size=4096)


def _output_onto_what_it_is_made_of(sound: Sound) -> MemoryPlan:
    return sound.moved("out", sound.at("b3"))


def _onto_what_another_holds(sound: Sound) -> MemoryPlan:
    return changed(sound.memory, reserved=(Reserved(188, 192),))


def _onto_what_is_donated_later(sound: Sound) -> MemoryPlan:
    """x is last read in k1, by when b0 has been written. What the plan says of that is not believed."""
    return changed(sound.memory, reserved=(Reserved(128, 192, end=0, nodes=("x",)),))


def _too_small(sound: Sound) -> MemoryPlan:
    return replace(sound.memory, sizes={**sound.memory.sizes, sound.index("b1"): 60})


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_onto_a_neighbour, r"b0 and b1 overlap at step 1, launch \w+\(b0, .*b1\)"),
        (_into_a_neighbour, "b0 and b1 overlap at step 1"),
        (_shorter_life, "b0 and b2 overlap at step 2"),
        (_later_birth, "overlap at step 2"),
        (_short_arena, "lies outside of its arena"),
        (_before_the_arena, "b0 lies outside of its arena"),
        (_misaligned, "b0 is misaligned"),
        (_output_onto_what_it_is_made_of, "b3 and out overlap at step 4"),
        (_onto_what_another_holds, "b0 and another program's output overlap at step 0"),
        (_onto_what_is_donated_later, "b0 and another program's output, here x overlap at step 0"),
        (_too_small, "b1 is too small"),
    ],
)
def test_a_fault_in_a_memory_plan_is_caught(plant: Callable[[Sound], MemoryPlan], message: str, sound: Sound) -> None:
    with pytest.raises(PlanError, match=message):
        verify_plan(sound.plan, plant(sound))


# The same program where memory comes and goes:
#
#   192 |    b1 b1 b1
#   128 | b0 b0 b0 b3 b3       one region, with b2, that is there all the time, and one for b1; out is allocated
#    64 |       b2 b2 b2       at every call
#     0 +--------------


def _nowhere(sound: Sound, memory: MemoryPlan) -> MemoryPlan:
    return put(memory, sound.index("out"), Place(Home.OPERATOR))


def _taken_out_of_its_region(sound: Sound, memory: MemoryPlan) -> MemoryPlan:
    return put(memory, sound.index("b1"), Place(Home.INPUT))


def _an_input(sound: Sound, memory: MemoryPlan) -> MemoryPlan:
    return put(memory, sound.index("x"), Place(Home.CALL))


def _output_in_a_region(sound: Sound, memory: MemoryPlan) -> MemoryPlan:
    there = replace(memory, regions=(*memory.regions, Region(CPU, 4, 5, 64, 64)))
    return put(there, sound.index("out"), Place(Home.REGION, 2))


def _in_another_region(sound: Sound, memory: MemoryPlan) -> MemoryPlan:
    return put(memory, sound.index("b3"), Place(Home.REGION, 1))


def _region_that_comes_too_late(sound: Sound, memory: MemoryPlan) -> MemoryPlan:
    return changed(memory, 0, begin=1)


def _region_that_goes_too_early(sound: Sound, memory: MemoryPlan) -> MemoryPlan:
    return changed(memory, 1, end=3)


def _too_small_a_region(sound: Sound, memory: MemoryPlan) -> MemoryPlan:
    return changed(memory, 1, size=60)


def _neighbours_in_a_region(sound: Sound, memory: MemoryPlan) -> MemoryPlan:
    return moved(memory, dict.fromkeys(memory.inside(memory.regions[0]), 0))


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_nowhere, "out has no memory"),
        (_taken_out_of_its_region, "b1 has no memory"),
        (_an_input, "x has no memory"),
        (_output_in_a_region, "out has memory in steps 4 to 4 only\n.*\n.*an output"),
        (_in_another_region, "b1 and b3 overlap at step 3"),
        (_region_that_comes_too_late, r"b0 has no memory at step 0, launch \w+\(x, .*b0\)"),
        (_region_that_goes_too_early, r"b1 has no memory at step 3, launch \w+\(b2, b1, b3\)"),
        (_too_small_a_region, "b1 lies outside of its region"),
        (_neighbours_in_a_region, "b0 and b2 overlap at step 2"),
    ],
)
def test_a_fault_is_caught_where_memory_comes_and_goes(
    plant: Callable[[Sound, MemoryPlan], MemoryPlan], message: str, sound: Sound
) -> None:
    memory = plan_program(SizedProgram(sound.plan, {}, {}, frozen=False))
    verify_plan(sound.plan, memory)
    assert [memory.inside(region).keys() for region in memory.regions] == [
        {sound.index(name) for name in ("b0", "b2", "b3")},
        {sound.index("b1")},
    ]
    assert memory.per_call == memory.outputs == {sound.index("out")}
    with pytest.raises(PlanError, match=message):
        verify_plan(sound.plan, plant(sound, memory))


@pytest.mark.parametrize("frozen", [True, False])
def test_memory_that_nobody_works_on_is_no_fault(frozen: bool) -> None:
    """Nor that there is nothing else: only the input is mutated and handed out."""
    maker = GraphMaker()
    x = maker.input("x")
    maker.allocate(name="idle")
    maker.launch("update", x, x)
    plan = planned(maker.finish([maker.view(x, (4,), (1,))]))
    verify_plan(plan, plan_program(SizedProgram(plan, {}, {}, frozen)))


def _view(maker: GraphMaker, mutated: Node, x: Node) -> Node:
    return maker.view(mutated, (8,), (1,), 8)


def _in_place_result(maker: GraphMaker, mutated: Node, x: Node) -> Node:
    return maker.extern(aten.add_.Tensor, mutated, x)


def _out_result(maker: GraphMaker, mutated: Node, x: Node) -> Node:
    return maker.extern(aten.mm.out, x, x, out=mutated)


@pytest.mark.parametrize("values", [True, False], ids=["fake values", "no fake values"])
@pytest.mark.parametrize("hand_out", [_view, _in_place_result, _out_result])
def test_an_output_that_something_later_overwrites_is_caught_behind_any_alias(
    hand_out: Callable[[GraphMaker, Node, Node], Node], values: bool
) -> None:
    """
    ::

        128 |    c  c               64 |    b  b  c         after its last use in the program, b is the caller's
         64 | b  b  b  b             0 +------------
          0 +------------              k0 h  k1 (after)
              k0 h  k1 (after)
    """
    maker = GraphMaker(values)
    x, b, c = maker.input("x"), maker.allocate(name="b"), maker.allocate(name="c")
    maker.launch("mix", x, x, b, name="k0")
    result = hand_out(maker, b, x)
    maker.launch("mix", x, x, c, name="k1")
    plan = planned(maker.finish([result]))
    memory = plan_program(SizedProgram(plan, {}, {}))
    verify_plan(plan, memory)
    assert memory.size == 128
    index = {storage.name: storage.index for storage in plan.facts.storages}
    faulty = moved(memory, {index["c"]: located(memory)[index["b"]]})
    with pytest.raises(PlanError, match="b and c overlap at step"):
        verify_plan(plan, faulty)


def test_memory_too_small_for_a_view_of_it_is_caught() -> None:
    """
    ::

        b: 0 1 2 3            4 elements, 16 bytes
        v:     0 1 2 3        reaches two elements further
    """
    maker = GraphMaker()
    x, b, out = maker.input("x"), maker.allocate((4,), name="b"), maker.allocate(name="out")
    maker.launch("mix", x, x, b)
    maker.graph.create_node("call_function", reinterpret, (b, (4,), (1,), 2), name="v")
    maker.launch("mix", b, x, out)
    plan = planned(maker.finish([out]))
    with pytest.raises(PlanError, match=r"b is too small\n.*24 bytes\n.*16 bytes"):
        verify_plan(plan, plan_program(SizedProgram(plan, {}, {})))


@PROPERTY
@given(recipes(), st.integers(0, 1000))
def test_any_two_storages_that_live_together_may_not_share_a_place(recipe: Recipe, choice: int) -> None:
    plan = planned(build(recipe).gm)
    memory = plan_program(SizedProgram(plan, {}, {}))
    assume(memory.arenas)
    buffers = buffers_of(SizedProgram(plan, {}, {}))
    index = {plan.facts.storages[i].name: i for i in located(memory)}
    together = [
        (one, two)
        for one in buffers.values()
        for two in buffers.values()
        # The other way around might lie outside of the arena, which is another fault.
        if one.size > two.size or (one.size == two.size and one.name < two.name)
        if max(one.begin, two.begin) < min(one.end, two.end)
    ]
    assume(together)
    one, two = random.Random(choice).choice(together)
    faulty = moved(memory, {index[two.name]: located(memory)[index[one.name]]})
    with pytest.raises(PlanError, match="overlap at step"):
        verify_plan(plan, faulty)


# -- faults in a schedule -----------------------------------------------------------------------------------


def _swapped(schedule: list[Node]) -> list[Node]:
    schedule[1], schedule[2] = schedule[2], schedule[1]
    return schedule


def _reversed(schedule: list[Node]) -> list[Node]:
    return schedule[::-1]


def _missing(schedule: list[Node]) -> list[Node]:
    return schedule[:2] + schedule[3:]


def _doubled(schedule: list[Node]) -> list[Node]:
    return [*schedule[:3], schedule[1], *schedule[3:]]


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (_swapped, r"k2 runs before k1\n.*k1 writes b1 first"),
        (_reversed, "runs before"),
        (_missing, "k2 never runs"),
        (_doubled, "k1 runs twice"),
    ],
)
def test_a_fault_in_a_schedule_is_caught(
    plant: Callable[[list[Node]], list[Node]], message: str, sound: Sound
) -> None:
    with pytest.raises(PlanError, match=message):
        verify_schedule(sound.gm, plant(list(sound.plan.schedule)))


@PROPERTY
@given(recipes(), st.integers(0, 1000))
def test_the_ends_of_any_dependency_may_not_change_places(recipe: Recipe, choice: int) -> None:
    plan = planned(build(recipe).gm)
    dependencies = build_dependency_graph(plan.graph, plan.facts)
    edges = [
        (before, after)
        for before, after, kind in dependencies.edges(data="kind")
        if is_work(before) and is_work(after) and kind != "order"  # see test_a_dropped_dependency_is_caught
    ]
    assume(edges)
    before, after = random.Random(choice).choice(edges)
    other = {before: after, after: before}
    with pytest.raises(PlanError, match="runs before"):
        verify_schedule(plan.graph, [other.get(node, node) for node in plan.schedule])


# -- faults in the dependency graph -------------------------------------------------------------------------
# One graph for each kind of edge, in which that edge is all that keeps its two nodes in order. Without it, a cut that
# prefers late nodes to early ones runs them the wrong way around.


def _data(maker: GraphMaker) -> list[Node]:
    """first: s = sin(x) --data--> second: b <- f(s)"""
    s = maker.extern(aten.sin.default, maker.input("x"), name="first")
    b = maker.allocate(name="b")
    maker.launch("mix", s, s, b, name="second")
    return [b]


def _raw(maker: GraphMaker) -> list[Node]:
    """first: x <- f(y) --raw--> second: b <- f(x)"""
    x, y, b = maker.input("x"), maker.input("y"), maker.allocate(name="b")
    maker.launch("update", y, x, name="first")
    maker.launch("mix", x, x, b, name="second")
    return [b]


def _war(maker: GraphMaker) -> list[Node]:
    """first: b <- f(x) --war--> second: x <- f(y)"""
    x, y, b = maker.input("x"), maker.input("y"), maker.allocate(name="b")
    maker.launch("mix", x, x, b, name="first")
    maker.launch("update", y, x, name="second")
    return [b]


def _waw(maker: GraphMaker) -> list[Node]:
    """first: b <- f(x) --waw--> second: b <- f(y)"""
    x, y, b = maker.input("x"), maker.input("y"), maker.allocate(name="b")
    maker.launch("mix", x, x, b, name="first")
    maker.launch("mix", y, y, b, name="second")
    return [b]


def _order(maker: GraphMaker) -> list[Node]:
    """first: rand --order--> second: rand"""
    draw = {"dtype": torch.float32, "device": CPU}
    return [maker.extern(aten.rand.default, [4], name=name, **draw) for name in ("first", "second")]


def _dependencies(gm: GraphModule) -> nx.DiGraph:
    """The dependency graph, from facts in which what a kernel only writes is not read, so that waw edges exist."""
    facts = analyse_storages(gm)
    only_written = replace(facts, read={name: facts.read[name] - facts.written[name] for name in facts.read})
    return build_dependency_graph(gm, only_written)


def _numbers_are_right(gm: GraphModule, schedule: Sequence[Node], inputs: list[torch.Tensor]) -> bool:
    expected = expected_of(gm, inputs, seed=1)
    torch.manual_seed(1)
    try:
        outputs = run_schedule(gm, schedule, inputs)
    except AssertionError:  # a value was used before it was there
        return False
    return same([*outputs, *inputs], expected)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("data", _data),
        ("raw", _raw),
        ("war", _war),
        ("waw", _waw),
        ("order", _order),
    ],
)
def test_a_dropped_dependency_is_caught(kind: str, make: Callable[[GraphMaker], list[Node]]) -> None:
    maker = GraphMaker()
    gm = maker.finish(make(maker))
    dependencies = reordered(_dependencies(gm))

    schedule = planned(gm, dependencies).schedule
    assert work_order(schedule) == "first second"
    verify_schedule(gm, schedule)
    assert _numbers_are_right(gm, schedule, maker.inputs(0))

    dropped = [(before, after) for before, after, found in dependencies.edges(data="kind") if found == kind]
    dependencies.remove_edges_from(dropped)
    schedule = planned(gm, dependencies).schedule
    assert work_order(schedule) == "second first"
    assert not _numbers_are_right(gm, schedule, maker.inputs(0))
    with pytest.raises(PlanError, match="second runs before first"):
        verify_schedule(gm, schedule)


# -- no false alarms ----------------------------------------------------------------------------------------


@PROPERTY
@given(recipes(), st.integers(0, 1000), st.booleans())
def test_what_the_passes_decide_is_accepted(recipe: Recipe, shuffle: int, places: bool) -> None:
    """For any order of the nodes, so that schedules and live ranges of all sorts come up; with places for inputs."""
    gm = build(recipe).gm
    dependencies = build_dependency_graph(gm, analyse_storages(gm))
    order = list(dependencies.nodes)
    random.Random(shuffle).shuffle(order)
    where: Mapping[Node, tuple[torch.device, int]] = {
        node: (CPU, 256) for node in gm.graph.nodes if places and node.op == "placeholder"
    }
    for nodes in (None, list(dependencies.nodes), order):
        plan = planned(gm, reordered(dependencies, nodes))
        verify_schedule(gm, plan.schedule)
        verify_plan(plan, plan_program(SizedProgram(plan, {}, where)))
        verify_plan(plan, plan_program(SizedProgram(plan, {}, {}, frozen=False)))


def test_storages_of_no_bytes_may_lie_anywhere() -> None:
    maker = GraphMaker()
    x, nothing, out = maker.input("x"), maker.allocate((0, 4), name="nothing"), maker.allocate(name="out")
    maker.launch("mix", x, x, nothing)
    maker.launch("mix", x, x, out)
    plan = planned(maker.finish([out]))
    memory = plan_program(SizedProgram(plan, {}, {}))
    buffers = buffers_of(SizedProgram(plan, {}, {}))
    assert buffers == {"nothing": Buffer("nothing", 0, 0, 1), "out": Buffer("out", 64, 1, 3)}
    verify_plan(plan, memory)
    memory = plan_program(SizedProgram(plan, {}, {}, frozen=False))
    assert [region.size for region in memory.regions] == [0]
    verify_plan(plan, memory)


@pytest.mark.parametrize("operator", ["var_mean", "split_copy"])
def test_updates_of_two_pieces_of_a_result_may_change_places(operator: str) -> None:
    """
    ::

        var, mean = var_mean(x)                     [ both  second ]        no edge between first and second
        (first: update of var)      becomes
        second: update of mean                      ( first )
    """
    maker = GraphMaker()
    x = maker.input("x")
    if operator == "var_mean":
        both = maker.extern(aten.var_mean.correction, x, [1], name="both")
    else:
        both = maker.extern(aten.split_copy.Tensor, x, 2, name="both")
    pieces = [maker.getitem(both, index) for index in (0, 1)]
    maker.launch("host_update", x, pieces[0], name="first")
    maker.launch("update", x, pieces[1], name="second")
    gm = maker.finish(pieces)
    plan = planned(gm)
    assert work_order(plan.schedule) == "both second first"
    assert _numbers_are_right(gm, plan.schedule, maker.inputs(0))
    verify_schedule(gm, plan.schedule)


def test_a_view_of_a_size_that_data_decide_is_in_no_partition() -> None:
    """It is made where k3 reads it; its size n is what eager work reads out of data.

    ::

        ( n ) --> [ k0: s   k1: t   k2: b ] --> ( k3 reads v = view(b, n) )

        128 |    s  s  b  b           b may lie where s was.
         64 | h  h  t  t  out out
          0 +--------------------
              n  k0 k1 k2 k3 (after)
    """
    maker = GraphMaker()
    x, length = maker.input("x"), maker.input("length", (), torch.int64)
    h, s, t, b, out = (maker.allocate(name=name) for name in ("h", "s", "t", "b", "out"))
    maker.launch("host_mix", x, x, h, name="begin")
    n = maker.integer(length, name="n")
    maker.launch("mix", h, x, s, name="k0")
    maker.launch("mix", s, x, t, name="k1")
    maker.launch("mix", t, x, b, name="k2")
    v = maker.view(b, (n,), (1,), 0, name="v")
    maker.launch("mix", v, x, out, name="k3")
    gm = maker.finish([out])
    program = compile_host_graph(gm, compile_request(options=Options(eager_ops=ALWAYS_EAGER)))
    assert work_order(program.plan.schedule) == "begin n k0 k1 k2 k3"
    check_calls(gm, maker.inputs, program, [False, False, False, True])
    verify_plan(program.plan, plan_program(SizedProgram(program.plan, {}, {})))
    assert set(program.counters.eager) <= {"warm-up"}


# -- independence -------------------------------------------------------------------------------------------


def test_the_verifier_shares_nothing_with_what_it_checks() -> None:
    """A fault in a shared function would be made twice and found never."""
    folder = Path(verify.__file__).parent
    files = list(folder.glob("*.py"))
    nodes = _imports(files)
    outside = {node.module for node in nodes if node.level > 1}
    assert len(files) > 2 and outside == {
        "errors",
        "host_graph.control_flow",
        "host_graph.nodes",
        "host_graph.listing",
        "host_graph.storages",
        "plan",
    }
    assert not [node.module for node in nodes if not node.level and str(node.module).startswith("fxwrap")]
    checked = [path for name in ("analysis", "memory") for path in (folder.parent / name).glob("*.py")]
    vocabulary = _names_of_nodes(nodes), _names_of_nodes(_imports(checked))
    assert vocabulary[0] & vocabulary[1] == {"Kernel"}


def _imports(files: Iterable[Path]) -> list[ast.ImportFrom]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def _names_of_nodes(imports: Iterable[ast.ImportFrom]) -> set[str]:
    modules = "host_graph.nodes", "host_graph.control_flow"
    return {alias.name for node in imports if node.module in modules for alias in node.names}
