"""What a subclass of ``fxwrap.FxwrapCodegen`` can do with what Inductor emits.

    python examples/subclassing.py

A class is passed as an option (``options={"codegen": Printing}``), or registered for a device
(``fxwrap.register_device(..., codegen=Printing)``). For devices see examples/minimal and examples/hostsim.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Interpreter, Node

import fxwrap
from fxwrap.host_graph.nodes import Kind, kind_of, operator_name
from fxwrap.plan import PartitionGraph


class Printing(fxwrap.FxwrapCodegen):
    """Gets the whole host graph, and hands it on: what ``compile_graph`` returns is what runs."""

    def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
        print(gm.graph)
        return super().compile_graph(gm)


class Alone(fxwrap.FxwrapCodegen):
    """Runs the host graph as it is, without the rest of the line: ``gm`` takes the inputs and returns the outputs."""

    def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
        return gm.forward


class Counting(fxwrap.FxwrapCodegen):
    """A pass that only looks: it returns nothing, and the graph stays what it is."""

    def passes(self) -> Iterable[Callable[[GraphModule], GraphModule | None]]:
        return [self.count]

    @staticmethod
    def count(gm: GraphModule) -> None:
        kinds = Counter(kind_of(node).value for node in gm.graph.nodes)
        print(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))


class SharedViews(fxwrap.FxwrapCodegen):
    """A pass that transforms: equal views of one value become one.

    ::

        v = reinterpret(w, (8, 8), (1, 8), 0)          v = reinterpret(w, (8, 8), (1, 8), 0)
        addmm.out(b, x, v, out=buf0)            ->     addmm.out(b, x, v, out=buf0)
        u = reinterpret(w, (8, 8), (1, 8), 0)          addmm.out(b, buf0, v, out=buf1)
        addmm.out(b, buf0, u, out=buf1)
    """

    def passes(self) -> Iterable[Callable[[GraphModule], GraphModule | None]]:
        return [self.share_views]

    @staticmethod
    def share_views(gm: GraphModule) -> None:
        seen: dict[Any, Node] = {}
        for node in gm.graph.nodes:
            if kind_of(node) is not Kind.VIEW:
                continue
            first = seen.setdefault((node.target, node.args, tuple(node.kwargs.items())), node)
            if first is not node:
                node.replace_all_uses_with(first)
                gm.graph.erase_node(node)
        gm.recompile()


class Timing(fxwrap.FxwrapCodegen):
    """Hands every partition to another compiler: here, an interpreter that times each operation."""

    def compile_partition(self, graph: PartitionGraph) -> Callable[..., Any]:
        print(f"partition {graph.partition.index}: {len(graph.signature.inputs)} inputs, of which it writes", end=" ")
        print(", ".join(graph.signature.inputs[i] for i in graph.signature.mutated))
        return Stopwatch(graph.module).run


class Stopwatch(Interpreter):
    """Runs a partition node by node; ``microseconds`` adds up by operation."""

    microseconds: ClassVar[Counter[str]] = Counter()

    def run_node(self, n: Node) -> Any:
        start = time.perf_counter()
        result = super().run_node(n)
        if kind_of(n) in (Kind.LAUNCH, Kind.EXTERN):
            self.microseconds[operator_name(n)] += int((time.perf_counter() - start) * 1e6)
        return result


def main() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)
    x = torch.randn(4, 8)
    with torch.no_grad():
        expected = model(x)
        for codegen in (Printing, Alone, Counting, SharedViews, Timing):
            print(f"-- {codegen.__name__}")
            torch.compiler.reset()
            compiled = torch.compile(model, backend="fxwrap", options={"codegen": codegen})
            for _ in range(4):
                torch.testing.assert_close(compiled(x), expected)
    for name, spent in Stopwatch.microseconds.most_common():
        print(f"{name}: {spent} microseconds in 4 calls")


if __name__ == "__main__":
    main()
