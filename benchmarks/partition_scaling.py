"""How the time of analysis and cut grows with the host graph.

    python benchmarks/partition_scaling.py                    # 1k, 10k, 100k nodes; a chain, and a random DAG
    python benchmarks/partition_scaling.py --nodes 1000 5000

A tenth of the launches cannot be captured. Every size runs in a process of its own, so that memory is its own; what
making the graph takes is shown beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

from fxwrap.host_graph.nodes import Kernel, launch
from fxwrap.passes.analysis.aliasing import analyse_storages
from fxwrap.passes.analysis.dependencies import build_dependency_graph
from fxwrap.passes.memory.requirements import expected_sizes
from fxwrap.passes.partition.capturability import judge
from fxwrap.passes.partition.cut import cut

CPU = torch.device("cpu")
# Operands of the random DAG are among the latest buffers, as those of models are.
NEAR = 1000


def host_graph(nodes: int, shape: str, seed: int = 0) -> GraphModule:
    """A host graph of about so many nodes: an allocation and a launch for each buffer."""
    draw, graph, root = random.Random(seed), Graph(), torch.nn.Module()
    with FakeTensorMode():
        value = torch.empty(1024)
    handles = {}
    for name in ("captured", "eager"):
        setattr(root, name, Kernel(name, "cpp", "", CPU, lambda *_: None, (2,)))
        handles[name] = graph.create_node("get_attr", name)
    x = graph.placeholder("x")
    x.meta["val"] = value
    buffers = [x]
    layout: Any = {"dtype": torch.float32, "device": CPU}
    for _ in range(nodes // 2):
        out = graph.call_function(torch.empty_strided, ((1024,), (1,)), layout)
        out.meta["val"] = value
        near = buffers[-1:] if shape == "chain" else buffers[-NEAR:]
        kernel = handles["eager" if draw.random() < 0.1 else "captured"]
        graph.call_function(launch, (kernel, draw.choice(near), draw.choice(near), out))
        buffers.append(out)
    graph.output([buffers[-1]])
    return GraphModule(root, graph)


def measure(nodes: int, shape: str) -> dict[str, Any]:
    """Seconds of each stage, and MiB."""
    gm = host_graph(nodes, shape)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    times = [time.perf_counter()]
    facts = analyse_storages(gm)
    times.append(time.perf_counter())
    dependencies = build_dependency_graph(gm, facts)
    times.append(time.perf_counter())
    verdicts = judge(gm, ("eager",))
    times.append(time.perf_counter())
    sizes = expected_sizes(gm, facts)
    inside = {index: sizes[index] for index in facts.inner()}
    found = cut(dependencies, verdicts, CPU, facts, inside)
    times.append(time.perf_counter())
    stages = ("storages", "dependencies", "verdicts", "cut")
    return {
        "graph": shape,
        "nodes": len(gm.graph.nodes),
        **{stage: end - begin for stage, (begin, end) in zip(stages, itertools.pairwise(times), strict=True)},
        "total": times[-1] - times[0],
        "captured": f"{found.captured} of {found.fewest}",
        "MiB before": before,
        "at peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.work:
        print(json.dumps(measure(int(arguments.work[0]), arguments.work[1])))
        return 0

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"seconds, torch {torch.__version__}")
    columns: list[str] = []
    for shape in ("chain", "random DAG"):
        last: dict[str, Any] = {}
        for nodes in arguments.nodes:
            command = [sys.executable, __file__, "--work", str(nodes), shape]
            row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            growth = f"{row['total'] / last['total']:.1f} for {row['nodes'] / last['nodes']:.0f}" if last else ""
            shown = {**row, "growth": growth}
            for column in shown if not columns else ():
                columns.append(column)
                table.add_column(column, justify="left" if column == "graph" else "right")
            table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in shown.values()))
            last = row
    Console(width=130).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
