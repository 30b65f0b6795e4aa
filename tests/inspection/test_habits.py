"""The habits of those who look: logs, structured traces, profiler ranges, debug files."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HOSTCUDA, Compiled, freezes
from torch._inductor import config
from torch._logging._internal import trace_log
from torch.profiler import ProfilerActivity, profile, record_function

import fxwrap
from fxwrap.graphs import program
from fxwrap.graphs.devices.cpu_graph import CPUGraph
from fxwrap.graphs.devices.runtime import runtime_for
from fxwrap.graphs.replay import operands, recording, steps
from fxwrap.graphs.traces import ProgramTraces

# -- ranges in profiles -------------------------------------------------------------------------------------


@torch.library.custom_op("fxwrap_habits::ordered", mutates_args=())
def ordered(x: torch.Tensor) -> torch.Tensor:
    return x.sort(0).values


@ordered.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _sorted_between(x: torch.Tensor, w: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
    """Two captured partitions with an eager one between them, and an input that is written."""
    calls.add_(1)
    return ordered((x @ w).sin()) @ w


_ORDERED_IS_EAGER = {"capture": "always", "eager_ops": ["fxwrap_habits::ordered"]}


def _inputs(device: torch.device, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.randn(8, 8).to(device), w, torch.zeros(1).to(device)


@contextlib.contextmanager
def _profiled() -> Iterator[list[Any]]:
    """The ranges of fxwrap's programs, and of tests, in the order in which they begin."""
    found = list[Any]()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield found
    ours = [event for event in profiler.events() if event.name.startswith(("fxwrap ", "test "))]
    found += sorted(ours, key=lambda event: event.time_range.start)


def _names(events: list[Any]) -> list[str]:
    return [event.name for event in events]


def _is_inside(event: Any, outer: Any) -> bool:
    return outer.time_range.start <= event.time_range.start and event.time_range.end <= outer.time_range.end


@contextlib.contextmanager
def _in_python(one: Any) -> Iterator[None]:
    units, one.specializations.units = one.specializations.units, ()
    yield
    one.specializations.units = units


def test_ranges_of_programs_partitions_and_copies(compiled: Any, device: torch.device) -> None:
    """The same ones in eager runs, in replays by a unit, and in replays in Python."""
    f: Compiled = compiled(_sorted_between, options=_ORDERED_IS_EAGER)
    w = torch.randn(8, 8).to(device)
    with torch.no_grad(), _profiled() as eager:
        f(*_inputs(device, w))
    name = f.program.name
    assert re.fullmatch(r"fxwrap \d+ inference", name)
    partitions = [f"{name}, partition {index}" for index in range(3)]
    assert len(f.program.plan.partitions) == 3
    assert _names(eager) == [name, *partitions]
    with torch.no_grad():
        with _profiled() as recorded:
            f(*_inputs(device, w))
        assert _names(recorded)[:2] == [name, f"{name}, recording"]
        f(*_inputs(device, w))
        before = f.program.counters.replays
        with _profiled() as natively:
            f(*_inputs(device, w))
        with _in_python(f.program), _profiled() as in_python:
            f(*_inputs(device, w))
        assert f.program.counters.replays == before + 2
    expected = [name, *partitions]
    if freezes(device):
        expected = [name, f"{name}, copies of inputs", *partitions[:2], f"{name}, copies after partition 1"]
        expected += [partitions[2], f"{name}, copies to inputs"]
    assert _names(natively) == expected
    assert _names(in_python) == expected
    for whole, *parts in (eager, natively, in_python):
        assert all(_is_inside(part, whole) for part in parts)
        assert all(a.time_range.end <= b.time_range.start for a, b in itertools.pairwise(parts))


def test_ranges_of_eager_runs_natively(compiled: Any) -> None:
    """What is never recorded runs eagerly, from the third call on through a unit."""
    f: Compiled = compiled(_sorted_between, options={**_ORDERED_IS_EAGER, "max_memory": 1, "warmup": 1000})
    w = torch.randn(8, 8)
    found = []
    with torch.no_grad():
        for _ in range(5):
            with _profiled() as events:
                f(*_inputs(torch.device("cpu"), w))
            found.append(_names(events))
    assert f.program.counters.replays == 0 and f.program.recorder.prepared.eager._unit is not None
    name = f.program.name
    assert found == [[name, *(f"{name}, partition {index}" for index in range(3))]] * 5


def test_forward_and_backward_have_ranges_and_names_of_their_own(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(lambda x, w: (x @ w).sin())
    w = torch.randn(8, 8).to(device).requires_grad_()
    for _ in range(3):
        f(torch.randn(8, 8).to(device), w).sum().backward()
    forward, backward = (one.name for one in f.programs)
    assert [forward.split()[2], backward.split()[2]] == ["forward", "backward"]
    assert forward.split()[1] != backward.split()[1]
    with _profiled() as events:
        f(torch.randn(8, 8).to(device), w).sum().backward()
    assert Counter(_names(events)).items() >= {forward: 1, backward: 1, f"{backward}, partition 0": 1}.items()


@pytest.mark.parametrize("native", [True, False])
def test_a_range_ends_where_a_call_raises(compiled: Any, native: bool) -> None:
    f: Compiled = compiled(lambda x, i: (x.sin() @ x)[i] @ x)
    x, good, wrong = torch.randn(8, 8), torch.tensor([1, 2]), torch.tensor([1, 2000])
    for _ in range(3):
        f(x, good)
    with contextlib.nullcontext() if native else _in_python(f.program), _profiled() as events:
        with pytest.raises(Exception, match="out of bounds"):
            f(x, wrong)
        with record_function("test after"):
            f(x, good)
    whole, *_ = (event for event in events if event.name == f.program.name)
    (after,) = (event for event in events if event.name == "test after")
    assert whole.time_range.end <= after.time_range.start
    assert _names(events).count(f.program.name) == 2


def test_nothing_is_made_while_no_profiler_is_on(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    f: Compiled = compiled(_sorted_between, options=_ORDERED_IS_EAGER)
    w = torch.randn(8, 8)
    with torch.no_grad():
        for _ in range(3):
            f(*_inputs(torch.device("cpu"), w))

        def never(name: str) -> Any:
            raise AssertionError(name)

        for module in (steps, operands, program, recording):
            monkeypatch.setattr(module, "record_function", never)
        f(*_inputs(torch.device("cpu"), w))
        with _in_python(f.program):
            f(*_inputs(torch.device("cpu"), w))
            with pytest.raises(AssertionError, match=f.program.name), _profiled():
                f(*_inputs(torch.device("cpu"), w))


# -- logs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    """``told(level)``: what was logged since the last question, numbers of milliseconds and serial numbers aside."""
    caplog.set_level(logging.DEBUG, "fxwrap")

    def since(level: int = logging.INFO) -> list[str]:
        records = [
            record for record in caplog.records if record.name.startswith("fxwrap") and record.levelno >= level
        ]
        caplog.clear()
        messages = (record.getMessage() for record in records)
        return [re.sub(r"[\d.]+ ms", "? ms", re.sub(r"fxwrap \d+", "fxwrap ?", message)) for message in messages]

    return since


def test_the_log_has_each_decision_once(compiled: Any, told: Any) -> None:
    f: Compiled = compiled(_sorted_between, options=_ORDERED_IS_EAGER)
    w, cpu = torch.randn(8, 8), torch.device("cpu")
    with torch.no_grad():
        f(*_inputs(cpu, w))
        head, first, second, third, warm_up = told()
        assert head == "fxwrap ? inference: 3 partition(s) on cpu"
        assert first.startswith("fxwrap ? inference, partition 0: captured, ")
        assert second.startswith(
            "fxwrap ? inference, partition 1: eager, 0 launches, 1 library calls; fxwrap_habits::ordered"
        )
        assert third.startswith("fxwrap ? inference, partition 2: captured, ")
        assert warm_up == "fxwrap ? inference: runs eagerly: warm-up"
        f(*_inputs(cpu, w))
        (recorded,) = told()
        peak, how = f.program.newest_plan.peak, "natively" if f.program.specializations.units else "in Python"
        assert recorded == f"fxwrap ? inference: recorded (first) in ? ms: 2 graph(s), {peak} bytes; replays {how}"
        for _ in range(3):
            f(*_inputs(cpu, w))
        with _in_python(f.program):
            f(*_inputs(cpu, w))
        assert told(logging.DEBUG) == []
        fxwrap.release(f.call)
        assert told() == ["fxwrap ? inference: a recording ends: released"]
        f(*_inputs(cpu, w))
        (again,) = told()
        assert again.startswith("fxwrap ? inference: recorded (released) in ")


def test_stages_and_plans_are_logged_for_debugging(compiled: Any, told: Any) -> None:
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
    f(torch.randn(8, 8))
    lines = told(logging.DEBUG)
    assert {"cut: ? ms", "cost model: ? ms", "memory: ? ms"} <= set(lines)
    memory = f.program.newest_plan
    planned = f"arenas 0 bytes, peak {memory.peak} bytes, lower bound {memory.lower_bound} bytes"
    assert lines.count(f"fxwrap ? inference: planned: {planned}") == 1


def test_the_log_has_who_goes_for_another_shape_and_who_waits(compiled: Any, told: Any) -> None:
    f: Compiled = compiled(lambda x: (x.sin() @ x.T).cos(), dynamic=True, options={"max_recordings": 1})
    for rows in (2, 2, 2):
        f(torch.randn(rows, 4))
    told()
    f(torch.randn(3, 4))  # a shape of its own is warmed up
    assert told() == ["fxwrap ? inference: runs eagerly: first call of these sizes"]
    f(torch.randn(2, 4))
    f(torch.randn(3, 4))
    waits = "fxwrap ? inference: runs eagerly: 1 other recordings are used more often (max_recordings)"
    assert told() == [waits]
    f(torch.randn(3, 4))
    ends, recorded = told()
    assert ends == "fxwrap ? inference: a recording ends: max_recordings: the least recently used"
    assert recorded.startswith("fxwrap ? inference: recorded (new shape) in ")


def test_the_log_has_fallbacks(compiled: Any, told: Any) -> None:
    class Refuses(fxwrap.FxwrapCodegen):
        def compile_graph(self, gm: Any) -> Any:
            raise fxwrap.FxwrapError("this graph is not wanted")

    f: Compiled = compiled(lambda x: x.sin(), options={"codegen": Refuses})
    with pytest.warns(UserWarning, match="not wanted"):
        f(torch.randn(4))
    (line,) = told()
    assert line.startswith("a inference graph runs through Inductor's own wrapper: this graph is not wanted")


# -- structured traces --------------------------------------------------------------------------------------

Told = list[tuple[dict[str, Any], str]]


class _Listener(logging.Handler):
    """Hears of torch's structured traces what is fxwrap's: entries and payloads."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.heard: Told = []

    def emit(self, record: Any) -> None:
        if record.metadata.get("artifact", {}).get("name", "").startswith("fxwrap_"):
            self.heard.append((record.metadata, record.payload))


@pytest.fixture
def heard() -> Iterator[Told]:
    listener, level = _Listener(), trace_log.level
    trace_log.addHandler(listener)
    trace_log.setLevel(logging.DEBUG)
    yield listener.heard
    trace_log.removeHandler(listener)
    trace_log.setLevel(level)


NAMES = ["fxwrap_host_graph", "fxwrap_partitions", "fxwrap_memory_plan"]


def _check_traces(found: Told, program: str) -> None:
    assert [entry["artifact"]["name"] for entry, _ in found] == NAMES
    assert [entry["artifact"]["encoding"] for entry, _ in found] == ["string", "json", "json"]
    # All belong to the compilation, although memory is planned when it is over.
    where = [{key: entry.get(key) for key in ("frame_compile_id", "attempt")} for entry, _ in found]
    assert where == [{"frame_compile_id": 0, "attempt": 0}] * 3 and "stack" not in found[-1][0]
    assert len({entry["frame_id"] for entry, _ in found}) == 1
    (_, graph), (_, partitions), (_, memory) = found
    assert "fxwrap_habits.ordered" in graph and "launch " in graph
    verdicts = [one["verdict"] for one in json.loads(partitions)["partitions"]]
    assert verdicts == ["captured", "eager", "captured"]
    assert json.loads(partitions)["program"] == json.loads(memory)["program"] == program
    assert json.loads(memory)["peak_bytes"] > 0


def test_traces_have_host_graph_partitions_and_plan(compiled: Any, device: torch.device, heard: Told) -> None:
    f: Compiled = compiled(_sorted_between, options=_ORDERED_IS_EAGER)
    w = torch.randn(8, 8).to(device)
    for _ in range(4):
        f(*_inputs(device, w))
    _check_traces(heard, f.program.name)
    storages = {one["name"]: one for one in json.loads(heard[2][1])["storages"]}
    assert len(storages) == len(f.program.newest_plan.places)
    assert storages["buf0"]["bytes"] == 8 * 8 * 4


def test_a_plan_of_nobody_s_compilation_is_told_all_the_same(compiled: Any, heard: Told) -> None:
    """As that of a saved program."""
    traces = ProgramTraces("fxwrap 1000 inference")
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos())
    f(torch.randn(8, 8))
    heard.clear()
    traces.planned(f.program.plan, f.program.newest_plan)
    ((entry, payload),) = heard
    assert "frame_id" not in entry and "stack" not in entry
    assert json.loads(payload)["program"] == "fxwrap 1000 inference"


# -- debug files --------------------------------------------------------------------------------------------


FILES = ["fxwrap_host_graph.txt", "fxwrap_partitions.json", "fxwrap_memory_plan.json"]


def test_debug_files_lie_beside_inductors(compiled: Any, device: torch.device, tmp_path: Path) -> None:
    if HOSTCUDA and device.type == "cuda" and hasattr(torch.accelerator, "Graph"):
        pytest.skip("torch writes graphs with cuda-python, which needs calls that the device does not have")
    f: Compiled = compiled(_sorted_between, options=_ORDERED_IS_EAGER)
    w = torch.randn(8, 8).to(device)
    with torch.no_grad(), config.patch({"trace.enabled": True, "trace.debug_dir": str(tmp_path)}):
        f(*_inputs(device, w))
    with torch.no_grad():
        f(*_inputs(device, w))
    (folder,) = {path.parent for path in tmp_path.rglob("fxwrap_*")}
    assert (folder / "output_code.py").exists()
    dumps = [f"fxwrap_partition_{index}_graph_0.dot" for index in (0, 2)]
    assert {path.name for path in folder.glob("fxwrap_*")} == {*FILES, *dumps}
    graph, partitions_text, memory_text = ((folder / name).read_text() for name in FILES)
    assert "fxwrap_habits.ordered" in graph
    memory, plan = json.loads(memory_text), f.program.newest_plan
    if not freezes(device):
        assert memory["peak_bytes"] == plan.peak and len(memory["storages"]) == len(plan.places)
    partitions = json.loads(partitions_text)
    assert [one["verdict"] for one in partitions["partitions"]] == ["captured", "eager", "captured"]
    (reason,) = partitions["eager_nodes"].values()
    assert "eager_ops" in reason["reason"]
    assert all((folder / dump).read_text() for dump in dumps)


def test_a_graph_that_cannot_be_dumped_is_recorded_all_the_same(
    compiled: Any, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    def refuse(self: Any, path: str) -> None:
        raise RuntimeError("no driver writes graphs here")

    graph = CPUGraph if device.type == "cpu" else type(runtime_for(device).new_graph(None))
    monkeypatch.setattr(graph, "debug_dump", refuse, raising=False)
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos())
    x = torch.randn(8, 8).to(device)
    with config.patch({"trace.enabled": True, "trace.debug_dir": str(tmp_path)}):
        f(x)
    f(x)
    f(x)
    assert f.replays() == [1]
    assert not list(tmp_path.rglob("*.dot"))
    (warning,) = (line for line in told(logging.WARNING) if "no driver" in line)
    assert warning.endswith("fxwrap_partition_0_graph_0.dot cannot be written: no driver writes graphs here")


def test_nothing_is_written_without_being_asked(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos())
    for _ in range(3):
        f(torch.randn(8, 8))
    assert f.program.recorder._traces.compilation.folder is None
    assert list(tmp_path.iterdir()) == []


# -- all of them ------------------------------------------------------------------------------------------------

_ASKED_BY_ENVIRONMENT = """
import torch

@torch.library.custom_op("fxwrap_habits::ordered", mutates_args=())
def ordered(x: torch.Tensor) -> torch.Tensor:
    return x.sort(0).values

@ordered.register_fake
def _(x):
    return torch.empty_like(x)

options = {"capture": "always", "eager_ops": ["fxwrap_habits::ordered"]}
f = torch.compile(lambda x, w: ordered((x @ w).sin()) @ w, backend="fxwrap", options=options)
w = torch.randn(8, 8)
for _ in range(3):
    f(torch.randn(8, 8), w)
"""


def _in_file(folder: Path) -> Told:
    """Fxwrap's entries in a raw trace, and their payloads."""
    (path,) = folder.glob("*.log")
    found: Told = []
    wanted, payload = dict[str, Any](), list[str]()
    for line in [*path.read_text().splitlines(), "V"]:
        if line.startswith("\t"):
            payload.append(line[1:])
            continue
        if wanted.get("artifact", {}).get("name", "").startswith("fxwrap_"):
            found.append((wanted, "\n".join(payload)))
        start, payload = line.find("{"), []
        wanted = json.loads(line[start:]) if start >= 0 else {}
    return found


def test_the_environment_asks_for_logs_traces_and_files(tmp_path: Path) -> None:
    """TORCH_LOGS, TORCH_TRACE and TORCH_COMPILE_DEBUG are read while torch is imported, long before fxwrap is."""
    script, traces = tmp_path / "asked.py", tmp_path / "traces"
    script.write_text(_ASKED_BY_ENVIRONMENT)
    asked = {
        "PYTHONPATH": str(Path(fxwrap.__file__).parent.parent),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCH_LOGS": "+fxwrap",
        "TORCH_TRACE": str(traces),
        "TORCH_COMPILE_DEBUG": "1",
        "TORCH_COMPILE_DEBUG_DIR": str(tmp_path),
    }
    command, environment = [sys.executable, str(script)], {**os.environ, **asked}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for said in ("fxwrap 0 inference: 3 partition(s) on cpu", "recorded (first) in", "cost model: "):
        assert said in done.stderr
    files = {path.name for path in tmp_path.glob("torch_compile_debug/*/torchinductor/*/fxwrap_*")}
    assert files == {*FILES, "fxwrap_partition_0_graph_0.dot", "fxwrap_partition_2_graph_0.dot"}
    _check_traces(_in_file(traces), "fxwrap 0 inference")
    tlparse = shutil.which("tlparse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if tlparse is not None:
        (log,) = traces.glob("*.log")
        command = [tlparse, str(log), "-o", str(tmp_path / "page"), "--no-browser"]
        subprocess.run(command, check=True, capture_output=True)
        index = (tmp_path / "page" / "index.html").read_text()
        for name in NAMES:
            assert re.search(rf'href="-_0_0_0/{name}_\d+\.(txt|json)"', index), name
