"""The pipeline: one list of stages, each of which declares what it requires and provides, with a hook in between.

::

    host graph     launches, needless copies, shared views, (a subclass's passes), aliasing, workspace, dependencies
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

import fxwrap
from fxwrap.errors import PipelineError, PlanError
from fxwrap.passes.memory.planner import plan_program
from fxwrap.pipeline import (
    DECISIONS,
    REWRITES,
    Scope,
    Stage,
    State,
    compile_host_graph,
    observed_by,
    restore_program,
    rewrite,
    run_stages,
)
from fxwrap.plan import Planned

STAGES = (*REWRITES, *DECISIONS)


def small_graph() -> GraphModule:
    maker = GraphMaker()
    x, a, out = maker.input("x"), maker.allocate(name="a"), maker.allocate(name="out")
    maker.launch("mix", x, x, a)
    maker.launch("mix", a, x, out)
    return maker.finish([out])


@pytest.mark.compiler
def test_the_hook_sees_every_stage_in_order(compiled: Any) -> None:
    seen: list[tuple[str, Scope]] = []

    def hook(stage: Stage, state: State, seconds: float) -> None:
        assert seconds >= 0 and all(getattr(state, name) is not None for name in stage.provides)
        seen.append((stage.name, stage.scope))

    f = compiled(lambda x: (x @ x).sin())
    with observed_by(hook):
        for _ in range(3):
            f(torch.randn(4, 4))
    names = [name for name, _ in seen]
    assert names[:2] == ["launches", "needless copies"]
    assert names[2:6] == ["shared views", "aliasing", "workspace", "dependencies"]
    assert names[6:9] == ["capturability", "cut", "cost model"]
    # The warm-up plans, and the recording takes that plan.
    assert names[9:] == ["partitions compiled elsewhere", "memory"]
    count = len(seen)
    g = compiled(lambda x: (x @ x).cos())
    g(torch.randn(4, 4))
    assert len(seen) == count, "it is observed inside of the context only"


def test_a_hook_is_taken_away_after_an_error() -> None:
    seen: list[str] = []
    with pytest.raises(ZeroDivisionError), observed_by(lambda stage, state, seconds: 1 // 0):
        compile_host_graph(small_graph(), compile_request())
    compile_host_graph(small_graph(), compile_request())
    assert not seen


@pytest.mark.parametrize(
    "left_out", [stage.name for stage in DECISIONS if stage.name != "partitions compiled elsewhere"]
)
def test_a_stage_that_is_missing_is_noticed_by_who_needs_it(left_out: str) -> None:
    """Not by a wrong result, nor by an error of something else."""
    stages = [stage for stage in STAGES if stage.name != left_out]
    with pytest.raises(PipelineError, match=r"requires|provides"):
        program = compile_host_graph(small_graph(), compile_request(), stages)
        program._planner.plan(Planned(program.plan, {}, {}))  # type: ignore[call-arg]


def test_a_stage_that_does_not_do_what_it_says_is_named() -> None:
    lazy = replace(next(stage for stage in STAGES if stage.name == "cut"), run=lambda state: None)
    stages = [lazy if stage.name == "cut" else stage for stage in STAGES]
    with pytest.raises(PipelineError, match="stage 'cut' provides cut"):
        compile_host_graph(small_graph(), compile_request(), stages)


def test_what_a_stage_provides_is_checked() -> None:
    """By code that shares nothing with it."""

    def overlapping(state: Any) -> None:
        memory = plan_program(state.planned)
        state.memory = moved(memory, dict.fromkeys(located(memory), 0))

    stages = [replace(stage, run=overlapping) if stage.name == "memory" else stage for stage in STAGES]
    program = compile_host_graph(small_graph(), compile_request(), stages)
    with pytest.raises(PlanError, match="overlap"):
        program._planner.plan(Planned(program.plan, {}, {}))  # type: ignore[call-arg]


@pytest.mark.compiler
def test_a_subclass_inserts_stages() -> None:
    seen: list[int] = []

    class Counting(fxwrap.FxwrapCodegen):
        def stages(self) -> Any:
            def count(state: State) -> None:
                seen.append(len(state.facts.storages))

            return (*super().stages(), Stage("count", Scope.GRAPH, count, ("facts",), ()))

    f = torch.compile(lambda x: (x @ x).sin(), backend="fxwrap", options={"codegen": Counting})
    x = torch.randn(4, 4)
    torch.testing.assert_close(f(x), (x @ x).sin())
    assert len(seen) == 1 and seen[0] >= 2


def test_a_pass_that_breaks_the_graph_is_found_at_once() -> None:
    def broken(gm: GraphModule) -> None:
        first, *_, last = (node for node in gm.graph.nodes if node.op == "call_function")
        last.append(first)  # it is used before it is made

    stages = (*REWRITES, rewrite("broken", broken), *DECISIONS)
    with pytest.raises(PipelineError, match="pass 'broken' leaves an invalid graph"):
        compile_host_graph(small_graph(), compile_request(), stages)


def test_stages_of_one_scope_run() -> None:
    state = run_stages(STAGES, State(small_graph(), compile_request()), Scope.GRAPH)
    assert state.facts is not None and state.dependencies is not None and state.verdicts is None


def test_a_restored_program_that_is_partitioned_again_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan has what library calls take."""
    plan = compile_host_graph(small_graph(), compile_request()).plan
    plan = replace(plan, workspace={"mix": 64})

    def measured(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr("fxwrap.pipeline.measure_workspace", measured)
    restored = restore_program(plan, compile_request())
    assert restored._planner.partition({"mix": "planted"}).workspace == {"mix": 64}
