"""Floats of Python's that vary between calls: torch compiles some of them in, under a key that does not have them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fxwrap

pytestmark = pytest.mark.compiler

_FUNCTIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "tensors and a number": lambda x, y, s: (x * s).add(y, alpha=1 - s),
    "in place": lambda x, y, s: x.clone().mul_(s).addcmul_(y, y, value=1 - s),
    "a number alone": lambda x, y, s: torch.add(x, y, alpha=s),
    "tensors alone": lambda x, y, s: x * s + y,
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_each_value_is_computed_with_and_again_from_warm_caches(name: str, device: torch.device) -> None:
    f, (x, y) = _FUNCTIONS[name], (torch.randn(4, dtype=torch.float64, device=device) for _ in range(2))
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(f, backend="fxwrap", fullgraph=True)
        for s in (0.1, 0.2, 0.3, 0.4, 0.5, 0.3):
            torch.testing.assert_close(compiled(x, y, s), f(x, y, s))
    told = any("numbers that vary" in reason for reason in fxwrap.stats(compiled)["not_stored"])
    assert told or name == "a number alone"  # Dynamo itself compiles each value in


def test_a_graph_without_such_numbers_is_stored() -> None:
    compiled = torch.compile(lambda x: x * 0.5, backend="fxwrap")
    compiled(torch.randn(4))
    assert not fxwrap.stats(compiled)["not_stored"]
