"""Needless copies become views: when that is safe, and the cases in which it is not.

::

    buf1 = aten.slice_copy(buf0, 0, 1, 3)           buf1 = aten.slice(buf0, 0, 1, 3)
    aten.mm.out(buf1, arg, out=buf2)          ->    aten.mm.out(buf1, arg, out=buf2)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import Compiled, assert_same, inductor
from graph_building import Building
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule

from fxwrap.host_graph.listing import list_graph
from fxwrap.host_graph.nodes import Kind, kind_of
from fxwrap.passes.rewrites import view_copies
from fxwrap.passes.rewrites.view_copies import needless_copies, view_needless_copies

aten = torch.ops.aten


def _replaced(gm: GraphModule) -> list[str]:
    return [decision.copy.name for decision in needless_copies(gm)]


def test_before_and_after() -> None:
    b = Building()
    copy = b.call(aten.slice_copy.Tensor, b.x, 0, 1, 3)
    gm = b.module(b.call(aten.mul.Tensor, copy, 2))
    assert list_graph(gm) == (
        "x: float32[4, 6] on cpu\n"
        "slice_copy_tensor = aten.slice_copy.Tensor(x, 0, 1, 3)\n"
        "mul_tensor = aten.mul.Tensor(slice_copy_tensor, 2)\n"
        "return [mul_tensor]"
    )
    view_needless_copies(gm)
    assert list_graph(gm) == (
        "x: float32[4, 6] on cpu\n"
        "slice_copy_tensor = aten.slice.Tensor(x, 0, 1, 3)\n"
        "mul_tensor = aten.mul.Tensor(slice_copy_tensor, 2)\n"
        "return [mul_tensor]"
    )
    assert kind_of(copy) is Kind.VIEW
    x = torch.randn(4, 6)
    assert torch.equal(gm(x)[0], x[1:3] * 2)


def test_a_list_of_copies_becomes_a_list_of_views() -> None:
    b = Building()
    parts = b.call(aten.split_copy.Tensor, b.x, 2)
    first = b.graph.call_function(torch.ops.aten.mul.Tensor, (b.call(operator.getitem, parts, 0), 2))
    assert _replaced(b.module(first)) == [parts.name]


def test_a_copy_of_a_copy() -> None:
    b = Building()
    first = b.call(aten.slice_copy.Tensor, b.x, 0, 1, 4)
    second = b.call(aten.select_copy.int, first, 0, 1)
    assert _replaced(b.module(b.call(aten.mul.Tensor, second, 2))) == [first.name, second.name]


# -- cases in which a view would be wrong --------------------------------------------------------------


def test_not_if_the_copy_is_written() -> None:
    b = Building()
    copy = b.call(aten.slice_copy.Tensor, b.x, 0, 1, 3)
    b.call(aten.add_.Tensor, copy, 1)
    assert _replaced(b.module(b.call(aten.mul.Tensor, copy, 2))) == []


def test_not_if_the_operand_is_written_before_the_last_use() -> None:
    b = Building()
    copy = b.call(aten.slice_copy.Tensor, b.x, 0, 1, 3)
    b.call(aten.add_.Tensor, b.x, 1)
    assert _replaced(b.module(b.call(aten.mul.Tensor, copy, 2))) == []


def test_not_if_a_view_of_the_operand_is_written_before_the_last_use_of_a_view_of_the_copy() -> None:
    b = Building()
    copy = b.call(aten.slice_copy.Tensor, b.x, 0, 1, 3)
    b.call(aten.add_.Tensor, b.call(aten.select.int, b.x, 0, 1), 1)
    assert _replaced(b.module(b.call(aten.mul.Tensor, b.call(aten.select.int, copy, 0, 0), 2))) == []


def test_a_write_into_the_operand_before_the_copy_or_after_its_last_use_does_no_harm() -> None:
    b = Building()
    b.call(aten.add_.Tensor, b.x, 1)
    copy = b.call(aten.slice_copy.Tensor, b.x, 0, 1, 3)
    product = b.call(aten.mul.Tensor, copy, 2)
    b.call(aten.add_.Tensor, b.x, 1)
    gm = view_needless_copies(b.module(product))
    assert copy.target is aten.slice.Tensor
    x = torch.randn(4, 6)
    assert torch.equal(gm(x.clone())[0], (x + 1)[1:3] * 2)


def test_of_a_copy_of_a_copy_the_last_keeps_what_is_needed_later() -> None:
    """The first ends with the second, before the write; the second is read after it."""
    b = Building()
    first = b.call(aten.slice_copy.Tensor, b.x, 0, 1, 4)
    second = b.call(aten.select_copy.int, first, 0, 1)
    b.call(aten.add_.Tensor, b.x, 1)
    gm = b.module(b.call(aten.mul.Tensor, second, 2))
    assert _replaced(gm) == [first.name]
    x = torch.randn(4, 6)
    assert torch.equal(view_needless_copies(gm)(x.clone())[0], x[2] * 2)


def test_not_if_it_is_handed_out() -> None:
    """The caller may write into an output, and would find the input changed; and keeps all of the operand alive."""
    b = Building()
    copy = b.call(aten.slice_copy.Tensor, b.x, 0, 1, 3)
    assert _replaced(b.module(b.call(aten.select.int, copy, 0, 0))) == []


def test_not_if_the_layout_differs() -> None:
    """Kernels that read the copy were compiled for its strides."""
    b = Building()
    copy = b.call(aten.slice_copy.Tensor, b.x, 1, 1, 3)
    assert _replaced(b.module(b.call(aten.mul.Tensor, copy, 2))) == []


def test_not_if_a_conjugation_would_be_pending() -> None:
    """A kernel reads memory, and would see the numbers as they are before it."""
    b = Building()
    with b.mode:
        b.x.meta["val"] = torch.empty(4, 6, dtype=torch.complex64)
    copy = b.call(aten._conj_copy.default, b.x)
    assert _replaced(b.module(b.call(aten.mul.Tensor, copy, 2))) == []


@pytest.mark.parametrize("size, replaced", [((4, 6), False), ((4, 8), True)])
def test_on_an_accelerator_the_view_must_be_aligned(size: tuple[int, int], replaced: bool) -> None:
    """Kernels there load 16 bytes at a time. A row of 6 floats is 24 bytes, one of 8 is 32."""
    b = Building("meta", size)  # any device but the CPU
    buffer = b.call(torch.empty_strided, size, (size[1], 1), dtype=torch.float32, device=torch.device("meta"))
    copy = b.call(aten.slice_copy.Tensor, buffer, 0, 1, 3)
    assert _replaced(b.module(b.call(aten.mul.Tensor, copy, 2))) == ([copy.name] if replaced else [])


def test_on_an_accelerator_an_input_may_lie_anywhere() -> None:
    b = Building("meta", (4, 8))
    copy = b.call(aten.slice_copy.Tensor, b.x, 0, 1, 3)
    assert _replaced(b.module(b.call(aten.mul.Tensor, copy, 2))) == []


# -- any graph ------------------------------------------------------------------------------------------

_STEPS = st.tuples(
    st.sampled_from(["slice", "select", "alias", "view", "write", "add", "return"]), st.integers(0, 99)
)


def _build(steps: list[tuple[str, int]]) -> GraphModule:
    b = Building(size=(4, 4))
    values, returned = [b.x], [b.call(aten.mul.Tensor, b.x, 2)]
    for what, choice in steps:
        value = values[choice % len(values)]
        rows = value.meta["val"].size(0)
        if what == "slice":
            values.append(b.call(aten.slice_copy.Tensor, value, 0, choice % 2, max(rows - 1, 1)))
        elif what == "select" and value.meta["val"].dim() == 2 and rows:
            values.append(b.call(aten.select_copy.int, value, 0, choice % rows))
        elif what == "alias":
            values.append(b.call(aten.alias_copy.default, value))
        elif what == "view":
            values.append(
                b.call(aten.view_as_real.default, b.call(aten.view_as_complex.default, value))
            ) if value.meta["val"].size(-1) == 2 else values.append(b.call(aten.alias.default, value))
        elif what == "write":
            b.call(aten.add_.Tensor, value, choice)
        elif what == "add":
            values.append(b.call(aten.add.Tensor, value, choice))
        elif what == "return":
            returned.append(value if choice % 3 == 0 else b.call(aten.mul.Tensor, value, 2))
    return b.module(*returned)


def _runs_the_same(steps: list[tuple[str, int]]) -> bool:
    x = torch.arange(16.0).view(4, 4)
    mine, theirs = x.clone(), x.clone()
    ours, plain = view_needless_copies(_build(steps))(mine), _build(steps)(theirs)
    for number, (a, b) in enumerate(zip(ours, plain, strict=True)):
        a.add_(number)  # what the caller does with an output is seen in no other and in no input
        b.add_(number)
    return torch.equal(mine, theirs) and all(map(torch.equal, ours, plain))


@settings(max_examples=300, deadline=None)
@given(st.lists(_STEPS, max_size=14))
def test_any_graph_computes_the_same(steps: list[tuple[str, int]]) -> None:
    assert _runs_the_same(steps)


@pytest.mark.parametrize(
    "fault, steps",
    [
        ("distinguish", [("slice", 0), ("write", 2), ("return", 1)]),
        ("distinguish", [("slice", 0), ("write", 1), ("return", 0)]),
    ],
)
def test_the_property_notices_a_pass_that_overlooks_writes(fault: str, steps: list[tuple[str, int]]) -> None:
    assert _runs_the_same(steps)
    with mock.patch.object(view_copies._Uses, fault, lambda *_: False):
        assert not _runs_the_same(steps)


# -- whole programs -------------------------------------------------------------------------------------


def _sliced(x: torch.Tensor) -> torch.Tensor:
    return torch.slice_copy(x * 2, 0, 1, 3) @ x[:4, :3]


def _split(x: torch.Tensor) -> list[torch.Tensor]:
    return [part @ part.t() for part in torch.split_copy(x * 2, 2)]


def _complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.select_copy(x * 2j, 0, 1) * (1 + 1j))


@pytest.mark.compiler
@pytest.mark.parametrize("function", [_sliced, _split, _complex])
def test_programs(compiled: Any, function: Callable[..., Any]) -> None:
    ours: Compiled = compiled(function)
    theirs = inductor(function)
    for _ in range(4):
        x = torch.randn(4, 4)
        assert_same(ours(x), theirs(x))
    assert "_copy" not in list_graph(ours.program.plan.graph)
    assert ours.program.counters.replays == 2
