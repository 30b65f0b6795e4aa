"""Verdicts, and the cut into as few captured partitions as the dependencies allow.

The drawings show the host graph in program order on the left and the partitions on the right. Lower case letters
are launches and extern calls; [square brackets] hold a captured partition, (round ones) an eager one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import networkx as nx
import pytest
import torch
from hypothesis import assume, given
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
    compile_request,
    expected_of,
    nodes_of,
    picture,
    random_recipe,
    recipes,
    reordered,
    run_schedule,
    same,
)
from torch.fx import GraphModule, Node

from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.graphs.program import Program
from fxwrap.host_graph.nodes import is_work
from fxwrap.options import Options
from fxwrap.passes.analysis.aliasing import analyse_storages
from fxwrap.passes.analysis.dependencies import build_dependency_graph
from fxwrap.passes.memory.planner import plan_program
from fxwrap.passes.partition.capturability import judge
from fxwrap.passes.partition.cut import cut
from fxwrap.passes.verify import verify_schedule
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import InputFacts, NodeVerdict, Partition, SizedProgram, Verdict
from fxwrap.testing.simulated import SIMULATED

HOLD = [False, True, False, False, True, True, False]


def compiled(gm: GraphModule, eager_ops: Sequence[str] = ()) -> Program:
    request = compile_request(options=Options(eager_ops=(*ALWAYS_EAGER, *eager_ops)))
    return compile_host_graph(gm, request)


def check(maker: GraphMaker, outputs: Sequence[Node], expected: str, eager_ops: Sequence[str] = ()) -> Program:
    """Compile, compare the partitions with ``expected`` and the numbers with those of the graph itself."""
    gm = maker.finish(outputs)
    program = compiled(gm, eager_ops)
    assert picture(program.plan.partitions) == expected
    check_calls(gm, maker.inputs, program, HOLD)
    assert program.counters.replays
    return program


def mix(maker: GraphMaker, name: str, *sources: Node, host: bool = False) -> Node:
    """A new buffer that launch ``name`` fills from one or two others."""
    out = maker.allocate(name=f"{name}_out")
    maker.launch("host_mix" if host else "mix", sources[0], sources[-1], out, name=name)
    return out


# -- before and after ---------------------------------------------------------------------------------------


def test_independent_work_is_pulled_together() -> None:
    """
    ::

        x --> a                                 x --> [ a ]
        x --> (b)                  becomes            [ c ]      one captured partition instead of two
        x --> c                                 x --> ( b )
    """
    maker = GraphMaker()
    x = maker.input("x")
    a, b, c = mix(maker, "a", x), mix(maker, "b", x, host=True), mix(maker, "c", x)
    check(maker, [a, b, c], "captured[a c] eager[b]")


def test_a_chain_of_colours_is_cut_at_every_change() -> None:
    """
    ::

        x --> a --> (b) --> c --> (d)     becomes     [ a ] --> ( b ) --> [ c ] --> ( d )     nothing to gain
    """
    maker = GraphMaker()
    a = mix(maker, "a", maker.input("x"))
    b = mix(maker, "b", a, host=True)
    c = mix(maker, "c", b)
    d = mix(maker, "d", c, host=True)
    check(maker, [a, d], "captured[a] eager[b] captured[c] eager[d]")


def test_two_chains_share_their_partitions() -> None:
    """
    ::

        x --> a --> (b) --> c                         [ a ]     ( b )     [ c ]
                                     becomes          [ d ] --> ( e ) --> [ f ]
        x --> d --> (e) --> f                      two captured partitions instead of three
    """
    maker = GraphMaker()
    x = maker.input("x")
    outputs = []
    for one, two, three in ("abc", "def"):
        outputs.append(mix(maker, three, mix(maker, two, mix(maker, one, x), host=True)))
    check(maker, outputs, "captured[a d] eager[b e] captured[c f]")


def test_the_better_colour_begins() -> None:
    """
    ::

        x --> c
                             becomes      ( a ) --> [ c b ]       beginning with c, which is ready, too,
        x --> (a) --> b                                           would give [ c ] ( a ) [ b ]
    """
    maker = GraphMaker()
    x = maker.input("x")
    c = mix(maker, "c", x)
    b = mix(maker, "b", mix(maker, "a", x, host=True))
    check(maker, [b, c], "eager[a] captured[c b]")


def test_of_two_best_cuts_the_one_with_fewer_partitions_is_taken() -> None:
    """
    ::

        x --> a --> (b)      becomes      [ a ] --> ( b c )       beginning with c would give ( c ) [ a ] ( b )
        x --> (c)
    """
    maker = GraphMaker()
    x = maker.input("x")
    b = mix(maker, "b", mix(maker, "a", x), host=True)
    c = mix(maker, "c", x, host=True)
    check(maker, [b, c], "captured[a] eager[b c]")


def test_an_update_of_what_was_read_before_stays_behind_the_read() -> None:
    """
    ::

        x --> a                                    [ a ] --> ( u ) --> [ c ]
        x <-- (u)            stays                   c reads what u wrote over what a read:
        x --> c                                      no edge of data, and still no way around
    """
    maker = GraphMaker()
    x, y = maker.input("x"), maker.input("y")
    a = mix(maker, "a", x)
    maker.launch("host_update", y, x, name="u")
    c = mix(maker, "c", x)
    check(maker, [a, c], "captured[a] eager[u] captured[c]")


def test_views_and_memory_belong_to_no_partition() -> None:
    """
    ::

        x --> a --> view --> (b)                      [ a ]
              |                         becomes       [ c ] --> ( b )
              +---> view --> c
    """
    maker = GraphMaker()
    a = mix(maker, "a", maker.input("x"))
    b = mix(maker, "b", maker.view(a, (8,), (1,), 8), host=True)
    c = mix(maker, "c", maker.view(a, (4, 4), (1, 4)))
    program = check(maker, [b, c], "captured[a c] eager[b]")
    assert {node.name for node in program.plan.schedule} == {"a", "b", "c"}


def test_random_draws_are_not_exchanged() -> None:
    """
    ::

        r = rand                              [ r ] --> ( n ) --> [ s ]
        (n = randn)            stays          nothing flows from one to the next; but drawn as [ r s ] ( n ),
        s = rand                              s would get the numbers that belong to n
    """
    maker = GraphMaker()
    draw = {"dtype": torch.float32, "device": CPU}
    r = maker.extern(aten.rand.default, [4, 4], name="r", **draw)
    n = maker.extern(aten.randn.default, [4, 4], name="n", **draw)
    s = maker.extern(aten.rand.default, [4, 4], name="s", **draw)
    check(maker, [r, n, s], "captured[r] eager[n] captured[s]", ["aten::randn"])


def test_what_depends_on_data_runs_with_its_arithmetic() -> None:
    """
    ::

        x --> n (a number) --> twice --> s               ( n twice s )     the number is read on the host,
                                            becomes                        so is all that is made of it
        x --> a                                          [ a ]
    """
    maker = GraphMaker()
    x = maker.input("x")
    number = maker.number(maker.view(x, (), ()), name="n")
    twice = maker.extern(lambda value: value * 2.0, number, name="twice")
    out = maker.allocate()
    maker.launch("scale", x, twice, out, name="s")
    a = mix(maker, "a", x)
    program = check(maker, [out, a], "captured[a] eager[n twice s]")
    reasons = {name: verdict.reason for name, verdict in program.plan.verdicts.items()}
    assert reasons["n"] == "reads a number out of a tensor on the host"
    assert reasons["s"].startswith("works on twice, ")


def test_program_order_is_kept_inside_a_partition() -> None:
    maker = GraphMaker()
    x = maker.input("x")
    outputs = [mix(maker, name, x, host=name in "bd") for name in "abcde"]
    check(maker, outputs, "captured[a c e] eager[b d]")


def test_graphs_of_one_colour_or_of_none() -> None:
    maker = GraphMaker()
    x = maker.input("x")
    check(maker, [mix(maker, "b", mix(maker, "a", x))], "captured[a b]")
    maker = GraphMaker()
    x = maker.input("x")
    check(maker, [mix(maker, "b", mix(maker, "a", x, host=True), host=True)], "eager[a b]")
    maker = GraphMaker()
    x = maker.input("x")
    check(maker, [maker.view(x, (16,), (1,))], "")


def test_an_eager_partition_says_why_and_a_captured_one_what_it_holds() -> None:
    maker = GraphMaker()
    x = maker.input("x")
    a = mix(maker, "a", x)
    s = maker.extern(aten.sin.default, a, name="s")
    b = mix(maker, "b", s, host=True)
    captured, eager = check(maker, [b], "captured[a s] eager[b]").plan.partitions
    assert (captured.launches, captured.externs, captured.reason) == (1, 1, "")
    assert (eager.launches, eager.externs, eager.reason) == (1, 0, "host_mix: listed in eager_ops")


# -- verdicts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["aten::mm", "aten.mm", "aten::mm.out", "aten.mm.out"])
def test_an_operator_can_be_listed_in_any_usual_spelling(spelling: str) -> None:
    maker = GraphMaker()
    x, out = maker.input("x"), maker.allocate()
    maker.extern(aten.mm.out, x, x, out=out, name="product")
    gm = maker.finish([out])
    verdict = judge(gm, (spelling,))["product"]
    assert (verdict.verdict, verdict.reason) == (Verdict.EAGER, "listed in eager_ops")


@pytest.mark.parametrize("spelling", ["aten::addmm", "mm", "aten::mm.default_out"])
def test_listing_another_operator_changes_nothing(spelling: str) -> None:
    maker = GraphMaker()
    x, out = maker.input("x"), maker.allocate()
    maker.extern(aten.mm.out, x, x, out=out, name="product")
    gm = maker.finish([out])
    assert judge(gm, (spelling,))["product"].verdict is Verdict.CAPTURED


@PROPERTY
@given(recipes())
def test_every_node_has_a_verdict_and_every_eager_one_a_reason(recipe: Recipe) -> None:
    graph = build(recipe)
    verdicts = judge(graph.gm, graph.options.eager_ops)
    assert verdicts.keys() == by_name(graph.gm).keys()
    assert all(verdict.reason for verdict in verdicts.values() if verdict.verdict is Verdict.EAGER)


# -- the number of captured partitions ----------------------------------------------------------------------


def colour(node: Node, verdicts: dict[str, NodeVerdict]) -> Verdict | None:
    """None for what belongs to no partition."""
    if verdicts[node.name].verdict is Verdict.EAGER or is_work(node):
        return verdicts[node.name].verdict
    return None


def lower_bound(dependencies: nx.DiGraph, verdicts: dict[str, NodeVerdict]) -> int:
    """The fewest captured partitions that any order allows.

    Walk along any path of the graph: each time captured work follows eager work, or is the first, another captured
    partition must have begun. So no order needs fewer than the largest number of such beginnings on one path. (And
    one with that many exists: put captured work into the partition of that number, eager work behind it.)

    ``most[node]`` holds that number for the paths that end at a node, by the last colour on the path.
    """
    most: dict[Node, dict[Verdict | None, int]] = {}
    for node in nx.topological_sort(dependencies):
        arriving: dict[Verdict | None, int] = {None: 0}
        for before in dependencies.predecessors(node):
            for last, count in most[before].items():
                arriving[last] = max(count, arriving.get(last, 0))
        own = colour(node, verdicts)
        if own is not None:
            begins = {last: own is Verdict.CAPTURED and last is not Verdict.CAPTURED for last in arriving}
            arriving = {own: max(count + begins[last] for last, count in arriving.items())}
        most[node] = arriving
    return max((count for counts in most.values() for count in counts.values()), default=0)


def best_by_search(dependencies: nx.DiGraph, verdicts: dict[str, NodeVerdict]) -> tuple[int, int]:
    """The fewest captured partitions, and the fewest partitions with that, found by trying every order."""
    nodes = [node for node in dependencies if colour(node, verdicts) is not None]
    before = [sum(1 << nodes.index(a) for a in nx.ancestors(dependencies, node) if a in nodes) for node in nodes]
    # What has run (a set of bits) and the colour that ran last -> (captured, all) partitions so far.
    best: dict[tuple[int, Verdict | None], tuple[int, int]] = {(0, None): (0, 0)}
    for done in range(1 << len(nodes)):
        for last in (None, *Verdict):
            if (done, last) not in best:
                continue
            captured, total = best[done, last]
            for i, node in enumerate(nodes):
                if done >> i & 1 or before[i] & ~done:
                    continue
                own = colour(node, verdicts)
                new = own is not last
                reached = (captured + (new and own is Verdict.CAPTURED), total + new)
                key = (done | 1 << i, own)
                best[key] = min(reached, best.get(key, reached))
    everything = (1 << len(nodes)) - 1
    return min(cost for (done, _), cost in best.items() if done == everything)


def captured_in(partitions: Sequence[Partition]) -> int:
    return sum(partition.verdict is Verdict.CAPTURED for partition in partitions)


@PROPERTY
@given(recipes(), st.integers(0, 1000))
def test_the_cut_reaches_the_lower_bound(recipe: Recipe, shuffle: int) -> None:
    """For every order of the nodes, because the cut breaks ties by it."""
    graph = build(recipe)
    dependencies = build_dependency_graph(graph.gm, analyse_storages(graph.gm))
    verdicts = judge(graph.gm, graph.options.eager_ops)
    shuffled = list(dependencies.nodes)
    random.Random(shuffle).shuffle(shuffled)
    for order in (list(dependencies.nodes), shuffled):
        partitions = cut(reordered(dependencies, order), verdicts, CPU).partitions
        assert captured_in(partitions) == lower_bound(dependencies, verdicts)
        assert sorted(name for p in partitions for name in p.nodes) == sorted(
            node.name for node in dependencies if colour(node, verdicts) is not None
        )
        assert all(verdicts[name].verdict is p.verdict for p in partitions for name in p.nodes)
        assert all(one.verdict is not two.verdict for one, two in itertools.pairwise(partitions))
        verify_schedule(graph.gm, nodes_of(graph.gm, partitions))


@PROPERTY
@given(recipes(most_steps=6))
def test_no_order_at_all_is_better(recipe: Recipe) -> None:
    """The bound above, and the number of all partitions, against a search through every order of small graphs."""
    graph = build(recipe)
    dependencies = build_dependency_graph(graph.gm, analyse_storages(graph.gm))
    verdicts = judge(graph.gm, graph.options.eager_ops)
    assume(sum(colour(node, verdicts) is not None for node in dependencies) <= 10)
    partitions = cut(dependencies, verdicts, CPU).partitions
    assert best_by_search(dependencies, verdicts) == (captured_in(partitions), len(partitions))
    assert lower_bound(dependencies, verdicts) == captured_in(partitions)


# pytest -m sweep tests/passes/partition/test_cut_random.py
@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.sweep)])
def test_random_graphs_of_all_sizes(count: int) -> None:
    """Minimal, in an order that the checker accepts, and with the graph's own numbers; 2 to 200 nodes."""
    sizes = []
    for seed in range(count):
        draw = random.Random(seed)
        graph = build(random_recipe(draw, draw.choice([1, 4, 14, 40, 70])))
        dependencies = build_dependency_graph(graph.gm, analyse_storages(graph.gm))
        verdicts = judge(graph.gm, graph.options.eager_ops)
        found = cut(dependencies, verdicts, CPU)
        assert found.captured == found.fewest == lower_bound(dependencies, verdicts)
        schedule = nodes_of(graph.gm, found.partitions)
        verify_schedule(graph.gm, schedule)
        inputs = graph.inputs(seed)
        expected = expected_of(graph.gm, inputs, seed)
        torch.manual_seed(seed)
        assert same([*run_schedule(graph.gm, schedule, inputs), *inputs], expected)
        sizes.append(sum(node.op == "call_function" for node in graph.gm.graph.nodes))
    assert min(sizes) <= 3 and max(sizes) >= 100


# -- the numbers --------------------------------------------------------------------------------------------


@PROPERTY
@given(recipes(), st.lists(st.booleans(), min_size=3, max_size=6))
def test_programs_compute_what_their_graphs_compute(recipe: Recipe, hold: list[bool]) -> None:
    """On every call: the warm-up, the recording and replays; updates of inputs; outputs that the caller keeps."""
    graph = build(recipe)
    program = compile_host_graph(graph.gm, compile_request(graph.options))
    check_calls(graph.gm, graph.inputs, program, hold)
    assert set(program.counters.eager) <= {"warm-up"}, "what was planned must be recorded"


@PROPERTY
@given(recipes(), st.lists(st.booleans(), min_size=3, max_size=6))
def test_programs_compute_the_same_with_frozen_addresses(recipe: Recipe, hold: list[bool]) -> None:
    """As on hardware: inputs are copied to places in the arena, and captured work sees no other address."""
    graph = build(recipe)
    with using_runtime(SIMULATED):
        program = compile_host_graph(graph.gm, compile_request(graph.options))
        check_calls(graph.gm, graph.inputs, program, hold)
    assert set(program.counters.eager) <= {"warm-up"}


@PROPERTY
@given(recipes(), st.sets(st.integers(0, 2), min_size=1), st.lists(st.booleans(), min_size=3, max_size=5))
def test_inputs_that_stay_in_place_are_bound(recipe: Recipe, static: set[int], hold: list[bool]) -> None:
    """Static inputs have the same address and new contents on every call; in the end they move after all."""
    graph = build(recipe)
    request = compile_request(graph.options, InputFacts(static=frozenset(static)))
    program = compile_host_graph(graph.gm, request)
    check_calls(graph.gm, graph.inputs, program, hold, sorted(static))
    (specialization,) = program.specializations.values()
    assert specialization.recordings
    assert all(set(recording.request.static_inputs) == static for recording in specialization.recordings)
    check_calls(graph.gm, graph.inputs, program, hold)


@pytest.mark.parametrize("operator", ["in place", "out", "view"])
def test_an_output_that_an_operator_returns_is_not_written_over(operator: str) -> None:
    """
    ::

        x --> a --> add_(a, x) --> output        the output's memory is a's
    """
    maker = GraphMaker()
    x = maker.input("x")
    a = mix(maker, "a", x)
    if operator == "in place":
        result = maker.extern(aten.add_.Tensor, a, x)
    elif operator == "out":
        result = maker.extern(aten.mm.out, x, x, out=a)
    else:
        result = maker.extern(aten.alias.default, a)
    gm = maker.finish([result])
    check_calls(gm, maker.inputs, compiled(gm), [True] * 5)


@pytest.mark.parametrize(
    "where",
    [
        "captured to output",
        "eager to captured",
        "captured to eager",
    ],
)
def test_pieces_of_an_operators_result_cross_partitions_with_frozen_addresses(where: str) -> None:
    """
    ::

        [ var, mean = var_mean(x) ] --> output          on the first replay there is no tuple to take var from
        ( var, mean = var_mean(x) ) --> [ a(var) ]      replays see the var of the recorded call
    """
    maker = GraphMaker()
    x = maker.input("x")
    both = maker.extern(aten.var_mean.correction, x, [1])
    var = maker.getitem(both, 0)
    outputs = [var] if where == "captured to output" else [mix(maker, "a", var, host=where == "captured to eager")]
    gm = maker.finish(outputs)
    with using_runtime(SIMULATED):
        program = compiled(gm, ["aten::var_mean"] if where == "eager to captured" else [])
        check_calls(gm, maker.inputs, program, HOLD)


def test_an_in_place_result_stays_a_view_with_frozen_addresses() -> None:
    """
    ::

        ( s = sin(x) )  ( t = add_(s, y) ) --> [ t <- update(t) ] --> output s        t is s
    """
    maker = GraphMaker()
    x, y = maker.input("x"), maker.input("y")
    s = maker.extern(aten.sin.default, x, name="s")
    t = maker.extern(aten.add_.Tensor, s, y, name="t")
    maker.launch("update", x, t)
    gm = maker.finish([s])
    with using_runtime(SIMULATED):
        check_calls(gm, maker.inputs, compiled(gm, ["aten::sin", "aten::add_"]), HOLD)


def test_random_graphs_are_worth_the_trouble() -> None:
    """The properties above say little if the graphs are all alike: many are cut, reuse memory, update inputs."""
    draw = random.Random(0)
    cuts = reuses = updates = 0
    for _ in range(60):
        graph = build(random_recipe(draw))
        plan = compile_host_graph(graph.gm, compile_request(graph.options)).plan
        memory = plan_program(SizedProgram(plan, {}, {}))
        written = [plan.maker(index) for indices in plan.facts.written.values() for index in indices]
        cuts += len(plan.partitions) >= 3
        reuses += memory.size < memory.plain
        updates += any(node.op == "placeholder" for node in written)
    assert min(cuts, reuses, updates) >= 15, (cuts, reuses, updates)
