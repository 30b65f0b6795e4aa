"""Ten architectures: bit for bit what Inductor's own wrapper computes, and replayed from the third call on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, tensors_in
from models import MODELS, SMALLER

from fxwrap.graphs.program import WARM_UPS

# In every run of the tests, and small: attention, convolutions, an encoder and a decoder, experts. A sweep has ten,
# and as large as the benchmarks have them.
OFTEN = {("llama", "training"), ("t5", "inference"), ("mixtral", "inference"), ("resnet", "training")}


def all_ten(mode: str) -> Any:
    return pytest.mark.parametrize(
        ("name", "small"),
        [
            pytest.param(name, small, marks=() if small and (name, mode) in OFTEN else pytest.mark.sweep)
            for name in MODELS
            for small in (True, False)
        ],
        ids=[f"{name}-{size}" for name in MODELS for size in ("small", "as in benchmarks")],
    )


def _loss(output: Any) -> torch.Tensor:
    return sum(t.float().square().mean() for t in tensors_in(output) if t.requires_grad)


@all_ten("inference")
def test_inference(name: str, small: bool, compiled: Any) -> None:
    model, fresh_inputs = MODELS[name](**SMALLER.get(name, {}) if small else {})
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


@all_ten("training")
def test_training(name: str, small: bool, compiled: Any) -> None:
    model, fresh_inputs = MODELS[name](**SMALLER.get(name, {}) if small else {})
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


# In every run of the tests: a decoder, convolutions, and a model with an operator that cannot be captured.
SAMPLE = {("llama", "training"), ("resnet", "inference"), ("mixtral", "inference")}


@pytest.mark.accelerator
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in SAMPLE else pytest.mark.sweep)
        for name in MODELS
        for mode in ("inference", "training")
    ],
)
def test_accelerator(name: str, mode: str, device: torch.device, compiled: Any) -> None:
    """On an accelerator: the CPU's numbers, and every replay is one of its graphs."""
    model, fresh_inputs = MODELS[name](**SMALLER.get(name, {}) if (name, mode) in SAMPLE else {})
    model.train(mode == "training")
    twin = copy.deepcopy(model)
    model.to(device)
    # Moving a model to a device out of the tree gives parameters that were one a life of their own.
    model.tie_weights()
    ours: Compiled = compiled(model)
    before: list[int] = []
    counted = getattr(torch.get_device_module(device), "graph_counters", None)
    replayed: dict[str, int] = {}
    for _ in range(4):  # a capture that fails costs one call more
        inputs = fresh_inputs()
        before = ours.replays()
        replayed = counted() if counted is not None else {}
        moved = {key: value.to(device) if hasattr(value, "to") else value for key, value in inputs.items()}
        with torch.set_grad_enabled(mode == "training"):
            mine, other = ours(**moved), twin(**inputs)
        _assert_close(tensors_in(mine), tensors_in(other))
        if mode == "training":
            model.zero_grad()
            twin.zero_grad()
            _loss(mine).backward()
            _loss(other).backward()
            gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, twin)]
            assert gradients[0]
            _assert_close(*gradients)
    _assert_all_replayed(ours, before)
    if counted is not None:
        captured = [p for program in ours.programs for p in program.plan.partitions if not p.reason]
        assert captured and counted()["replays"] == replayed["replays"] + len(captured)


def _assert_close(mine: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-4)


def _assert_all_replayed(ours: Compiled, before: list[int]) -> None:
    """The last call replayed every program and ran none eagerly."""
    assert not ours.compilation.fallbacks
    assert len(before) == len(ours.programs)
    for program, replays in zip(ours.programs, before, strict=True):
        assert program.counters.replays == replays + 1, program.counters.to_dict()
        assert set(program.counters.eager) <= set(WARM_UPS)
