"""Sequences of calls, drawn: everything that a caller can see is what Inductor's own wrapper gives, bit for bit.

``sweep.py`` beside this runs any number of them. What it has found is in tests/graphs, as tests of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import on_simulated
from grammar import OPS, Recipe, Statement, random_recipe, runs_eagerly, shrunk_recipe, text_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sequences import (
    HABITS,
    STEPS,
    DifferenceError,
    Pool,
    Sequence_,
    Step,
    Variant,
    program_alone,
    random_sequence,
    run,
    shrunk,
    torch_settings,
)
from torch.fx import Node

from fxwrap import pipeline
from fxwrap.api import record as record_module
from fxwrap.codegen.emit import emission
from fxwrap.graphs.prepared import DynamicSizes
from fxwrap.graphs.program import Program
from fxwrap.graphs.replay.liveness_guard import LivenessGuard
from fxwrap.graphs.replay.recording import Recording, Replay
from fxwrap.host_graph.control_flow import ControlFlow, control_flow_of
from fxwrap.passes.analysis import aliasing
from fxwrap.passes.memory import requirements
from fxwrap.passes.verify import memory as verify_memory
from fxwrap.plan import SizedProgram

# Of the sample in every run: compiling them takes most of its time.
PROGRAMS, EXAMPLES = 1, 12
# Of ``pytest -m sweep``: sequences, in tests of a hundred.
SWEPT = int(os.environ.get("FXWRAP_FUZZ_SEQUENCES", "1000"))


@st.composite
def sequences(draw: st.DrawFn, pool: int) -> Sequence_:
    """With few habits, each often. What fails is made shorter, and plainer."""
    habits = [("", ""), *draw(st.lists(st.sampled_from(HABITS), max_size=4, unique=True))]
    numbers = st.integers(0, pool - 1)
    step = st.builds(
        Step, st.integers(0, 1), st.integers(0, 2), st.integers(0, 2), st.sampled_from(habits), st.integers(0, 7)
    )
    steps = draw(st.lists(step, min_size=STEPS // 2, max_size=STEPS))
    return Sequence_((draw(numbers), draw(numbers)), tuple(steps))


@pytest.fixture(autouse=True)
def as_fuzzed() -> Iterator[None]:
    with torch_settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_sample(device: torch.device) -> None:
    drawn = Pool(device, seed=2)
    # Plain inputs, and sizes that vary: fewer programs are compiled.
    variants = {
        n: replace(drawn.variant(n), layouts=drawn.variant(n).layouts[:2], dynamic=True) for n in range(PROGRAMS)
    }
    pool = Pool(device, variants=variants)

    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(sequences(PROGRAMS))
    def same_on_both_sides(sequence: Sequence_) -> None:
        run(sequence, pool, device)

    same_on_both_sides()
    assert sum(program.counters.replays for program in pool.programs()) > EXAMPLES


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, SWEPT, 100))
def test_many(device: torch.device, first: int) -> None:
    """Six programs for each hundred sequences."""
    pool = Pool(device, seed=first)
    for number in range(first, min(first + 100, SWEPT)):
        try:
            run(random_sequence(random.Random(number), 6), pool, device)
        except DifferenceError as error:
            raise DifferenceError(f"sequence {number}: {error}") from None


# -- the grammar ---------------------------------------------------------------------------------------------------


def test_every_part_of_a_recipe_is_a_recipe() -> None:
    for seed in range(3):
        recipe = random_recipe(random.Random(seed))
        for end in range(len(recipe.statements)):
            compile(text_of(Recipe(recipe.statements[end:], recipe.outputs)).source, "part", "exec")


def test_every_operation_runs() -> None:
    for op in OPS:
        assert runs_eagerly(Recipe((Statement(op, (0, 0, 0)),), (0, 1))), op


def test_a_recipe_is_shrunk_to_what_fails() -> None:
    ops = ("sin", "noise", "total_", "sum")
    recipe = Recipe(tuple(Statement(op, (0, 0, 0)) for op in ops), (0, 1, 2))
    small = shrunk_recipe(recipe, lambda one: any(statement.op == "noise" for statement in one.statements))
    assert [statement.op for statement in small.statements] == ["noise"] and len(small.outputs) == 1


# -- faults that it has to find ------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def _takes_every_output_for_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LivenessGuard, "all_dead", lambda self: True)


def _leaves_out(patch: pytest.MonkeyPatch, name: str) -> None:
    """Parts of replays."""

    def faulty(self: Replay) -> Any:
        return [part.run(self.registers) for part in self.parts if not part.name.endswith(name)][-1]

    patch.setattr(Replay, "run", faulty)


def _leaves_inputs_in_their_buffers(patch: pytest.MonkeyPatch) -> None:
    _leaves_out(patch, "copies of inputs")


def _does_not_copy_back(patch: pytest.MonkeyPatch) -> None:
    _leaves_out(patch, "copies to inputs")


def _loses_what_is_written_to_donated_inputs(patch: pytest.MonkeyPatch) -> None:
    copied_back = requirements._copied_back

    def faulty(sized: SizedProgram) -> frozenset[str]:
        plan = sized.plan
        return copied_back(sized) - {plan.placeholders[p].name for p in plan.inputs.donated}

    patch.setattr(requirements, "_copied_back", faulty)
    patch.setattr(verify_memory, "_check_copied_back", lambda storage, plan: None)


def _ignores_sizes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DynamicSizes, "key", lambda self, inputs: None)


def _ignores_addresses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Recording, "may_run", lambda self, inputs, owner: self.is_idle_for(owner) and self.spares_live_outputs()
    )


def _hands_out_the_memory_of_the_call_before(patch: pytest.MonkeyPatch) -> None:
    run_recording, last = Recording.run, dict[int, Any]()

    def faulty(self: Recording, *args: Any) -> Any:
        outputs, before = list(run_recording(self, *args)), last.get(id(self), [])
        for index, (new, old) in enumerate(zip(outputs, before, strict=False)):
            if isinstance(new, torch.Tensor) and not new.is_inference() and not old.is_inference():
                outputs[index] = old.copy_(new)
        last[id(self)] = outputs
        return tuple(outputs)

    patch.setattr(Recording, "run", faulty)


def _draws_no_random_numbers(patch: pytest.MonkeyPatch) -> None:
    run_recording = Recording.run

    def faulty(self: Recording, *args: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return run_recording(self, *args)
        finally:
            torch.set_rng_state(state)

    patch.setattr(Recording, "run", faulty)


def _records_without_putting_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(record_module.torch.random, "fork_rng", lambda **given: contextlib.nullcontext())


def _swallows_exceptions(patch: pytest.MonkeyPatch) -> None:
    run_program = Program.run

    def faulty(self: Program, inputs: list[Any]) -> Any:
        given = list(inputs)
        try:
            return run_program(self, inputs)
        except ValueError:
            return tuple(torch.zeros(1) for _ in given)

    patch.setattr(Program, "run", faulty)


def _overlooks_conditions(patch: pytest.MonkeyPatch) -> None:
    def faulty(node: Node) -> ControlFlow | None:
        flow = control_flow_of(node)
        return None if flow is None else replace(flow, subgraphs=flow.returning)

    patch.setattr(aliasing, "control_flow_of", faulty)
    patch.setattr(pipeline, "verify_schedule", lambda *_: None)


def _overlooks_windows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(emission, "used_outside", lambda gm, from_storage: {})


PLANTED: list[Plant] = [
    _takes_every_output_for_dead,
    _leaves_inputs_in_their_buffers,
    _does_not_copy_back,
    _loses_what_is_written_to_donated_inputs,
    _ignores_sizes,
    _ignores_addresses,
    _hands_out_the_memory_of_the_call_before,
    _draws_no_random_numbers,
    _records_without_putting_back,
    _swallows_exceptions,
]


def _variant(training: bool, outputs: tuple[int, ...], *ops: str) -> Variant:
    statements = tuple(Statement(op, (1, 0, 0) if op == "loss" else (0, 0, 0)) for op in ops)  # of x itself
    return Variant(Recipe(statements, outputs, training), (("capture", "always"),), True, (3, 5, 2), ("plain",))


@pytest.mark.parametrize(
    ("statements", "plant"),
    [
        # The last one reads what the condition has written.
        ((("linear", 0), ("loop", 0), ("linear", 1)), _overlooks_conditions),
        ((("window", 0), ("sin", 0)), _overlooks_windows),
    ],
)
def test_a_fault_of_the_analysis_is_found(
    monkeypatch: pytest.MonkeyPatch, statements: tuple[tuple[str, int], ...], plant: Plant
) -> None:
    # The host decides in loops, so that they split the program, and what they write decides what may run where.
    monkeypatch.setattr(pipeline, "conditional_nodes_of", lambda device: None)
    recipe = Recipe(tuple(Statement(op, (pick, 0, 0)) for op, pick in statements), (0, 1))
    for planted in (False, True):
        torch._dynamo.reset()
        with on_simulated() as device, monkeypatch.context() as patch:
            if planted:
                plant(patch)
            pool = Pool(device, variants={0: replace(_variant(False, ()), recipe=recipe)})
            assert any(_fails(number, pool, device, 1) for number in range(4)) == planted


@pytest.mark.sweep
@pytest.mark.launches_graphs
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each within a few sequences over three programs. In Python: what is planted is not in units."""
    variants = [
        _variant(False, (0, 1), "linear", "update_input_", "total_", "noise", "raises"),
        _variant(True, (0,), "linear", "sin"),
        _variant(False, (0,), "softmax", "linear"),
        _variant(True, (0,), "loss"),
    ]
    monkeypatch.setattr(Recording, "make_unit", lambda self: "")
    with on_simulated() as device:
        pool = Pool(device, variants=dict(enumerate(variants)))
        for number in range(20):
            run(random_sequence(random.Random(number), len(variants)), pool, device)
        missed = []
        for plant in PLANTED:
            with monkeypatch.context() as patch:
                plant(patch)
                if not any(_fails(number, pool, device, len(variants)) for number in range(100)):
                    missed.append(plant.__name__)
    assert not missed


def _fails(number: int, pool: Pool, device: torch.device, programs: int) -> bool:
    """Whatever is raised: a fault may break more than numbers."""
    try:
        run(random_sequence(random.Random(number), programs), pool, device)
    except Exception:
        return True
    return False


@pytest.mark.sweep
@pytest.mark.launches_graphs
def test_what_differs_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the statement and the steps that it takes."""
    monkeypatch.setattr(Recording, "make_unit", lambda self: "")
    _does_not_copy_back(monkeypatch)
    with on_simulated() as device:
        pool = Pool(device, variants={0: _variant(False, (0,), "sin", "update_input_")})
        steps = tuple(Step(0, 0, 0, habit, 0) for habit in [("after", "keep")] * 5)
        small, (variant,) = shrunk(Sequence_((0,), steps), pool, device)
    # The first step warms up, the second records, and the third replays; what is kept makes an input move.
    assert len(small.steps) == 3 and sum(step.habit != ("", "") for step in small.steps) <= 1
    assert "x.add_" in program_alone(variant) and "sin" not in program_alone(variant)
