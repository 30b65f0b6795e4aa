"""The pipeline: one list of stages, each of which takes what an earlier one returns, with a hook in between.

::

    host graph     launches, shared views, (a subclass's passes), aliasing, workspace, dependencies
    partitions     capturability, cut, cost model (the schedule is checked), partitions compiled elsewhere
    sizes          memory (the plan is checked)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from placements import located, moved
from random_graphs import GraphMaker, compile_request
from torch.fx import GraphModule

from fxwrap.errors import PipelineError, PlanError
from fxwrap.passes.memory.planner import plan_program
from fxwrap.pipeline import REWRITES, compile_host_graph, restore_program
from fxwrap.plan import MemoryPlan, SizedProgram
from fxwrap.stages import Rewrite, observed_by


def small_graph() -> GraphModule:
    maker = GraphMaker()
    x, a, out = maker.input("x"), maker.allocate(name="a"), maker.allocate(name="out")
    maker.launch("mix", x, x, a)
    maker.launch("mix", a, x, out)
    return maker.finish([out])


@pytest.mark.compiler
def test_the_hook_sees_every_stage_in_order(compiled: Any) -> None:
    seen: list[str] = []

    def hook(name: str, seconds: float) -> None:
        assert seconds >= 0
        seen.append(name)

    f = compiled(lambda x: (x @ x).sin())
    with observed_by(hook):
        for _ in range(3):
            f(torch.randn(4, 4))
    assert seen[:3] == ["launches", "shared views", "memory of branches and loops"]
    assert seen[3:6] == ["aliasing", "workspace", "dependencies"]
    assert seen[6:9] == ["capturability", "cut", "cost model"]
    # The warm-up plans, and the recording takes that plan.
    assert seen[9:] == ["partitions compiled elsewhere", "memory"]
    count = len(seen)
    g = compiled(lambda x: (x @ x).cos())
    g(torch.randn(4, 4))
    assert len(seen) == count, "it is observed inside of the context only"


def test_a_hook_is_taken_away_after_an_error() -> None:
    seen: list[str] = []
    with pytest.raises(ZeroDivisionError), observed_by(lambda name, seconds: 1 // 0):
        compile_host_graph(small_graph(), compile_request())
    compile_host_graph(small_graph(), compile_request())
    assert not seen


def test_what_a_stage_returns_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By code that shares nothing with it."""

    def overlapping(sized: SizedProgram, *others: object) -> MemoryPlan:
        memory = plan_program(sized)
        return moved(memory, dict.fromkeys(located(memory), 0))

    monkeypatch.setattr("fxwrap.pipeline.plan_program", overlapping)
    program = compile_host_graph(small_graph(), compile_request())
    with pytest.raises(PlanError, match="overlap"):
        program.planner.plan_memory(SizedProgram(program.plan, {}, {}))


def test_a_pass_that_breaks_the_graph_is_found_at_once() -> None:
    def broken(gm: GraphModule) -> None:
        first, *_, last = (node for node in gm.graph.nodes if node.op == "call_function")
        last.append(first)  # it is used before it is made

    with pytest.raises(PipelineError, match="pass 'broken' leaves an invalid graph"):
        compile_host_graph(small_graph(), compile_request(), (*REWRITES, Rewrite("broken", broken)))


def test_a_restored_program_that_is_partitioned_again_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan has what library calls take."""
    plan = compile_host_graph(small_graph(), compile_request()).plan
    plan = replace(plan, workspace={"mix": 64})

    def measured(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr("fxwrap.pipeline.workspace_of", measured)
    restored = restore_program(plan, compile_request())
    assert restored.planner.partition(plan.inputs, {"mix": "planted"}).workspace == {"mix": 64}
