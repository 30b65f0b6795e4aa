"""Devices that have so many graphs and no more: less is captured, the rest runs eagerly, and is counted."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import assert_same, inductor

import fxwrap
from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.testing.simulated import SimulatedRuntime, simulated


class Quota:
    """Makes so many graphs, of those that live at one time; None for any number."""

    def __init__(self, make: Callable[[Any], Any], limit: int | None) -> None:
        self.make, self.limit, self.live = make, limit, weakref.WeakSet[Any]()

    def __call__(self, pool: Any) -> Any:
        if self.limit is not None and len(self.live) >= self.limit:
            raise RuntimeError(f"the device has {self.limit} graphs, and all are in use")
        graph = self.make(pool)
        self.live.add(graph)
        return graph


@pytest.fixture
def quota(own_arenas: Any) -> Iterator[Quota]:
    runtime: SimulatedRuntime = simulated()
    limited = Quota(runtime.new_graph, None)
    with using_runtime(dataclasses.replace(runtime, new_graph=limited)):
        yield limited


def in_three(x: torch.Tensor) -> torch.Tensor:
    """Two captured partitions around a product, which runs eagerly."""
    return (x.sin() @ x).cos() + 1


@pytest.mark.launches_graphs
@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_beyond_the_quota_work_runs_eagerly(limit: int, quota: Quota, compiled: Any) -> None:
    """A pool's own graph counts, too. What was captured is replayed, whatever else there was no graph for."""
    quota.limit = limit
    theirs = inductor(in_three)
    ours = compiled(in_three, options={"eager_ops": "aten::mm"})
    for _ in range(5):
        x = torch.randn(6, 6)
        assert_same(ours(x), theirs(x))
    captured = max(0, limit - 1)
    counters = ours.program.counters.to_dict()
    refused = "capture failed: RuntimeError: the device has"
    assert sum(count for event, count in counters["events"].items() if event.startswith(refused)) == 2 - captured
    (recording,) = ours.program.specializations.recordings()
    assert len(recording.graphs) == captured
    assert len(recording.eager_reasons) == 2 - captured


@pytest.mark.launches_graphs
def test_a_program_without_graphs_records_when_there_are_some_again(quota: Quota, compiled: Any) -> None:
    first, second = (compiled(fn) for fn in (lambda x: (x @ x).sin() @ x, lambda x: (x @ x).cos() @ x))
    for _ in range(3):
        first(torch.randn(6, 6))
    quota.limit = len(quota.live)
    theirs = inductor(lambda x: (x @ x).cos() @ x)
    for _ in range(3):
        x = torch.randn(6, 6)
        assert_same(second(x), theirs(x))
    assert not any(recording.graphs for recording in second.program.specializations.recordings())
    quota.limit = None
    fxwrap.release(second.call)
    for _ in range(3):
        assert_same(second(x), theirs(x))
    assert all(recording.graphs for recording in second.program.specializations.recordings())
