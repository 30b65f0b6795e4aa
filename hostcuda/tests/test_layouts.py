"""Results lie as torch predicts for CUDA: what Inductor compiles relies on it (torch/_subclasses/fake_tensor.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# shape of the input, of the weight, groups
CONVOLUTIONS = {
    "image": ((2, 8, 6, 6), (16, 8, 3, 3), 1),
    "one pixel": ((2, 8, 6, 6), (16, 8, 1, 1), 1),
    "depthwise": ((2, 8, 6, 6), (16, 1, 3, 3), 8),
    "volume": ((2, 8, 6, 6, 6), (4, 8, 3, 3, 3), 1),
    "line": ((2, 8, 6), (16, 8, 3), 1),
}


def layouts(*results: Any) -> list[tuple[int, ...]]:
    return [tuple(t.stride()) for t in tree_leaves(results) if isinstance(t, torch.Tensor)]


def predicted(work: Any, *tensors: torch.Tensor) -> list[tuple[int, ...]]:
    with FakeTensorMode() as mode:
        return layouts(work(*tree_map(mode.from_tensor, tensors)))


def in_layouts(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Each of them contiguous, and with its channels last."""
    for last in itertools.product((False, True), repeat=len(tensors)):
        yield [
            t.to(memory_format=CHANNELS_LAST[t.dim()]) if yes and t.dim() in CHANNELS_LAST else t
            for t, yes in zip(tensors, last, strict=True)
        ]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_of_convolutions(case: str, transposed: bool) -> None:
    shape, kernel, groups = CONVOLUTIONS[case]
    n = len(kernel) - 2
    if transposed:  # its weight's first size is that of the input's channels
        kernel = (shape[1], 16 // groups, *kernel[2:])
    settings = ([1] * n, [1] * n, [1] * n, transposed, [0] * n, groups)
    source, weight = torch.randn(shape, device="cuda"), torch.randn(kernel, device="cuda")
    channels = [kernel[1] * groups if transposed else kernel[0]]

    def step(grad: torch.Tensor, source: torch.Tensor, weight: torch.Tensor) -> Any:
        result = aten.convolution(source, weight, None, *settings)
        return result, aten.convolution_backward(grad, source, weight, channels, *settings, [True, True, True])

    grad = torch.randn_like(aten.convolution(source, weight, None, *settings))
    for tensors in in_layouts(grad, source, weight):
        assert layouts(step(*tensors)) == predicted(step, *tensors), layouts(*tensors)


@pytest.mark.parametrize("case", ["abs", "logical_and", "logical_xor", "mul", "neg", "rsqrt", "angle", "isnan"])
def test_of_pointwise_operators(case: str) -> None:
    """Where an operator's only kernel for CUDA is that of ``out=``, TensorIterator lays its result out."""
    operator = getattr(torch, case)
    values = torch.rand(4, 5, 6, device="cuda")
    for order in itertools.permutations(range(3)):
        source = values.permute(order)
        inputs = [source, source] if case in ("logical_and", "logical_xor", "mul") else [source]
        assert layouts(operator(*inputs)) == predicted(operator, *inputs)


@pytest.mark.parametrize("keys", [4, 16, 24])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_of_attention_with_a_bias(keys: int, p: float) -> None:
    """The gradient of the bias has rows with room for a multiple of 16."""
    q, k, v = (torch.randn(2, n, 3, 8, device="cuda").transpose(1, 2) for n in (5, keys, keys))
    bias = torch.randn(2, 3, 5, keys, device="cuda")

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> Any:
        out, lse, *state = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, p)
        wanted = [True, True, True, True]
        return out, lse, aten._scaled_dot_product_efficient_attention_backward(
            out, q, k, v, bias, out, lse, *state, p, wanted
        )  # fmt: skip

    assert layouts(step(q, k, v, bias)) == predicted(step, q, k, v, bias)
