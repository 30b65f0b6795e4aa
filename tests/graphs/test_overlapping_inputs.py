"""Inputs that share bytes at a call, though they did not when the program was compiled, and one of which is written.

::

    base  |-------- x --------|
              |-------- y --------|       f writes x, and reads y: what Inductor's wrapper computes, in its order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, freezes

from fxwrap.codegen.torch_runtime import overlap
from fxwrap.graphs.overlaps import MutatedInputs


def _scale_(x: torch.Tensor) -> None:
    x.mul_(2)


Inputs = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    library = torch.library.Library("overlapping", "FRAGMENT")
    library.define("scale_(Tensor(a!) x) -> ()")
    library.impl("scale_", _scale_, "CompositeExplicitAutograd")
    torch.library.register_fake("overlapping::scale_", lambda x: None, lib=library)
    yield
    library._destroy()


def apart(device: torch.device) -> Inputs:
    return torch.randn(3, 4, device=device), torch.randn(3, 4, device=device)


def overlapping(device: torch.device) -> Inputs:
    base = torch.randn(4, 4, device=device)
    return base[:3], base[1:]


def contained(device: torch.device) -> Inputs:
    base = torch.randn(6, 4, device=device)
    return base[:3], base.flatten()[2:14].view(3, 4)


def columns(device: torch.device) -> Inputs:
    """Their spans overlap, and no element is shared."""
    base = torch.randn(3, 8, device=device)
    return base[:, :4], base[:, 4:]


def neighbours(device: torch.device) -> Inputs:
    base = torch.randn(6, 4, device=device)
    return base[:3], base[3:]


def writes_then_reads(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    torch.ops.overlapping.scale_(x)
    return y @ w


def reads_then_writes(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = (y @ w).sin() @ w
    torch.ops.overlapping.scale_(x)
    return z + y


def writes_both(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    torch.ops.overlapping.scale_(x)
    z = x @ w
    torch.ops.overlapping.scale_(y)
    return z + x @ w


def writes_in_a_kernel(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return (y @ w).relu() @ w


PROGRAMS = [writes_then_reads, reads_then_writes, writes_both, writes_in_a_kernel]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("eager_ops", [(), ("overlapping::scale_",)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_calls_compute_what_inductors_wrapper_does(
    compiled: Any,
    device: torch.device,
    program: Callable[..., Any],
    eager_ops: tuple[str, ...],
    native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not native:
        monkeypatch.setenv("FXWRAP_NATIVE_REPLAY", "0")
    ours: Compiled = compiled(program, options={"eager_ops": eager_ops}, dynamic=False)
    theirs = torch.compile(program, backend="inductor", dynamic=False)
    w = torch.randn(4, 4, device=device)
    made = [apart] * 4 + [overlapping, apart, contained, neighbours, neighbours, overlapping, contained, apart]
    with torch.no_grad():
        for make in made:
            seed = torch.seed()
            x, y = make(device)
            torch.manual_seed(seed)
            a, b = make(device)
            assert_same(ours(x, y, w), theirs(a, b, w))
            assert_same((x, y), (a, b))
    told = ours.program.counters.eager.get("a mutated input overlaps another one", 0)
    assert told == (4 if freezes(device) else 0)
    assert ours.program.counters.replays >= 4


def test_columns_of_one_matrix_are_replayed(compiled: Any, device: torch.device) -> None:
    """AOTAutograd lets inputs of one storage be inputs of their own, where they share no element."""
    ours: Compiled = compiled(writes_then_reads, dynamic=False)
    w = torch.randn(4, 4, device=device)
    with torch.no_grad():
        for _ in range(6):
            x, y = columns(device)
            expected_x, expected = x * 2, y @ w
            torch.testing.assert_close(ours(x, y, w), expected)
            torch.testing.assert_close(x, expected_x)
    counters = ours.program.counters
    assert counters.replays >= 3 and set(counters.eager) <= {"warm-up"}


def test_inputs_that_stay_where_they_are(compiled: Any, device: torch.device) -> None:
    """A cache that does not move is written where it lies: what is read of it is looked for there."""
    ours: Compiled = compiled(writes_then_reads, dynamic=False)
    cache, w = torch.zeros(8, 4, device=device), torch.randn(4, 4, device=device)
    with torch.no_grad():
        for call in range(20):
            x, y = cache[:3], torch.randn(3, 4, device=device)
            if call % 5 == 4:
                y = cache[2:5]
            cache.copy_(torch.randn(8, 4))
            scaled = cache.clone()
            scaled[:3] *= 2
            expected = (scaled[2:5] if call % 5 == 4 else y) @ w
            torch.testing.assert_close(ours(x, y, w), expected)
            torch.testing.assert_close(cache, scaled)
    assert ours.program.counters.replays >= 8


def test_spans_are_told_apart() -> None:
    base = torch.zeros(8, 8)
    rows = [base[i] for i in range(8)]

    def apart(written: list[bool], tensors: list[torch.Tensor], static: tuple[int, ...] = ()) -> bool:
        known = MutatedInputs(list(enumerate(written)), (), (), overlap).with_static(tensors, static)
        return known is None or known.are_apart(tensors)

    assert apart([True, False], [rows[0], rows[1]])
    assert apart([False, False], [base[:2], base[1:]]), "nothing is written"
    assert not apart([True, False], [base[:2], base[1:]]) and not apart([False, True], [base[:2], base[1:]])
    assert not apart([True, False, False], [base, rows[1], rows[5]]), "the first reaches over the second to the third"
    assert not apart([False, False, True], [base, rows[1], rows[5]])
    assert apart([False, False, True], [base[:3], rows[1], rows[5]])
    assert apart([True, False], [base[:0], base]) and apart([True, False], [base, base[:0]]), (
        "nothing is in an empty one"
    )
    assert apart([True, False], [base[:, :4], base[:, 4:]])
    assert not apart([True, False], [base[:, :5], base[:, 4:]])
    for static in ((0,), (1,)):
        assert not apart([True, False], [base[:2], base[1:]], static)
        assert apart([True, False], [base[:2], base[2:]], static)
    assert apart([True, False], [base[:2], base[1:]], (0, 1)), "a replay works on the inputs themselves"
    assert apart([True, False, True], [rows[0], rows[1], rows[2]], (0, 2))
