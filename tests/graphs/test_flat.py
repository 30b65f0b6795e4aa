"""Flat functions: the steps that a replay runs, and the kind that each node's step is of."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_graphs import CPU, KERNELS, GraphMaker
from torch.fx import Graph, GraphModule, Node

from fxwrap.graphs.record.flat import FlatBuilder
from fxwrap.graphs.replay import steps
from fxwrap.host_graph.nodes import Kind, aligned, by_name, check, constants, launch, reinterpret, require
from fxwrap.torch_private.functions import layout_check


def test_the_layouts_of_all_inputs_in_one_look() -> None:
    """It may say no where nothing is wrong, and never yes where something is."""
    a, b, c = torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(3)
    check = layout_check([a, 7, b, c], [0, 2])
    assert check([a, 7, b, c]) and check([a + 1, "anything", b.clone(), None])
    for wrong in (torch.randn(4, 5), torch.randn(6, 4).t(), a.double(), a[None], a.to("meta"), 3, None):
        assert not check([wrong, 7, b, c]), wrong
    assert not check([a, 7, b.contiguous(), c])
    assert not check([b, 7, b, c])
    assert layout_check([c], [0])([torch.zeros(3)]) and not layout_check([c], [0])([torch.zeros(4)])


def assert_size_stride(tensor: torch.Tensor, size: Any, stride: Any, name: str = "") -> None:
    """What torch calls so is known by its name."""


def assert_alignment(tensor: torch.Tensor, nbytes: int, name: str = "") -> None: ...


def reinterpreted(*args: Any) -> None:
    """What emission has Python call in the place of ``reinterpret``."""


_ON_CPU: dict[str, Any] = {"dtype": torch.float32, "device": CPU}


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "meta", "kind"),
    [
        (torch.empty_strided, ((4,), (1,)), _ON_CPU, {}, steps.Allocate),
        (torch.empty_strided, ((4,), (1,)), {**_ON_CPU, "pin_memory": True}, {}, steps.Allocate),
        (torch.empty_strided, ((4,), (1,)), {}, {}, steps.CallPython),
        (torch.zeros, ((4,),), {}, {"kind": Kind.ALLOCATION}, steps.CallPython),
        (reinterpret, ("x", (2, 2), (1, 2), 0), {}, {"call": reinterpreted}, steps.View),
        (reinterpret, ("x", (2, 2), (1, 2)), {}, {}, steps.View),
        (reinterpret, ("x",), {"size": (2, 2), "stride": (1, 2)}, {}, steps.CallPython),
        (aligned, ("x",), {}, {}, steps.CallPython),
        (operator.add, ("n", 1), {}, {}, steps.Arithmetic),
        (torch.ops.aten.sym_size.int, ("x", 0), {}, {}, steps.CallOperator),
        (torch.ops.aten.mm.default, ("x", "x"), {}, {"call": torch.mm}, steps.CallOperator),
        (torch.ops.aten.mm.out, ("x", "x"), {"out": "x"}, {"call": torch.mm}, steps.Multiply),
        (torch.mm, ("x", "x"), {}, {"op_overload": torch.ops.aten.mm.default}, steps.CallOperator),
        (torch.mm, ("x", "x"), {}, {}, steps.CallPython),
        (operator.getitem, ("x", 0), {}, {}, steps.CallPython),
        (assert_size_stride, ("x", (2, 2), (1, 2), "it"), {}, {"kind": Kind.CHECK}, steps.CheckLayout),
        (assert_alignment, ("x", 16, "it"), {}, {"kind": Kind.CHECK}, steps.CheckAlignment),
        (check, ("n", "it"), {}, {}, steps.CheckCondition),
        (check, ("n",), {}, {}, steps.CheckCondition),
        (require, ("n", "it"), {}, {}, steps.CheckCondition),
        (print, ("x",), {}, {"kind": Kind.CHECK}, steps.CallPython),
    ],
)
def test_the_kind_of_a_node(
    target: Callable[..., Any], args: Any, kwargs: Any, meta: Any, kind: type[steps.Step]
) -> None:
    """It is chosen from what the node calls, and Python calls what the node says."""
    graph = Graph()
    inputs = {name: graph.placeholder(name) for name in ("x", "n")}
    node = graph.call_function(
        target, tuple(inputs.get(arg, arg) if type(arg) is str else arg for arg in args), kwargs
    )
    node.meta.update(meta)
    graph.output(())
    GraphModule(torch.nn.Module(), graph)
    step = _last_step(node, {inputs["x"]: 0, inputs["n"]: 1})
    assert type(step) is kind
    call = step.call()
    assert call.function is meta.get("call", target)
    given = len(args) + (target is reinterpret and len(args) == 3)
    assert len(call.args) == given and call.kwargs.keys() == kwargs.keys()


def _last_step(node: Node, registers: dict[Node, int]) -> steps.Step:
    builder = FlatBuilder({}, registers)
    builder.append([node])
    return [step for step in builder.build().steps if not isinstance(step, steps.Drop)][-1]


#   a, b, a again, a = sort(x)[0, 1, 0, -2]
def test_a_tuple_that_is_taken_apart() -> None:
    """What an operator returns is its elements at once; of a list they are taken out, as many as are needed."""
    maker = GraphMaker()
    x = maker.input("x")
    sorted_, parts = maker.extern(torch.ops.aten.sort.default, x), maker.extern(torch.ops.aten.split.Tensor, x, 1)
    elements = [maker.getitem(sorted_, position) for position in (0, 0, -2)]
    gm = maker.finish([*elements, maker.getitem(parts, 3)])
    x, sorted_, parts = (by_name(gm)[node.name] for node in (x, sorted_, parts))
    builder = FlatBuilder({}, {x: 0})
    builder.append([sorted_, parts])
    flat = builder.build([by_name(gm)[node.name] for node in gm.graph.find_nodes(op="output")[0].args[0]])
    load, sort, split, item = (step for step in flat.steps if not isinstance(step, steps.Drop))
    assert isinstance(load, steps.Load) and isinstance(item, steps.Item)
    assert len(sort.results) == 2 and sort.results[1] is None and sort.unpacks
    assert flat.result[:3] == [sort.results[0]] * 3 and flat.result[3] == item.result
    assert isinstance(split, steps.CallOperator) and item.whole == split.result and item.position == 3
    given = torch.randn(4, 4)
    for result, expected in zip(flat.run([given]), gm(given), strict=True):
        assert torch.equal(result, expected)


def test_a_launch_and_what_it_needs() -> None:
    """Values are made where they are used, and dropped after that; a register is emptied where nobody reads it."""
    maker = GraphMaker()
    x = maker.input("x")
    out = maker.allocate(name="out")
    maker.launch("mix", maker.view(x, (2, 8), (8, 1), name="v"), x, out)
    gm = maker.finish([out])
    nodes = by_name(gm)
    builder = FlatBuilder(constants(gm), {nodes["x"]: 0}, emptied=[nodes["x"]])
    builder.append([node for node in gm.graph.nodes if node.target is launch])
    flat = builder.build(nodes["out"])
    kinds = [steps.Load, steps.View, steps.Allocate, steps.Launch, steps.Drop]
    assert [type(step) for step in flat.steps] == kinds
    load, view, allocate, run, drop = flat.steps
    assert isinstance(load, steps.Load) and load.empties
    assert isinstance(run, steps.Launch) and run.kernel is KERNELS["mix"] and run.node is not None
    assert run.args == (*view.results, *load.results, *allocate.results)
    assert isinstance(drop, steps.Drop) and set(drop.locals) == {*load.results, *view.results}
    registers: list[Any] = [torch.randn(4, 4)]
    given = registers[0]
    assert torch.equal(flat.run(registers), gm(given)[0]) and registers == [None]
