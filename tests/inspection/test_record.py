"""Sizes recorded ahead of time."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import Compiled

import fxwrap


def _model(device: torch.device) -> torch.nn.Module:
    layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8)
    return torch.nn.Sequential(*layers).to(device)


def test_what_is_recorded_ahead_neither_warms_up_nor_records(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(_model(device).eval(), dynamic=True)
    examples = [(torch.randn(rows, 16, device=device),) for rows in range(2, 42)]
    with torch.no_grad():
        fxwrap.record(f.call, *examples)
        before = f.program.counters.to_dict()
        for example in examples * 2:
            f(*example)
        now = f.program.counters.to_dict()
    assert now["replays"] == before["replays"] + 80
    assert now["recordings"] == before["recordings"] and now["eager"] == before["eager"]


def test_the_largest_comes_first(compiled: Any, device: torch.device) -> None:
    """So that an arena has its size from the beginning: no recording ends because it grows."""
    f: Compiled = compiled(lambda x: (x.sin() @ x.t()).cos() @ x, dynamic=True)
    with torch.no_grad():
        made = fxwrap.record(f.call, *[torch.randn(rows, 8, device=device) for rows in (3, 50, 7)])
    assert made == 3
    assert f.program.counters.recordings == {"first": 1, "new shape": 2}


def test_what_is_collected_meanwhile_is_not_taken_off(compiled: Any, device: torch.device) -> None:
    others: list[Any] = [torch.compile(lambda x: x.cos() - 1, backend="fxwrap")]
    f: Compiled = compiled(lambda x: x.sin() + 1)

    def call(x: torch.Tensor) -> None:
        if others:
            others.clear()
            torch._dynamo.reset()
            gc.collect()
        f(x)

    x = torch.randn(8, device=device)
    with torch.no_grad():
        for _ in range(4):
            others[0](x)
        before = sum(fxwrap.stats()["recordings"].values())
        assert before >= 1 and fxwrap.record(call, x) == sum(f.program.counters.recordings.values()) > 0


def test_training_is_recorded_by_a_function_that_runs_the_backward(compiled: Any, device: torch.device) -> None:
    model = _model(device)
    f: Compiled = compiled(model, dynamic=True)

    def step(x: torch.Tensor) -> None:
        model.zero_grad(set_to_none=True)
        f(x).square().sum().backward()

    fxwrap.record(step, *[torch.randn(rows, 16, device=device) for rows in (4, 5)])
    before = [program.counters.to_dict() for program in f.programs]
    assert len(before) == 2
    for _ in range(2):
        for rows in (4, 5):
            step(torch.randn(rows, 16, device=device))
    for program, counters in zip(f.programs, before, strict=True):
        assert program.counters.recordings == counters["recordings"]
        assert program.counters.replays == counters["replays"] + 4


def test_random_numbers_go_on_as_if_nothing_had_been_recorded(compiled: Any) -> None:
    f: Compiled = compiled(_model(torch.device("cpu")))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.no_grad():
        fxwrap.record(f.call, torch.ones(2, 16))
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_uses() -> None:
    with pytest.raises(fxwrap.InputError, match="nothing to call"):
        fxwrap.record(torch.sin)
    with pytest.raises(fxwrap.FxwrapError, match="called no program"):
        fxwrap.record(torch.sin, torch.ones(3))
