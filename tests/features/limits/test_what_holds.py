"""A limit holds, or a call raises: at other sizes, with memory that no plan knows, where addresses are frozen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import freezes
from torch import nn, optim

import fxwrap
from fxwrap.errors import FxwrapError, MemoryLimitError
from fxwrap.torch_private.functions import allocations


def peak(run: Callable[[], Any]) -> int:
    changes = allocations(run)
    assert changes is not None
    return max(itertools.accumulate(changes), default=0)


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _made(model: nn.Module, loss: Any = square, **settings: Any) -> Any:
    return fxwrap.train_step(model, loss, optim.AdamW(model.parameters(), lr=1e-3), **settings)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(*t.shape[:2], 2, 16).transpose(1, 2) for t in self.q(x).chunk(3, -1))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def _convolutions() -> nn.Module:
    last = nn.Conv2d(16, 16, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(16, 8, 1)
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *last)


@pytest.mark.parametrize(
    ("make", "batch", "sizes"),
    [
        (Attention, lambda n: torch.randn(3, n, 32), (20, 24, 64)),
        (_convolutions, lambda n: torch.randn(n, 3, 16, 16), (9, 7, 5)),
    ],
    ids=["attention", "convolution"],
)
def test_workspace_counts_at_sizes_that_were_not_compiled(make: Any, batch: Any, sizes: tuple[int, int, int]) -> None:
    """Library calls are run on zeros of the new sizes before the limit is said to hold; a profiler is no obstacle."""
    step = _made(make(), dynamic=True)
    for n in sizes:
        step(batch(n))
        step(batch(n))  # now nothing is compiled any more
    x = batch(sizes[2])
    fxwrap.limit_memory(step, 1)
    with pytest.raises(MemoryLimitError) as caught:
        step(x)
    fxwrap.limit_memory(step, caught.value.least)
    assert max(peak(lambda: step(x)) for _ in range(4)) <= caught.value.least
    assert fxwrap.stats(step)["replays"] >= 2


def test_a_size_is_fitted_again_after_another_one_was_planned() -> None:
    """A plan is for all sizes; that it fits is known of those alone that were compared with it."""
    step = _made(Attention(), dynamic=True)
    large, small = torch.randn(3, 64, 32), torch.randn(3, 16, 32)
    for x in (large, small):
        step(x)
    fxwrap.limit_memory(step, 1)
    with pytest.raises(MemoryLimitError) as caught:
        step(large)
    limit = caught.value.least
    fxwrap.limit_memory(step, limit)
    for x in (large, small, large, small, large):
        assert peak(lambda: step(x)) <= limit  # noqa: B023 (called at once)


@pytest.fixture
def heavy() -> Iterator[Any]:
    """An operator that allocates eight times what it returns."""
    with torch.library._scoped_library("limit_tests", "FRAGMENT"):

        @torch.library.custom_op("limit_tests::heavy", mutates_args=())
        def op(x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x + i for i in range(8)]).mean(0)

        @op.register_fake
        def _(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(x)

        op.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)
        yield op


def test_the_memory_of_a_custom_operator_is_measured_in_the_first_call(heavy: Any) -> None:
    """The first call at a size tells; then the next one raises, and ``least`` is what it takes."""
    step, x = _made(nn.Linear(16, 16), lambda m, x: heavy(torch.relu(m(x))).square().mean()), torch.randn(512, 16)
    step(x)
    taken = peak(lambda: step(x))
    (picture,) = fxwrap.report(step).limits()
    assert picture.least <= taken <= picture.rows[0].peak
    fxwrap.limit_memory(step, picture.least - 1)
    with pytest.raises(MemoryLimitError) as caught:
        step(x)
    assert caught.value.least == picture.least
    fxwrap.limit_memory(step, picture.least)
    assert max(peak(lambda: step(x)) for _ in range(3)) <= picture.least


def test_a_first_call_that_cannot_be_measured_is_refused(heavy: Any) -> None:
    step, x = (
        _made(nn.Linear(16, 16), lambda m, x: heavy(m(x)).square().mean(), memory_limit="1GiB"),
        torch.ones(8, 16),
    )
    with pytest.raises(MemoryLimitError, match="what limit_tests::heavy allocates is not known"):
        allocations(lambda: step(x))
    for _ in range(3):
        step(x)
    assert fxwrap.stats(step)["replays"] >= 1


@torch.no_grad()
def test_memory_on_which_data_decide_is_refused_by_name(compiled: Any, device: torch.device) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):

        def picked(x: torch.Tensor) -> torch.Tensor:
            return x[(x[:, 0] > 0).nonzero().squeeze(-1)].sin() * 2

        x = torch.randn(64, 8, device=device)
        limited = compiled(picked, options={"memory_limit": "1GiB"})
        with pytest.raises(MemoryLimitError, match="memory_limit cannot be held") as caught:
            limited(x)
        assert "aten::nonzero" in (caught.value.got or "")


@pytest.mark.parametrize("moves", [False, True])
@torch.no_grad()
def test_the_least_that_an_error_names_fits(compiled: Any, device: torch.device, moves: bool) -> None:
    """Gaps of an arena, static buffers of inputs that move, and what captures have taken count from the beginning.

    ::

        memory_limit   1          error, least 40,960
                       40,960     fits, wherever the input lies
    """
    torch.manual_seed(0)
    weight = torch.randn(64, 64, device=device) * 0.1

    def f(x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = (x @ weight).relu()
        b = (a @ weight).relu()
        c = (b @ weight).sin() + p.sum()
        return c.sum() + b, (a * b).exp()

    fixed = torch.randn(33, 64, device=device), torch.randn(3, device=device)
    kept = list[Any]()  # so that the next ones lie elsewhere

    def call() -> Any:
        args = tuple(map(torch.clone, fixed)) if moves else fixed
        kept.append(args)
        return run.call(*args)

    run = compiled(f)
    expected = [value.clone() for value in call()]
    for _ in range(3):
        call()
    (picture,) = fxwrap.report(run.call).limits()
    fxwrap.limit_memory(run.call, 1)
    with pytest.raises(MemoryLimitError) as caught:
        call()
    assert caught.value.least == picture.least > 1
    fxwrap.limit_memory(run.call, caught.value.least)
    for _ in range(5):
        assert all(map(torch.equal, call(), expected))
    assert run.program.counters.replays >= 1 or not freezes(device)


def test_a_graph_without_a_plan_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise FxwrapError("planted")

    monkeypatch.setattr("fxwrap.codegen.emit.emission.compile_host_graph", fails)
    x = torch.randn(64, 8)
    limited = _made(nn.Linear(8, 8), memory_limit=100)
    with pytest.raises(MemoryLimitError, match=r"Inductor's own wrapper") as caught:
        limited(x)
    assert "planted" in str(caught.value)
    free = _made(nn.Linear(8, 8))
    with pytest.warns(UserWarning, match="Inductor's own wrapper"):
        free(x)
    with pytest.raises(MemoryLimitError, match="planted"):
        fxwrap.limit_memory(free, 100)
