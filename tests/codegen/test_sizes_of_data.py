"""Sizes and numbers that operators read out of data, and what the program promises of them.

::

    z = x.nonzero()
    torch._check(z.size(0) == 4)      Inductor lays its kernels out for 4 rows; a call with other data raises
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor
from torch._inductor.exc import InductorError

import fxwrap
from fxwrap.plan import Verdict

CALLS = 4  # warm-up, recording, two replays


@pytest.fixture(autouse=True)
def unbacked() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@torch.library.custom_op("fxwrap_promised::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


@positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("fxwrap_promised::four_positive", mutates_args=())
def four_positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


@four_positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(4)


@torch.library.custom_op("fxwrap_promised::counted", mutates_args=())
def counted(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x[x > 0].clone(), int((x > 0).sum())


@counted.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(size), torch.library.get_ctx().new_dynamic_size()


def number(x: torch.Tensor) -> torch.Tensor:
    size = (x > 0).sum().item()
    torch._check(size >= 0)
    return torch.ones(size, device=x.device)


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "a mask as index": lambda x: x[x > 0],
    "unique": lambda x: torch.unique(x * (x > 0) + (x <= 0)),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, (x > 0).long()),
    "bincount": lambda x: torch.bincount(x.long())[1:],
    "a custom operator": lambda x: positive(x),
    "one of its results": lambda x: counted(x)[0],
    "a number of a custom operator": lambda x: torch.ones(counted(x)[1], device=x.device),
    "a number out of a tensor": number,
}


def rows(count: int, device: torch.device) -> torch.Tensor:
    """So many positive numbers, in order, and zeros behind them."""
    x = torch.arange(1.0, 9, device=device)
    return x * (x <= count)


def outcome(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    try:
        return function(*inputs)
    except (AssertionError, RuntimeError) as error:
        return error


def assert_alike(ours: Callable[..., Any], theirs: Callable[..., Any], counts: list[int], device: Any) -> None:
    for call, count in enumerate(counts):
        inputs = rows(count, device), torch.ones(4, device=device) * call
        expected = outcome(theirs, *inputs)
        if isinstance(expected, InductorError):
            pytest.skip(f"this torch's Inductor does not compile it: {expected}")
        assert isinstance(expected, Exception) is (count != 4), expected
        got = outcome(ours, *inputs)
        if isinstance(expected, Exception):
            assert isinstance(got, Exception), f"{count} rows: {got}"
        else:
            assert_same(got, expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_data_that_break_the_promise_raise_at_every_kind_of_call(name: str, device: torch.device) -> None:
    """At the first calls, while recording, and at replays; in between, the program computes what it did."""
    operator = OPERATORS[name]

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = operator(x)
        torch._check(z.size(0) == 4)
        return z + 3, (w.sin() @ w[:, None]).cos()

    # A result of no rows passes Inductor's assert on the layout; the promise itself is asserted, too.
    broken = [6, 1, 2] if name == "bincount" else [6, 1, 0]
    if name == "unique":
        broken = [6, 3, 2]
    for first in (0, 1, 2):
        torch._dynamo.reset()
        f = Compiled(function)
        counts = [4] * first + broken + [4] * CALLS + broken + [4]
        assert_alike(f, inductor(function), counts, device)
        assert not f.compilation.fallbacks and f.program.counters.replays


def test_as_many_rows_as_an_input_has(device: torch.device) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = x.nonzero()[:, 0]
        torch._check(z.size(0) == w.size(0))
        return z + 3, z + w

    f = Compiled(function, compile_options={"dynamic": True})
    assert_alike(f, inductor(function, dynamic=True), [4] * CALLS + [6, 2, 1, 4], device)
    assert f.program.counters.replays


def test_a_result_of_another_size_than_its_fake_kernel_says(device: torch.device) -> None:
    """Where addresses are frozen, a single row would fill all four rows of the place that the plan has for it."""

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return four_positive(x) + 3, (w.sin() @ w[:, None]).cos()

    f = Compiled(function)
    assert_alike(f, inductor(function), [4] * CALLS + [1, 2, 6, 4], device)
    assert f.program.counters.replays


def test_an_operator_whose_result_s_size_is_promised_is_not_captured() -> None:
    """It waits for its data on the host. Its fake result looks like that of any other operator."""

    def function(x: torch.Tensor) -> torch.Tensor:
        z = positive(x.sin())
        torch._check(z.size(0) == 4)
        return (z + 3).cos() @ z

    (graph,) = fxwrap.explain(function, torch.tensor([1.0, 2, 3, -1, -2, 3, -1])).graphs
    partitions = graph.program.plan.partitions
    assert [partition.verdict for partition in partitions] == [Verdict.CAPTURED, Verdict.EAGER, Verdict.CAPTURED]
    assert "fxwrap_promised::positive: its result's size is data-dependent" in partitions[1].reason


# -- operators that return numbers among tensors -------------------------------------------------------


@torch.library.custom_op("fxwrap_promised::twice", mutates_args=())
def twice(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x * 2, int((x > 0).sum())


@twice.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return torch.empty_like(x), torch.library.get_ctx().new_dynamic_size(min=0, max=100)


@torch.library.custom_op("fxwrap_promised::number_first", mutates_args=())
def number_first(x: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor, int]:
    return int((x > 0).sum()), x * 2, x[x > 0].clone(), int((x > 1).sum())


@number_first.register_fake
def _(x: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor, int]:
    size = torch.library.get_ctx().new_dynamic_size()
    return size, torch.empty_like(x), x.new_empty(size), torch.library.get_ctx().new_dynamic_size()


class Numbers(torch.nn.Module):
    """In kernels, as a size, as a result; beside tensors that products read."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[Any, ...]:
        y, n = twice(x)
        m, z, chosen, more = number_first(x.cos())
        return y + 1, w * n, y @ w, torch.ones(n, device=x.device) * 3, z * m, chosen + 1, more, n


def numbers_inputs(device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4, device=device), torch.randn(4, 4, device=device)


def assert_same_numbers(got: Any, expected: Any) -> None:
    assert_same(got, expected)
    numbers = [[value for value in values if type(value) is int] for values in (got, expected)]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 2


def test_an_operator_that_returns_a_tuple_with_numbers_in_it(device: torch.device) -> None:
    with torch.no_grad():
        f, theirs = Compiled(Numbers(), compile_options={"fullgraph": True}), inductor(Numbers(), fullgraph=True)
        for _ in range(CALLS + 1):
            inputs = numbers_inputs(device)
            assert_same_numbers(f(*inputs), theirs(*inputs))
    assert not f.compilation.fallbacks and f.program.counters.replays >= 2


def test_such_an_operator_ahead_of_time_and_in_a_file(tmp_path: Path) -> None:
    methods = {"f": (Numbers(), numbers_inputs())}
    with torch.no_grad():
        theirs = inductor(Numbers(), fullgraph=True)
        stored = fxwrap.load(fxwrap.save(tmp_path / "f.fxw", methods), trust=True)
        for program in (fxwrap.aot_compile(methods), stored):
            for _ in range(CALLS):
                inputs = numbers_inputs()
                assert_same_numbers(program.f(*inputs), theirs(*inputs))
