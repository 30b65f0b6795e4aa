"""Faults that are planted, each as it happens to people: checked mode finds it, and calls it by its name."""

from __future__ import annotations

import ctypes
import dataclasses
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, on_cpu, on_simulated

import fxwrap
import fxwrap.graphs.replay.recording
import fxwrap.passes.memory.planner
import fxwrap.pipeline
from fxwrap.graphs.memory.static_buffers import StaticBuffers
from fxwrap.graphs.record.layout import Layout
from fxwrap.graphs.record.recording_builder import RecordingBuilder
from fxwrap.graphs.replay.flat_python import Part
from fxwrap.graphs.replay.liveness_guard import LivenessGuard
from fxwrap.graphs.replay.recording import Replay
from fxwrap.graphs.replay.steps import CallOperator, CallPython, Step
from fxwrap.passes.memory.planner import plan_program
from fxwrap.plan import Home, MemoryPlan
from fxwrap.testing.simulated import SimulatedGraph

pytestmark = pytest.mark.launches_graphs


@pytest.fixture
def simulated(own_arenas: Any) -> Iterator[None]:
    with on_simulated():
        yield


class Operators:
    """A library of operators that lives as long as a test."""

    def __init__(self) -> None:
        self.name = f"planted_{uuid.uuid4().hex[:8]}"
        self._library = torch.library.Library(self.name, "FRAGMENT")

    def add(
        self, schema: str, work: Callable[..., Any], looks: Callable[..., Any] = torch.empty_like
    ) -> Callable[..., Any]:
        name = schema.partition("(")[0]
        self._library.define(schema)
        self._library.impl(name, work, "CPU")
        torch.library.register_fake(f"{self.name}::{name}", looks, lib=self._library)
        return getattr(getattr(torch.ops, self.name), name)  # type: ignore[no-any-return]


@pytest.fixture
def operators() -> Iterator[Operators]:
    # With CI in the environment AOTAutograd raises where it warns elsewhere, before anything is checked here.
    with torch._functorch.config.patch(error_on_custom_op_aliasing=False):
        yield Operators()


def fault_in(
    f: Compiled, *inputs: Callable[[], torch.Tensor], calls: int = 6, call: Callable[..., Any] | None = None
) -> fxwrap.CheckError:
    """What is found when ``f`` is called. Afterwards it runs eagerly."""
    with pytest.raises(fxwrap.CheckError) as found, torch.no_grad():
        for _ in range(calls):
            (call or f)(*(make() for make in inputs))
    error: fxwrap.CheckError = found.value
    assert error.expected and error.got and error.remedy, str(error)
    faulty = [program for program in f.programs if program.recorder.never_recorded]
    replays = [program.counters.replays for program in faulty]
    with torch.no_grad():
        for _ in range(2):
            f(*(make() for make in inputs))
    for program in faulty:
        assert program.counters.eager[f"checked mode has found: {error.fault}"] == 2
    assert faulty and [program.counters.replays for program in faulty] == replays
    return error


def x() -> torch.Tensor:
    return torch.randn(6, 8)


CHECKED: Any = {"options": {"checked": 1}}


# -- operators --------------------------------------------------------------------------------------------------


def _scale_by_item(t: torch.Tensor) -> torch.Tensor:
    return t * t.sum().item()


def _scale_by_numpy(t: torch.Tensor) -> torch.Tensor:
    return t * float(t.numpy().sum())


def _scale_by_list(t: torch.Tensor) -> torch.Tensor:
    return t * sum(t.flatten().tolist())


def _choose(t: torch.Tensor) -> torch.Tensor:
    return t + 1 if t.sum() > 0 else t - 1


def _compare(t: torch.Tensor) -> torch.Tensor:
    return t + 1 if torch.allclose(t, t * 2) else t - 1


def _choose_by_mask(t: torch.Tensor) -> torch.Tensor:
    return t + t[t > 0].sum()


def _fill_by_mask(t: torch.Tensor) -> torch.Tensor:
    filled = t.clone()
    filled[t > 0] = torch.ones(())
    return filled


def _repeat(t: torch.Tensor) -> torch.Tensor:
    return t + t.flatten().repeat_interleave(torch.ones(48, dtype=torch.int64)).sum()


def _count(t: torch.Tensor) -> torch.Tensor:
    return t + (t > 0).long().flatten().bincount().sum()


READERS = [_scale_by_item, _scale_by_numpy, _scale_by_list, _choose]
READERS += [_compare, _choose_by_mask, _fill_by_mask, _repeat, _count]


@pytest.mark.parametrize("work", READERS)
def test_an_operator_reads_a_value_on_the_host(compiled: Any, simulated: None, operators: Any, work: Any) -> None:
    scale = operators.add("scale(Tensor t) -> Tensor", work)

    def program(t: torch.Tensor) -> torch.Tensor:
        return scale(t.sin()).cos()

    error = fault_in(compiled(program, **CHECKED), x)
    assert error.fault == "host value" and error.operator == f"{operators.name}::scale"
    assert "test_planted_faults.py" in error.line and "scale(t.sin())" in error.line
    assert "eager_ops" in error.remedy


def _repeat_to_known_size(t: torch.Tensor) -> torch.Tensor:
    return t + t.flatten().repeat_interleave(torch.ones(48, dtype=torch.int64), output_size=48).sum()


def _index(t: torch.Tensor) -> torch.Tensor:
    indexed = t[torch.zeros(3, dtype=torch.int64)]
    indexed[torch.tensor([1])] = torch.ones(())
    return t + indexed.sum()


@pytest.mark.parametrize("work", [_repeat_to_known_size, _index])
def test_an_operator_that_knows_its_sizes_reads_nothing(
    compiled: Any, simulated: None, operators: Any, work: Any
) -> None:
    op = operators.add("knows(Tensor t) -> Tensor", work)
    f = compiled(lambda t: op(t.sin()).cos(), **CHECKED)
    with torch.no_grad():
        for _ in range(4):
            t = x()
            torch.testing.assert_close(f(t), work(t.sin()).cos())


def test_an_operator_waits_for_the_device(
    compiled: Any, simulated: None, operators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *device: None)

    def work(t: torch.Tensor) -> torch.Tensor:
        torch.accelerator.synchronize()
        return t + 1

    op = operators.add("waits(Tensor t) -> Tensor", work)
    error = fault_in(compiled(lambda t: op(t.sin()), **CHECKED), x)
    assert error.fault == "host synchronisation" and error.operator.endswith("::waits")


def test_an_operator_keeps_an_operand(compiled: Any, simulated: None, operators: Any) -> None:
    seen: list[torch.Tensor] = []

    def log(t: torch.Tensor) -> torch.Tensor:
        seen.append(t)
        return t + 1

    op = operators.add("log(Tensor t) -> Tensor", log)
    error = fault_in(compiled(lambda t: op(t.sin()).cos(), **CHECKED), x)
    assert error.fault == "keeps an operand" and error.operator.endswith("::log") and "clone" in error.remedy


def test_an_operator_keeps_an_operand_that_is_written_to_later(compiled: Any, operators: Any) -> None:
    """On the CPU, too: Inductor computes in place what nobody reads any more."""
    seen: list[torch.Tensor] = []

    def log(t: torch.Tensor) -> torch.Tensor:
        seen.append(t)
        return t.sum()

    op = operators.add("log(Tensor t) -> Tensor", log, lambda t: t.new_empty(()))

    def program(t: torch.Tensor) -> torch.Tensor:
        a = t @ t.T
        return (a + op(a)) @ t

    error = fault_in(compiled(program, **CHECKED), x)
    assert error.fault == "keeps an operand" and error.operator.endswith("::log")
    assert "writes to it in the same call" in error.subject


def test_an_operator_keeps_a_result(compiled: Any, simulated: None, operators: Any) -> None:
    cache: list[torch.Tensor] = []

    def work(t: torch.Tensor) -> torch.Tensor:
        cache[:] = [t + 1]
        return cache[0]

    op = operators.add("cached(Tensor t) -> Tensor", work)
    error = fault_in(compiled(lambda t: op(t.sin()).cos(), **CHECKED), x)
    assert error.fault == "keeps a result" and error.operator.endswith("::cached")


def test_an_operator_keeps_what_it_allocates(compiled: Any, simulated: None, operators: Any) -> None:
    scratch: list[torch.Tensor] = []

    def work(t: torch.Tensor) -> torch.Tensor:
        scratch.append(torch.empty_like(t))
        return torch.add(t, 1, out=scratch[-1]) * 2

    op = operators.add("scratches(Tensor t) -> Tensor", work)
    error = fault_in(compiled(lambda t: op(t.sin()), **CHECKED), x)
    assert error.fault == "keeps what it allocates" and error.operator.endswith("::scratches")


@pytest.mark.parametrize("where", [on_cpu, on_simulated])
def test_an_operator_writes_what_it_does_not_declare(compiled: Any, operators: Any, where: Any) -> None:
    def work(t: torch.Tensor) -> torch.Tensor:
        t.add_(1)
        return t * 2

    op = operators.add("sneaks(Tensor t) -> Tensor", work)
    with where():
        error = fault_in(compiled(lambda t: op(t.sin()), **CHECKED), x)
    assert error.fault == "undeclared write" and error.operator.endswith("::sneaks")
    assert "sneaks(Tensor t) -> Tensor" in error.got


@pytest.mark.parametrize("where", [on_cpu, on_simulated])
def test_an_operator_returns_memory_of_its_operand(compiled: Any, operators: Any, where: Any) -> None:
    op = operators.add("turns(Tensor t) -> Tensor", lambda t: t.view(-1), lambda t: t.new_empty(t.numel()))
    with where():
        error = fault_in(compiled(lambda t: op(t.sin()) + 1, **CHECKED), x)
    assert error.fault == "undeclared alias" and error.operator.endswith("::turns")


def test_one_of_several_results_is_memory_of_an_operand(compiled: Any, operators: Any) -> None:
    def looks(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(t), torch.empty_like(t)

    op = operators.add("splits(Tensor t) -> (Tensor, Tensor)", lambda t: (t + 1, t.view(t.shape)), looks)

    def program(t: torch.Tensor) -> torch.Tensor:
        a, b = op(t.sin())
        return a * b

    error = fault_in(compiled(program, **CHECKED), x)
    assert error.fault == "undeclared alias" and error.operator.endswith("::splits")


@pytest.mark.parametrize("at", [-4, 6 * 8 * 4])
def test_an_operator_writes_beside_its_operand(compiled: Any, operators: Any, at: int) -> None:
    def work(t: torch.Tensor) -> None:
        t.add_(1)
        ctypes.memset(t.data_ptr() + at, 0, 4)

    op = operators.add("spills(Tensor(a!) t) -> ()", work, lambda t: None)

    def program(t: torch.Tensor) -> torch.Tensor:
        y = t.sin()
        op(y)
        return y.cos()

    # Without an eager run before: what it writes to there is nobody's.
    error = fault_in(compiled(program, options={"checked": 1, "warmup": 0}), x, calls=1)
    assert error.fault == "writes outside of a storage" and error.operator.endswith("::spills")
    assert ("before it" if at < 0 else "after it") in error.got and error.got.startswith("4 byte(s)")


def test_a_program_reads_what_nobody_wrote(compiled: Any, operators: Any) -> None:
    def work(out: torch.Tensor, t: torch.Tensor) -> None:
        out.add_(t)

    op = operators.add("adds_to(Tensor(a!) out, Tensor t) -> ()", work, lambda out, t: None)

    def program(t: torch.Tensor) -> torch.Tensor:
        total = torch.empty(6, 8)
        op(total, t)
        return total.sin()

    error = fault_in(compiled(program, options={"checked": 1, "warmup": 0}), lambda: torch.ones(6, 8), calls=1)
    assert error.fault == "reads uninitialised memory" and "adds_to" in error.operator


def test_an_operator_with_a_counter_of_its_own(compiled: Any, simulated: None, operators: Any) -> None:
    state = {"calls": 0}

    def work(t: torch.Tensor) -> torch.Tensor:
        state["calls"] += 1
        return t + state["calls"]

    op = operators.add("counts(Tensor t) -> Tensor", work)
    error = fault_in(compiled(lambda t: op(t.sin()), **CHECKED), x)
    assert error.fault == "not the same twice" and error.operator.endswith("::counts")


# -- plans ------------------------------------------------------------------------------------------------------


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxwrap.pipeline, "verify_memory", lambda *args: None)


def plan_changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[MemoryPlan], MemoryPlan]) -> None:
    monkeypatch.setattr(fxwrap.pipeline, "plan_program", lambda *given: change(plan_program(*given)))


def all_at_the_start(plan: MemoryPlan) -> MemoryPlan:
    places = tuple(
        dataclasses.replace(place, offset=0) if place.home is Home.REGION else place for place in plan.places
    )
    return dataclasses.replace(plan, places=places)


def chain(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    b = (a @ w).sin()
    c = (b @ w).cos()
    d = c @ w
    return b @ d.T @ c


def square() -> torch.Tensor:
    return torch.randn(8, 8)


@pytest.mark.parametrize("where", [on_cpu, on_simulated])
def test_storages_overlap(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, unverified: None, own_arenas: Any, where: Any
) -> None:
    plan_changed(monkeypatch, all_at_the_start)
    with where():
        error = fault_in(compiled(chain, **CHECKED), square, square)
    assert error.fault == "storages overlap" and error.operator


def test_storages_overlap_where_replays_do_not_show_it(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, unverified: None, simulated: None
) -> None:
    """The result is the same by chance: what lies there is written anew with the same numbers."""

    def change(plan: MemoryPlan) -> MemoryPlan:
        return all_at_the_start(plan)

    plan_changed(monkeypatch, change)

    def same(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        b = a @ w
        c = a @ w.T.T.contiguous()
        return b @ c

    error = fault_in(compiled(same, **CHECKED), lambda: torch.zeros(8, 8), lambda: torch.zeros(8, 8))
    assert error.fault == "storages overlap" and "lies over it" in error.subject


def test_a_storage_is_freed_too_early(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, unverified: None, simulated: None
) -> None:
    lay_out = fxwrap.passes.memory.planner.lay_out_arena

    def shortened(buffers: Any, *args: Any) -> Any:
        short = [dataclasses.replace(b, end=max(b.begin + 1, b.end - 3)) for b in buffers]
        return lay_out(short, *args)

    monkeypatch.setattr(fxwrap.passes.memory.planner, "lay_out_arena", shortened)
    error = fault_in(compiled(chain, **CHECKED), square, square)
    assert error.fault == "storages overlap" and error.operator


# -- recordings -------------------------------------------------------------------------------------------------


def _copy_no_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Layout.fill_input_buffers

    def planted(self: Layout, inputs: Any) -> Any:
        for part in fill(self, inputs):
            part.run(list(inputs))
        return []  # nothing that would fill them at a replay

    monkeypatch.setattr(Layout, "fill_input_buffers", planted)


def test_an_input_is_not_copied_in(compiled: Any, monkeypatch: pytest.MonkeyPatch, simulated: None) -> None:
    _copy_no_inputs(monkeypatch)
    error = fault_in(compiled(chain, **CHECKED), square, square)
    assert error.fault == "input not copied in" and error.operator


def test_an_input_baked_in_is_found_on_the_run_that_records(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, simulated: None
) -> None:
    _copy_no_inputs(monkeypatch)
    monkeypatch.setattr("fxwrap.features.checked.program.check_steps", lambda recording: None)
    f: Compiled = compiled(lambda t: (t + 1).sin() @ t, **CHECKED)
    error = fault_in(f, square, calls=2)
    assert error.fault == "input baked in" and "input(s) 0" in error.subject
    assert f.program.counters.replays == 0


def test_a_static_input_that_moves_is_not_noticed(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, simulated: None
) -> None:
    monkeypatch.setattr(fxwrap.graphs.replay.recording, "pointer_check", lambda *args: lambda inputs: True)
    error = fault_in(compiled(torch.nn.Linear(8, 8), **CHECKED), x, calls=2)
    assert error.fault == "input baked in" and "elsewhere" in error.got


@pytest.mark.parametrize("where", [on_cpu, on_simulated])
def test_a_parameter_is_copied_when_it_is_recorded(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, own_arenas: Any, where: Any
) -> None:
    """An optimizer that updates it in place is not seen by replays."""
    monkeypatch.setattr(Layout, "_unowned", lambda self, value: value.detach().clone())
    with where():
        error = fault_in(compiled(torch.nn.Linear(8, 8), **CHECKED), x, calls=2)
    assert error.fault == "input baked in" and "aten::addmm" in error.operator


@pytest.mark.parametrize("fault", ["input not copied back", "wrong input"])
def test_an_updated_input_is_not_copied_back(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, simulated: None, fault: str
) -> None:
    """Left out of the replay, or there without effect."""
    finished = RecordingBuilder._make_recording

    def planted(self: RecordingBuilder, replay: Replay) -> Any:
        without = [part for part in replay.parts if not part.name.endswith("copies to inputs")]
        return finished(self, dataclasses.replace(replay, parts=without))

    if fault == "wrong input":
        builder = "fxwrap.graphs.record.recording_builder"
        monkeypatch.setattr(f"{builder}.CallOperator", lambda _, args, **__: CallPython(lambda *_: None, args))
    else:
        monkeypatch.setattr(RecordingBuilder, "_make_recording", planted)

    def program(t: torch.Tensor) -> torch.Tensor:
        t.mul_(2)
        return t + 1

    error = fault_in(compiled(program, **CHECKED), x)
    assert error.fault == fault and "input 0" in error.subject


def test_an_output_is_overwritten_while_somebody_has_it(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, simulated: None
) -> None:
    monkeypatch.setattr(LivenessGuard, "all_dead", lambda self: True)
    f = compiled(lambda t: t.sin() @ t.T, **CHECKED)
    kept: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        if len(kept) < 3:
            kept.append(f(t).sum())  # dropped: what the first calls return is copied if somebody has it
        else:
            kept.append(f(t))
        return kept[-1]

    error = fault_in(f, x, calls=8, call=keep)
    assert error.fault == "live output overwritten"


def two_captures(operators: Any) -> Callable[..., Any]:
    outside = operators.add("outside(Tensor t) -> Tensor", lambda t: t * 2)

    def program(t: torch.Tensor) -> torch.Tensor:
        return outside(t.sin() @ t.T).cos() @ t

    return program


@pytest.mark.parametrize("look", ["at the recording", "at results"])
@pytest.mark.parametrize(
    "fault, steps",
    [("partitions in the wrong order", slice(None, None, -1)), ("partition not replayed", slice(0, -1))],
)
def test_a_replay_is_not_what_was_planned(
    compiled: Any,
    monkeypatch: pytest.MonkeyPatch,
    simulated: None,
    operators: Any,
    fault: str,
    steps: slice,
    look: str,
) -> None:
    """Found where the recording is compared with the plan; and if it were not, where numbers are compared."""
    finished = RecordingBuilder._make_recording

    def planted(self: RecordingBuilder, replay: Replay) -> Any:
        begin = next(i for i, part in enumerate(replay.parts) if "partition" in part.name)
        planned = [*replay.parts[:begin], *replay.parts[begin:-1][steps], replay.parts[-1]]
        return finished(self, dataclasses.replace(replay, parts=planned))

    monkeypatch.setattr(RecordingBuilder, "_make_recording", planted)
    if look == "at results":
        monkeypatch.setattr("fxwrap.features.checked.program.check_steps", lambda recording: None)
        fault = "input baked in"
    options = {"checked": 1, "eager_ops": [f"{operators.name}::outside"]}
    error = fault_in(compiled(two_captures(operators), options=options), x)
    assert error.fault == fault and error.operator


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_the_step_of_a_recording_that_goes_wrong(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, operators: Any, eager: bool
) -> None:
    """It is recorded again in single steps, and what each leaves is compared."""
    finished = RecordingBuilder._make_recording

    def wrong(step: Step) -> Step:
        if not isinstance(step, CallOperator) or step.overload.namespace != operators.name:
            return step
        return CallPython(lambda t: t * 3, step.args, results=step.results, node=step.node)

    def planted(self: RecordingBuilder, replay: Replay) -> Any:
        parts = [Part.of(list(map(wrong, part.steps)), part.result, part.name) for part in replay.parts]
        return finished(self, dataclasses.replace(replay, parts=parts))

    monkeypatch.setattr(RecordingBuilder, "_make_recording", planted)
    options = {"checked": 1, "eager_ops": [f"{operators.name}::outside"] if eager else []}
    error = fault_in(compiled(two_captures(operators), options=options), x)
    assert error.operator == f"{operators.name}::outside" and "is the first that leaves" in error.subject


def test_what_eager_work_returns_stays_where_it_was_allocated(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, simulated: None, operators: Any
) -> None:
    """Captured work reads what the first call left."""
    monkeypatch.setattr(StaticBuffers, "buffer_of", lambda self, value: value.clone())
    monkeypatch.setattr("fxwrap.graphs.record.recording_builder.copy_tensors", lambda source, place: None)
    monkeypatch.setattr("fxwrap.graphs.record.placed_results.copy_tensors", lambda source, place: None)
    outside = operators.add("outside(Tensor t) -> Tensor", lambda t: t * 2)
    options = {"checked": 1, "eager_ops": [f"{operators.name}::outside"]}
    error = fault_in(compiled(lambda t: outside(t.sin()) @ t.T, options=options), x)
    # Its place in the plan holds what nobody has written.
    assert error.fault == "reads uninitialised memory" and error.operator.endswith("::outside")


def test_replays_do_not_advance_the_generator(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, simulated: None
) -> None:
    replay = SimulatedGraph.replay

    def planted(self: SimulatedGraph) -> None:
        with torch.random.fork_rng(devices=[]):
            replay(self)

    monkeypatch.setattr(SimulatedGraph, "replay", planted)
    options = {"checked": 1, "fallback_random": True}
    error = fault_in(compiled(lambda t: torch.nn.functional.dropout(t.sin(), 0.5), options=options), x)
    assert error.fault == "random numbers"


def test_a_graph_captured_a_number_of_its_first_call(
    compiled: Any, monkeypatch: pytest.MonkeyPatch, simulated: None
) -> None:
    """As a kernel does that is launched with a number which the host has read."""
    captured: dict[int, Any] = {}
    work = torch.ops.aten.addmm.out

    replay = SimulatedGraph.replay

    def planted(self: SimulatedGraph) -> None:
        replay(self)
        for call in self._calls:
            for number, value in enumerate(_globals(call)):
                if isinstance(value, torch.Tensor) and value.dim() == 2 and value.size(0) == 6:
                    key = id(self) + number
                    captured.setdefault(key, value.clone())
                    value.copy_(captured[key])

    def _globals(call: Any) -> list[Any]:
        return [call.function.__globals__[name] for name in sorted(call.function.__globals__)]

    monkeypatch.setattr(SimulatedGraph, "replay", planted)
    error = fault_in(compiled(torch.nn.Linear(8, 8), **CHECKED), x)
    assert error.fault == "input baked in" and error.operator
    del work
