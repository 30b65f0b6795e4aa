"""Host time of a call beside CUDA graph trees, where the device computes nothing.

    python -m hostcuda benchmarks/host_time.py               # torch's CUDA build, no GPU
    python -m hostcuda benchmarks/host_time.py --cases training --turns 15 --json host_time.json

On the CUDA device of host memory (hostcuda/README.md) with ``HOSTCUDA_OPERATORS=0`` launches are counted and
nothing is computed. What is left of a call is what the host does: Dynamo's guards, the wrapper, copies of inputs,
launching the graph. Each case runs in a process of its own, with five sides in turn: Inductor's wrapper,
``mode="reduce-overhead"``, fxwrap, the same bound (``fxwrap.bind``; of a training the forward; of a training
with its update and of the world model, ``fxwrap.train_step``), and the bare replay of one graph of the whole step,
captured by hand from Inductor's wrapper. Figures are medians in microseconds a call; "over" is above the bare replay
of the same turn. The ratios are fxwrap's and the bound one's to graph trees'.

The world model's step of any_step_programs.py has two sides, graph trees and ``fxwrap.train_step``, as it leaves
gradients between calls, which would lie in the memory of another side's programs. The bare replay is that of
``train_step``'s own graphs.

These are no times of a GPU: a launch takes what the host-memory device takes, for all sides alike.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from any_step_programs import as_written, compiled_by, world_model
from timing import geometric_mean, own
from torch import Tensor, nn

import fxwrap

Step = Callable[[], Any]
SIDES: dict[str, dict[str, Any]] = {
    "inductor": {},
    "trees": {"mode": "reduce-overhead"},
    "fxwrap": {"backend": "fxwrap"},
    "bound": {"backend": "fxwrap", "bound": True},
}
# Sides of a case that has not all of them.
SOME = {"world model": ("trees", "bound")}
RATIOS = {"fxwrap": "ratio", "bound": "bound ratio"}
WIDTH, ROWS = 4096, 64
WARM = 12


class Block(nn.Module):
    """Two kernels, two parameters, no library call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * self.weight + self.bias, -1).sum(0, keepdim=True) * x


class Blocks(nn.Module):
    def __init__(self, blocks: int, outputs: int = 3) -> None:
        super().__init__()
        self.blocks, self.outputs = nn.Sequential(*(Block() for _ in range(blocks))), outputs

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        x = self.blocks(x)
        for other in others:
            x = x + other
        return tuple((x, x.sum(), x * 2)[: self.outputs])


def compiled(module: Blocks, how: dict[str, Any], *example: Tensor) -> Any:
    """A side's function. Dynamo keeps what it has compiled by code object, so each side's module has its own."""
    module.__class__ = type("Blocks", (Blocks,), {"forward": own(Blocks.forward)})
    model = torch.compile(module, **{key: value for key, value in how.items() if key != "bound"})
    return fxwrap.bind(model, *example) if "bound" in how else model


def tensors(count: int, rows: int = ROWS) -> list[Tensor]:
    return [torch.randn(rows, WIDTH, device="cuda") for _ in range(count)]


def inference(blocks: int, inputs: int = 2) -> Callable[[Any], list[Step]]:
    """A call on the same tensors again and again; their results are dropped."""

    def make(how: Any) -> list[Step]:
        given = tensors(inputs)
        model = compiled(Blocks(blocks).cuda(), how, *given)
        return [lambda: model(*given)]

    return make


def moving_inputs(how: Any) -> list[Step]:
    """Five inputs at other addresses at every call."""
    given = [tensors(5) for _ in range(2)]
    model = compiled(Blocks(12).cuda(), how, *given[0])
    return [lambda given=one: model(*given) for one in given]  # type: ignore[misc]


def kept_outputs(how: Any) -> list[Step]:
    """Three outputs, which are kept until the next call's are there. Graph trees need them to be copied for that."""
    given, kept = tensors(2), list[Any]()
    model = compiled(Blocks(12).cuda(), how, *given)
    trees = how.get("mode") == "reduce-overhead"

    def step() -> None:
        outputs = model(*given)
        kept[:] = [output.clone() for output in outputs] if trees else outputs

    return [step]


def two_shapes(how: Any) -> list[Step]:
    given = [tensors(2, rows) for rows in (ROWS, 2 * ROWS)]
    model = compiled(Blocks(12).cuda(), {**how, "dynamic": False}, *given[0])
    return [lambda given=one: model(*given) for one in given]  # type: ignore[misc]


def training(how: Any) -> list[Step]:
    """Forward, backward, and gradients dropped."""
    module, given = Blocks(12, outputs=1).cuda(), tensors(2)
    model, parameters = compiled(module, how, *given), list(module.parameters())

    def step() -> None:
        model(*given)[0].sum().backward()
        for parameter in parameters:
            parameter.grad = None

    return [step]


def training_and_update(how: Any) -> list[Step]:
    """Loss, gradients and AdamW's update, which is compiled, too. In place of a bound forward: ``train_step``."""
    module, given = Blocks(12, outputs=1).cuda(), tensors(2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, capturable=True, foreach=True)
    if "bound" in how:
        whole = fxwrap.train_step(module, lambda model, *given: model(*given)[0].sum(), optimizer)
        return [lambda: whole(*given)]
    model, bare = compiled(module, how, *given), inspect.unwrap(torch.optim.AdamW.step)
    update = torch.no_grad()(torch.compile(own(lambda: bare(optimizer)), **how))  # type: ignore[call-arg]

    def step() -> None:
        model(*given)[0].sum().backward()
        update()
        optimizer.zero_grad()

    return [step]


def world_model_step(how: Any) -> list[Step]:
    """Three losses and three Adams, each compiled by itself. In place of a bound forward: ``train_step``."""
    with torch.device("cuda"):
        step, batch = world_model(as_written if "bound" in how else compiled_by(**how))
    if "bound" in how:
        step = fxwrap.train_step(step)
    return [lambda: step(*batch)]


CASES: dict[str, Callable[[Any], list[Step]]] = {
    "12 blocks": inference(12),
    "40 blocks": inference(40),
    "training": training,
    "training and update": training_and_update,
    "world model": world_model_step,
    "5 moving inputs": moving_inputs,
    "3 kept outputs": kept_outputs,
    "2 shapes in turn": two_shapes,
}


def captured(steps: list[Step]) -> list[Step]:
    """A graph of each step, replayed by hand."""
    replays, side = list[Step](), torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            for step in steps:
                step()
    torch.cuda.synchronize()
    for step in steps:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            step()
        replays.append(graph.replay)
    return replays


def own_graphs() -> list[Step]:
    """The replays of all graphs that fxwrap has, as one step."""
    recordings = [one for report in fxwrap.report().graphs for one in report.program.specializations.recordings()]
    graphs = [graph for recording in recordings for graph in recording.graphs]

    def replay() -> None:
        for graph in graphs:
            graph.replay()

    return [replay]


def in_turn(steps: list[Step], marks: bool) -> Step:
    """Calls the steps one after the other, and tells graph trees of each new one."""
    mark = torch.compiler.cudagraph_mark_step_begin

    def call() -> None:
        for step in steps:
            if marks:
                mark()
            step()

    return call


def microseconds(call: Step, calls: int, steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls / steps * 1e6


def measure(name: str, turns: int, calls: int) -> dict[str, float]:
    torch.set_grad_enabled(name.startswith("training") or name == "world model")
    made = {side: CASES[name](SIDES[side]) for side in SOME.get(name, SIDES)}
    count = len(made["trees"])
    sides = {side: in_turn(steps, side == "trees") for side, steps in made.items()}
    for call in sides.values():
        for _ in range(WARM):
            call()
    sides["bare"] = in_turn(captured(made["inductor"]) if "inductor" in made else own_graphs(), False)
    # In turn: what the calls of one side leave alive lies in the memory of another one's.
    for call in [*sides.values()] * 3:
        microseconds(call, 20, count)
    eager = sum(fxwrap.stats()["eager"].values())
    rows = [{side: microseconds(call, calls, count) for side, call in sides.items()} for _ in range(turns)]
    stats = fxwrap.stats()
    if sum(stats["eager"].values()) != eager:
        raise SystemExit(f"{name}: fxwrap ran eagerly while it was timed: {stats}")
    found = {side: statistics.median(row[side] for row in rows) for side in sides}
    for side in made:
        found[f"{side} over"] = statistics.median(row[side] - row["bare"] for row in rows)
    for side, ratio in RATIOS.items():
        if side in made:
            found[ratio] = found[f"{side} over"] / found["trees over"]
    return found


def shown(row: dict[str, float], column: str) -> str:
    if column not in row:
        return "-"
    return f"{row[column]:.2f}" if column in RATIOS.values() else f"{row[column]:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--calls", type=int, default=200, help="in each turn, of each side")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.turns, args.calls)))
        return
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: python -m hostcuda benchmarks/host_time.py")
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; microseconds a call, nothing computed\n")
    columns = ["bare", *SIDES, *(f"{side} over" for side in SIDES), *RATIOS.values()]
    print("| case | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 1) + "|")
    results = {}
    for name in args.cases:
        command = [sys.executable, __file__, "--one", name, "--turns", str(args.turns), "--calls", str(args.calls)]
        environment = {**os.environ, "HOSTCUDA_OPERATORS": "0"}
        answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        results[name] = row = json.loads(answer.splitlines()[-1])
        figures = [shown(row, column) for column in columns]
        print(f"| {name} | " + " | ".join(figures) + " |", flush=True)
    for side, ratio in RATIOS.items():
        if having := [row[ratio] for row in results.values() if ratio in row]:
            print(f"\ngeometric mean, {side} to trees: {geometric_mean(having):.2f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
