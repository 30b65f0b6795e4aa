"""Profiles name every launch and library call, and the module that it is of."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compiled, freezes
from native_calls import native
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fxwrap.graphs.replay.flat_python import as_python
from fxwrap.graphs.replay.steps import CallPython
from fxwrap.inspection.document import graph_data

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@contextlib.contextmanager
def _profiled(wanted: set[str]) -> Iterator[list[Any]]:
    """The ranges with these names, in the order in which they begin."""
    found = list[Any]()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield found
    ours = (event for event in profiler.events() if event.name in wanted)
    found += sorted(ours, key=lambda event: event.time_range.start)


def _work(program: Any) -> list[str]:
    """The ranges of a program's work, in its order."""
    return [one.range for work in graph_data(program).in_graphs.values() for one in work]


def _names(events: list[Any]) -> list[str]:
    return [event.name for event in events]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).sin())


@pytest.mark.compiler
@pytest.mark.parametrize("way", ["natively", "in Python"])
def test_each_step_of_work_has_a_range_of_its_own(
    compiled: Any, device: torch.device, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside of a device graph that only a device replays, there are none."""
    if way == "in Python":
        monkeypatch.setattr("fxwrap.graphs.replay.recording.Recording.make_unit", lambda self: "")
    model = nn.Sequential(Block(), Block()).to(device)
    f: Compiled = compiled(model)
    with torch.no_grad():
        f(torch.randn(4, 8, device=device))
        work = _work(f.program)
        products = [name.partition(":")[0] for name in work if name.endswith(("aten::addmm", "aten::mm"))]
        assert products == ["0.up", "0.down", "1.up", "1.down"], work
        assert all(name.partition(":")[0].startswith(("0", "1")) for name in work) and len(work) >= 6
        for _ in range(2):
            f(torch.randn(4, 8, device=device))
        for _ in range(2):
            x, before = torch.randn(4, 8, device=device), f.program.counters.replays
            with _profiled({*work, f"{f.program.name}, partition 0"}) as events:
                same = torch.allclose(f(x), model(x), atol=1e-5)
            assert f.program.counters.replays == before + 1 and same
            partition, *inside = events
            assert _names(inside) == ([] if freezes(device) else work)
            assert all(event.time_range.end <= partition.time_range.end for event in inside)


@pytest.mark.compiler
def test_eager_runs_have_the_same_ranges(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(nn.Sequential(Block(), Block()).to(device), options={"warmup": 1000})
    with torch.no_grad():
        f(torch.randn(4, 8, device=device))
        work = _work(f.program)
        for _ in range(4):  # the last ones through a unit
            with _profiled(set(work)) as events:
                f(torch.randn(4, 8, device=device))
            assert _names(events) == work and work


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.yes(x), lambda x: self.no(x), (x,))


@pytest.mark.compiler
@pytest.mark.parametrize("way", ["natively", "in Python"])
def test_work_inside_of_a_branch_has_a_range(compiled: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "in Python":
        monkeypatch.setattr("fxwrap.graphs.replay.recording.Recording.make_unit", lambda self: "")
    f: Compiled = compiled(Chooses())
    with torch.no_grad():
        for _ in range(3):
            f(torch.ones(8, 8))
        wanted = {f"{one}: aten::addmm" for one in ("yes", "no")}
        for sign, name in ((1, "yes"), (-1, "no")):
            before = f.program.counters.replays
            with _profiled(wanted) as events:
                f(sign * torch.ones(8, 8))
            assert f.program.counters.replays == before + 1
            assert _names(events) == [f"{name}: aten::addmm"]


def test_a_step_that_runs_twice_has_one_range() -> None:
    asked, graph = list[int](), torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))

    def short() -> None:
        asked.append(len(asked))
        if len(asked) == 1:
            raise torch.OutOfMemoryError

    step = CallPython(short, node=node, may_retry=True)
    run, *_ = as_python([step], None, profiled=True, give_back=lambda: None)
    with _profiled({"aten::sin"}) as events:
        run([])
    assert asked == [0, 1] and _names(events) == ["aten::sin"]


@native
@pytest.mark.compiler
def test_a_profile_of_a_decoder_step_names_every_kernel_and_its_module(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    model, arguments = importlib.import_module("speed_models").decoder()
    f: Compiled = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            f(*arguments)
        work = _work(f.program)
        with _profiled(set(work)) as events:
            f(*arguments)
    assert f.program.specializations.units and _names(events) == work
    modules = {name for name, _ in model.named_modules()}
    assert all(name.partition(": ")[0] in modules for name in work) and len(work) > 30
