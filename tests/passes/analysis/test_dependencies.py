"""The dependency graph: one rule per kind of edge, what counts as the same memory, and that nothing is missing."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from random_graphs import (
    CPU,
    PROPERTY,
    GraphMaker,
    Recipe,
    aten,
    build,
    expected_of,
    halve,
    overlapped,
    recipes,
    reordered,
    run_schedule,
    same,
)
from torch.fx import GraphModule

from fxwrap.errors import PlanError
from fxwrap.host_graph.nodes import communicates, is_work, require
from fxwrap.host_graph.storages import StorageFacts
from fxwrap.passes.analysis.aliasing import analyse_storages
from fxwrap.passes.analysis.dependencies import build_dependency_graph
from fxwrap.passes.verify import verify_schedule


def dependencies_of(gm: GraphModule) -> nx.DiGraph:
    return build_dependency_graph(gm, analyse_storages(gm))


def edges_between_work(gm: GraphModule, facts: StorageFacts | None = None) -> dict[tuple[str, str], str]:
    """``{(before, after): kind}`` for edges that join two launches or extern calls."""
    graph = build_dependency_graph(gm, facts or analyse_storages(gm))
    return {
        (before.name, after.name): kind
        for before, after, kind in graph.edges(data="kind")
        if is_work(before) and is_work(after)
    }


# -- one test per rule --------------------------------------------------------------------------------------
# In the drawings time goes to the right, and an arrow says "must run before".


def test_data_a_node_runs_after_the_node_whose_value_it_uses() -> None:
    """
    ::

        x --> s = sin(x) --data--> t = sin(s)
    """
    maker = GraphMaker()
    s = maker.extern(aten.sin.default, maker.input("x"), name="s")
    t = maker.extern(aten.sin.default, s, name="t")
    assert edges_between_work(maker.finish([t])) == {("s", "t"): "data"}


def test_raw_a_read_stays_after_the_write_before_it() -> None:
    """
    ::

        write: b <- f(x) --raw--> read: c <- f(b)         neither uses the other's value, both use b
    """
    maker = GraphMaker()
    x, b = maker.input("x"), maker.allocate(name="b")
    maker.launch("mix", x, x, b, name="write")
    c = maker.allocate()
    maker.launch("mix", b, b, c, name="read")
    assert edges_between_work(maker.finish([c])) == {("write", "read"): "raw"}


def test_war_a_write_stays_after_the_reads_before_it() -> None:
    """
    ::

        read:  b <- f(x) --war--+
                                +--> write: x <- g(x, y)
        again: c <- f(x) --war--+
    """
    maker = GraphMaker()
    x, y = maker.input("x"), maker.input("y")
    b, c = maker.allocate(), maker.allocate()
    maker.launch("mix", x, x, b, name="read")
    maker.launch("mix", x, x, c, name="again")
    maker.launch("update", y, x, name="write")
    # Two reads have no order among themselves.
    assert edges_between_work(maker.finish([b, c])) == {("read", "write"): "war", ("again", "write"): "war"}


def test_waw_writes_of_one_storage_stay_in_order() -> None:
    """
    ::

        first: b <- f(x) --waw--> second: b <- f(y)

    A kernel may read what it writes, and its signature does not say whether it does. So the facts count a written
    argument as read, and the edge carries the stronger name, ``raw``. Facts that know better give ``waw``.
    """
    maker = GraphMaker()
    x, y, b = maker.input("x"), maker.input("y"), maker.allocate(name="b")
    maker.launch("mix", x, x, b, name="first")
    maker.launch("mix", y, y, b, name="second")
    gm = maker.finish([b])
    facts = analyse_storages(gm)
    assert edges_between_work(gm, facts) == {("first", "second"): "raw"}
    only_written = replace(facts, read={name: facts.read[name] - facts.written[name] for name in facts.read})
    assert edges_between_work(gm, only_written) == {("first", "second"): "waw"}


def test_inputs_count_as_one_storage_where_one_is_written() -> None:
    """
    ::

        read: b <- f(y) --war--> write: x <- g(y, x) --raw--> again: c <- f(y)        at a call, x and y may overlap

    They cannot on two devices, and two that are read need no order.
    """
    maker = GraphMaker()
    x, y = maker.input("x"), maker.input("y")
    b, c = maker.allocate(), maker.allocate()
    maker.launch("mix", y, y, b, name="read")
    maker.launch("update", b, x, name="write")
    maker.launch("mix", y, y, c, name="again")
    edges = edges_between_work(gm := maker.finish([b, c]))
    assert edges == {("read", "write"): "raw", ("write", "again"): "raw"}  # ``write`` reads b, too
    schedule = [node for node in gm.graph.nodes if is_work(node)]
    verify_schedule(gm, schedule)
    with pytest.raises(PlanError, match="again runs before write") as told:
        verify_schedule(gm, [schedule[0], schedule[2], schedule[1]])
    assert "where another may lie" in str(told.value)


def test_order_random_numbers_are_drawn_in_program_order() -> None:
    """
    ::

        rand --order--> rand --order--> rand          no data, no memory in common
    """
    maker = GraphMaker()
    drawn = [maker.extern(aten.rand.default, [4], dtype=torch.float32, device=CPU, name=f"r{i}") for i in range(3)]
    assert edges_between_work(maker.finish(drawn)) == {("r0", "r1"): "order", ("r1", "r2"): "order"}


def test_order_effects_happen_in_program_order() -> None:
    """Functions without a schema may print, communicate or count: they keep their order, whatever they work on."""
    maker = GraphMaker()
    first = maker.extern(halve, maker.allocate(), name="first")
    second = maker.extern(halve, maker.allocate(), name="second")
    assert edges_between_work(maker.finish([first, second])) == {("first", "second"): "order"}


def test_an_edge_carries_the_first_rule_that_asks_for_it() -> None:
    maker = GraphMaker()
    s = maker.extern(aten.sin.default, maker.input("x"), name="s")
    maker.extern(aten.add_.Tensor, s, maker.input("y"), name="t")
    # t uses the value of s, and writes to memory that s made.
    assert edges_between_work(maker.finish([s])) == {("s", "t"): "data"}


def test_check_a_node_runs_after_the_asserts_on_what_it_uses() -> None:
    """
    ::

        a, b = sizes of data --> require(a == b) --check--> launch over a rows of memory
                                                            (it uses a alone, and runs over b rows)
    """
    maker = GraphMaker()
    x = maker.input("x")
    a, b = maker.integer(x, name="a"), maker.integer(x, name="b")
    equal = maker.extern(operator.eq, a, b, name="equal")
    promise = maker.graph.call_function(require, (equal, "a == b"))
    out = maker.extern(torch.empty_strided, (a,), (1,), dtype=torch.float32, device=CPU, name="out")
    write = maker.launch("mix", x, x, out, name="write")
    graph = dependencies_of(maker.finish([out]))
    assert graph.edges[promise, write]["kind"] == "check"
    assert not graph.has_edge(write, promise)


# -- what counts as the same memory -------------------------------------------------------------------------


def _whole(maker: GraphMaker, base: Any) -> Any:
    return base


def _transposed(maker: GraphMaker, base: Any) -> Any:
    return maker.view(base, (4, 4), (1, 4))


def _view_of_view(maker: GraphMaker, base: Any) -> Any:
    return maker.view(maker.view(base, (8,), (1,), 8), (2,), (1,), 1)


def _mutated(maker: GraphMaker, base: Any) -> Any:
    return maker.extern(aten.add_.Tensor, base, maker.constant("one", torch.ones(4, 4)), name="add")


def _undeclared(maker: GraphMaker, base: Any) -> Any:
    return maker.extern(halve, base, name="halve")


@pytest.mark.parametrize("values", [True, False], ids=["fake values", "no fake values"])
@pytest.mark.parametrize("alias", [_whole, _transposed, _view_of_view, _mutated, _undeclared])
def test_memory_is_followed_through_views_and_in_place_results(alias: Callable[..., Any], values: bool) -> None:
    """
    ::

        b --view--> v        write to v  --raw-->  read of b
    """
    maker = GraphMaker(values)
    x, b = maker.input("x"), maker.input("b")
    v = alias(maker, b)
    maker.launch("update", x, v, name="write")
    c = maker.allocate()
    maker.launch("mix", b, b, c, name="read")
    assert edges_between_work(maker.finish([c]))["write", "read"] == "raw"


@pytest.mark.parametrize("values", [True, False], ids=["fake values", "no fake values"])
def test_memory_is_followed_through_a_list_of_views(values: bool) -> None:
    """
    ::

        b --split--> [upper, lower]        write to lower  --raw-->  read of b
    """
    maker = GraphMaker(values)
    x, b = maker.input("x"), maker.input("b")
    halves = maker.extern(aten.split.Tensor, b, 2)
    maker.launch("update", x, maker.getitem(halves, 1), name="write")
    c = maker.allocate()
    maker.launch("mix", b, b, c, name="read")
    assert edges_between_work(maker.finish([c])).get(("write", "read")) == "raw"


def test_two_nodes_that_read_one_attribute_are_one_memory() -> None:
    """
    ::

        table ---------> read:  c <- f(table) --war--> write: again <- g(x)
        table again ------------------------------------------^
    """
    maker = GraphMaker()
    x, table = maker.input("x"), maker.constant("table", torch.zeros(4, 4))
    c = maker.allocate()
    maker.launch("mix", table, table, c, name="read")
    again = maker.graph.get_attr("table")
    maker.extern(aten.copy_.default, again, x, name="write")
    assert edges_between_work(maker.finish([c])).get(("read", "write")) == "war"


@pytest.mark.parametrize("values", [True, False], ids=["fake values", "no fake values"])
def test_results_of_one_operator_are_memory_of_their_own(values: bool) -> None:
    """
    ::

        var, mean = var_mean(x)        update of var  ...  update of mean: in any order
    """
    maker = GraphMaker(values)
    x = maker.input("x")
    both = maker.extern(aten.var_mean.correction, x, [1], name="both")
    var, mean = maker.getitem(both, 0), maker.getitem(both, 1)
    maker.launch("update", x, var, name="one")
    maker.launch("update", x, mean, name="other")
    # Between the operator and the launches stand the two getitems, which are no work.
    assert edges_between_work(maker.finish([var, mean])) == {}


def test_what_an_operator_writes_is_read_off_its_schema() -> None:
    """``out=`` and ``self`` of an in-place operator are written, other operands are read."""
    maker = GraphMaker()
    x, y, z = (maker.input(name) for name in "xyz")
    out = maker.allocate(name="out")
    maker.extern(aten.mm.out, x, y, out=out, name="mm")
    maker.extern(aten.copy_.default, z, out, name="copy")
    gm = maker.finish([z])
    facts = analyse_storages(gm)
    assert facts.written["mm"] == facts.values["out"]
    assert facts.written["copy"] == facts.values["z"]
    assert facts.values["mm"] == facts.values["out"], "the result of an out= operator is that memory"
    assert edges_between_work(gm) == {("mm", "copy"): "raw"}


@pytest.mark.parametrize("target", [torch.rand, torch.ops.aten.rand], ids=["function", "packet"])
def test_whoever_may_draw_random_numbers_keeps_its_turn(target: Callable[..., Any]) -> None:
    """
    ::

        rand (operator) --order--> torch.rand (nothing declared)
    """
    maker = GraphMaker(values=False)
    first = maker.extern(aten.rand.default, [4], dtype=torch.float32, device=CPU, name="declared")
    second = maker.extern(target, [4], name="undeclared")
    assert edges_between_work(maker.finish([first, second])) == {("declared", "undeclared"): "order"}


# -- nothing is missing -------------------------------------------------------------------------------------


@PROPERTY
@given(recipes(), st.integers(0, 1000))
def test_every_topological_order_computes_the_same(recipe: Recipe, shuffle: int) -> None:
    """The promise of ``build_dependency_graph``: what no edge forbids, changes no number."""
    graph = build(recipe)
    dependencies = dependencies_of(graph.gm)
    draw = random.Random(shuffle)
    orders = [
        # At random, and as far from program order as the edges allow.
        list(nx.lexicographical_topological_sort(dependencies, key=lambda node: draw.random())),
        list(nx.topological_sort(reordered(dependencies))),
    ]
    for order in orders:
        schedule = [node for node in order if is_work(node)]
        inputs = graph.inputs(shuffle)
        expected = expected_of(graph.gm, inputs, shuffle)
        torch.manual_seed(shuffle)
        outputs = run_schedule(graph.gm, schedule, inputs)
        assert same([*outputs, *inputs], expected)


@PROPERTY
@given(recipes(), st.integers(0, 1000))
def test_every_order_computes_the_same_where_inputs_overlap(recipe: Recipe, shuffle: int) -> None:
    """Any two inputs may lie in the same bytes at a call; what is computed then is what program order computes."""
    graph = build(recipe)
    gm, inputs, twins = graph.gm, overlapped(graph.inputs(shuffle)), overlapped(graph.inputs(shuffle))
    # What a communication reads while others write is anybody's guess.
    assume(not any(communicates(node) for node in gm.graph.nodes))
    torch.manual_seed(shuffle)
    try:
        expected = run_schedule(gm, [node for node in gm.graph.nodes if is_work(node)], twins)
    except RuntimeError as error:
        assume("single memory location" not in str(error))
        raise
    schedule = [node for node in nx.topological_sort(reordered(dependencies_of(gm))) if is_work(node)]
    verify_schedule(gm, schedule)
    torch.manual_seed(shuffle)
    outputs = run_schedule(gm, schedule, inputs)
    assert same([*outputs, *inputs], [*expected, *twins])


@PROPERTY
@given(recipes())
def test_program_order_is_one_of_the_orders(recipe: Recipe) -> None:
    gm = build(recipe).gm
    position = {node: step for step, node in enumerate(gm.graph.nodes)}
    dependencies = dependencies_of(gm)
    assert set(dependencies.nodes) == set(position)
    assert all(position[before] < position[after] for before, after in dependencies.edges)
    assert {kind for _, _, kind in dependencies.edges(data="kind")} <= {"data", "raw", "waw", "war", "order"}
