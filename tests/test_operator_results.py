"""Results that captured operators allocate are handed out in memory that the plan owns.

::

    buf0 = aten.sort(x)                      buf0 = aten.sort(x)
    buf1 = buf0[0]                           buf1 = buf0[0]
    return buf1                     ->       own = empty_strided(...)
                                             aten.copy_(own, buf1)
                                             return own
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same
from random_graphs import GraphMaker, collectives
from test_view_copies import Building
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxwrap.listing import list_graph
from fxwrap.passes.operator_results import own_results, placeable_results
from fxwrap.passes.storages import analyse_storages
from fxwrap.passes.verdicts import is_work
from fxwrap.plan import Origin

aten = torch.ops.aten


def _own(gm: GraphModule, but: Any = ()) -> bool:
    return own_results(gm, analyse_storages(gm), {n for n in gm.graph.nodes if is_work(n)} - set(but))


def test_before_and_after() -> None:
    b = Building()
    result = b.call(aten.cumsum.default, b.x, 0)
    gm = b.module(result, b.call(aten.mul.Tensor, result, 2))
    assert _own(gm)
    assert list_graph(gm) == (
        "x: float32[4, 6] on cpu\n"
        "cumsum_default = aten.cumsum(x, 0)\n"
        "empty_strided = allocate (4, 6), strides (6, 1), float32, cpu\n"
        "aten.copy_(empty_strided, cumsum_default)\n"
        "mul_tensor = aten.mul.Tensor(empty_strided, 2)\n"
        "empty_strided_1 = allocate (4, 6), strides (6, 1), float32, cpu\n"
        "aten.copy_(empty_strided_1, mul_tensor)\n"
        "return [empty_strided, empty_strided_1]"
    )
    x = torch.randn(4, 6)
    assert_same(gm(x), [x.cumsum(0), x.cumsum(0) * 2])
    assert not _own(gm)  # nothing is left to do


def test_an_element_of_a_tuple_and_a_view_of_it() -> None:
    b = Building()
    sort = b.call(aten.sort.default, b.x, 1)
    values, indices = (b.call(operator.getitem, sort, i) for i in (0, 1))
    gm = b.module(b.call(aten.t.default, values), b.call(aten.mul.Tensor, indices, 2))
    assert _own(gm, but={gm.graph.output_node().args[0][1]})
    facts = analyse_storages(gm)
    mine, other = gm.graph.output_node().args[0]
    assert [facts.storages[i].origin for i in facts.of[mine]] == [Origin.ALLOCATION]
    assert [facts.storages[i].origin for i in facts.of[other]] == [Origin.EXTERN]  # it is not captured
    assert indices.users.keys() == {other}  # and this one is nobody's result
    x = torch.randn(4, 6)
    assert_same(gm(x), [x.sort(1)[0].t(), x.sort(1)[1] * 2])


def test_what_may_be_the_callers_memory_stays() -> None:
    """The graph would hand out a copy of what the caller expects to be one with its input."""
    b = Building()
    gm = b.module(b.call(aten.relu_.default, b.x))
    assert not _own(gm)


def test_what_a_communication_fills_stays() -> None:
    """It is filled when somebody has waited, not when the call that begins it returns."""
    maker = GraphMaker()
    x = maker.input("x")
    begun = maker.extern(collectives.all_reduce.default, x, "sum", "0", name="begun")
    waited = maker.extern(collectives.wait_tensor.default, begun, name="waited")
    gm = maker.finish([waited])
    facts = analyse_storages(gm)
    assert [facts.storages[index].origin for index in facts.of[waited]] == [Origin.EXTERN]
    assert not _own(gm)


@pytest.mark.parametrize("known", [True, False])
def test_symbolic_sizes(known: bool) -> None:
    """Sizes are numbers that the graph has; where it has none, as for a size of data, the result stays."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = Graph()
    how = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    value = mode.from_tensor(torch.randn(5, 3), symbolic_context=how, source=ConstantSource("x"))
    rows, columns = value.size()
    with mode:
        result = torch.empty_strided((rows, columns), (2 * columns, 1))
    if known:
        for name, number in (("rows", rows), ("columns", columns)):
            graph.placeholder(name).meta["val"] = number
    x = graph.placeholder("x")
    x.meta["val"] = value
    node = graph.call_function(aten.cumsum.default, (x, 0))
    node.meta["val"] = result
    graph.output([node])
    gm = GraphModule(torch.nn.Module(), graph)
    assert _own(gm) is known
    if known:
        (own,) = gm.graph.output_node().args[0]
        assert [str(n) for n in own.args[0]] == ["rows", "columns"]
        out = gm(5, 3, torch.randn(5, 3))[0]
        assert out.size() == (5, 3) and out.stride() == (6, 1)  # a product that the graph did not have


def test_replayed_with_any_shape(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(lambda x: torch.nn.functional.avg_pool2d(x, 2) + 0, dynamic=True)
    for width in (8, 12, 8, 12, 8, 12):
        x = torch.randn(1, 2, 8, width)
        assert_same(f(x.to(device)).cpu(), torch.nn.functional.avg_pool2d(x, 2))


def test_placed_results_are_not_copied() -> None:
    """The plan owns their memory already."""
    b = Building()
    sort = b.call(aten.sort.default, b.x, 1)
    values, indices = (b.call(operator.getitem, sort, i) for i in (0, 1))
    gm = b.module(values, indices)
    facts = analyse_storages(gm)
    placed = placeable_results(facts, gm, torch.device("cpu"), set(gm.graph.nodes))
    assert {facts.storages[index].name: nbytes for index, nbytes in placed.items()} == {
        f"{sort.name}[0]": 96,
        f"{sort.name}[1]": 192,
    }
    assert not own_results(gm, facts, set(gm.graph.nodes), placed)
    first = next(iter(placed))
    assert own_results(gm, facts, set(gm.graph.nodes), [first])
    assert [facts.of.get(node) == {first} for node in gm.graph.output_node().args[0]] == [True, False]
