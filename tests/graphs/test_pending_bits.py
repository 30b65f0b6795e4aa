"""Inputs and results of which a conjugation or a negation is pending, and inputs with a tangent.

::

    x.conj()         the memory of x, and a bit: whoever reads it conjugates
    x.conj().imag    every second number of that memory, and a bit: whoever reads it negates

What stands for such a tensor (a static buffer, a placed result, a copy) has its bits and its bytes.
Inductor's kernels read memory without a look at the negative bit (pytorch/pytorch#145093). There we compare with its
wrapper alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor, tensors_in
from torch.autograd import forward_ad

from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.graphs.memory.locks import LockOwner
from fxwrap.graphs.memory.output_views import copy_out, relay, views_of
from fxwrap.graphs.memory.static_buffers import StaticBuffers

_COMPLEX = torch.complex64
_neg = torch._neg_view


@torch.library.custom_op("fxwrap_pending::conjugated", mutates_args=())
def conjugated(x: torch.Tensor) -> torch.Tensor:
    """A new tensor with the bit."""
    return (x * 2).conj()


@conjugated.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).conj()


def _doubled(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x.sin()


def _doubled_imag(x: torch.Tensor) -> torch.Tensor:
    x.imag.mul_(2)
    return x + 1


def _raised_real(x: torch.Tensor) -> torch.Tensor:
    x.real.add_(1)
    return x.imag * 2


_OF_CONJUGATES: dict[str, Callable[[torch.Tensor], Any]] = {
    "imag": lambda x: x.imag * 2,
    "real": lambda x: x.real * 2,
    "a product": lambda x: x @ x,
    "its parts": lambda x: x.imag @ x.real,
    "views of it": lambda x: (x.real, x[1:], x.conj(), x.sum()),
    "resolved": lambda x: torch.view_as_real(x.resolve_conj()) * 2,
    "mutated": _doubled,
    "a mutated imag": _doubled_imag,
    "a mutated real": _raised_real,
}
_OF_NEGATIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a kernel": lambda x: x * 2,
    "a product": lambda x: x @ x,
    "views of it": lambda x: (x[1:], x.t(), x.cumsum(0)),
    "mutated": _doubled,
}
_INPUTS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "a conjugate": lambda device: torch.randn(4, 4, dtype=_COMPLEX, device=device).conj(),
    "a part of one": lambda device: torch.randn(40, dtype=_COMPLEX, device=device)[8:24].view(4, 4).conj(),
    "a repeated one": lambda device: torch.randn(1, 4, dtype=_COMPLEX, device=device).conj().expand(4, 4),
    "both": lambda device: _neg(torch.randn(4, 4, dtype=_COMPLEX, device=device).conj()),
    "a negative": lambda device: _neg(torch.randn(4, 4, device=device)),
    "of a conjugate": lambda device: torch.randn(4, 4, dtype=_COMPLEX, device=device).conj().imag,
}
_CASES = [
    *((name, of) for of in ("a conjugate", "a part of one", "both") for name in _OF_CONJUGATES),
    *((name, "a repeated one") for name in ("imag", "a product", "views of it")),
    *((name, of) for of in ("a negative", "of a conjugate") for name in _OF_NEGATIVES),
]


def _compare(f: Compiled, g: Callable[..., Any], make: Callable[[], torch.Tensor], eager: bool) -> None:
    """Results, and the inputs afterwards: bit for bit with Inductor's wrapper, and with eager where that is right."""
    theirs = inductor(g)
    for seed in range(5):

        def made(seed: int = seed) -> torch.Tensor:
            torch.manual_seed(seed)
            return make()

        mine, others, last = (made() for _ in range(3))
        got, expected = f(mine), theirs(others)
        assert_same([got, mine], [expected, others])
        if eager:
            torch.testing.assert_close([*tensors_in(got), mine], [*tensors_in(g(last)), last])


@pytest.mark.parametrize(("name", "of"), _CASES)
def test_inputs(compiled: Any, device: torch.device, name: str, of: str) -> None:
    def make() -> torch.Tensor:
        return _INPUTS[of](device)

    g = (_OF_CONJUGATES if make().is_complex() else _OF_NEGATIVES)[name]
    f: Compiled = compiled(g)
    _compare(f, g, make, eager=not make().is_neg())
    assert f.program.counters.replays >= 2


def test_bits_that_change_from_call_to_call(compiled: Any, device: torch.device) -> None:
    """Dynamo guards them: each kind of tensor has a program of its own."""

    def g(x: torch.Tensor) -> torch.Tensor:
        return x.imag @ x.real

    f: Compiled = compiled(g)
    base = torch.randn(4, 4, dtype=_COMPLEX, device=device)
    for _ in range(5):
        base.copy_(torch.randn(4, 4, dtype=_COMPLEX))
        for x in (base, base.conj(), base.t().conj(), base.clone().conj()):
            torch.testing.assert_close(f(x), g(x))
    assert len(f.programs) >= 2 and all(f.replays())


def test_one_conjugate_at_every_call(compiled: Any, device: torch.device) -> None:
    """It stays where it is: its numbers are read at every call."""
    f: Compiled = compiled(lambda x: x.imag @ x.real)
    x = torch.randn(4, 4, dtype=_COMPLEX, device=device).conj()
    for _ in range(6):
        x.copy_(torch.randn(4, 4, dtype=_COMPLEX))
        torch.testing.assert_close(f(x), x.imag @ x.real)
    assert f.program.counters.replays >= 4


@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks"])
def test_saved_for_the_backward(compiled: Any, device: torch.device, hooks: bool) -> None:
    """With the bit, or without it, as what a hook of the caller's has unpacked."""

    def g(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.imag * y).sin() @ (x.conj() @ x).real

    f: Compiled = compiled(g)
    unpacked = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.resolve_conj().resolve_neg())
    for _ in range(5):
        x = torch.randn(4, 4, dtype=_COMPLEX, device=device).conj().requires_grad_()
        y = torch.randn(4, 4, device=device, requires_grad=True)
        results = []
        for call in (f, g):
            with unpacked if hooks else contextlib.nullcontext():
                out = call(x, y)
            results.append((out, *torch.autograd.grad(out.square().sum(), (x, y))))
        torch.testing.assert_close(*results)
    assert all(f.replays())


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_results_of_operators(compiled: Any, device: torch.device, eager: bool) -> None:
    """Read by a graph, and handed out."""

    def g(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = conjugated(x + 1)
        return y.imag @ y.real, y, y.conj()[1:], y.imag

    f: Compiled = compiled(g, options={"eager_ops": ["fxwrap_pending::conjugated"] if eager else []})
    theirs, kept = inductor(g), []
    for _ in range(6):
        x = torch.randn(4, 4, dtype=_COMPLEX, device=device)
        kept.append((f(x), theirs(x)))
        for mine, expected in kept:
            assert_same(mine, expected)


def test_what_stands_for_a_tensor_has_its_bits_and_its_bytes() -> None:
    base = torch.randn(6, dtype=_COMPLEX)
    whole = torch.randn(6, dtype=_COMPLEX)
    values = whole, whole.conj()[2:], whole.conj().imag, _neg(whole)
    for made in (StaticBuffers(set()).buffer_of(values), tuple(map(copy_out, values))):
        assert_same(made, values)
        assert all(one.untyped_storage()._cdata != whole.untyped_storage()._cdata for one in made)
    # Values that share memory do so in their buffers.
    whole, conjugate, *_ = StaticBuffers(set()).buffer_of(values)
    assert whole.untyped_storage()._cdata == conjugate.untyped_storage()._cdata
    # The same views of another tensor, whose own bits do not matter.
    views = views_of((whole, whole.conj()[2:], whole.conj().imag), whole.data_ptr())
    assert_same(relay(views, base.conj()), (base, base.conj()[2:], base.conj().imag))


def test_what_a_recording_keeps_is_freed_when_it_ends(device: torch.device, own_arenas: ArenaPool) -> None:
    """``Tensor.record_stream`` of such a tensor leaks it, and writes to memory that is freed (torch 2.14.1)."""
    if device.type == "cpu":
        pytest.skip("no allocator that knows streams")
    stream = torch.accelerator.current_stream(device)
    arena, allocated = own_arenas.acquire(device, stream, LockOwner(), []), torch.accelerator.memory_allocated
    arena.resize(512)
    arena.stream, before = stream, allocated(device)
    for pending in (torch.conj, _neg):
        arena.keep_until_done([pending(torch.empty(1 << 16, dtype=_COMPLEX, device=device))])
        assert allocated(device) == before


# -- tangents of forward-mode derivatives ----------------------------------------------------------------------


def _sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x


def _product(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).sin()


def _written(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x.sort(0)[0]


@pytest.mark.parametrize("g", [_sine, _product, _written])
@pytest.mark.parametrize("first", range(4))
def test_a_tangent_is_no_hindrance(compiled: Any, device: torch.device, g: Any, first: int) -> None:
    """At any kind of call the result is the function's; like Inductor's kernels, a program derives nothing.

    If the first call has a tangent, Dynamo of torch 2.14 leaves the function to eager work, which derives.
    """
    f, leaves_to_eager = compiled(g), False
    for call in range(7):
        x = torch.randn(4, 4, device=device)
        expected = g(twin := x.clone())
        with forward_ad.dual_level():
            derived = forward_ad.unpack_dual(g(forward_ad.make_dual(x.clone(), torch.ones_like(x)))).tangent
            with_tangent = call >= first and call % 2 == first % 2
            dual = forward_ad.make_dual(x, torch.ones_like(x)) if with_tangent else x
            result, tangent = forward_ad.unpack_dual(f(dual))
        torch.testing.assert_close([result, x], [expected, twin])
        if tangent is not None:
            torch.testing.assert_close(tangent, derived)
            leaves_to_eager = True
    assert sum(f.replays()) >= 4 or (leaves_to_eager and first == 0)
