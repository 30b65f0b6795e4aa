"""Reports of ten models, inference and training: lines of the user's, and sums that agree with what was counted and
measured."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import Compiled
from models import MODELS, SMALLER

import fxwrap
from fxwrap.torch_private.functions import allocations

SAMPLE = [("llama", "training"), ("resnet", "inference")]
CASES = [
    pytest.param(name, mode, marks=() if (name, mode) in SAMPLE else pytest.mark.sweep)
    for name in MODELS
    for mode in ("inference", "training")
]
CALLS = 5


@pytest.mark.parametrize("name, mode", CASES)
def test_a_report_of_a_model(compiled: Any, name: str, mode: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name](**SMALLER.get(name, {}) if (name, mode) in SAMPLE else {})
    given = inputs()

    def loss(**given: Any) -> torch.Tensor:
        found = model(**given)
        return (found.logits if hasattr(found, "logits") else found[0]).float().sum()

    f: Compiled = compiled(loss)

    def step() -> None:
        model.zero_grad()
        if mode == "training":
            f(**given).backward()
        else:
            with torch.no_grad():
                f(**given)

    for _ in range(CALLS):
        step()
    document = fxwrap.report(f.call).to_dict()
    assert [graph["phase"] for graph in document["graphs"]] == (
        ["inference"] if mode == "inference" else ["forward", "backward"]
    )
    work = [node for graph in document["graphs"] for node in graph["nodes"].values() if node["operator"]]
    named = [node for node in work if node["user_line"] and ".py, line " in node["user_line"]]
    assert len(named) >= 0.95 * len(work), [node["line"] for node in work if node not in named]
    for graph in document["graphs"]:
        _check_sums(graph)
    model.zero_grad()
    changes = allocations(step)
    assert changes is not None
    (predicted,) = document["graphs"][0]["memory"]["predicted"]
    measured = max(itertools.accumulate(changes))
    # Autograd makes a gradient of the loss, which no graph knows of.
    assert predicted["total"] == measured - (4 if mode == "training" else 0)


def _check_sums(graph: dict[str, Any]) -> None:
    nodes, partitions, counters, memory = (graph[key] for key in ("nodes", "partitions", "counters", "memory"))
    in_partitions = [nodes[name] for one in partitions for name in one["nodes"]]
    launches = sum(node["kind"] == "launch" for node in in_partitions)
    assert launches == sum(one["launches"] for one in partitions)
    assert launches == sum(len(kernel["launches"]) for kernel in graph["kernels"])
    assert len(in_partitions) - launches == sum(one["extern_calls"] for one in partitions)
    calls = counters["replays"] + sum(counters["recordings"].values()) + sum(counters["eager"].values())
    assert calls == CALLS and sum(counters["recordings"].values()) == len(graph["recordings"]) == 1
    assert memory["steps"] == len(in_partitions)
    alive = [0] * (memory["steps"] + 2)
    for one in memory["storages"]:
        for step in range(one["begin"], one["end"]):
            alive[step] += one["bytes"]
    assert max(alive) == memory["peak"]["bytes"] == alive[memory["peak"]["step"]]
    assert memory["lower_bound_bytes"] <= memory["peak_bytes"] <= memory["without_reuse_bytes"]
    assert memory["lower_bound_bytes"] <= memory["inductor_peak_bytes"]
    for one, other in itertools.combinations(memory["storages"], 2):
        in_time = one["begin"] < other["end"] and other["begin"] < one["end"]
        in_space = one["address"] < other["address"] + other["bytes"]
        in_space &= other["address"] < one["address"] + one["bytes"]
        assert not (in_time and in_space), (one["name"], other["name"])
