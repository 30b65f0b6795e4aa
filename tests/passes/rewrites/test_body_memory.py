"""Branches and loops get memory for what they allocate.

::

    body (i, x):                         memory, a, b allocated                              bytes of memory
        t = allocate; to_t (x, t)        loop (i, x)                                         to_t   | |t|
        u = allocate; to_u (t, u)          temporaries: t at 64, u at 0, v at 64             to_u   |u|t|
        v = allocate; to_v (u, v)          results: y in a and b in turn                     to_v   |u|v|
        y = allocate; to_y (v, y)                                                            to_y   | |v|
        return i + 1, y
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from random_graphs import GraphMaker, halve, same
from torch.fx import GraphModule, Node

from fxwrap.errors import PlanError
from fxwrap.graphs.record.flat import flat_subgraph
from fxwrap.host_graph.control_flow import switch, while_loop
from fxwrap.host_graph.nodes import by_name, output_node, output_values
from fxwrap.passes.rewrites.body_memory import place_bodies
from fxwrap.passes.verify import verify_bodies

aten = torch.ops.aten
# Bytes of a buffer of 4 by 4 floats.
_ONE = 64
Body = Callable[[GraphMaker, Sequence[Node]], Sequence[Node]]


def subgraph(body: Body, inputs: Sequence[str]) -> GraphModule:
    maker = GraphMaker()
    given = [
        maker.input(name, () if name in "in" else (4, 4), torch.int64 if name in "in" else torch.float32)
        for name in inputs
    ]
    return maker.finish(body(maker, given))


def step(maker: GraphMaker, source: Node, name: str, kernel: str = "mix", size: Sequence[int] = (4, 4)) -> Node:
    buffer = maker.allocate(size, name=name)
    maker.launch(kernel, source, source, buffer, name=f"to_{name}")
    return buffer


def chain(maker: GraphMaker, source: Node, names: str) -> Node:
    for name in names:
        source = step(maker, source, name)
    return source


def less(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    return [maker.extern(aten.lt.Tensor, given[0], given[-1])]


def loop(body: Body, carried: int = 2, stacked: bool = False) -> tuple[GraphModule, GraphMaker]:
    """``i, x, ... = while_loop(i < n, body, (i, x, ...), (n,))``"""
    names = ["i", "x", "w", "z"][:carried]
    maker = GraphMaker()
    given = [
        maker.input(name, () if name == "i" else (4, 4), torch.int64 if name == "i" else torch.float32)
        for name in names
    ]
    limit = maker.input("n", (), torch.int64)
    subgraphs = {"condition": subgraph(less, [*names, "n"]), "body": subgraph(body, [*names, "n"])}
    node = _call(
        maker,
        while_loop,
        subgraphs,
        lambda handles: (*handles, tuple(given), (limit,), *((True,) if stacked else ())),
    )
    node.meta["val"] = [
        torch.empty((3,) * stacked + tuple(one.meta["val"].size()), dtype=one.meta["val"].dtype) for one in given
    ]
    return maker.finish([maker.getitem(node, position) for position in range(carried)]), maker


def branch(*bodies: Body) -> tuple[GraphModule, GraphMaker]:
    """``(y,) = switch(p, (x,), ...)``"""
    maker = GraphMaker()
    x, p = maker.input("x"), maker.input("p", (), torch.int64)
    subgraphs = {f"branch_{n}": subgraph(body, ["x"]) for n, body in enumerate(bodies)}
    node = _call(maker, switch, subgraphs, lambda handles: (p, (x,), *handles))
    node.meta["val"] = [torch.empty(4, 4)]
    return maker.finish([maker.getitem(node, 0)]), maker


def _call(
    maker: GraphMaker, function: Any, subgraphs: dict[str, GraphModule], args: Callable[[list[Node]], Any]
) -> Node:
    handles = []
    for name, gm in subgraphs.items():
        setattr(maker._root, name, gm)
        handles.append(maker.graph.create_node("get_attr", name))
    return maker.graph.create_node("call_function", function, args(handles), name="flow")


def run(gm: Callable[..., Any], maker: GraphMaker, number: int) -> list[torch.Tensor]:
    """The results, and what the inputs hold afterwards."""
    inputs = maker.inputs(1)
    for given in inputs:
        if given.dtype is torch.int64:
            given.fill_(0)
    inputs[-1].fill_(number)
    return [*gm(*inputs), *inputs]


def assert_given(made: Callable[[], tuple[GraphModule, GraphMaker]]) -> GraphModule:
    """The graph computes the same as before, as a graph and as steps, and the verifier finds so, too."""
    before, maker = made()
    gm, _ = made()
    place_bodies(gm, alternates=True)
    gm.graph.lint()
    verify_bodies(gm)
    for number in range(6 if "n" in by_name(gm) else 2):
        expected = run(before, maker, number)
        assert same(run(gm, maker, number), expected), number
        assert same(run(flat_subgraph(gm), maker, number), expected), number
    return gm


def temporaries(gm: GraphModule, number: int) -> dict[str, int]:
    """The bytes at which those of a subgraph begin."""
    views: Any = by_name(gm)["flow"].kwargs["temporaries"]
    return {name: view.args[3] * view.meta["val"].itemsize for name, view in views[number].items()}


def places(gm: GraphModule) -> list[list[str]]:
    """Where the results lie."""
    several: Any = by_name(gm)["flow"].kwargs.get("results", ())
    return [[place.name for place in one] for one in several]


def counted(maker: GraphMaker, i: Node) -> Node:
    return maker.extern(aten.add.Tensor, i, 1)


def four(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    return [counted(maker, given[0]), chain(maker, given[1], "tuvy")]


def test_the_drawing() -> None:
    gm = assert_given(lambda: loop(four))
    assert temporaries(gm, 1) == {"t": _ONE, "u": 0, "v": _ONE} and temporaries(gm, 0) == {}
    assert by_name(gm)["flow_memory"].args[0] == (2 * _ONE,)
    assert places(gm) == [[], ["flow_place_1_a", "flow_place_1_b"]]
    body, before = (one.get_submodule("body") for one in (gm, loop(four)[0]))
    assert str(body.graph) == str(before.graph)


def test_branches_lie_over_each_other_and_write_to_one_place() -> None:
    """The larger one counts."""

    def large(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
        return [step(maker, step(maker, step(maker, given[0], "t", size=(32, 4)), "u"), "y")]

    def small(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
        return [chain(maker, given[0], "ty")]

    gm = assert_given(lambda: branch(large, small))
    assert [temporaries(gm, number) for number in (0, 1)] == [{"t": 0, "u": 8 * _ONE}, {"t": 0}]
    assert by_name(gm)["flow_memory"].args[0] == (9 * _ONE,)
    assert places(gm) == [["flow_place_0"]] and output_values(gm) == [by_name(gm)["flow_place_0"]]


def test_a_branch_that_returns_its_operand_keeps_the_others_result() -> None:
    def made(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
        return [chain(maker, given[0], "ty")]

    assert places(assert_given(lambda: branch(made, lambda maker, given: given))) == [[]]


def test_a_subgraph_that_is_called_twice() -> None:
    """By one node, and by two: each has memory of its own."""

    def made(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
        return [chain(maker, given[0], "ty")]

    def calls() -> tuple[GraphModule, GraphMaker]:
        gm, maker = branch(made, made)
        gm.branch_1 = gm.branch_0
        flow, (output,) = by_name(gm)["flow"], gm.graph.find_nodes(op="output")
        with gm.graph.inserting_before(output):
            again = gm.graph.create_node("call_function", switch, flow.args, name="again")
            again.meta["val"] = flow.meta["val"]
            output.args = ([*output.args[0], gm.graph.call_function(operator.getitem, (again, 0))],)  # type: ignore[misc]
        gm.recompile()
        return gm, maker

    gm = assert_given(calls)
    assert {"flow_memory", "again_memory", "flow_place_0", "again_place_0"} <= by_name(gm).keys()


def test_branches_in_a_loop_are_a_temporary_of_it() -> None:
    def inner(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
        return [chain(maker, given[0], "tuy")]

    def outer(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
        subgraphs = {"first": subgraph(inner, ["x"]), "second": subgraph(inner, ["x"])}
        flow = _call(maker, switch, subgraphs, lambda handles: (given[0], (given[1],), *handles))
        flow.meta["val"] = [torch.empty(4, 4)]
        return [counted(maker, given[0]), step(maker, maker.getitem(flow, 0), "z")]

    gm = assert_given(lambda: loop(outer))
    assert temporaries(gm, 1) == {"flow_place_0": 0, "flow_memory": _ONE}


def previous(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    """``w`` is what ``x`` was: two places would not do."""
    i, x, w, *_ = given
    y = maker.allocate(name="y")
    maker.launch("mix", x, w, y)
    return [counted(maker, i), y, x]


def twice(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    y = chain(maker, given[1], "y")
    return [counted(maker, given[0]), y, y]


def part(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    """What is returned is a view."""
    y = step(maker, given[1], "y", size=(8, 4))
    return [counted(maker, given[0]), maker.view(y, (4, 4), (4, 1), 16)]


def kept(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    """Foreign code may keep what it is given."""
    y = chain(maker, given[1], "ty")
    maker.extern(halve, y)
    return [counted(maker, given[0]), y]


@pytest.mark.parametrize(("body", "carried"), [(previous, 3), (twice, 3), (part, 2), (kept, 2)])
def test_what_does_not_alternate(body: Body, carried: int) -> None:
    assert not any(places(assert_given(lambda: loop(body, carried))))


def test_what_is_stacked_does_not_alternate() -> None:
    assert not any(places(assert_given(lambda: loop(four, stacked=True))))


def swapped(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    i, x, w, *_ = given
    y, z = maker.allocate(name="y"), maker.allocate(name="z")
    maker.launch("mix", x, w, y)
    maker.launch("mix", w, w, z)
    return [counted(maker, i), z, y]


def test_two_values_alternate_apart() -> None:
    gm = assert_given(lambda: loop(swapped, 3))
    assert sum("_place_" in node.name for node in gm.graph.nodes) == 4


def random_body(seed: int, carried: int) -> Body:
    def body(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
        draw, values = random.Random(seed), [*given[1:carried]]
        for number in range(draw.randrange(2, 9)):
            buffer = maker.allocate(draw.choice([(4, 4), (4, 4), (8, 4)]), name=f"b{number}")
            maker.launch("mix", draw.choice(values), draw.choice(values), buffer)
            values.append(buffer)
        whole = [value for value in values if tuple(value.meta["val"].size()) == (4, 4)]
        return [counted(maker, given[0]), *(draw.choice(whole[-3:]) for _ in range(carried - 1))]

    return body


@pytest.mark.parametrize("carried", [2, 3, 4])
def test_random_loops(carried: int) -> None:
    moved = 0
    for seed in range(25):
        gm = assert_given(lambda seed=seed: loop(random_body(seed, carried), carried))  # type: ignore[misc]
        moved += "flow_memory" in by_name(gm)
    assert moved > 5


# -- the verifier finds what is planted -----------------------------------------------------------------------------


def named(gm: GraphModule) -> dict[str, Any]:
    """The nodes; those of the body, and the views that its temporaries lie in."""
    nodes, body = by_name(gm), by_name(gm.get_submodule("body"))
    views: Any = nodes["flow"].kwargs["temporaries"]
    views = {f"{name}_lies": view for name, view in views[1].items()}
    return nodes | {f"body_{name}": node for name, node in body.items()} | views


def change(node: Node, position: int, value: Any) -> None:
    node.args = (*node.args[:position], value, *node.args[position + 1 :])


def lie(nodes: dict[str, Any], *places: str) -> None:
    """What the loop carries lies in these."""
    flow = nodes["flow"]
    flow.kwargs = {**flow.kwargs, "results": ((), tuple(map(nodes.__getitem__, places)))}


def use(node: Node, function: Callable[..., Any], *others: Any) -> None:
    output = output_node(node.graph.owning_module)  # type: ignore[arg-type]
    with node.graph.inserting_before(output):
        node.graph.call_function(function, (node, *others))


Nodes = dict[str, Any]
PLANTED: list[tuple[str, Callable[[Nodes], None]]] = [
    ("u overlap", lambda n: change(n["u_lies"], 3, 16)),
    ("overlap", lambda n: change(n["body_to_y"], 2, n["body_t"])),  # it reads what lies there no longer
    ("within 128 bytes", lambda n: change(n["t_lies"], 3, 32)),
    ("within 128 bytes", lambda n: change(n["u_lies"], 3, 1)),  # misaligned
    ("its layout", lambda n: change(n["t_lies"], 1, (2, 4))),
    ("among temporaries", lambda n: change(n["body_output"], 0, [n["body_i"], n["body_v"]])),
    ("given twice", lambda n: lie(n, "flow_place_1_a", "flow_place_1_a")),  # it would write what it reads
    ("given twice", lambda n: lie(n, "flow_place_1_a", "flow_memory")),
    ("an operand", lambda n: lie(n, "flow_place_1_a", "x")),
    ("places like it", lambda n: lie(n, "flow_place_1_a")),
    ("places like it", lambda n: change(n["flow_place_1_b"], 0, (2, 4))),
    ("places like it", lambda n: change(n["body_output"], 0, [n["body_i"], n["body_x"]])),
    ("nothing else uses", lambda n: use(n["flow_memory"], aten.sum.default)),
    ("may keep", lambda n: use(n["body_v"], halve)),
    ("may keep", lambda n: use(n["body_x"], halve)),
    ("may keep", lambda n: use(n["body_y"], halve)),
    ("of its own, for", lambda n: use(n["body_v"], aten.as_strided.default, (4,), (1,), 0)),
]


@pytest.mark.parametrize(("message", "plant"), PLANTED)
def test_planted_faults(message: str, plant: Callable[[Nodes], None]) -> None:
    gm, _ = loop(four)
    place_bodies(gm, alternates=True)
    verify_bodies(gm)
    plant(named(gm))
    with pytest.raises(PlanError, match=message):
        verify_bodies(gm)


def test_an_alternation_that_loses_a_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ``forgets`` were always true."""
    from fxwrap.passes.rewrites import body_memory as module

    monkeypatch.setattr(module._Body, "forgets", lambda self, position: True)
    gm, _ = loop(previous, 3)
    place_bodies(gm, alternates=True)
    with pytest.raises(PlanError, match="x cannot lie"):
        verify_bodies(gm)


def test_a_result_that_is_returned_twice_is_found() -> None:
    gm, _ = loop(swapped, 3)
    place_bodies(gm, alternates=True)
    nodes = named(gm)
    change(nodes["body_output"], 0, [nodes["body_i"], nodes["body_z"], nodes["body_z"]])
    with pytest.raises(PlanError, match="returned once"):
        verify_bodies(gm)
