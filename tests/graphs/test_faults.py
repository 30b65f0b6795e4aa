"""Faults at every point of a call: the next calls are right, and nothing is left.

A sample of the points runs every time, and all of them with ``-m sweep``; ``-s`` prints how many there were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from faults import FLAT, AtAllocation, AtLine, AtOperator, AtTime, Fault, Faulty, Inference, Training

# Names of faults, and what makes one at a point.
FAULTS: dict[str, Callable[[torch.device, int], Fault]] = {
    "an interrupt at a line": lambda device, at: AtLine(at),
    "an interrupt in a step": lambda device, at: AtLine(at, files=FLAT),
    "an error in a step": lambda device, at: AtLine(at, files=FLAT, error=RuntimeError),
    "an error in an operator": lambda device, at: AtOperator(at),
    "a signal in an operator": lambda device, at: AtOperator(at, error=None),
    "an allocation": lambda device, at: AtAllocation(device, at),
    "all memory": lambda device, at: AtAllocation(device, at, all_after=True),
}
CASES: dict[str, Any] = {"inference": Inference, "training": Training}


WAYS = [(case, native) for case in CASES for native in (True, False)]


@pytest.fixture
def faulty(device: torch.device, request: pytest.FixtureRequest) -> Iterator[Faulty]:
    case, native = request.param
    faulty = Faulty(CASES[case], device, native)
    yield faulty
    faulty.close()


@pytest.mark.launches_graphs  # a fault in the middle of one
@pytest.mark.parametrize("faulty", WAYS, indirect=True, ids=str)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.sweep
def test_at_every_point(faulty: Faulty, device: torch.device, name: str) -> None:
    tried = faulty.sweep(functools.partial(FAULTS[name], device))
    print(f"{device.type}: {name}: {tried} points tried; {dict(faulty.after)}")


@pytest.mark.launches_graphs
@pytest.mark.parametrize("faulty", WAYS[:1], indirect=True, ids=str)
def test_at_some_points(faulty: Faulty, device: torch.device) -> None:
    for make in FAULTS.values():
        faulty.sweep(functools.partial(make, device), sample=3)
    assert faulty.after["replayed within three calls"] > 15


@pytest.mark.launches_graphs
@pytest.mark.parametrize("faulty", WAYS, indirect=True, ids=str)
@pytest.mark.sweep
def test_signals_at_any_time(faulty: Faulty, device: torch.device) -> None:
    """While a unit runs, too: Python looks for them when it returns, and in its steps in Python."""
    tried = faulty.sweep(AtTime, points=2000)
    print(f"{device.type}: signals: {tried} tried; {dict(faulty.after)}")
