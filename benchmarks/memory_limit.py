"""Training steps within a limit of bytes: what is measured, what is planned, and what it costs.

    python benchmarks/memory_limit.py                               # all models, at 1, 1/2 and 1/3 of the memory
    python benchmarks/memory_limit.py --models gpt2 --shares 0.8 0.6 0.4

A is the most that a step takes beside parameters, state and batch without a limit. Each share of A is a limit of its
own. "measured" is the peak of the allocator's events in a call, and never above the limit; losses and parameters of
four steps are those without a limit, bit for bit (exit code 1 else). "time" is the median of the ratios of
neighbouring runs with and without the limit. "ordinary" is the loop that Inductor compiles, gradients included.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from speed_models import Made, bert, gpt2, resnet18, unet, vit
from timing import compare
from torch import Tensor, nn
from train_step import adamw, loss, ordinary

import fxwrap
from fxwrap.codegen.torch_runtime import allocations
from fxwrap.errors import MemoryLimitError
from fxwrap.passes.memory.planner import bytes_of_call

_MIB = 2**20
MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: gpt2(batch=2, length=128),
    "bert": lambda: bert(batch=2, length=128),
    "vit": lambda: vit(width=258),
    "resnet18": resnet18,
    "unet": unet,
}


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that a call holds beside what there was before, by torch's allocator."""
    changes = allocations(run)
    assert changes is not None
    return max(itertools.accumulate(changes), default=0)


def step_of(model: nn.Module, limit: int) -> Any:
    return fxwrap.train_step(model, loss, adamw(model), memory_limit=limit or None)


def first_steps(step: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    """The losses of four steps, and the highest peak of those after the first, which compiles."""
    losses = [step(*inputs)]
    peaks = [peak(lambda: losses.append(step(*inputs))) for _ in range(3)]
    return torch.stack(losses), max(peaks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--shares", nargs="+", type=float, default=[1 / 2, 1 / 3])
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table, wrong = Table("model", "limit, MiB", "of A", "measured, MiB", "planned, MiB", "nodes", "time"), False
    for name in given.models:
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        loop = ordinary(copy.deepcopy(model), inputs, "inductor")
        for _ in range(3):
            loop()
        gradients = sum(p.numel() * p.element_size() for p in model.parameters())
        table.add_row(name, "ordinary", "", f"{(peak(loop) + gradients) / _MIB:.2f}")
        free = step_of(unlimited := copy.deepcopy(model), 0)
        expected, _ = first_steps(free, inputs)
        program = fxwrap.report(free).graphs[0].program
        whole = bytes_of_call(program.recorder.newest_sized)
        table.add_row("", "none", "1", "", f"{whole / _MIB:.2f}", str(len(program.plan.schedule)), "1")
        after = list(map(torch.clone, unlimited.state_dict().values()))
        for share in given.shares:
            limit = int(whole * share)
            step = step_of(limited := copy.deepcopy(model), limit)
            try:
                losses, measured = first_steps(step, inputs)
            except MemoryLimitError as error:
                table.add_row("", f"{limit / _MIB:.2f}", f"{share:.2f}", "", error.expected)
                continue
            same = torch.equal(losses, expected) and all(map(torch.equal, limited.state_dict().values(), after))
            if not same or measured > limit:
                print(f"{name} at {limit} bytes: {'takes ' + str(measured) if same else 'other numbers'}")
                wrong = True
            fitting = fxwrap.report(step).graphs[0].program
            ratio = compare(lambda: step(*inputs), lambda: free(*inputs), pairs=7, calls=2).ratio  # noqa: B023
            planned = bytes_of_call(fitting.recorder.newest_sized) / _MIB
            cells = f"{limit / _MIB:.2f}", f"{share:.2f}", f"{measured / _MIB:.2f}", f"{planned:.2f}"
            table.add_row("", *cells, str(len(fitting.plan.schedule)), f"{ratio:.2f}")
        torch._dynamo.reset()
    Console(width=140).print(table)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
