"""A captured partition must pay for itself: the estimate, and what becomes of one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled
from random_graphs import ALWAYS_EAGER, GraphMaker, aten, compile_request, picture
from torch.fx import GraphModule, Node

import fxwrap
from fxwrap.devices import CaptureCost
from fxwrap.options import Options
from fxwrap.passes.memory.requirements import expected_sizes
from fxwrap.passes.partition.cost_model import apply_cost_model
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import InputFacts, ProgramPlan, Verdict

COST = CaptureCost(launch=5, extern=10, replay=12, copy=4, bytes=1000)


def mix(maker: GraphMaker, name: str, source: Node, host: bool = False) -> Node:
    out = maker.allocate(name=f"{name}_out")
    maker.launch("host_mix" if host else "mix", source, source, out, name=name)
    return out


def plan_of(gm: GraphModule, static: tuple[int, ...] = ()) -> ProgramPlan:
    request = compile_request(Options(eager_ops=ALWAYS_EAGER, capture="always"), InputFacts(static=frozenset(static)))
    return compile_host_graph(gm, request).plan


def with_cost_model(plan: ProgramPlan, capture: str = "auto", min_launches: int = 1) -> ProgramPlan:
    return apply_cost_model(plan, COST, expected_sizes(plan.graph, plan.facts), capture, min_launches)


def chain(*names: str) -> GraphModule:
    """Launches one after the other; those in (round) brackets on the host."""
    maker = GraphMaker()
    value = maker.input("x")
    for name in names:
        value = mix(maker, name.strip("()"), value, host=name.startswith("("))
    return maker.finish([value])


def test_the_estimate() -> None:
    """Three launches, a library call; one input of 64 bytes is copied; the replay costs what it costs."""
    maker = GraphMaker()
    x = maker.input("x")
    value = mix(maker, "c", mix(maker, "b", mix(maker, "a", x)))
    (partition,) = with_cost_model(plan_of(maker.finish([maker.extern(aten.sin.default, value)]))).partitions
    benefit = partition.benefit
    assert benefit is not None and (benefit.saved, benefit.replay, benefit.copies) == (25, 12, 4 + 64 / 1000)
    assert benefit.pays and str(benefit) == "saves 25 us of calls for 12 us of replay and 4 us of copies"


def test_an_input_that_stays_is_not_paid_for() -> None:
    (partition,) = with_cost_model(plan_of(chain("a", "b", "c"), static=(0,))).partitions
    assert partition.benefit is not None and partition.benefit.copies == 0 and partition.benefit.pays


def test_a_partition_that_does_not_pay_joins_its_neighbours() -> None:
    """
    ::

        [ a b c d ] ( e ) [ f ] ( g ) [ h i j k ]      becomes      [ a b c d ] ( e f g ) [ h i j k ]
    """
    plan = plan_of(chain("a", "b", "c", "d", "(e)", "f", "(g)", "h", "i", "j", "k"))
    assert picture(plan.partitions) == "captured[a b c d] eager[e] captured[f] eager[g] captured[h i j k]"
    found = with_cost_model(plan)
    assert picture(found.partitions) == "captured[a b c d] eager[e f g] captured[h i j k]"
    assert [partition.index for partition in found.partitions] == [0, 1, 2]
    (f,) = [node for node in found.schedule if node.name == "f"]
    assert found.verdicts[f.name].verdict is Verdict.EAGER
    assert (
        found.verdicts[f.name].reason
        == "a capture does not pay: it saves 5 us of calls for 12 us of replay and 0 us of copies"
    )
    assert found.verdicts[f.name].reason in found.partitions[1].reason and "always" in found.verdicts[f.name].remedy
    assert found.schedule == plan.schedule


@pytest.mark.parametrize(
    "capture, min_launches, expected",
    [
        ("always", 1, "captured[a] eager[b] captured[c d e f]"),
        ("always", 2, "eager[a b] captured[c d e f]"),
        ("auto", 1, "eager[a b] captured[c d e f]"),
        ("auto", 5, "eager[a b c d e f]"),
        ("never", 1, "eager[a b c d e f]"),
    ],
)
def test_the_options(capture: str, min_launches: int, expected: str) -> None:
    plan = with_cost_model(plan_of(chain("a", "(b)", "c", "d", "e", "f")), capture, min_launches)
    assert picture(plan.partitions) == expected


@pytest.mark.compiler
def test_programs_compute_the_same_however_little_is_captured(compiled: Callable[..., Any]) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ x) @ x).sin()

    for options in ({"capture": "never"}, {"capture": "always"}, {"min_launches": 100}, {"capture": "auto"}):
        f: Compiled = compiled(lambda x: g(x), options=options)
        for _ in range(4):
            x = torch.randn(4, 4)
            torch.testing.assert_close(f(x), g(x))
        verdicts = {partition.verdict for partition in f.program.plan.partitions}
        captured = options in ({"capture": "always"}, {"capture": "auto"})
        assert verdicts == {Verdict.CAPTURED if captured else Verdict.EAGER}
        assert f.program.counters.replays == 2


@pytest.mark.compiler
def test_the_explanation_says_what_would_have_to_change() -> None:
    def g(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        scale = (x @ x).sum().item()
        rows = torch.nonzero(x[0] > 0).sum()
        return x + rows, scale

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        explanation = fxwrap.explain(g, torch.randn(4, 4))
    text = " ".join(str(explanation).split())
    assert "to have more captured:" in text
    assert "no .item(), int() or float()" in text and "torch.nonzero_static" in text
    (graph,) = explanation.to_dict()["graphs"]
    eager = [node for node in graph["nodes"].values() if node["verdict"] == "eager" and node["operator"]]
    assert eager and all(node["reason"] and node["to_capture_it"] for node in eager)
    assert any("scale = (x @ x).sum().item()" in node["user_line"] for node in eager)
