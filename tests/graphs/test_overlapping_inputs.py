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
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from fxwrap.graphs.replay.overlaps import MutatedInputs
from fxwrap.host_graph.listing import list_graph


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
    told = ours.program.counters.eager.get("a mutated input overlaps another input", 0)
    # Inductor copies a written input that is not aligned before the program runs, and before torch 2.12 any that is
    # not aligned: then it overlaps nothing.
    at_first_use = hasattr(PythonWrapperCodegen, "register_alignment_check_inputs")
    copied = device.type in ("cuda", "xpu") and (program is writes_both or not at_first_use)
    assert told == (0 if not freezes(device) else 2 if copied else 4)
    assert ours.program.counters.replays >= 4


@pytest.fixture
def counts_on_alignment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor counts on aligned inputs, as it does on a GPU."""
    if not hasattr(PythonWrapperCodegen, "register_alignment_check_inputs"):
        pytest.skip("this torch copies inputs that are not aligned before its wrapper runs")

    def tensors(inputs: Any, static: Any) -> list[int]:
        return [position for position, value in enumerate(inputs) if isinstance(value, torch.Tensor)]

    monkeypatch.setattr(torch._inductor.compile_fx, "get_input_idxs_to_check", tensors)
    # What the caches hold was compiled without.
    functorch: Any = torch._functorch.config
    with torch._inductor.config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield


def test_an_input_that_is_not_aligned_is_copied_at_its_first_use(
    compiled: Any, device: torch.device, counts_on_alignment: None
) -> None:
    """
    ::

        before the program runs                    at its first use
        y' = copy(y)                               scale_(x)
        scale_(x)          # y overlaps x          y' = copy(y)
        mm(y', w)          # as y was before       mm(y', w)
    """
    ours: Compiled = compiled(writes_then_reads, dynamic=False)
    w = torch.randn(4, 4, device=device)
    with torch.no_grad():
        for make in [apart] * 4 + [contained, apart, contained]:
            seed = torch.seed()
            x, y = make(device)
            torch.manual_seed(seed)
            expected = writes_then_reads(*make(device), w)
            assert_same(ours(x, y, w), expected)
    assert "aligned(y)" in list_graph(ours.program.plan.graph)
    assert ours.program.counters.replays >= 2


def test_a_parameter_that_is_not_aligned_is_copied_at_every_call(
    compiled: Any, device: torch.device, counts_on_alignment: None
) -> None:
    """Its address stays, its numbers do not: what is made of it while recording is not what it is at a replay."""
    held = torch.zeros(5, 4, device=device).flatten()[2:18].view(4, 4)
    assert held.data_ptr() % 16
    ours: Compiled = compiled(lambda x, w: x @ w, dynamic=False)
    x = torch.randn(4, 4, device=device)
    with torch.no_grad():
        for _ in range(5):
            held.copy_(torch.randn(4, 4))
            assert_same(ours(x, held), x @ held)
    assert ours.program.counters.replays >= 2


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
        known = MutatedInputs(list(enumerate(written)), (), ()).with_static(tensors, static)
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
