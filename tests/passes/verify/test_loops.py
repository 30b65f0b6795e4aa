"""Loops: what a loop's condition and body do to their operands is known, and the verifier finds out by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from conftest import assert_same, inductor
from torch._dynamo.exc import UncapturedHigherOrderOpError
from torch.fx import Graph, GraphModule, Node

import fxwrap
from fxwrap.host_graph.control_flow import ControlFlow, control_flow_of, while_loop
from fxwrap.host_graph.nodes import is_work
from fxwrap.passes.analysis import aliasing
from fxwrap.passes.analysis.aliasing import analyse_storages
from fxwrap.passes.analysis.dependencies import build_dependency_graph
from fxwrap.passes.verify import verify_schedule
from fxwrap.passes.verify.accesses import Accesses

aten = torch.ops.aten


def _subgraph(result: str, writes: bool) -> GraphModule:
    """``(v, w) -> [sin(v)]``, or ``[sum(v)]``; it may write w."""
    graph = Graph()
    v, w = graph.placeholder("v"), graph.placeholder("w")
    if writes:
        graph.call_function(aten.add_.Tensor, (w, 1))
    graph.output([graph.call_function(getattr(aten, result).default, (v,))])
    return GraphModule({}, graph)


def loop_and_reader(condition_writes: bool, body_writes: bool) -> GraphModule:
    """``y = loop(x; w); reader = sin(w)``."""
    modules, graph = torch.nn.Module(), Graph()
    modules.condition, modules.body = _subgraph("sum", condition_writes), _subgraph("sin", body_writes)
    x, w = graph.placeholder("x"), graph.placeholder("w")
    handles = [graph.create_node("get_attr", name) for name in ("condition", "body")]
    y = graph.call_function(while_loop, (*handles, (x,), (w,)), name="loop")
    y.meta["val"] = [torch.empty(4)]
    graph.output([y, graph.call_function(aten.sin.default, (w,), name="reader")])
    return GraphModule(modules, graph)


def work_of(gm: GraphModule) -> dict[str, Node]:
    return {node.name: node for node in gm.graph.nodes if is_work(node)}


@pytest.mark.parametrize("condition", [False, True])
@pytest.mark.parametrize("body", [False, True])
def test_what_a_loop_does_to_its_operands_is_known(condition: bool, body: bool) -> None:
    gm = loop_and_reader(condition, body)
    facts, work = analyse_storages(gm), work_of(gm)
    inputs = facts.behind(gm.graph.find_nodes(op="placeholder"))
    written = facts.of(gm.graph.find_nodes(op="placeholder")[1])  # the loop hands w on from iteration to iteration
    assert facts.writes(work["loop"]) == (written if condition or body else frozenset())
    assert facts.reads(work["loop"]) == inputs and not facts.of(work["loop"]) & inputs
    edges = build_dependency_graph(gm, facts)
    assert edges.has_edge(work["loop"], work["reader"]) == (condition or body)


def test_an_operand_may_lie_at_another_position_in_the_next_iteration() -> None:
    """``(a, b) = loop(x, y)``, whose body returns ``(b, a)`` and writes to the first: it writes to both."""
    modules, body, graph = torch.nn.Module(), Graph(), Graph()
    a, b = body.placeholder("a"), body.placeholder("b")
    body.call_function(aten.add_.Tensor, (a, 1))
    body.output([b, a])
    modules.condition, modules.body = _subgraph("sum", False), GraphModule({}, body)
    x, y = graph.placeholder("x"), graph.placeholder("y")
    handles = [graph.create_node("get_attr", name) for name in ("condition", "body")]
    loop = graph.call_function(while_loop, (*handles, (x, y), ()), name="loop")
    loop.meta["val"] = [torch.empty(4), torch.empty(4)]
    graph.output([loop])
    facts = analyse_storages(GraphModule(modules, graph))
    both = facts.behind((x, y))
    assert facts.writes(loop) == both and both < facts.of(loop)
    accesses = Accesses(graph)
    assert accesses.written(loop) == accesses.roots_in((x, y))


def without_condition(node: Node) -> ControlFlow | None:
    """The fault: of a loop, the body alone is looked at."""
    flow = control_flow_of(node)
    return None if flow is None else dataclasses.replace(flow, subgraphs=flow.returning)


def test_the_verifier_does_not_make_the_analysis_fault_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = loop_and_reader(True, False)
    work = work_of(gm)
    monkeypatch.setattr(aliasing, "control_flow_of", without_condition)
    assert not build_dependency_graph(gm, analyse_storages(gm)).has_edge(work["loop"], work["reader"])
    verify_schedule(gm, [work["loop"], work["reader"]])
    with pytest.raises(fxwrap.PlanError, match="reader runs before loop"):
        verify_schedule(gm, [work["reader"], work["loop"]])


def counted(x: torch.Tensor, total: torch.Tensor) -> Any:
    """Reads what the condition has written."""

    def condition(i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return i < 3

    def body(i: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, v @ x

    _, v = torch._higher_order_ops.while_loop(condition, body, (torch.tensor(0), x.clone()))
    return v, total @ x


@torch.inference_mode()
def test_a_condition_writes_an_input(compiled: Any, device: torch.device) -> None:
    f, theirs = compiled(counted), inductor(counted)
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        mine, others = torch.zeros(4, 4, device=device), torch.zeros(4, 4, device=device)
        try:
            expected = theirs(x, others)
        except UncapturedHigherOrderOpError:
            pytest.skip("this torch's Dynamo refuses a condition that writes")
        assert_same((f(x, mine), mine), (expected, others))
    assert f.replays() == [2] and not f.compilation.fallbacks


@torch.inference_mode()
def test_a_fault_of_the_analysis_ends_a_compilation(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what follows the loop would run before it."""
    monkeypatch.setattr(aliasing, "control_flow_of", without_condition)
    x, apart = torch.randn(4, 4), {"eager_ops": ["while_loop"]}
    with pytest.raises(Exception, match="PlanError: schedule: mm runs before"):
        compiled(counted, options={"strict": True, **apart})(x, torch.zeros(4, 4))
    with pytest.warns(UserWarning, match="schedule: mm runs before"):
        f = compiled(counted, options=apart)
        assert_same(f(x, torch.zeros(4, 4)), inductor(counted)(x, torch.zeros(4, 4)))
