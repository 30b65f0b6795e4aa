"""Branches and loops: steps of the recording on the CPU, natively, with the results of Inductor's wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import assert_same, inductor
from native_calls import native
from torch._higher_order_ops.while_loop import while_loop

import fxwrap
from fxwrap.plan import Verdict


def loop(x: torch.Tensor, n: torch.Tensor) -> Any:
    return while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x.sin() + x * 0.5), (torch.tensor(0), x))


def branch(x: torch.Tensor, n: torch.Tensor) -> Any:
    return torch.cond(n > 1, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,))


@native
@torch.no_grad()
@pytest.mark.parametrize(("function", "begins"), [(loop, "while True:"), (branch, "match ")])
def test_one_unit_without_python_runs_it(compiled: Any, function: Callable[..., Any], begins: str) -> None:
    """::

    launch k0 | while_loop | launch k1          one unit: launch, a step that consists of steps, launch
    captured    on the host   captured   ->
    """
    f, theirs = compiled(function), inductor(function)
    for count in (0, 1, 7, 3, 0):
        x = torch.randn(32)
        assert_same(f(x, torch.tensor(count)), theirs(x, torch.tensor(count)))
    (graph,) = fxwrap.report(f).graphs
    assert [partition.verdict for partition in graph.partitions] == [Verdict.CAPTURED]
    lines = graph.unit.splitlines()
    assert sum(line.startswith(begins) for line in lines) == 1
    inner = [line for line in lines if line.startswith("    ")]
    assert any("cpp_fused" in line for line in inner) and not any(line.endswith("# Python") for line in inner)


@native
@torch.no_grad()
def test_an_error_inside_of_a_loop_leaves_it_usable(compiled: Any) -> None:
    """What the body asserts is told as Inductor's wrapper tells it, and the next call is right."""

    def function(x: torch.Tensor, n: torch.Tensor) -> Any:
        def body(i: torch.Tensor, x: torch.Tensor) -> Any:
            torch._assert_async(x.sum() < 100, "too large")
            return i + 1, x * 2

        return while_loop(lambda i, x: i < n, body, (torch.tensor(0), x))

    f, theirs = compiled(function), inductor(function)
    small, large = torch.ones(4), torch.full((4,), 20.0)
    for _ in range(2):
        for x in (small, small, large, small):
            outcomes = []
            for run in (f, theirs):
                try:
                    outcomes.append(run(x, torch.tensor(3)))
                except RuntimeError as error:
                    outcomes.append(str(error).splitlines()[0])
            mine, others = outcomes
            assert mine == others if isinstance(others, str) else assert_same(mine, others) is None
