"""Ten models on a device without kernels, captured and replayed: what its operators compute eagerly, bit for bit.

Run in a process of its own: ``python -m pytest examples/minimal``; with ``-m "sweep or not sweep"`` all ten models.
"""

import copy
import sys
from pathlib import Path

import minimal
import pytest
import torch

import fxwrap

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import processes
from models import MODELS

pytestmark = pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch.accelerator.Graph: torch 2.13")
DEVICE = "minimal"
# T5 saves views of views for its backward, and nothing else holds what they are views of.
SAMPLE = {("t5", "training"), ("resnet", "inference")}


@pytest.fixture(scope="module", autouse=True)
def device():
    minimal.load()
    with minimal.register():
        yield


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)


def tensors_in(value):
    leaves = torch.utils._pytree.tree_leaves(value.to_tuple() if hasattr(value, "to_tuple") else value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def step(call, model, inputs, training):
    """Results and buffers, and gradients."""
    model.zero_grad()
    with torch.set_grad_enabled(training):
        results = tensors_in(call(**inputs))
    if training:
        sum(t.float().square().mean() for t in results if t.requires_grad).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert bool(gradients) == training
    return [[t.detach().cpu() for t in tensors] for tensors in ((*results, *model.buffers()), gradients)]


def test_the_program_of_the_guide_runs():
    """docs/devices.md begins with it."""
    done = processes.run(str(Path(minimal.__file__)))
    assert done.returncode == 0 and "captured" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (name, mode) in SAMPLE else pytest.mark.sweep)
        for name in MODELS
        for mode in ("inference", "training")
    ],
)
def test_models(name, mode):
    model, fresh_inputs = MODELS[name]()
    model.train(mode == "training")
    eager, on_cpu = copy.deepcopy(model), copy.deepcopy(model)
    for moved in (model, eager):
        moved.to(DEVICE)
        moved.tie_weights()  # which moving to a device out of the tree has untied
    compiled = torch.compile(model, backend="fxwrap", options={"capture": "always"})
    for call in range(8):  # what a backward finds live costs a call, twice
        inputs = fresh_inputs()
        there = {key: value.to(DEVICE) for key, value in inputs.items()}
        before = fxwrap.stats(compiled)["replays"] if call else 0
        mine, theirs = (step(c, m, there, mode == "training") for c, m in ((compiled, model), (eager, eager)))
        assert len(mine[0]) == len(theirs[0]) and all(map(torch.equal, mine[0], theirs[0]))
        torch.testing.assert_close(mine[1], theirs[1])  # autograd adds up what a tensor gets in another order
        expected = step(on_cpu, on_cpu, inputs, mode == "training")
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)  # whose attention is one operator
    stats = fxwrap.stats(compiled)
    assert stats["replays"] == before + stats["programs"] and not stats["fallbacks"], stats
    for graph in fxwrap.report(compiled).graphs:
        assert any(p.verdict.value == "captured" for p in graph.partitions)
        assert not any(p.launches for p in graph.partitions)
