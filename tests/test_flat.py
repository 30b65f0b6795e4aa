"""Flat functions: what a replay runs, a line for each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_graphs import GraphMaker, by_name

from fxwrap.codegen.torch_versions import layout_check
from fxwrap.graphs.flat import FlatBuilder
from fxwrap.host_graph import Kind, kind_of

aten = torch.ops.aten


def _source(maker: GraphMaker, result: Any) -> str:
    gm = maker.finish([result])
    builder = FlatBuilder({}, {node: i for i, node in enumerate(gm.graph.nodes) if node.op == "placeholder"})
    builder.run(node for node in gm.graph.nodes if kind_of(node) is Kind.EXTERN)
    return builder.build(by_name(gm)[result.name]).source


def test_a_view_is_made_once_for_all_who_only_compute() -> None:
    """
    ::

        v = view of x                v = view of x
        a = v + v                    a = v + v
        w = the same view     ->     b = v * a
        b = w * a
        u = another view             u = another view
        c = u + b                    c = u + b
    """
    maker = GraphMaker()
    x = maker.input("x")
    v, w, u = (maker.view(x, size, stride, name=name) for name, size, stride in (
        ("v", (16,), (1,)), ("w", (16,), (1,)), ("u", (1, 16), (16, 1)),
    ))  # fmt: skip
    a = maker.extern(aten.add.Tensor, v, v)
    b = maker.extern(aten.mul.Tensor, w, a)
    source = _source(maker, maker.extern(aten.add.Tensor, u, b))
    assert source.count("(v0, ") == 2, source


@pytest.mark.parametrize("keeps", ["an operator of somebody's", "the caller"])
def test_a_view_that_somebody_may_keep_is_made_for_him_alone(keeps: str) -> None:
    maker = GraphMaker()
    x = maker.input("x")
    v, w = (maker.view(x, (16,), (1,), name=name) for name in ("v", "w"))
    maker.extern(aten.add.Tensor, v, v)
    if keeps == "the caller":
        source = _source(maker, w)
    else:
        maker.extern(_keep, w)
        source = _source(maker, x)
    views = [line for line in source.splitlines() if "(v0, " in line]
    assert len(views) == 2, source


def _keep(value: torch.Tensor) -> torch.Tensor:
    return value + 1


def test_the_layouts_of_all_inputs_in_one_look() -> None:
    """It may say no where nothing is wrong, and never yes where something is."""
    a, b, c = torch.randn(4, 6), torch.randn(6, 4).t(), torch.randn(3)
    check = layout_check([a, 7, b, c], [0, 2])
    assert check([a, 7, b, c]) and check([a + 1, "anything", b.clone(), None])
    for wrong in (torch.randn(4, 5), torch.randn(6, 4).t(), a.double(), a[None], a.to("meta"), 3, None):
        assert not check([wrong, 7, b, c]), wrong
    assert not check([a, 7, b.contiguous(), c])
    assert not check([b, 7, b, c])
    assert layout_check([c], [0])([torch.zeros(3)]) and not layout_check([c], [0])([torch.zeros(4)])
