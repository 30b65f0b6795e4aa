"""Views are made once, and not for kernels of the CPU, which take addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Compiled
from random_graphs import GraphMaker, by_name, kernel
from torch.fx import GraphModule

from fxwrap.host_graph.nodes import reinterpret
from fxwrap.passes.rewrites.shared_views import share_views

aten = torch.ops.aten
FLAT, SQUARE = ((16,), (1,)), ((4, 4), (4, 1))


def _views(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.target is reinterpret]


def test_a_view_is_made_once() -> None:
    """
    ::

        v = view of buf0             v = view of buf0
        a = v + v                    a = v + v
        w = the same view     ->     b = v * a
        b = w * a
        return b, the same view      return b, v
    """
    maker = GraphMaker()
    buffer = maker.allocate()
    v, w, u = (maker.view(buffer, *FLAT, name=name) for name in ("v", "w", "u"))
    a = maker.extern(aten.add.Tensor, v, v)
    b = maker.extern(aten.mul.Tensor, w, a)
    gm = share_views(maker.finish([b, u]))
    assert _views(gm) == ["v"]
    assert by_name(gm)["output"].args[0][1].name == "v"


def test_a_view_of_a_view_counts_from_the_buffer_and_may_be_the_buffer() -> None:
    """
    ::

        v = 3rd row of buf0 on       v = 3rd row of buf0 on
        w = v, but its first row     w = 4th row of buf0 on
        u = buf0 as a line    ->     a = buf0 + buf0
        x = u as a square
        a = x + x
    """
    maker = GraphMaker()
    buffer = maker.allocate()
    v = maker.view(buffer, (2, 4), (4, 1), 8, name="v")
    w = maker.view(v, (1, 4), (4, 1), 4, name="w")
    u = maker.view(buffer, *FLAT, name="u")
    x = maker.view(u, *SQUARE, name="x")
    a, b = maker.extern(aten.add.Tensor, x, x), maker.extern(aten.add.Tensor, w, v)
    gm = share_views(maker.finish([a, b]))
    assert _views(gm) == ["v", "w"]
    assert by_name(gm)["w"].args == (by_name(gm)[buffer.name], (1, 4), (4, 1), 12)
    assert by_name(gm)[a.name].args == (by_name(gm)[buffer.name],) * 2


def test_a_kernel_gets_what_its_operand_begins_with() -> None:
    maker = GraphMaker()
    one, two = maker.allocate(), maker.allocate()
    begins, within = maker.view(one, *FLAT), maker.view(two, (12,), (1,), 4, name="within")
    maker.launch(kernel("takes_addresses", lambda a, b: None, (1,)), begins, within)
    gm = share_views(maker.finish([two]))
    (launch,) = (node for node in gm.graph.nodes if node.op == "call_function" and "launch" in node.name)
    assert launch.args[1] is by_name(gm)[one.name] and launch.args[2].name == "within"
    assert _views(gm) == ["within"]


@pytest.mark.parametrize("keeps", ["an operator of somebody's", "the caller, twice", "the caller, of an input"])
def test_a_view_that_somebody_may_keep_is_made_for_him_alone(keeps: str) -> None:
    maker = GraphMaker()
    base = maker.input("x") if keeps.endswith("input") else maker.allocate()
    v, w = (maker.view(base, *FLAT, name=name) for name in ("v", "w"))
    result: list[Any] = [maker.extern(aten.add.Tensor, v, v), w]
    if keeps.startswith("an operator"):
        result = [result[0], maker.extern(_keep, w)]
    elif keeps.endswith("twice"):
        result.append(v)
    assert _views(share_views(maker.finish(result))) == ["v", "w"]


def _keep(value: torch.Tensor) -> torch.Tensor:
    return value + 1


@pytest.mark.compiler
def test_what_the_caller_gets_is_new_at_every_call(compiled: Any, device: torch.device) -> None:
    """The view that work needs is handed out, too: both are made at the call."""
    w = torch.randn(6, 6)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.sin().view(-1, 6)
        return y, (y @ w.to(x.device)).relu()

    f: Compiled = compiled(fn)
    kept = []
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(2, 3, 6, device=device)
            got, expected = f(x), fn(x)
            torch.testing.assert_close(got, expected)
            kept.append((got, expected))
    for got, expected in kept:
        torch.testing.assert_close(got, expected)
    assert len({id(got[0]) for got, _ in kept}) == len(kept)
