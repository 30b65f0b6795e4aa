"""A server's and a trainer's mix of sizes, on CUDA graph trees and on fxwrap: what is recorded, replayed and kept.

    python -m hostcuda benchmarks/many_sizes.py                    # torch's CUDA build, no GPU
    python -m hostcuda benchmarks/many_sizes.py --mixes server --calls 100

On the CUDA device of host memory (hostcuda/README.md), where launches are counted and nothing is computed, each side
makes the same calls in a process of its own. "server": a feed-forward network on 1 to 64 rows, small numbers more
often, inference. "trainer": the same network on one of eight lengths, forward and backward. "behind" has a dynamic
operator (``nonzero``) before the network, so that its size depends on data.

Columns: captures and launches of graphs as the device counts them; MiB that torch's allocator reserves in the end,
cache emptied; seconds that all these calls took; microseconds of host time, median of the last half of the calls; and
the same when the mix has run twice more ("later"). Each new recording makes the next replay of each other one slow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import fxwrap

SIDES: dict[str, dict[str, Any]] = {
    "inductor": {},
    "trees": {"mode": "reduce-overhead"},
    "fxwrap": {"backend": "fxwrap"},
    "fxwrap, max_recordings=64": {"backend": "fxwrap", "options": {"max_recordings": 64}},
    "fxwrap, buckets": {"backend": "fxwrap", "options": {"buckets": {"rows": (1, 2, 4, 8, 16, 32, 64)}}},
}
WIDTH, LENGTHS = 512, (16, 24, 32, 48, 64, 96, 128, 192)


class Network(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(6)))


class Behind(nn.Module):
    """The network behind an operator whose result's size depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def forward(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return self.network(x), torch.nonzero(chosen).sum()


def server(calls: int, side: str) -> Iterator[tuple[Tensor, ...]]:
    """Sizes of 1 to 64, each as often as one over its rank."""
    draw, sizes = random.Random(0), range(1, 65)
    for rows in draw.choices(sizes, [1 / size for size in sizes], k=calls):
        x = torch.randn(rows, WIDTH, device="cuda")
        if "buckets" in side:
            fxwrap.mark_bucket(x, 0, "rows")
        else:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        yield (x,)


def trainer(calls: int, side: str) -> Iterator[tuple[Tensor, ...]]:
    draw = random.Random(0)
    for _ in range(calls):
        x = torch.randn(draw.choice(LENGTHS), WIDTH, device="cuda")
        torch._dynamo.maybe_mark_dynamic(x, 0)
        yield (x,)


def behind(calls: int, side: str) -> Iterator[tuple[Tensor, ...]]:
    for (x,) in server(calls, side):
        yield x, torch.ones(len(x), device="cuda")


MIXES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, str], Iterator[tuple[Tensor, ...]]]]] = {
    "server": (Network, server),
    "trainer": (Network, trainer),
    "behind": (Behind, behind),
}
# Buckets are for inference, of rows that do not see each other.
WITHOUT = {("trainer", "fxwrap, buckets"), ("behind", "fxwrap, buckets")}


def counted() -> tuple[int, int]:
    from hostcuda.library import runtime

    return runtime().hostcuda_counter(b"captures"), runtime().hostcuda_counter(b"graph_launches")


def measure(mix: str, side: str, calls: int) -> dict[str, float]:
    torch.manual_seed(0)
    make, inputs = MIXES[mix]
    module, training = make().cuda(), mix == "trainer"
    model = torch.compile(module, **SIDES[side])
    mode: AbstractContextManager[Any] = nullcontext() if training else torch.inference_mode()
    captures, launches = counted()

    def run() -> list[float]:
        took = list[float]()
        for given in inputs(calls, side):
            if side == "trees":
                torch.compiler.cudagraph_mark_step_begin()
            begin = time.perf_counter()
            result = model(*given)
            if training:
                result.sum().backward()
                module.zero_grad(set_to_none=True)
            took.append(time.perf_counter() - begin)
            del result, given
        return took

    with mode:
        took, now = run(), counted()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        run()
        later = run()
    return {
        "captures": now[0] - captures,
        "launches": now[1] - launches,
        "MiB": reserved / 2**20,
        "seconds": sum(took),
        "us": statistics.median(took[calls // 2 :]) * 1e6,
        "later": statistics.median(later[calls // 2 :]) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, args.calls)))
        return
    if not hasattr(torch.cuda, "graph_counters"):
        raise SystemExit("launches are counted on hostcuda: python -m hostcuda benchmarks/many_sizes.py")
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; {args.calls} calls, nothing computed\n")
    columns = "captures", "launches", "MiB", "seconds", "us", "later"
    print("| mix | side | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 2) + "|")
    for mix in args.mixes:
        for side in args.sides:
            if (mix, side) in WITHOUT:
                continue
            command = [sys.executable, __file__, "--one", mix, side, "--calls", str(args.calls)]
            environment = {**os.environ, "HOSTCUDA_COMPUTE": "0"}
            answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
            row = json.loads(answer.splitlines()[-1])
            print(f"| {mix} | {side} | " + " | ".join(f"{row[column]:,.0f}" for column in columns) + " |", flush=True)


if __name__ == "__main__":
    main()
