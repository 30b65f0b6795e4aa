"""``bound.run(x, out=y)``: results of a bound function are written to tensors of the caller.

::

    call 0 of compiled code     y <- copy of a new result: it is found out which result of the program this is
    call 1, 2, ...              the last kernel of the program writes to y
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from conftest import assert_same
from threads import in_threads
from torch import Tensor, nn

import fxwrap
from fxwrap.errors import InputError

compiled = functools.partial(torch.compile, backend="fxwrap")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) + 1


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def net() -> Net:
    torch._dynamo.reset()
    return Net()


def variants(call: Any) -> list[Any]:
    """Programs that take the caller's tensors."""
    return [graph.program for graph in fxwrap.report(call).graphs if graph.program.plan.inputs.write_only]


def test_the_result_is_in_the_caller_s_tensor(net: Net) -> None:
    model = compiled(net)
    call = fxwrap.bind(model, torch.randn(4, 8))
    for _ in range(8):
        x, y = torch.randn(4, 8), torch.full((4, 8), float("nan"))
        assert call.run(x, out=y) is y
        assert_same(y, model(x))
    (variant,) = variants(call)
    assert variant.counters.replays >= 5
    assert not call.ordinary_calls


def test_no_memory_is_allocated_for_the_result() -> None:
    torch._dynamo.reset()
    x, y = torch.randn(512, 512), torch.empty(512, 512)
    call = fxwrap.bind(compiled(nn.Sequential(nn.Linear(512, 512), nn.Tanh())), x)
    for _ in range(5):
        call.run(x, out=y)

    def kept(**out: Any) -> int:
        activities = [torch.profiler.ProfilerActivity.CPU]
        run = functools.partial(call.run, x, **out) if out else functools.partial(call, x)
        # A profiler would make the bound function call torch.compile's wrapper: it is asked for memory alone.
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            result = run()
        assert result is not None
        return sum(event.self_cpu_memory_usage for event in profile.key_averages())

    assert kept() >= y.nbytes
    assert kept(out=y) < y.nbytes / 16


def test_several_results_and_sizes() -> None:
    torch._dynamo.reset()

    def f(x: Tensor, scale: float) -> dict[str, Any]:
        y = torch.sin(x) * scale
        return {"y": y, "rest": (x, y.sum(0), [torch.sort(y, stable=True)[0], 7])}

    call = fxwrap.bind(compiled(f), torch.randn(4, 8), 2.0)
    for turn in range(12):
        x = torch.randn(4 + turn % 3, 8)
        expected = call(x, 2.0)
        y, sums, order = (torch.empty_like(t) for t in (expected["y"], expected["rest"][1], expected["rest"][2][0]))
        got = call.run(x, 2.0, out={"y": y, "rest": (None, sums, [order, None])})
        assert got["y"] is y and got["rest"][0] is x and got["rest"][1] is sums and got["rest"][2][0] is order
        assert_same([y, sums, order], [expected["y"], expected["rest"][1], expected["rest"][2][0]])
        assert got["rest"][2][1] == 7


def test_a_program_that_another_result_of_is_kept(net: Net) -> None:
    """What the function keeps for itself is not in the caller's tensor."""

    def f(x: Tensor) -> Tensor:
        y = x * 2
        net.last = y + 1
        return y

    torch._dynamo.reset()
    call = fxwrap.bind(compiled(f), torch.randn(4))
    for _ in range(5):
        x, y = torch.randn(4), torch.empty(4)
        call.run(x, out=y)
        y.zero_()
        assert net.last is not None and torch.equal(net.last, x * 2 + 1)


def test_a_function_in_pieces_is_copied_from() -> None:
    """With a graph break several programs run, and Python between them."""
    torch._dynamo.reset()

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    call = fxwrap.bind(compiled(f), torch.randn(4), strict=False)
    for _ in range(5):
        x, y = torch.randn(4), torch.empty(4)
        assert call.run(x, out=y) is y
        assert_same(y, compiled(f)(x))
    assert not variants(call)


@pytest.mark.parametrize("calls", [0, 3], ids=["at first", "later"])
def test_wrong_tensors_are_refused(net: Net, calls: int) -> None:
    x = torch.randn(4, 8)
    call = fxwrap.bind(compiled(net), x)
    y = torch.empty(4, 8)
    for _ in range(calls):
        call.run(x, out=y)
    wrong: list[Any] = [
        torch.empty(5, 8),
        torch.empty(4, 9),
        torch.empty(32),
        torch.empty(8, 4).mT,
        torch.empty(4, 8, dtype=torch.float64),
        torch.empty(4, 8, device="meta"),
        torch.zeros(4, 8).to_sparse(),
        torch.empty(1, 8).expand(4, 8),
        torch._neg_view(torch.empty(4, 8)),
        torch.empty(4, 8, requires_grad=True),
        torch.inference_mode()(torch.empty)(4, 8),
        nn.Parameter(torch.empty(4, 8)),
        3,
        (y,),
        {"y": y},
    ]
    for out in wrong:
        with pytest.raises(InputError, match="out= of a bound function"):
            call.run(x, out=out)
    if calls:
        for out in (x, net.linear.weight.detach()[:4]):
            before = out.clone()
            with pytest.raises(InputError, match="shares memory"):
                call.run(x, out=out)
            assert torch.equal(out, before)
    with torch.enable_grad(), pytest.raises(InputError, match=r"no_grad"):
        call.run(x, out=y)
    assert_same(call.run(x, out=y), call(x))


def test_a_padded_result_is_copied_from() -> None:
    """
    ::

        rows   bucket   the program's result        y
        8      8        8 rows                <-    a copy
        5      8        8 rows, cut to 5      <-    a copy
    """
    torch._dynamo.reset()
    model = compiled(nn.Linear(8, 8), options={"buckets": {"batch": (8,)}})

    def rows(count: int) -> Tensor:
        x = torch.randn(count, 8)
        fxwrap.mark_bucket(x, 0, "batch")
        return x

    call = fxwrap.bind(model, rows(8))
    for count in (8, 5, 8, 3, 12, 8):
        x, y = rows(count), torch.empty(count, 8)
        assert call.run(x, out=y) is y
        assert_same(y, model(x))


def test_threads(net: Net) -> None:
    model = compiled(net)
    call = fxwrap.bind(model, torch.randn(4, 8))
    wrong = []

    def work(seed: int) -> None:
        maker = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x, y = torch.randn(4, 8, generator=maker), torch.empty(4, 8)
            if call.run(x, out=y) is not y or not torch.equal(y, call(x)):
                wrong.append(seed)

    in_threads([functools.partial(work, seed) for seed in range(3)])
    assert not wrong


def test_another_size_at_the_same_addresses_is_checked_again() -> None:
    """
    ::

        base   0 1 2 3 4 5 6 7 8 9 ...
        4      x x x x y y y y            apart
        6      x x x x x x                y begins where it began, in the memory of x
                       y y y y y y
    """
    torch._dynamo.reset()
    call, base = (
        fxwrap.bind(torch.compile(lambda x: x * 2, backend="fxwrap", dynamic=True), torch.ones(5)),
        torch.ones(32),
    )
    for _ in range(3):
        call.run(base[:4], out=base[4:8])
        call.run(torch.ones(6), out=torch.empty(6))
    with pytest.raises(InputError, match="shares memory"):
        call.run(base[:6], out=base[4:10])


def test_a_result_whose_size_the_data_decides_is_copied() -> None:
    torch._dynamo.reset()

    def f(x: Tensor) -> Tensor:
        return torch.nonzero(x) * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = fxwrap.bind(compiled(f, fullgraph=True), torch.ones(4))
        for _ in range(4):
            y = torch.empty(4, 1, dtype=torch.int64)
            assert_same(call.run(torch.ones(4), out=y), torch.arange(4)[:, None] * 2)


def test_the_error_of_a_call_leaves_nothing_behind(net: Net) -> None:
    x, y = torch.randn(4, 8), torch.empty(4, 8)
    call = fxwrap.bind(compiled(net), x)
    with pytest.raises(Exception, match=r"shape|size|multiplied"):
        call.run(torch.randn(4, 7), out=y)
    before = y.clone()
    call(x)
    assert torch.equal(y.isnan(), before.isnan()) and torch.equal(y.nan_to_num(), before.nan_to_num())
