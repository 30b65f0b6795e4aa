"""What is known of a program before it runs: what a graph's values will be like, and the backward graph."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch._functorch.config
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node

from ...host_graph.sizes import hint

# For a data-dependent size: odd, because nothing may be taken for granted of it.
_UNKNOWN_SIZE = 7


def backward_at_once() -> contextlib.AbstractContextManager[Any]:
    """Have backward graphs compiled with their forward graphs, and not when they are needed."""
    patch: Any = torch._functorch.config.patch
    return patch(force_non_lazy_backward_lowering=True)  # type: ignore[no-any-return]


def example_inputs(gm: GraphModule) -> list[Any]:
    """Inputs of a host graph as it was compiled for: fake tensors, each in a storage of its own, and numbers."""
    return [_apart(node.meta["val"]) for node in gm.graph.nodes if node.op == "placeholder"]


def _apart(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return _concrete(value)
    size, stride = ([_concrete(number) for number in numbers] for numbers in (value.size(), value.stride()))
    # A program from a cache has no fake tensors.
    with value.fake_mode if isinstance(value, FakeTensor) else FakeTensorMode():
        return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)


def value_of(node: Node) -> Any:
    """What a node stands for when the program runs: a fake tensor, a number."""
    return torch.utils._pytree.tree_map(_concrete, node.meta["val"])


def _concrete(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        number = hint(value)
        return _UNKNOWN_SIZE if number is None else number
    if isinstance(value, torch.SymFloat):
        return 0.5
    if isinstance(value, torch.SymBool):
        return True
    if isinstance(value, FakeTensor) and not all(isinstance(n, int) for n in (*value.size(), *value.stride())):
        size, stride = ([_concrete(number) for number in numbers] for numbers in (value.size(), value.stride()))
        with value.fake_mode:
            return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    return value
