"""Plans are data: they go to JSON and come back unchanged, and so they can be cached, saved and compared.

::

    ProgramPlan --to_data--> JSON --from_data(graph=...)--> a ProgramPlan with equal fields
    MemoryPlan  --to_data--> JSON --from_data------------->  an equal MemoryPlan
"""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace
from typing import Any

import pytest
from memory_oracle import random_case
from random_graphs import GraphMaker, compile_request

from fxwrap.host_graph.typed_json import from_data, to_data
from fxwrap.passes.memory.planner import plan_program
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import InputFacts, MemoryPlan, ProgramPlan, SizedProgram


def to_json(plan: Any) -> str:
    return json.dumps(to_data(plan))


def fields_of(plan: ProgramPlan) -> dict[str, Any]:
    """A plan is equal to itself alone, so that it can be a key."""
    return {field.name: getattr(plan, field.name) for field in fields(plan)}


def from_json(kind: Any, text: str, **missing: Any) -> Any:
    return from_data(kind, json.loads(text), **missing)


@pytest.mark.parametrize("seed", range(30))
def test_plans_come_back_unchanged(seed: int) -> None:
    case = random_case(random.Random(seed))
    text = to_json(case.plan)
    again = from_json(ProgramPlan, text, graph=case.plan.graph)
    assert fields_of(again) == fields_of(case.plan) and to_json(again) == text
    assert again.schedule == case.plan.schedule
    for memory in (case.plan_with(), plan_program(case.calls_again())):
        text = to_json(memory)
        assert from_json(MemoryPlan, text) == memory and to_json(from_json(MemoryPlan, text)) == text


def small_plan() -> ProgramPlan:
    maker = GraphMaker()
    x, a, out = maker.input("x"), maker.allocate(name="a"), maker.allocate(name="out")
    maker.launch("mix", x, x, a, name="k0")
    maker.launch("mix", a, x, out, name="k1")
    return compile_host_graph(maker.finish([out]), compile_request()).plan


def test_what_is_in_the_text() -> None:
    plan = small_plan()
    stored = json.loads(to_json(plan))
    assert "graph" not in stored and "calls" not in stored
    assert stored["facts"]["storages"][0] == {"index": 0, "origin": "input", "node": "x", "element": None}
    assert stored["facts"]["written"] == {"k0": [1], "k1": [2]}
    (partition,) = stored["cut"]["partitions"]
    assert (partition["verdict"], partition["nodes"]) == ("captured", ["k0", "k1"])
    memory = json.loads(to_json(plan_program(SizedProgram(plan, {}, {}))))
    assert [place["home"] for place in memory["places"]] == ["input", "region", "region"]


def test_a_tensor_or_a_function_is_no_data() -> None:
    plan = small_plan()
    with pytest.raises(TypeError, match="is no data"):
        to_json(replace(plan, inputs=InputFacts(phase=len)))


@pytest.mark.parametrize(
    "change",
    [lambda d: d.pop("cut"), lambda d: d.update(more=1), lambda d: d.update(inputs={"static": ["0"]}), dict.clear],
)
def test_a_text_that_is_no_plan_is_refused(change: object) -> None:
    plan = small_plan()
    stored = json.loads(to_json(plan))
    change(stored)  # type: ignore[operator]
    with pytest.raises((TypeError, ValueError, KeyError)):
        from_json(ProgramPlan, json.dumps(stored), graph=plan.graph)
