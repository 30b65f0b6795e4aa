"""A fallback always works: wherever compiling fails, the graph runs through Inductor's own wrapper."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor
from torch._inductor.virtualized import V
from torch.fx import GraphModule

import fxwrap
from fxwrap.codegen.emit.converter import HostGraphConverter


class PlantedError(Exception):
    """A fault of fxwrap's own that nobody expects."""


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    dynamo = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    # A program that a cache holds is not emitted again.
    caches = torch._inductor.config.patch(fx_graph_cache=False)
    with dynamo, caches, torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@torch.library.custom_op("fxwrap_fallback::counted", mutates_args=())
def counted(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x * 2, int((x > 0).sum())


@counted.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return torch.empty_like(x), torch.library.get_ctx().new_dynamic_size(min=0, max=100)


def sizes_of_data(x: torch.Tensor) -> tuple[Any, ...]:
    y, n = counted(x)
    chosen = torch.masked_select(x, x > 0)
    total = x.sum().item()
    return y + 1, torch.ones(n) * 2, chosen.sin(), x.nonzero() * 2, x * total


def promised(x: torch.Tensor) -> torch.Tensor:
    z = x.nonzero()
    torch._check(z.size(0) == 16)
    return z + 1


def control_flow(x: torch.Tensor) -> torch.Tensor:
    either = torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x - 1, (x,))
    count = torch.zeros((), dtype=torch.long)
    loop = torch._higher_order_ops.while_loop
    return loop(lambda i, y: i < 2, lambda i, y: (i + 1, y @ y * 0.5), (count, either))[1]


def writes_its_input(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x @ x


PROGRAMS: dict[str, tuple[Callable[..., Any], bool]] = {
    "sizes of data": (sizes_of_data, False),
    "a promised size": (promised, False),
    "control flow": (control_flow, False),
    "a written input": (writes_its_input, False),
    "training": (lambda x: (x.sin() @ x).relu().sum(), True),
}


def fail_after_line(number: int, patch: pytest.MonkeyPatch) -> None:
    read, lines = HostGraphConverter._read_line, []

    def reading(self: HostGraphConverter, line: Any, text: Any) -> None:
        lines.append(line)
        read(self, line, text)
        if len(lines) == number:
            raise PlantedError(str(line))

    patch.setattr(HostGraphConverter, "_read_line", reading)


def fail_in(name: str, patch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise PlantedError(name)

    patch.setattr(HostGraphConverter, name, fail)


class WithSymbols(fxwrap.FxwrapCodegen):
    """A pass that makes sizes, as the fake kernel of a data-dependent operator does, and fails."""

    def passes(self) -> Any:
        def make(gm: GraphModule) -> None:
            V.graph.sizevars.shape_env.create_unbacked_symint()
            V.graph.sizevars.shape_env.create_unbacked_symfloat()
            raise PlantedError

        return (make,)


PLACES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    **{f"line {number}": functools.partial(fail_after_line, number) for number in (1, 2, 3, 5, 7)},
    "inputs": functools.partial(fail_in, "_generate_graph_inputs"),
    "the outputs": functools.partial(fail_in, "_outputs"),
    "a pass of the user's": lambda patch: None,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_wherever_emission_fails(program: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, trains = PROGRAMS[program]
    options = {"codegen": WithSymbols} if place == "a pass of the user's" else {}
    f, theirs = Compiled(function, compile_options={"options": options}), inductor(function)
    results = []
    for g in (theirs, f):
        torch.manual_seed(0)
        with monkeypatch.context() as patch, warnings.catch_warnings(action="ignore"):
            if g is f:
                PLACES[place](patch)
            for _ in range(2):
                x = torch.randn(4, 4, requires_grad=trains)
                result = g(x)
                if trains:
                    result.backward()
                results.append((result, x.detach(), x.grad))
    assert_same(results[2:], results[:2])
    assert f.compilation.fallbacks and len(f.programs) <= 1  # backward compiles after a line that fails only once
