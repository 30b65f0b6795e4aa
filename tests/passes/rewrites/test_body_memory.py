"""What branches and loops allocate is moved out of them.

::

    body (i, x):                                 memory, a, b allocated                      bytes of memory
        t = allocate; to_t (x, t)                body (i, x, a, b; memory):                  to_t   | |t|
        u = allocate; to_u (t, u)        ->          t = place 64; to_t (x, t)               to_u   |u|t|
        v = allocate; to_v (u, v)                    u = place 0; to_u (t, u)                to_v   |u|v|
        y = allocate; to_y (v, y)                    v = place 64; to_v (u, v)               to_y   | |v|
        return i + 1, y                              to_y (v, a)
                                                     return i + 1, a, b, a
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from random_graphs import GraphMaker, same
from torch.fx import GraphModule, Node

from fxwrap.errors import PlanError
from fxwrap.host_graph.control_flow import control_flow_of, switch, while_loop
from fxwrap.host_graph.nodes import by_name, output_node, output_values, reinterpret
from fxwrap.passes.rewrites.body_memory import BodyMemory, body_memory, place_bodies
from fxwrap.passes.verify import SameBodies

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


def decided(gm: GraphModule) -> BodyMemory:
    node = by_name(gm)["flow"]
    flow = control_flow_of(node)
    assert flow is not None
    return body_memory(node, flow, alternates=True)


def run(gm: GraphModule, maker: GraphMaker, number: int) -> list[torch.Tensor]:
    """The results, and what the inputs hold afterwards."""
    inputs = maker.inputs(1)
    for given in inputs:
        if given.dtype is torch.int64:
            given.fill_(0)
    inputs[-1].fill_(number)
    return [*gm(*inputs), *inputs]


def assert_moved(made: Callable[[], tuple[GraphModule, GraphMaker]]) -> GraphModule:
    """The rewritten graph computes the same, and the verifier finds so, too."""
    before, maker = made()
    gm, _ = made()
    proof = SameBodies(gm)
    place_bodies(gm, alternates=True)
    gm.graph.lint()
    proof.verify(gm)
    for number in range(6 if "n" in by_name(gm) else 2):
        assert same(run(gm, maker, number), run(before, maker, number)), number
    return gm


def counted(maker: GraphMaker, i: Node) -> Node:
    return maker.extern(aten.add.Tensor, i, 1)


def four(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    return [counted(maker, given[0]), chain(maker, given[1], "tuvy")]


def test_the_drawing() -> None:
    memory = decided(loop(four)[0])
    assert memory == BodyMemory([{}, {"t": _ONE, "u": 0, "v": _ONE}], 2 * _ONE, {}, {1: "y"})
    gm = assert_moved(lambda: loop(four))
    body = gm.get_submodule("body")
    inputs = [node.name for node in body.graph.find_nodes(op="placeholder")]
    assert inputs == ["i", "x", "flow_place_1_a", "flow_place_1_b", "n", "flow_memory"]
    assert [str(value) for value in output_values(body)[1:]] == ["flow_place_1_a", "flow_place_1_b", "flow_place_1_a"]
    assert not body.graph.find_nodes(op="call_function", target=torch.empty_strided)


def test_branches_lie_over_each_other_and_write_to_one_place() -> None:
    """The larger one counts."""

    def large(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
        return [step(maker, step(maker, step(maker, given[0], "t", size=(32, 4)), "u"), "y")]

    def small(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
        return [chain(maker, given[0], "ty")]

    memory = decided(branch(large, small)[0])
    assert memory == BodyMemory([{"t": 0, "u": 8 * _ONE}, {"t": 0}], 9 * _ONE, {0: ["y", "y"]}, {})
    gm = assert_moved(lambda: branch(large, small))
    assert "flow_result_0" in by_name(gm)


def test_a_branch_that_returns_its_operand_keeps_the_others_result() -> None:
    def made(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
        return [chain(maker, given[0], "ty")]

    assert decided(branch(made, lambda maker, given: given)[0]).results == {}
    assert_moved(lambda: branch(made, lambda maker, given: given))


def test_a_subgraph_that_is_called_twice_stays() -> None:
    """Whatever its names are: what one call passes, the other would have to pass, too."""

    def made(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
        return [chain(maker, given[0], "ty")]

    gm, _ = branch(made, made)
    gm.branch_1 = gm.branch_0
    place_bodies(gm, alternates=True)
    assert not [node for node in gm.graph.nodes if node.name.startswith("flow_")]


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
    from random_graphs import halve

    y = chain(maker, given[1], "ty")
    maker.extern(halve, y)
    return [counted(maker, given[0]), y]


@pytest.mark.parametrize(("body", "carried"), [(previous, 3), (twice, 3), (part, 2), (kept, 2)])
def test_what_does_not_alternate(body: Body, carried: int) -> None:
    assert decided(loop(body, carried)[0]).alternating == {}
    assert_moved(lambda: loop(body, carried))


def test_what_is_stacked_does_not_alternate() -> None:
    assert decided(loop(four, stacked=True)[0]).alternating == {}


def swapped(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    i, x, w, *_ = given
    y, z = maker.allocate(name="y"), maker.allocate(name="z")
    maker.launch("mix", x, w, y)
    maker.launch("mix", w, w, z)
    return [counted(maker, i), z, y]


def test_two_values_alternate_apart() -> None:
    gm = assert_moved(lambda: loop(swapped, 3))
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
        gm = assert_moved(lambda seed=seed: loop(random_body(seed, carried), carried))  # type: ignore[misc]
        moved += "flow_memory" in by_name(gm)
    assert moved > 5


# -- the verifier finds what is planted -----------------------------------------------------------------------------


def four_and_what_it_carries(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    """The last launch reads what the first one reads."""
    y, v = maker.allocate(name="y"), chain(maker, given[1], "tuv")
    maker.launch("mix", v, given[1], y, name="to_y")
    return [counted(maker, given[0]), y]


def _shares_bytes(gm: GraphModule) -> None:
    """A temporary lies where another is in use."""
    for node in gm.get_submodule("body").graph.find_nodes(op="call_function", target=reinterpret):
        node.args = (*node.args[:3], 0)


def _writes_what_it_carries(gm: GraphModule) -> None:
    """One place in place of two: an iteration writes where it reads."""
    body = gm.get_submodule("body")
    output = output_node(body)
    *first, a, _, _ = output.args[0]  # type: ignore[misc]
    output.args = ([*first, a, a, a],)


def _keeps_the_old_value(gm: GraphModule) -> None:
    """It returns what the iteration before has returned."""
    body = gm.get_submodule("body")
    output = output_node(body)
    *first, _, b, again = output.args[0]  # type: ignore[misc]
    output.args = ([*first, by_name(body)["x"], b, again],)


def _reads_another_iteration(gm: GraphModule) -> None:
    """A temporary is read before it is written."""
    body = gm.get_submodule("body")
    nodes, late = by_name(body), body.graph.find_nodes(op="call_function", target=reinterpret)[2]
    nodes["to_t"].prepend(late)
    nodes["to_u"].args = (nodes["to_u"].args[0], late, late, nodes["to_u"].args[3])


def _lies_outside(gm: GraphModule) -> None:
    """A result lies in the memory of temporaries."""
    body = gm.get_submodule("body")
    output, place = output_node(body), body.graph.find_nodes(op="call_function", target=reinterpret)[-1]
    *first, _, b, again = output.args[0]  # type: ignore[misc]
    output.args = ([*first, place, b, again],)


PLANTED = [_shares_bytes, _writes_what_it_carries, _keeps_the_old_value, _reads_another_iteration, _lies_outside]


@pytest.mark.parametrize("plant", PLANTED)
def test_planted_faults(plant: Callable[[GraphModule], None]) -> None:
    gm, _ = loop(four_and_what_it_carries)
    proof = SameBodies(gm)
    place_bodies(gm, alternates=True)
    proof.verify(gm)
    plant(gm)
    with pytest.raises(PlanError):
        proof.verify(gm)


def test_an_alternation_that_loses_a_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ``forgets`` were always true."""
    from fxwrap.passes.rewrites import body_memory as module

    monkeypatch.setattr(module._Body, "forgets", lambda self, position: True)
    gm, _ = loop(previous, 3)
    proof = SameBodies(gm)
    place_bodies(gm, alternates=True)
    with pytest.raises(PlanError, match="share bytes of flow_place_1"):
        proof.verify(gm)


def test_names_are_new() -> None:
    """Even where the graph has such names."""
    names = [node.name for gm in (assert_moved(lambda: loop(four)),) for node in gm.graph.nodes]
    assert len(names) == len(set(names)) and not [a for a, b in itertools.pairwise(names) if a == b]
