"""Results of operators: a graph reads them at a fixed address, and what an operator keeps is its own."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fxwrap


@pytest.fixture
def registered(device: Any) -> Iterator[torch.device]:
    import hostsim.inductor

    torch.compiler.reset()
    with hostsim.inductor.register():
        yield torch.device(hostsim.NAME, 0)
    torch.compiler.reset()
    fxwrap.release()


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(2, 4, 3), torch.nn.Conv2d(4, 3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        return self.second(hidden.relu()), hidden


def test_gradients_of_convolutions(registered: torch.device) -> None:
    torch.manual_seed(0)
    model = Convolutions().to(registered)
    reference = copy.deepcopy(model).cpu()
    f = torch.compile(lambda x: sum(one.square().mean() for one in model(x)), backend="fxwrap")
    for i in range(6):
        x = torch.randn(2, 2, 8, 8, generator=torch.manual_seed(i))
        model.zero_grad()
        reference.zero_grad()
        f(x.to(registered)).backward()
        sum(one.square().mean() for one in reference(x)).backward()
        for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            assert got.grad is not None
            torch.testing.assert_close(got.grad.cpu(), wanted.grad, rtol=1e-4, atol=1e-5)
    assert [graph.counters["replays"] for graph in fxwrap.report(f).graphs] == [4, 4]


def test_what_eager_work_returns_is_copied_into_the_arena(registered: torch.device) -> None:
    """``(conv) [ relu ] (conv) [ cos ]``: where captured work reads it, at every call."""
    torch.manual_seed(0)
    reference = Convolutions()
    model = copy.deepcopy(reference).to(registered)
    options = {"eager_ops": ("aten::convolution",), "capture": "always"}
    f = torch.compile(lambda x: model(x.sin())[0].cos().sum(1), backend="fxwrap", options=options)
    with torch.no_grad():
        for i in range(6):
            x = torch.randn(2, 2, 8, 8, generator=torch.manual_seed(i))
            wanted = reference(x.sin())[0].cos().sum(1)
            torch.testing.assert_close(f(x.to(registered)).cpu(), wanted, rtol=1e-4, atol=1e-5)
    (graph,) = fxwrap.report(f).graphs
    assert graph.counters["replays"] > 0
    assert [partition.verdict.value for partition in graph.partitions].count("eager") == 2
    recordings = graph.program.specializations.recordings()
    assert recordings and not any(recording.own_bytes for recording in recordings)


def test_results_of_several_sizes_have_one_place_after_another(registered: torch.device) -> None:
    """
    ::

        a a .  .        a, of 8 x 8, is dead when c, of 6 x 6, is made: at the same address
        . b b  .   ->   a a c c
        . . c  c        . b b .
    """
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(2, 2, 3, padding=1), *(torch.nn.Conv2d(2, 2, 2) for _ in range(4))]
    reference = torch.nn.Sequential(*layers)
    model = copy.deepcopy(reference).to(registered)
    options = {"eager_ops": ("aten::convolution",), "capture": "always"}
    f = torch.compile(model, backend="fxwrap", options=options)
    with torch.no_grad():
        for i in range(6):
            x = torch.randn(1, 2, 8, 8, generator=torch.manual_seed(i))
            torch.testing.assert_close(f(x.to(registered)).cpu(), reference(x), rtol=1e-4, atol=1e-5)
    (graph,) = fxwrap.report(f).graphs
    assert graph.memory is not None and graph.counters["replays"] > 0
    (arena,) = graph.memory.arenas.values()
    at: dict[int, set[int]] = {}
    for index, offset in graph.memory.inside(arena).items():
        at.setdefault(offset, set()).add(graph.memory.sizes[index])
    assert any(len(sizes) > 1 for sizes in at.values())


# -- operators that are not torch's own, which may keep what they allocate -----------------------------------


@pytest.fixture
def operators() -> Iterator[Callable[..., Callable[..., Any]]]:
    """Defines operators that have to wait for the host, and so run eagerly between graphs."""
    libraries = []

    def define(function: Callable[..., Any], schema: str = "(Tensor x) -> Tensor") -> Callable[..., Any]:
        name = f"fxwrap_kept{next(_numbers)}"
        library = torch.library.Library(name, "DEF")
        library.define(f"op{schema}")
        library.impl("op", lambda x: (x.sum().item(), function(x))[1], "CompositeExplicitAutograd")

        def fake(x: torch.Tensor) -> Any:
            return tuple(map(torch.empty_like, (x, x))) if schema.endswith("Tensor)") else torch.empty_like(x)

        torch.library.register_fake(f"{name}::op", fake, lib=library)
        libraries.append(library)
        return getattr(torch.ops, name).op.default

    yield define
    for library in libraries:
        library._destroy()


_numbers = itertools.count()


def results(op: Callable[..., Any], calls: int) -> tuple[list[Any], Any]:
    """Calls of a program with ``op`` between captured work."""
    f = torch.compile(lambda x: op(x.sin()).cos() + 1, backend="fxwrap", options={"capture": "always"})
    found = []
    for i in range(calls):
        found.append(f(torch.full((64, 8), float(i), device="hostsim")).cpu())
    return found, f


def expected(calls: int) -> list[torch.Tensor]:
    return [(torch.full((64, 8), float(i)).sin() * 2).cos() + 1 for i in range(calls)]


def recordings(f: Any) -> list[Any]:
    (graph,) = fxwrap.report(f).graphs
    return [one for one in graph.program.specializations.recordings() if not one.ended]


def test_the_caller_may_get_it_too(registered: torch.device, operators: Any) -> None:
    """A graph could not hand it out; once it is known that none returns it, it is not copied any more.

    ::

        [ sin double copy cos ]   ->   [ sin ] (double) [ cos ]
    """
    op = operators(lambda x: x * 2)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = op(x.sin())
        return y, y.cos()

    f = torch.compile(program, backend="fxwrap", options={"capture": "always"})
    kept = [f(torch.full((64, 8), float(i), device=registered)) for i in range(8)]
    for i, (one, other) in enumerate(kept):
        wanted = torch.full((64, 8), float(i)).sin() * 2
        torch.testing.assert_close((one.cpu(), other.cpu()), (wanted, wanted.cos()))
    del kept, one, other
    for _ in range(4):
        f(torch.zeros(64, 8, device=registered))
    for recording in recordings(f):
        assert not [n for n in recording.plan.graph.graph.nodes if n.target is torch.ops.aten.copy_.default]
        assert not recording.own_bytes


def test_one_of_several_results_may_be_kept(registered: torch.device, operators: Any) -> None:
    kept, calls = [], itertools.count()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        call = next(calls)
        if call < 6:
            second = x * 3
            return x * 2, second
        first, second = x * 2, x * 3
        if call == 7:
            kept.append(second)
        return first, second

    op = operators(both, "(Tensor x) -> (Tensor, Tensor)")

    def program(x: torch.Tensor) -> torch.Tensor:
        one, two = op(x.sin())
        return one.cos() + two.sin().cumsum(0)

    f = torch.compile(program, backend="fxwrap", options={"capture": "always"})
    for i in range(12):
        x = torch.full((64, 8), float(i))
        wanted = (x.sin() * 2).cos() + (x.sin() * 3).sin().cumsum(0)
        torch.testing.assert_close(f(x.to(registered)).cpu(), wanted)
    assert not recordings(f)[0].own_bytes
    torch.testing.assert_close(kept[0].cpu(), torch.full((64, 8), 7.0).sin() * 3)


@pytest.mark.parametrize("first", [0, 6])
def test_a_result_that_its_operator_keeps(registered: torch.device, operators: Any, first: int) -> None:
    """From the first call on, or from a later one on: it is never overwritten.

    Its sum is another buffer: Inductor's own kernels write elementwise results over what they read.
    """
    kept: list[torch.Tensor] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        found = x * 2
        kept.append(found if calls[0] >= first else found.clone())
        calls[0] += 1
        return found

    calls, op = [0], operators(double)
    f = torch.compile(lambda x: op(x.sin()).cos().sum(0), backend="fxwrap", options={"capture": "always"})
    for i in range(12):
        x = torch.full((64, 8), float(i))
        torch.testing.assert_close(f(x.to(registered)).cpu(), (x.sin() * 2).cos().sum(0))
    seen = sorted(one.cpu().flatten()[0].item() for one in kept)
    assert seen == pytest.approx(sorted(math.sin(i) * 2 for i in range(12)), abs=1e-5)


def test_a_table_that_an_operator_keeps_from_its_first_call_on(registered: torch.device, operators: Any) -> None:
    table: list[torch.Tensor] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        if not table:
            table.append(torch.full_like(x, 2.0))
        return x * table[0]

    found, _ = results(operators(double), 10)
    torch.testing.assert_close(found, expected(10))
    assert table[0].cpu().eq(2).all()
