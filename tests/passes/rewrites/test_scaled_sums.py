"""A sum with a product of matrices multiplies first, since Inductor would lose the factor.

::

    mm = aten.mm(a, b)                        mm = aten.mm(a, b)
    add = aten.add(mm, w, alpha=0.6)    ->    mul = aten.mul(w, 0.6)
                                              add = aten.add(mm, mul)
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxwrap.passes.rewrites.scaled_sums import multiply_before_adding

_aten = torch.ops.aten
Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_CHANGED: dict[str, Sum] = {
    "the product first": lambda a, b, w: torch.add(a @ b, w, alpha=0.6),
    "the product second": lambda a, b, w: torch.add(w, a @ b, alpha=0.6),
    "two products": lambda a, b, w: torch.add(a @ b, (a + 1) @ b, alpha=0.6),
    "a row": lambda a, b, w: torch.add(a @ b, w[0], alpha=2),
}
_LEFT: dict[str, Sum] = {
    "no factor": lambda a, b, w: a @ b + w,
    "no product": lambda a, b, w: torch.add(w, w, alpha=0.6),
    "a difference": lambda a, b, w: torch.sub(a @ b, w, alpha=0.6),
}


def _operands() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(*sizes, dtype=torch.float64) for sizes in ((4, 5), (5, 8), (4, 8)))


@pytest.mark.parametrize("name", [*_CHANGED, *_LEFT])
def test_the_graph(name: str) -> None:
    f, operands = {**_CHANGED, **_LEFT}[name], _operands()
    gm = make_fx(f)(*operands)
    before = gm.code
    multiply_before_adding(gm)
    gm.graph.lint()
    assert (gm.code == before) == (name in _LEFT)
    sums = gm.graph.find_nodes(op="call_function", target=_aten.add.Tensor)
    assert name in _LEFT or not any("alpha" in node.kwargs for node in sums)
    torch.testing.assert_close(gm(*operands), f(*operands))
    for node in gm.graph.nodes:
        assert node.op == "output" or node.meta["val"].shape is not None


@pytest.mark.compiler
@pytest.mark.parametrize("name", [*_CHANGED, *_LEFT])
def test_the_numbers(name: str, device: torch.device) -> None:
    f, operands = {**_CHANGED, **_LEFT}[name], [one.to(device) for one in _operands()]
    torch.testing.assert_close(torch.compile(f, backend="fxwrap")(*operands), f(*operands))
