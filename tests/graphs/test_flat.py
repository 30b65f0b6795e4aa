"""Flat functions: what a replay runs, a line for each call."""

from __future__ import annotations

import torch

from fxwrap.codegen.torch_runtime import layout_check


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
