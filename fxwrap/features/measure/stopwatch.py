"""Times each launch and library call of the programs that a call runs, on the real operands.

Each program of a call runs several times: as it is, and with clocks among its steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...api.compile_afresh import compile_afresh
from ...graphs.copies import Copies, Generators
from ...graphs.program import Program
from ...graphs.program_runs import calls_run_by, programs_run_by
from ...host_graph.nodes import communicates, operator_name
from ...host_graph.typed_json import to_data
from ...host_graph.user_code import module_path
from ...inspection.explanation import Explanation
from .bytes_moved import BytesMoved
from .clocked_steps import ClockedSteps, synchronized
from .measured import Measured, MeasuredProgram, MeasuredStep

# Calls before the measured one. Most programs replay from the third call on; some record twice.
_CALLS = 5
_FEWEST, _MOST, _SECONDS = 5, 51, 0.5  # of runs: the numbers, and for how long there are more than the fewest


def explain_times(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    calls: int,
) -> Explanation:
    """What ``fxwrap.explain`` does with ``measure``."""
    watch = Stopwatch()
    explanation = compile_afresh(fn, args, kwargs, options, max(calls, _CALLS), watch.time)
    return explanation.with_section("measured", to_data(watch.measured()))


class Stopwatch:
    """Measures the programs of one call."""

    def __init__(self) -> None:
        self._programs: dict[str, MeasuredProgram] = {}

    def time(self, call: Callable[[], Any]) -> None:
        """Make a call, whose programs are measured. A program that runs several times is measured the first time."""
        with calls_run_by(self._run):
            call()

    def measured(self) -> Measured:
        return Measured(self._programs)

    def _run(self, program: Program, inputs: list[Any]) -> Any:
        with programs_run_by(None):
            if program.name not in self._programs:
                self._programs[program.name] = _measured(program, list(inputs))
            return program.run(inputs)


def _measured(program: Program, inputs: Sequence[Any]) -> MeasuredProgram:
    """Run a program several times, as it is and with clocks among its steps. Inputs and random numbers stay."""
    plan, facts = program.plan, program.plan.facts
    written = facts.all_written()
    changed = set(program.recorder.prepared.overwritten)
    changed |= {p for p, node in enumerate(plan.placeholders) if not written.isdisjoint(facts.of(node))}
    before, generators = Copies([inputs[position] for position in sorted(changed)]), Generators(plan.device)

    def taken_back(run: Callable[[list[Any]], Any]) -> Any:
        given = list(inputs)
        try:
            return run(given)
        finally:
            before.restore()
            generators.set()

    replays = program.counters.replays
    taken_back(program.run)
    recordings = [recording for recording in program.specializations.recordings() if recording.replay is not None]
    if program.counters.replays == replays or not recordings:
        eager = ", ".join(program.counters.to_dict()["eager"]) or "nothing is recorded"
        return MeasuredProgram(why_not=f"its calls are no replays: {eager}")
    recording = max(recordings, key=lambda recording: recording.used)
    clocked = ClockedSteps.of(program, recording)

    def clocked_call(given: list[Any]) -> int:
        begin = synchronized(plan.device)()
        outputs = program.run(given)  # they are freed after the clock
        took = synchronized(plan.device)() - begin
        del outputs
        return took

    # All processes that communicate have to run equally often.
    most = _FEWEST if any(map(communicates, plan.schedule)) else _MOST
    calls, times = list[float](), list[list[float]]()
    begin = time.monotonic()
    while len(calls) < _FEWEST or (len(calls) < most and time.monotonic() - begin < _SECONDS):
        # Each is first in turn: on a busy machine other processes may come in after every second run.
        runs: list[tuple[list[Any], Callable[[list[Any]], Any]]] = [(calls, clocked_call), (times, clocked.run)]
        for results, run in runs if len(calls) % 2 else reversed(runs):
            results.append(taken_back(run))
    *medians, between = (statistics.median(of_step) / 1e3 for of_step in zip(*times, strict=True))
    moved = BytesMoved(plan, program.recorder.prepared.provider.symbols(inputs))
    return MeasuredProgram(
        runs=len(calls),
        call_us=statistics.median(calls) / 1e3,
        between_us=0.0 if clocked.apart else between,
        in_graphs=clocked.apart,
        steps=tuple(
            MeasuredStep(node.name, operator_name(node), module_path(node), us, moved.by(node))
            for node, us in zip(clocked.nodes, medians, strict=True)
        ),
    )
