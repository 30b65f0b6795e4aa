"""The pipeline: one list of stages, each of which takes what an earlier one returns, with a hook in between.

::

    host graph     launches, needless copies, shared views, (a subclass's passes), aliasing, workspace, dependencies
    partitions     capturability, cut, cost model (the schedule is checked), partitions compiled elsewhere
    sizes          memory (the plan is checked)
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from placements import located, moved
from random_graphs import GraphMaker, compile_request
from torch.fx import GraphModule

import fxwrap
from fxwrap.errors import PipelineError, PlanError
from fxwrap.host_graph.storages import StorageFacts
from fxwrap.options import Options
from fxwrap.passes.memory.planner import plan_program
from fxwrap.pipeline import (
    REWRITES,
    Stage,
    Stages,
    compile_host_graph,
    observed_by,
    restore_program,
    rewrite,
)
from fxwrap.plan import MemoryPlan, SizedProgram

STAGES = Stages(REWRITES)


def small_graph() -> GraphModule:
    maker = GraphMaker()
    x, a, out = maker.input("x"), maker.allocate(name="a"), maker.allocate(name="out")
    maker.launch("mix", x, x, a)
    maker.launch("mix", a, x, out)
    return maker.finish([out])


@pytest.mark.compiler
def test_the_hook_sees_every_stage_in_order(compiled: Any) -> None:
    seen: list[str] = []

    def hook(name: str, result: object, seconds: float) -> None:
        assert seconds >= 0 and result is not None
        seen.append(name)

    f = compiled(lambda x: (x @ x).sin())
    with observed_by(hook):
        for _ in range(3):
            f(torch.randn(4, 4))
    assert seen[:2] == ["launches", "needless copies"]
    assert seen[2:4] == ["shared views", "memory of branches and loops"]
    assert seen[4:7] == ["aliasing", "workspace", "dependencies"]
    assert seen[7:10] == ["capturability", "cut", "cost model"]
    # The warm-up plans, and the recording takes that plan.
    assert seen[10:] == ["partitions compiled elsewhere", "memory"]
    count = len(seen)
    g = compiled(lambda x: (x @ x).cos())
    g(torch.randn(4, 4))
    assert len(seen) == count, "it is observed inside of the context only"


def test_a_hook_is_taken_away_after_an_error() -> None:
    seen: list[str] = []
    with pytest.raises(ZeroDivisionError), observed_by(lambda name, result, seconds: 1 // 0):
        compile_host_graph(small_graph(), compile_request())
    compile_host_graph(small_graph(), compile_request())
    assert not seen


def test_a_stage_in_the_wrong_place_is_a_type_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        ("aliasing", "graph: GraphModule", "StorageFacts"): True,
        ("aliasing", "verdicts: Verdicts", "StorageFacts"): False,
        ("dependencies", "graph: GraphModule, verdicts: Verdicts", "nx.DiGraph"): False,
        ("memory", "sized: SizedProgram, *others: object", "MemoryPlan"): True,
        ("memory", "sized: SizedProgram, *others: object", "ProgramPlan"): False,
    }
    lines = ["from fxwrap.pipeline import *", "from fxwrap.plan import *"]
    lines += ["from torch.fx import GraphModule", "import networkx as nx"]
    for number, (field, given, result) in enumerate(cases):
        lines += [f"def run_{number}({given}) -> {result}: raise NotImplementedError"]
        lines += [f"Stages({field}=Stage('mine', run_{number}))"]
    snippet, root = tmp_path / "snippet.py", Path(fxwrap.__file__).parent.parent
    snippet.write_text("\n".join(lines))
    monkeypatch.setenv("MYPYPATH", str(root))
    monkeypatch.chdir(root)
    check = pytest.importorskip("mypy.api").run
    told, _, _ = check(["--follow-imports=silent", "--ignore-missing-imports", str(snippet)])
    wrong = {int(line.split(":")[1]) for line in told.splitlines() if ": error:" in line}
    assert wrong == {6 + 2 * number for number, fits in enumerate(cases.values()) if not fits}, told


@pytest.mark.parametrize("name", [one.name for one in dataclasses.fields(Stages) if one.name != "rewrites"])
def test_a_stage_that_returns_nothing_is_named(name: str) -> None:
    stage = replace(getattr(STAGES, name), run=lambda *given: None)
    with pytest.raises(PipelineError, match=f"stage {stage.name!r} returns nothing"):
        limited = compile_request(options=Options(memory_limit=1 << 40))  # two stages run for a limit only
        program = compile_host_graph(small_graph(), limited, replace(STAGES, **{name: stage}))
        program.planner.plan(SizedProgram(program.plan, {}, {}))


def test_what_a_stage_returns_is_checked() -> None:
    """By code that shares nothing with it."""

    def overlapping(sized: SizedProgram, *others: object) -> MemoryPlan:
        memory = plan_program(sized)
        return moved(memory, dict.fromkeys(located(memory), 0))

    stages = replace(STAGES, memory=replace(STAGES.memory, run=overlapping))
    program = compile_host_graph(small_graph(), compile_request(), stages)
    with pytest.raises(PlanError, match="overlap"):
        program.planner.plan(SizedProgram(program.plan, {}, {}))


@pytest.mark.compiler
def test_a_subclass_replaces_a_stage() -> None:
    seen: list[int] = []

    class Counting(fxwrap.FxwrapCodegen):
        def stages(self) -> Stages:
            stages = super().stages()

            def count(graph: GraphModule) -> StorageFacts:
                facts = stages.aliasing.run(graph)
                seen.append(len(facts.storages))
                return facts

            return replace(stages, aliasing=Stage("count", count))

    f = torch.compile(lambda x: (x @ x).sin(), backend="fxwrap", options={"codegen": Counting})
    x = torch.randn(4, 4)
    torch.testing.assert_close(f(x), (x @ x).sin())
    assert len(seen) == 1 and seen[0] >= 2


def test_a_pass_that_breaks_the_graph_is_found_at_once() -> None:
    def broken(gm: GraphModule) -> None:
        first, *_, last = (node for node in gm.graph.nodes if node.op == "call_function")
        last.append(first)  # it is used before it is made

    stages = Stages((*REWRITES, rewrite("broken", broken)))
    with pytest.raises(PipelineError, match="pass 'broken' leaves an invalid graph"):
        compile_host_graph(small_graph(), compile_request(), stages)


def test_a_restored_program_that_is_partitioned_again_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan has what library calls take."""
    plan = compile_host_graph(small_graph(), compile_request()).plan
    plan = replace(plan, workspace={"mix": 64})

    def measured(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr("fxwrap.pipeline.measure_workspace", measured)
    restored = restore_program(plan, compile_request())
    assert restored.planner.partition(plan.inputs, {"mix": "planted"}).workspace == {"mix": 64}
