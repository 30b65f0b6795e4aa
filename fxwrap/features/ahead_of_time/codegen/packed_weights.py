"""Weights that a library (oneDNN, MKL) has packed for its own kernels, in saved programs.

Only the library can read a packed tensor. So a saved program has the plain tensors, and the calls that pack them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._inductor.constant_folding import ConstantFolder
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from ....errors import StorageError
from ....graphs.memory.locks import lock_of_process
from ....torch_private.functions import empty_graph

_lock = lock_of_process()


def is_packed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_mkldnn


class PackingCalls:
    """The calls that packed weights, each with its result."""

    def __init__(self) -> None:
        # They include the results, which must live as long as their ids are used.
        self._calls: dict[int, tuple[Any, Any, Any, Any]] = {}

    def add(self, result: Any, target: Any, args: Any, kwargs: Any) -> None:
        self._calls[id(result)] = result, target, args, kwargs

    def graph_of(self, description: str, packed: torch.Tensor) -> GraphModule:
        """A graph without inputs that makes a packed tensor from its attributes, which are plain tensors.

        Args:
            description: names the tensor in an error.

        Raises:
            StorageError: the call that has packed the tensor is not known.
        """
        gm = empty_graph()
        gm.graph.output(self._node_of(description, packed, gm))
        return gm

    def _node_of(self, description: str, value: Any, gm: GraphModule) -> Any:
        """The node or the plain value that stands for a value in the graph."""
        if isinstance(value, (list, tuple)) and id(value) not in self._calls:
            return type(value)(self._node_of(description, item, gm) for item in value)
        if id(value) in self._calls:
            _, target, args, kwargs = self._calls[id(value)]
            args = self._node_of(description, tuple(args), gm)
            kwargs = {name: self._node_of(description, item, gm) for name, item in kwargs.items()}
            return gm.graph.call_function(_as_operator(target), args, kwargs)
        if is_packed(value):
            raise StorageError(
                description,
                expected="a tensor that is plain memory, or one that Inductor has packed while it froze the method",
                got=f"a tensor of {value.layout}",
                remedy="save the method without freezing, or with torch.backends.mkldnn.flags(enabled=False)",
            )
        if isinstance(value, torch.Tensor):
            name = f"tensor{len(gm.graph.nodes)}"
            setattr(gm, name, value)
            return gm.graph.create_node("get_attr", name)
        return value


def _as_operator(target: Any) -> Any:
    """The operator behind a function of ``torch._C._nn``, which has no name that can be stored; others themselves."""
    name = getattr(target, "__name__", "")
    return getattr(torch.ops.aten, name) if getattr(torch._C._nn, name, None) is target else target


@contextlib.contextmanager
def packing_calls(freezing: bool) -> Iterator[PackingCalls]:
    """Inside the context, collect the calls that pack weights while a graph is frozen.

    Inductor evaluates them, and stores only their results.
    """
    calls = PackingCalls()
    if not freezing:
        yield calls
        return
    run_node: Any = ConstantFolder.run_node

    def observed(self: ConstantFolder, node: Node) -> Any:
        result = run_node(self, node)
        if node.op == "call_function" and any(map(is_packed, pytree.tree_leaves(result))):
            calls.add(result, node.target, *self.fetch_args_kwargs_from_env(node))
        return result

    with _lock, mock.patch.object(ConstantFolder, "run_node", observed):
        yield calls
