"""What is inside of a branch or a loop decides whether it can be a node of a device graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from random_graphs import GraphMaker
from torch.fx import GraphModule, Node

from fxwrap.host_graph.control_flow import while_loop
from fxwrap.passes.partition.capturability import DECIDED_ON_HOST, judge
from fxwrap.plan import Verdict

aten = torch.ops.aten
Body = Callable[[GraphMaker, Sequence[Node]], Sequence[Node]]


def subgraph(body: Body) -> GraphModule:
    maker = GraphMaker()
    return maker.finish(body(maker, [maker.input("i", (), torch.int64), maker.input("x")]))


def loop(body: Body) -> GraphModule:
    """``i, x = while_loop(i < 3, body, (i, x))``"""
    maker = GraphMaker()
    i, x = maker.input("i", (), torch.int64), maker.input("x")
    handles = []
    for name, gm in (("condition", subgraph(less)), ("body", subgraph(body))):
        setattr(maker._root, name, gm)
        handles.append(maker.graph.get_attr(name))
    node = maker.graph.call_function(while_loop, (*handles, (i, x), ()), name="loop")
    node.meta["val"] = [i.meta["val"], x.meta["val"]]
    return maker.finish([maker.getitem(node, 1)])


def less(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    return [maker.extern(aten.lt.Scalar, given[0], 3)]


def makes_new(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    i, x = given
    y = maker.allocate((4, 4))
    maker.launch("mix", x, x, y)
    return [maker.extern(aten.add.Tensor, i, 1), y]


def writes_and_makes_new(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    """Only the first iteration would write to the loop's operand: a node of a graph has one place for all of them."""
    maker.launch("mix", given[1], given[1], given[1])
    return makes_new(maker, given)


def writes_what_it_carries_on(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    """What ``scan`` stacks: each iteration writes a part of one tensor."""
    i, x = given
    maker.launch("mix", x, x, x)
    return [maker.extern(aten.add.Tensor, i, 1), x]


def draws(maker: GraphMaker, given: Sequence[Node]) -> Sequence[Node]:
    i, x = given
    return [maker.extern(aten.add.Tensor, i, 1), maker.extern(aten.rand_like.default, x)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (makes_new, ""),
        (writes_what_it_carries_on, ""),
        (writes_and_makes_new, "writes in place what it carries"),
        (draws, "aten::rand_like, inside of it, draws random numbers"),
    ],
)
def test_a_loop_is_a_node_of_a_graph(body: Body, reason: str) -> None:
    verdict = judge(loop(body), conditional_nodes=True)["loop"]
    assert verdict.verdict is (Verdict.EAGER if reason else Verdict.CAPTURED)
    assert reason in verdict.reason


def test_an_operator_inside_that_must_be_eager_makes_the_loop_eager() -> None:
    verdict = judge(loop(makes_new), ["aten::add"], conditional_nodes=True)["loop"]
    assert verdict.verdict is Verdict.EAGER
    assert verdict.reason == "aten::add, inside of it: listed in eager_ops"


def test_without_such_nodes_the_host_decides() -> None:
    verdict = judge(loop(makes_new), [DECIDED_ON_HOST])["loop"]
    assert (verdict.verdict, verdict.reason) == (Verdict.EAGER, "control flow is decided on the host")
