"""Storages that have memory in the steps that name them only, and stay otherwise: on the CPU, beside an arena."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from conftest import Compiled
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import CPU, PROPERTY, TORCH_FUNCTIONS, GraphMaker, Recipe, build, check_calls, kernel, recipes
from test_verify_random import random_case

import fxwrap.passes.memory_planning as planning
from fxwrap.compiler import CompileRequest, compile_host_graph
from fxwrap.errors import PlanError
from fxwrap.graphs.program import Program
from fxwrap.graphs.recording import Recording
from fxwrap.passes.memory_planning import plan_program

aten = torch.ops.aten


@pytest.fixture
def all_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is allocated when it is needed, whether that takes less or not."""
    monkeypatch.setattr(planning, "choose_anew", _all)


def _all(buffers: object, beside: object, alignment: int, movable: set[str], asked: object) -> frozenset[str]:
    return frozenset(movable)


def recordings(program: Program) -> list[Recording]:
    return [recording for family in program.families.values() for recording in family.recordings]


def memory_of(recording: Recording) -> dict[str, int]:
    storages = recording.plan.facts.storages
    return {storages[i].name: storage.nbytes() for i, storage in recording._transients.storages.items()}


def test_memory_is_there_in_the_steps_that_name_a_storage(all_that_can: None) -> None:
    """
    ::

        step          0  1  2  3
        a             a  a  .  .      mix(x, x, a); mix(a, a, b)
        b             .  b  b  .      look(b)
        out           .  .  .  o      handed out: new at every call
    """
    seen: list[dict[str, int]] = []

    def look(source: torch.Tensor) -> None:
        seen.append({name: nbytes for one in recordings(program) for name, nbytes in memory_of(one).items()})

    maker = GraphMaker()
    x = maker.input("x")
    a, b, out = (maker.allocate(name=name) for name in ("a", "b", "out"))
    maker.launch("mix", x, x, a)
    maker.launch("mix", a, maker.view(a, (16,), (1,)), b)
    maker.launch(kernel("look", look, ()), b)
    maker.launch("mix", x, x, out)
    program = compile_host_graph(maker.finish([out]), CompileRequest())
    for seed in range(4):
        program(*maker.inputs(seed))
    assert seen[-2:] == [{"a": 0, "b": 64}] * 2  # replays
    (recording,) = recordings(program)
    assert memory_of(recording) == {"a": 0, "b": 0}
    (text,) = [step.source for step in recording._graphs[0]._calls]
    # A storage is the constant between the calls that give it memory and take it back.
    assert text.splitlines() == [
        "def flat(r):",
        "    c0()",
        "    v0 = r[0]",
        "    r[0] = None",
        "    c2(v0, v0, c1)",
        "    c3()",
        "    c2(c1, c4, c5)",
        "    c6()",
        "    c7(c5)",
        "    c8()",
        "    v1 = c13(c9, c10, dtype=c11, device=c12)",
        "    r[1] = v1",
        "    c2(v0, v0, v1)",
        "    del v0, v1",
        "    return None",
    ]


@PROPERTY
@given(recipes(), st.lists(st.booleans(), min_size=3, max_size=6))
def test_random_graphs_compute_the_same(recipe: Recipe, hold: list[bool]) -> None:
    """A storage without memory has no address: whoever named it then would fail, not compute something else."""
    graph = build(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "choose_anew", _all)
        program = compile_host_graph(graph.gm, CompileRequest(graph.options, torch=TORCH_FUNCTIONS["use counts"]))
        check_calls(graph.gm, graph.inputs, program, hold)
    assert set(program.counters.eager) <= {"warm-up"}
    assert not any(sum(memory_of(recording).values()) for recording in recordings(program))


def test_an_error_leaves_no_memory_behind(all_that_can: None) -> None:
    fails = False

    def may_fail(source: torch.Tensor, out: torch.Tensor) -> None:
        if fails:
            raise ValueError("here")
        out.copy_(source)

    maker = GraphMaker()
    x = maker.input("x")
    a, b, out = (maker.allocate(name=name) for name in ("a", "b", "out"))
    maker.launch("mix", x, x, a)
    maker.launch(kernel("may_fail", may_fail, (1,)), a, b)
    maker.launch("mix", b, b, out)
    gm = maker.finish([out])
    program = compile_host_graph(gm, CompileRequest())
    for seed in range(3):
        program(*maker.inputs(seed))
    (recording,) = recordings(program)
    fails = True
    with pytest.raises(ValueError, match="here"):
        program(*maker.inputs(3))
    assert memory_of(recording) == {"a": 0, "b": 0}
    fails = False
    check_calls(gm, maker.inputs, program, [False, True])
    assert program.counters.recordings == {"first": 1}


def test_a_custom_operator_may_keep_what_it_is_given(all_that_can: None, compiled: object) -> None:
    """So that its operand is a new tensor at every call."""
    kept: list[torch.Tensor] = []

    @torch.library.custom_op("fxwrap_transients::keep", mutates_args=())
    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x + 1

    keep.register_fake(torch.empty_like)
    f: Compiled = compiled(lambda x: keep(x.sin()).cos())  # type: ignore[operator]
    given_ones = [torch.randn(4, 4) for _ in range(5)]
    for x in given_ones:
        torch.testing.assert_close(f(x), (x.sin() + 1).cos())
    assert f.program.counters.replays == 3
    for x, seen in zip(given_ones, kept, strict=True):
        torch.testing.assert_close(seen, x.sin())


# -- one fault ----------------------------------------------------------------------------------------------


def faults(
    case: object, memory: planning.MemoryPlan, draw: random.Random
) -> Iterator[tuple[planning.MemoryPlan, str]]:
    for index, (begin, end) in memory.transient.items():
        yield replace(memory, transient={**memory.transient, index: (begin + 1, end)}), "has no memory at step"
        yield replace(memory, transient={**memory.transient, index: (begin, end - 1)}), "has no memory at step"
        placed = {**memory.location, index: (CPU, 0)}
        yield replace(memory, location=placed), "has memory in steps"
    for index in memory.outputs & memory.made_at_calls:
        yield replace(memory, transient={index: (0, 100)}), "has memory in steps"


def test_steps_that_are_too_few_are_rejected(all_that_can: None) -> None:
    planted = 0
    for seed in range(60):
        draw = random.Random(seed)
        case = random_case(draw)
        memory = plan_program(replace(case.planned(), frozen=False), lambda device, case=case: case.taken)
        case.verify(memory)
        for faulty, message in faults(case, memory, draw):
            planted += 1
            with pytest.raises(PlanError, match=message):
                case.verify(faulty)
    assert planted > 200
