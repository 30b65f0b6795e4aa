"""What reads a tensor runs before what writes it. Inductor's own wrapper gives the wrong numbers that drawings show.

Foreach operators are one kernel, with a part for each tensor, in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from conftest import assert_same
from torch._inductor import lowering
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ForeachKernelSchedulerNode
from triton_lane import Launch, triton_on_cpu

from fxwrap.codegen.order_of_lowering import reads_before_writes

pytestmark = pytest.mark.compiler
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    with triton_on_cpu() as seen:
        yield seen


def penalty(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """The sum is lowered where it is returned.

    ::

        a * a + b * b               before: one kernel, whose second part has the sum: of a's new values
        foreach: a += c, b += c     after:  a kernel for the sum, and one for foreach
    """
    squares = a * a + b * b
    torch._foreach_add_([a, b], [c, c])
    return squares


def crossed(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[Any, ...]:
    """::

    foreach: y = a + c, z = b + c     before: one kernel, whose first part, u, reads z that the second has not made
    foreach: u = y * z, v = z * y     after:  two kernels
    """
    sums = torch._foreach_add([a, b], [c, c])
    return sums, torch._foreach_mul(sums, [sums[1], sums[0]])


def in_a_row(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
    """What depends on its own part only stays one kernel."""
    return torch._foreach_mul(torch._foreach_add([a, b], [c, c]), [c, c])


@pytest.mark.parametrize(("fn", "kernels"), [(penalty, 2), (crossed, 2), (in_a_row, 1)])
def test_what_is_read_was_not_written_yet(
    fn: Callable[..., Any], kernels: int, compiled: Any, launches: list[Launch]
) -> None:
    def given() -> Tensors:
        return torch.full((2,), 1.0), torch.full((2,), 2.0), torch.full((2,), 5.0)

    expected, mine = given(), given()
    results = fn(*expected)
    assert_same(compiled(fn)(*mine), results)
    assert_same(mine, expected)
    assert len(launches) == kernels and any("for_fused" in launch.kernel for launch in launches)


def test_a_reader_by_a_view(compiled: Any) -> None:
    """pytorch#198104.

    ::

        doubled = x.view(int32) * 2     before: x[:, 2:5] = 2; doubled, of x's new values
        x[:, 2:5] = 2                   after:  doubled; x[:, 2:5] = 2
    """

    def write(x: torch.Tensor) -> torch.Tensor:
        doubled = x.view(torch.int32) * 2
        doubled.sub_(-4)
        x[:, 2:5] = 2
        return doubled.view(torch.int64)

    expected, mine = torch.arange(24).reshape(3, 8), torch.arange(24).reshape(3, 8)
    result = write(expected)
    assert torch.equal(compiled(write)(mine), result) and torch.equal(mine, expected)


def test_inductors_tables_are_as_before_also_after_an_error() -> None:
    def tables() -> tuple[Any, ...]:
        classes = vars(ForeachKernelSchedulerNode)["can_fuse"], GraphLowering.mark_buffer_mutated
        return dict(lowering.lowerings), classes

    before = tables()
    with pytest.raises(ValueError, match="of the user's"), reads_before_writes():
        assert tables()[0] != before[0] and not set(tables()[1]) & set(before[1])
        raise ValueError("an error of the user's")
    assert tables() == before
