"""Branches and loops beside Inductor's Python wrapper and its C++ wrapper: microseconds a call, one thread.

    python benchmarks/control_flow.py                     # all programs; --programs loop scan for some

Each pair of sides runs in turn in one process (``timing.compare``). "bound" is ``fxwrap.bind`` of the same function,
which is called without Dynamo's frame evaluation: what is left of "fxwrap" is the program. Results are compared with
those of Inductor's Python wrapper, bit for bit; the exit code is 1 if any differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._dynamo.config
from timing import compare, own
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional

import fxwrap

WIDTH = 16


@dataclass(frozen=True)
class Program:
    """A function, and what it is called with."""

    function: Callable[..., Any]
    inputs: Callable[[], tuple[Tensor, ...]]


def loop(x: Tensor, times: Tensor) -> Any:
    """Small iterations, as many as a tensor says."""
    return while_loop(lambda i, x: i < times, lambda i, x: (i + 1, x.sin() + x * 0.5), (torch.tensor(0), x))


def branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos() - 1, (x,))


def recurrence(xs: Tensor, h: Tensor, w: Tensor, u: Tensor) -> Any:
    """A recurrent cell over a sequence."""

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ w + x @ u)
        return h, h.clone()

    return scan(cell, h, xs, dim=0)


def root(a: Tensor) -> Any:
    """Newton's method, until it converges."""

    def step(y: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        new = 0.5 * (y + a / y)
        return new, (new - y).abs().max()

    return while_loop(lambda y, error: error > 1e-6, step, (a.clone(), torch.tensor(1.0)))


def decode(table: Tensor, head: Tensor, w: Tensor, token: Tensor, limit: Tensor) -> Any:
    """The likeliest token again and again, until the token that ends a text."""

    def step(i: Tensor, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(h @ w + functional.embedding(token, table))
        return i + 1, (head @ h).argmax(), h

    start = torch.tensor(0), token.clone(), torch.zeros(WIDTH)
    return while_loop(lambda i, token, h: (token != 0) & (i < limit), step, start)


def nested(x: Tensor, times: Tensor) -> Any:
    """A branch in a loop."""

    def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.cond(i % 2 == 0, lambda x: x.sin(), lambda x: x * 0.5, (x,))

    return while_loop(lambda i, x: i < times, step, (torch.tensor(0), x))


def _matrix() -> Tensor:
    return torch.randn(WIDTH, WIDTH) * 0.1


PROGRAMS = {
    "loop": Program(loop, lambda: (torch.randn(32), torch.tensor(100))),
    "branch": Program(branch, lambda: (torch.randn(32),)),
    "scan": Program(recurrence, lambda: (torch.randn(64, 4, WIDTH), torch.zeros(4, WIDTH), _matrix(), _matrix())),
    "solver": Program(root, lambda: (torch.rand(64) + 0.5,)),
    "decoding": Program(
        decode, lambda: (torch.randn(50, WIDTH), torch.randn(50, WIDTH), _matrix(), torch.tensor(3), torch.tensor(40))
    ),
    "nested": Program(nested, lambda: (torch.randn(32), torch.tensor(50))),
}


def measure(name: str, pairs: int, calls: int) -> tuple[str, bool]:
    """A row of the table, and whether all results are the same."""
    torch.manual_seed(0)
    program = PROGRAMS[name]
    inputs = program.inputs()
    sides = {
        "python": torch.compile(own(program.function), backend="inductor"),
        "c++": torch.compile(own(program.function), backend="inductor", options={"cpp_wrapper": True}),
        "fxwrap": torch.compile(own(program.function), backend="fxwrap"),
    }
    results = {side: [f(*inputs) for _ in range(4)][-1] for side, f in sides.items()}
    sides["bound"] = fxwrap.bind(sides["fxwrap"], *inputs)
    results["bound"] = sides["bound"](*inputs)
    leaves = {side: torch.utils._pytree.tree_leaves(result) for side, result in results.items()}
    same = all(all(map(torch.equal, leaves["python"], found)) for found in leaves.values())
    row = [f"{name:9}"]
    for ours in ("fxwrap", "bound"):
        for theirs in ("python", "c++"):
            found = compare(partial(sides[ours], *inputs), partial(sides[theirs], *inputs), pairs, calls)
            row.append(f"{found.first:8.1f} {found.second:8.1f} {found.ratio:6.2f}")
    return "  ".join(row) + ("" if same else "  DIFFERENT"), same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--calls", type=int, default=30, help="calls of each side, in turn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True  # scan reads its counter
    columns = ("fxwrap   python  ratio", "fxwrap      c++  ratio", " bound   python  ratio", " bound      c++  ratio")
    print("           " + "    ".join(columns))
    same = True
    with torch.no_grad():
        for name in arguments.programs:
            row, equal = measure(name, arguments.pairs, arguments.calls)
            print(row, flush=True)
            same = same and equal
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
