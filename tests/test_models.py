"""Ten architectures: bit for bit what Inductor's own wrapper computes, and replayed from the third call on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, tensors_in
from models import MODELS


def _loss(output: Any) -> torch.Tensor:
    return sum(t.float().square().mean() for t in tensors_in(output) if t.requires_grad)


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str, compiled: Any) -> None:
    model, fresh_inputs = MODELS[name]()
    model.eval()
    ours: Compiled = compiled(model)
    theirs = torch.compile(copy.deepcopy(model), backend="inductor")
    before: list[int] = []
    with torch.no_grad():
        for call in range(3):
            inputs = fresh_inputs()
            before = ours.replays()
            assert_same(ours(**inputs), theirs(**inputs))
            if call == 0:
                assert ours.programs
    _assert_all_replayed(ours, before)


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, compiled: Any) -> None:
    model, fresh_inputs = MODELS[name]()
    model.train()
    twin = copy.deepcopy(model)
    ours: Compiled = compiled(model)
    theirs = torch.compile(twin, backend="inductor")
    before: list[int] = []
    for _ in range(3):
        inputs = fresh_inputs()
        before = ours.replays()
        model.zero_grad()
        twin.zero_grad()
        mine, other = ours(**inputs), theirs(**inputs)
        assert_same(mine, other)
        _loss(mine).backward()
        _loss(other).backward()
        compared = 0
        for (parameter_name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), parameter_name
            if p.grad is not None:
                assert torch.equal(p.grad, q.grad), parameter_name
                compared += 1
        assert compared
        for p, q in zip(model.buffers(), twin.buffers(), strict=True):
            assert torch.equal(p, q)
    _assert_all_replayed(ours, before)


def _assert_all_replayed(ours: Compiled, before: list[int]) -> None:
    """The last call replayed every program and ran none eagerly."""
    assert not ours.owner.fallbacks
    assert len(before) == len(ours.programs)
    for program, replays in zip(ours.programs, before, strict=True):
        assert program.counters.replays == replays + 1, program.counters.to_dict()
        assert set(program.counters.eager) == {"warm-up"}
