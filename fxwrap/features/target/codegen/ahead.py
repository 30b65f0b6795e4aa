"""Compiling ahead of a run: example values for a host graph's inputs and nodes, and backward graphs at once."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch._functorch.config
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node

from ....host_graph.sizes import hint

# The example of a data-dependent size: odd, so that no divisibility is assumed.
_UNKNOWN_SIZE = 7


def backward_at_once() -> contextlib.AbstractContextManager[Any]:
    """A context in which backward graphs are compiled with their forward graphs, not at the first backward."""
    patch: Any = torch._functorch.config.patch
    return patch(force_non_lazy_backward_lowering=True)  # type: ignore[no-any-return]


def example_inputs(gm: GraphModule) -> list[Any]:
    """Inputs at the sizes that a host graph was compiled for: numbers, and fake tensors with unshared storages."""
    return [_unshared(node.meta["val"]) for node in gm.graph.nodes if node.op == "placeholder"]


def _unshared(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return _concrete(value)
    size, stride = ([_concrete(number) for number in numbers] for numbers in (value.size(), value.stride()))
    # A program from a cache has no fake tensors.
    with value.fake_mode if isinstance(value, FakeTensor) else FakeTensorMode():
        return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)


def value_of(node: Node) -> Any:
    """The value of a node at the sizes that the program was compiled for: a fake tensor or a number."""
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
        return _unshared(value)
    return value
