"""What branches and loops take beside their results is planned for whatever data decide.

::

    cond(flag, conv2d(x), sin(x))        the warm-up takes one branch; the limit holds in the other, too
    while_loop(i < n, conv2d)            no iteration: a copy of x. Several: places, and the library's workspace
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.while_loop import while_loop

import fxwrap
from fxwrap.torch_private.functions import allocations

pytestmark = pytest.mark.compiler

WEIGHT = torch.randn(8, 8, 3, 3) / 8


def _taken(call: Callable[[], Any]) -> int:
    """The most bytes that a call allocates at one time."""
    results: list[Any] = []
    changes = allocations(lambda: results.append(call()))
    assert changes is not None
    return max(itertools.accumulate(changes), default=0)


def _convolved(x: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, WEIGHT, padding=1)


def _branch(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    return torch.cond(flag > 0, torch.sin, _convolved, (x,)) + 1


def _loop(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    start = torch.zeros((), dtype=torch.int64), x
    return while_loop(lambda i, x: i < n, lambda i, x: (i + 1, _convolved(x)), start)[1] + 1


def _nested(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    start = torch.zeros((), dtype=torch.int64), x
    body = lambda i, x: (i + 1, torch.cond(i > 1, torch.sin, _convolved, (x,)))
    return while_loop(lambda i, x: i < n, body, start)[1] + 1


def _least(function: Callable[..., Any], *inputs: torch.Tensor) -> int:
    limited = torch.compile(function, backend="fxwrap", options={"memory_limit": 1})
    with pytest.raises(fxwrap.MemoryLimitError) as raised:
        limited(*inputs)
    return raised.value.least


@pytest.mark.parametrize("function", [_branch, _loop, _nested])
@torch.no_grad()
def test_a_limit_holds_whatever_data_decide(function: Callable[..., Any]) -> None:
    x, numbers = torch.randn(2, 8, 16, 16), [torch.tensor(n) for n in range(4)]
    least = _least(function, x, numbers[1])
    torch._dynamo.reset()
    limited = torch.compile(function, backend="fxwrap", options={"memory_limit": least})
    for _ in range(2):  # the warm-up goes one way only
        limited(x, numbers[1])
    taken = [_taken(lambda n=n: limited(x, n)) for n in numbers]  # type: ignore[misc]
    assert fxwrap.stats(limited)["replays"] == len(numbers)
    assert max(taken) <= least
    if function is _branch:
        assert max(taken) == least and taken[0] > taken[1]
    for n in numbers:
        torch.testing.assert_close(limited(x, n), function(x, n))


@torch.no_grad()
def test_what_a_library_does_not_tell_is_measured_in_the_branch_that_runs() -> None:
    """A custom operator in a branch: what the branch takes is not known before it has run."""

    def function(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        return torch.cond(flag > 0, torch.sin, lambda x: torch.ops.fxwrap_test.three_times(x), (x,)) + 1

    x = torch.randn(64, 64)
    f = torch.compile(function, backend="fxwrap", options={"memory_limit": "1MiB"})
    for flag in (0, 0, 1):
        torch.testing.assert_close(f(x, torch.tensor(flag)), function(x, torch.tensor(flag)))
    (report,) = fxwrap.report(f).graphs
    assert not report.program.plan.workspace


@torch.library.custom_op("fxwrap_test::three_times", mutates_args=())
def three_times(x: torch.Tensor) -> torch.Tensor:
    return x + x + x


@three_times.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
