"""Small host graphs, written node by node."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node


class Building:
    """A host graph on a (4, 6) input ``x``, with fake values."""

    def __init__(self, device: str = "cpu", size: tuple[int, ...] = (4, 6)) -> None:
        self.graph, self.mode = Graph(), FakeTensorMode()
        self.x = self.graph.placeholder("x")
        with self.mode:
            self.x.meta["val"] = torch.empty(size, device=device)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        values = torch.fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def allocate(self, *size: int) -> Node:
        strides = tuple(torch.empty(size, device="meta").stride())
        return self.call(torch.empty_strided, size, strides, dtype=torch.float32, device=torch.device("cpu"))

    def module(self, *outputs: Node) -> GraphModule:
        self.graph.output(list(outputs))
        return GraphModule(torch.nn.Module(), self.graph)
