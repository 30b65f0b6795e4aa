"""Graphs with work that cannot be captured run as captured, eager, captured, and the explanation says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor

import fxwrap
from fxwrap.plan import Verdict

torch.library.define("fxwrap_test::lookup", "(Tensor x) -> Tensor")


@torch.library.impl("fxwrap_test::lookup", "CompositeExplicitAutograd")
def _lookup(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@torch.library.register_fake("fxwrap_test::lookup")
def _lookup_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _verdicts(program: Any) -> list[str]:
    return [partition.verdict.value for partition in program.plan.partitions]


@pytest.fixture(autouse=True)
def capture_everything() -> Any:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


#   mm, launch  |  lookup  |  launch, mm
#    captured      eager        captured
def test_custom_operator_listed_by_the_user(compiled: Any, device: torch.device) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ x)
        return torch.ops.fxwrap_test.lookup(y).sin() @ x

    f: Compiled = compiled(g, options={"eager_ops": ["fxwrap_test::lookup"]})
    theirs = inductor(g)
    for _ in range(5):
        x = torch.randn(4, 4, device=device)
        assert_same(f(x), theirs(x))
    assert _verdicts(f.program) == ["captured", "eager", "captured"]
    assert "fxwrap_test::lookup: listed in eager_ops" in f.program.plan.partitions[1].reason
    assert "torch.ops.fxwrap_test.lookup(y)" in f.program.plan.partitions[1].reason  # the user's line
    assert f.program.counters.replays == 3


def test_custom_operator_is_captured_unless_listed(compiled: Any) -> None:
    f: Compiled = compiled(lambda x: torch.ops.fxwrap_test.lookup(x.sin()).cos())
    for _ in range(4):
        x = torch.randn(4)
        torch.testing.assert_close(f(x), (x.sin() * 3).cos())
    assert _verdicts(f.program) == ["captured"]


#   mm  |  item, launch(y * n)  |  mm
def test_item_arithmetic(compiled: Any, device: torch.device) -> None:
    def g(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        scale = y.abs().max().item()
        return (y / (scale + 1)) @ w

    f: Compiled = compiled(g)
    for _ in range(5):
        x, w = torch.randn(2, 4, 4, device=device)
        torch.testing.assert_close(f(x, w), g(x, w))
    assert f.compilation.fallbacks == []


#   launch, mm  |  item  ->  a size  |  what works on that size stays eager
def test_item_that_decides_a_size(compiled: Any, device: torch.device) -> None:
    def g(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = n.item()
        torch._check(size >= 1)
        torch._check(size <= 16)
        grown = torch.ones(size, device=x.device) * 2
        return x.sin() @ x, grown.cumsum(0)

    f: Compiled = compiled(g)
    for size in (3, 5, 4, 3, 7):
        x = torch.randn(4, 4, device=device)
        for got, expected in zip(f(x, torch.tensor(size)), g(x, torch.tensor(size)), strict=True):
            torch.testing.assert_close(got, expected)
    (program,) = f.programs
    assert "captured" in _verdicts(program) and "eager" in _verdicts(program)
    assert program.counters.replays == 3


#   launch  |  nonzero, gather on its result  |  (nothing captured depends on it)
def test_nonzero(compiled: Any, device: torch.device) -> None:
    def g(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.sin(x) + 0.2
        indices = torch.nonzero(y > 0)
        return y @ y.t(), indices * 2

    f: Compiled = compiled(g)
    theirs = inductor(g)
    for _ in range(5):
        x = torch.randn(4, 4, device=device)
        assert_same(f(x), theirs(x))
    assert _verdicts(f.program) == ["captured", "eager"]
    assert "aten::nonzero: its result's size is data-dependent" in f.program.plan.partitions[1].reason
    assert "torch.nonzero(y > 0)" in f.program.plan.partitions[1].reason
    assert f.program.counters.replays == 3


def test_captured_work_after_eager_work_reads_its_fresh_result(compiled: Any, device: torch.device) -> None:
    """An eager operator's result is new memory at every call; what was captured must see it."""

    def g(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        looked_up = torch.ops.fxwrap_test.lookup(x @ w)
        return (looked_up @ w).relu() + looked_up

    f: Compiled = compiled(g, options={"eager_ops": "fxwrap_test.lookup"})
    for _ in range(6):
        x, w = torch.randn(2, 4, 4, device=device)
        torch.testing.assert_close(f(x, w), g(x, w))
    assert f.program.counters.replays == 4


def test_every_node_has_a_verdict_and_eager_ones_a_reason(compiled: Any) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x.sin() > 0) + 1

    f: Compiled = compiled(g)
    f(torch.randn(8))
    plan = f.program.plan
    assert plan.verdicts.keys() == plan.nodes.keys()
    eager = [verdict for verdict in plan.verdicts.values() if verdict.verdict is Verdict.EAGER]
    assert eager and all(verdict.reason for verdict in eager)


def test_explain_says_why() -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(torch.sin(x) > 0)

    text = str(fxwrap.explain(g, torch.randn(3, 3)))
    assert "aten::nonzero: its result's size is data-dependent" in text
    assert "eager" in text and "captured" in text


def test_exception_in_an_eager_partition_leaves_everything_usable(compiled: Any, device: torch.device) -> None:
    fail = [False]

    @torch.library.custom_op("fxwrap_test::maybe_fails", mutates_args=())
    def maybe_fails(x: torch.Tensor) -> torch.Tensor:
        if fail[0]:
            raise RuntimeError("lookup failed")
        return x + 1

    @maybe_fails.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def g(x: torch.Tensor) -> torch.Tensor:
        return maybe_fails(x.sin() * 2).cos()

    f: Compiled = compiled(g, options={"eager_ops": "fxwrap_test::maybe_fails"})
    for when in (0, 1, 2, 3, None):
        for call in range(5):
            x = torch.randn(4, device=device)
            fail[0] = call == when
            if fail[0]:
                with pytest.raises(RuntimeError, match="lookup failed"):
                    f(x)
            else:
                torch.testing.assert_close(f(x), (x.sin() * 2 + 1).cos())
    assert f.program.counters.replays
