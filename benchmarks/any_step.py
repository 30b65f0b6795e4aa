"""Training steps as they are written, as one program each, beside the same steps with their parts compiled.

    python benchmarks/any_step.py                            # all programs, one thread
    python benchmarks/any_step.py --programs gan ppo --seconds 5

any_step_programs.py has the programs: several losses and optimizers, clipping, averages of weights, gradients of
gradients, micro-batches. The step function is the same code on each side:

    inductor     each loss function and each optimizer's update compiled by Inductor; the rest of the step is Python
    fxwrap       the same with backend="fxwrap"
    train_step   nothing but fxwrap.train_step(step)
    jax          the world model's step by jax.jit, where jax is installed

Six steps are made first, beside six of the step without a compiler. Losses that are more than 1e-3 apart make the
exit code 1. Then the sides are timed in turn, in random order. The table shows medians in microseconds a step, and
the median of the ratios of train_step to each other side in the same turn. Below it are geometric means.
"""

from __future__ import annotations

import argparse
import random
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from any_step_jax import jax_step
from any_step_programs import PROGRAMS, as_written, compiled_by
from rich.console import Console
from rich.table import Table
from timing import geometric_mean, in_turn
from torch import Tensor

import fxwrap

INDUCTOR, FXWRAP, STEP, JAX = "inductor", "fxwrap", "train_step", "jax"
SIDES = INDUCTOR, FXWRAP, STEP, JAX
# Steps whose losses are compared, and how far they may be apart.
_CHECKED, _TOLERANCE = 6, 1e-3

Call = Callable[[], Any]


def sides_of(name: str) -> dict[str, Call]:
    """A call that makes one step, for each side."""

    def call(step: Callable[..., Any], batch: tuple[Tensor, ...]) -> Call:
        return lambda: step(*batch)

    make = PROGRAMS[name]
    sides = {backend: call(*make(compiled_by(backend=backend))) for backend in (INDUCTOR, FXWRAP)}
    step, batch = make(as_written)
    sides[STEP] = call(fxwrap.train_step(step), batch)
    if (jitted := jax_step(name)) is not None:
        sides[JAX] = jitted
    return sides


def losses_of(side: Call) -> Tensor:
    """The losses of the first steps, a row each."""
    rows = []
    for _ in range(_CHECKED):
        losses = side()
        rows.append(torch.cat([loss.reshape(-1) for loss in (losses if isinstance(losses, tuple) else (losses,))]))
    return torch.stack(rows)


def problems(name: str, sides: dict[str, Call]) -> list[str]:
    """What is wrong with the losses, beside those of the step without a compiler; empty if nothing is."""
    step, batch = PROGRAMS[name](as_written)
    expected, found = losses_of(lambda: step(*batch)), []
    for side, call in sides.items():
        losses = losses_of(call)
        if not torch.allclose(losses, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            far = (losses - expected).abs().max().item()
            found.append(f"{name}: losses of {side} are up to {far:.2g} away from those of the step as it is written")
    return found


def ratio(times: dict[str, list[float]], other: str) -> float:
    return statistics.median(a / b for a, b in zip(times[STEP], times[other], strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--seconds", type=float, default=10, help="for each program")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    random.seed(0)
    table = Table("program", *(f"{side}, us" for side in SIDES), *(f"/ {side}" for side in SIDES if side != STEP))
    ratios, failed = defaultdict[str, list[float]](list), False
    for name in given.programs:
        sides = sides_of(name)
        for problem in problems(name, sides):
            print(problem)
            failed = True
        times = in_turn(sides, given.seconds)
        for side in sides:
            ratios[side].append(ratio(times, side))
        medians = [f"{statistics.median(times[side]):.0f}" if side in times else "" for side in SIDES]
        shown = [f"{ratios[side][-1]:.2f}" if side in times else "" for side in SIDES if side != STEP]
        table.add_row(name, *medians, *shown)
        torch._dynamo.reset()
    Console(width=160).print(table)
    for side in (INDUCTOR, FXWRAP):
        print(f"train_step / {side}, geometric mean: {geometric_mean(ratios[side]):.3f}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
