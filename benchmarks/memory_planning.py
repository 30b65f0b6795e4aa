"""How small arenas get, and how planning time grows.

    python benchmarks/memory_planning.py --instances DIR      # CSV files of id,lower,upper,size (upper exclusive)
    python benchmarks/memory_planning.py --scaling            # 1k, 10k, 60k buffers; as in a network, and dense

Instances are planned as they are (alignment 1), by the heuristics; their file names may end in
a capacity that is known to suffice, as in A.1048576.csv, the form of MiniMalloc's benchmarks.
"""

from __future__ import annotations

import argparse
import csv
import gc
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fxwrap.packing import Buffer, Placement, plan_memory


def read(path: Path) -> list[Buffer]:
    with path.open() as file:
        rows = csv.DictReader(file)
        return [Buffer(row["id"], int(row["size"]), int(row["lower"]), int(row["upper"])) for row in rows]


def network(count: int, seed: int = 0) -> list[Buffer]:
    """One buffer a step: most die soon, some wait for a later layer, and some for the way back."""
    draw = random.Random(seed)
    buffers = []
    for step in range(count):
        kind = draw.random()
        if kind < 0.85:
            end = step + 1 + int(draw.expovariate(1 / 4))
        elif kind < 0.97:
            end = step + draw.randrange(1, 200)
        else:
            end = max(step + 1, 2 * (count // 2) - step)
        buffers.append(Buffer(f"b{step}", 64 * int(2 ** draw.uniform(0, 14)), step, end))
    return buffers


def dense(count: int, seed: int = 0) -> list[Buffer]:
    """Begins and lengths are uniform: each buffer meets a third of all others."""
    draw = random.Random(seed)
    steps = 4 * count
    begins = [draw.randrange(steps) for _ in range(count)]
    return [
        Buffer(f"b{i}", draw.randrange(1, 1 << 20), begin, draw.randint(begin + 1, steps))
        for i, begin in enumerate(begins)
    ]


def timed(plan: Callable[[], Placement]) -> tuple[Placement, float]:
    gc.collect()  # of all that torch keeps: that takes longer than a plan
    begin = time.perf_counter()
    placement = plan()
    return placement, time.perf_counter() - begin


def instances(folder: Path) -> None:
    table = Table("instance", "buffers", "lower bound", "arena", "ratio", "proven", "seconds")
    ratios: list[float] = []
    for path in sorted(folder.glob("*.csv")):
        buffers = read(path)
        plan_memory(buffers, 1)  # the second run is timed: the first also warms the machine up
        placement, took = timed(lambda: plan_memory(buffers, 1))  # noqa: B023
        ratios.append(placement.size / placement.lower_bound)
        table.add_row(
            path.stem, str(len(buffers)), str(placement.lower_bound), str(placement.size), f"{ratios[-1]:.4f}",
            "yes" if placement.proven else "no", f"{took:.3f}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    if ratios:
        console.print(f"geometric mean {statistics.geometric_mean(ratios):.4f} times the lower bound")


def scaling(counts: list[int]) -> None:
    table = Table("buffers", "shape", "seconds", "growth", "ratio")
    for shape in (network, dense):
        before = None
        for count in counts:
            buffers = shape(count)
            placement, took = timed(lambda: plan_memory(buffers))  # noqa: B023
            growth = "" if before is None else f"x {took / before[1]:.1f} for x {count / before[0]:g} buffers"
            ratio = placement.size / placement.lower_bound
            table.add_row(str(count), shape.__name__, f"{took:.3f}", growth, f"{ratio:.4f}")
            before = (count, took)
        table.add_section()
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=Path, help="a folder of CSV files")
    parser.add_argument("--scaling", action="store_true", help="time against the number of buffers")
    parser.add_argument("--buffers", type=int, nargs="+", default=[1000, 10_000, 60_000], help="for --scaling")
    arguments = parser.parse_args()
    if not arguments.instances and not arguments.scaling:
        parser.error("nothing to do: pass --instances DIR or --scaling")
    if arguments.instances:
        instances(arguments.instances)
    if arguments.scaling:
        scaling(arguments.buffers)


if __name__ == "__main__":
    main()
