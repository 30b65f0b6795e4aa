"""Host work in the middle of a model: few captured partitions, no more than Inductor's own cut has, right numbers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "host_work.py"


@pytest.fixture(scope="module")
def host_work() -> Any:
    spec = importlib.util.spec_from_file_location("host_work", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["host_work"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def device() -> Iterator[torch.device]:
    import hostsim
    import hostsim.inductor

    torch.compiler.reset()
    with hostsim.inductor.register():
        yield torch.device(hostsim.NAME, 0)
    torch.compiler.reset()


# All of them: benchmarks/host_work.py.
@pytest.mark.parametrize("name", ["mixture of experts, .item()", "scalars on the host", "ragged rows", "branches"])
def test_no_more_captured_partitions_than_inductors_own_cut(host_work: Any, device: torch.device, name: str) -> None:
    row = host_work.compare(name, device)  # compares the numbers with eager's, too
    assert row["fewest possible"] == row["fxwrap"] <= row["Inductor"]
    assert row["replays"] == 2


def test_scalars_on_the_host_are_copied_once_and_read_at_every_call(device: torch.device) -> None:
    """
    ::

        [ mm ] ( * step ) [ mm ] ( * step ) [ mm ]      becomes      ( step * 2, copy ) [ mm * mm * mm ]
    """

    def g(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        step = step * 2
        return ((x @ x) * step @ x) * step @ x

    f = torch.compile(g, backend="fxwrap", options={"capture": "always"})
    for call in range(5):
        x, step = torch.randn(4, 4), torch.tensor(1.0 + call)
        torch.testing.assert_close(f(x.to(device), step).cpu(), g(x, step))
    (graph,) = fxwrap.report(f).graphs
    assert [partition.verdict.value for partition in graph.partitions] == ["eager", "captured"]
    assert graph.counters["replays"] == 3
