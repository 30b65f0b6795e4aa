"""One program, many shapes: right numbers, each shape recorded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor

from fxwrap.passes.arena_layout import lay_out_arena


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)
    )


@pytest.mark.parametrize("dynamic", [True, None])
def test_eight_batch_sizes(compiled: Any, device: torch.device, dynamic: bool | None) -> None:
    model = _model().to(device)
    ours: Compiled = compiled(model, dynamic=dynamic)
    theirs = inductor(model, dynamic=dynamic)
    with torch.no_grad():
        for _ in range(5):
            before = ours.replays()
            for batch in range(2, 10):
                x = torch.randn(batch, 16, device=device)
                assert_same(ours(x), theirs(x))
    program = ours.programs[-1]
    # Automatic dynamic shapes compile the first size by itself, turn dynamic at the second, and take the first
    # one through the dynamic program when it comes again: one round less for it.
    assert len(program.families) == 8
    # A size that needs a larger arena than was foreseen ends what was recorded in it.
    assert set(program.counters.recordings) <= {"first", "new shape", "the arena moved"}
    assert program.counters.eager == {"warm-up": 8}
    assert sum(ours.replays()) - sum(before) == 8, "the last round replays every size"


def test_training_with_varying_batch(compiled: Any) -> None:
    model = _model()
    ours: Compiled = compiled(model, dynamic=True)
    twin = _model()
    twin.load_state_dict(model.state_dict())
    theirs = torch.compile(twin, backend="inductor", dynamic=True)
    for _ in range(4):
        for batch in (3, 5, 6):
            x = torch.randn(batch, 16)
            model.zero_grad()
            twin.zero_grad()
            ours(x).square().sum().backward()
            theirs(x).square().sum().backward()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
    for program in ours.programs:
        assert len(program.families) == 3 and program.counters.replays >= 3


def test_sizes_in_arithmetic_and_outputs(compiled: Any) -> None:
    def g(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        half = x.shape[0] // 2
        return (x[:half] * x.shape[0]).sum(0), x.shape[0] * 3

    f: Compiled = compiled(g, dynamic=True)
    for _ in range(3):
        for length in (4, 7, 9):
            x = torch.randn(length, 3)
            got, number = f(x)
            torch.testing.assert_close(got, g(x)[0])
            assert number == 3 * length


def test_more_shapes_than_may_be_recorded_run_eagerly_and_are_counted(compiled: Any) -> None:
    f: Compiled = compiled(torch.nn.Linear(4, 4), dynamic=True, options={"max_recordings": 2})
    with torch.no_grad():
        for _ in range(3):
            for batch in range(2, 7):
                x = torch.randn(batch, 4)
                torch.testing.assert_close(f(x), f.fn(x))
    counters = f.program.counters
    assert sum(counters.recordings.values()) == 2
    assert counters.eager == {"warm-up": 2, "more than 2 shapes (max_recordings)": 9}
    assert len(f.program.families) == 2  # nothing grows with the shapes that are not recorded


def test_a_backward_that_takes_an_expression_of_sizes(compiled: Any, device: torch.device) -> None:
    """What a forward saved of its shape is an input of the backward."""

    class TimesCount(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.count = x.numel()
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * ctx.count

    f: Compiled = compiled(lambda x: TimesCount.apply(x) * 2, dynamic=True)
    for _ in range(4):
        for shape in ((5, 7), (9, 3)):
            x = torch.randn(*shape, device=device, requires_grad=True)
            f(x).sum().backward()
            assert torch.equal(x.grad.cpu(), torch.full(shape, 2.0 * x.numel()))  # type: ignore[union-attr]
    assert not f.owner.fallbacks and all(f.replays()) and len(f.programs) == 2


def test_another_shape_is_planned_in_the_order_of_the_one_before(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def lay_out(*args: Any) -> Any:
        found = lay_out_arena(*args)
        tried.append((args[-1], found.offsets))
        return found

    monkeypatch.setattr("fxwrap.passes.memory_planning.lay_out_arena", lay_out)
    f: Compiled = compiled(lambda x: (x @ x.t()).softmax(-1) @ x, dynamic=True)
    for length in (5, 5, 50, 50):
        x = torch.randn(length, 8)
        torch.testing.assert_close(f(x), (x @ x.t()).softmax(-1) @ x)
    first, *others = tried
    assert not first[0] and first[1]
    assert [like for like, _ in others] == [offsets for _, offsets in tried[:-1]]
