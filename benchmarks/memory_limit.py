"""Training steps within a limit of bytes: what is measured, what is planned, and what it costs.

    python benchmarks/memory_limit.py                               # six models, at 1, 1/2 and 1/3 of the memory
    python benchmarks/memory_limit.py --models gpt2 --shares 0.8 0.6 0.4
    python benchmarks/memory_limit.py --limits 20                   # twenty limits, from the least that fits to A
    python benchmarks/memory_limit.py --models issue16 --shares     # pytorch#197838: upstream's budgets, the least

A is the most that a step takes beside parameters, state and batch without a limit. Each share of A is a limit of its
own, "least" is the lowest that fits. "measured" is the peak of the allocator's events in a call: it has to be what is
planned, and never above the limit; with ``--limits``, a lower limit may never measure more. Losses and parameters of
three steps are those without a limit, bit for bit. Exit code 1 else. "time" is the median of the ratios of
neighbouring runs with and without the limit. "ordinary" is the loop that Inductor compiles, gradients included, of
which others state shares.

A model is compiled once: the host graph that Inductor has emitted is planned again for each limit, by the stages of
the product, and the step runs the program that results.

``issue16``, ``issue24`` and ``issue32`` are made after what pytorch#197838 says of its model in three sizes: hidden
256, 1,024 in its feed-forward layers, two sequences. "budget" is upstream's loss and gradients, without an update,
with ``activation_memory_budget``, in the issue's way (``aot_eager``) and by the same events.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from speed_models import Made, bert, gpt2, llama, resnet18, unet, vit
from timing import compare, own
from torch import Tensor, nn
from train_step import adamw, loss, ordinary

import fxwrap
from fxwrap.errors import MemoryLimitError
from fxwrap.graphs.program import Program
from fxwrap.graphs.program_runs import programs_run_by
from fxwrap.limit import Limit
from fxwrap.passes.memory.planner import bytes_of_call
from fxwrap.torch_private.functions import allocations

_MIB = 2**20
_ISSUE = "issue"
_BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3)


class IssueBlock(nn.Module):
    """Attention, and a gated feed-forward layer, without rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (of(h).view(batch, length, self.heads, -1).transpose(1, 2) for of in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def issue(layers: int, width: int = 256, vocabulary: int = 1024) -> Made:
    """The issue's model: the length grows with the layers."""
    blocks = (IssueBlock(width, 8) for _ in range(layers))
    last = nn.Linear(width, vocabulary, bias=False)
    model = nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.RMSNorm(width), last)
    return model, (torch.randint(0, vocabulary, (2, 32 * layers)),)


SIX: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: gpt2(batch=2, length=128),
    "bert": lambda: bert(batch=2, length=128),
    "vit": lambda: vit(width=258, batch=8),
    "llama": lambda: llama(batch=2, length=128),
    "resnet18": lambda: resnet18(batch=16),
    "unet": lambda: unet(width=64, batch=2),
}
MODELS = {**SIX, **{f"{_ISSUE}{layers}": lambda layers=layers: issue(layers) for layers in (16, 24, 32)}}  # type: ignore[misc]


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that a call holds beside what there was before, by torch's allocator."""
    changes = allocations(run)
    assert changes is not None
    return max(itertools.accumulate(changes), default=0)


class Step:
    """A training step that runs its program within any limit."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._model, self._inputs, self._optimizer = model, inputs, adamw(model)
        self._step = fxwrap.train_step(model, loss, self._optimizer)
        for _ in range(3):
            self._step(*inputs)
        self.free: Program = fxwrap.report(self._step).graphs[0].program
        self._begin = [one.clone() for one in self._tensors()]

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._model.state_dict().values()
        for state in self._optimizer.state.values():
            yield from (one for one in state.values() if isinstance(one, Tensor))

    def within(self, limit: int) -> Program:
        """The program that takes no more than ``limit`` bytes."""
        free = self.free
        plan = free.planner.partition(free.plan.inputs, limit=Limit(limit))
        return Program(plan, free.planner, replace(free.options, memory_limit=limit))

    def least(self) -> int:
        """The bytes of the lowest limit that fits."""
        try:
            self.within(1)
        except MemoryLimitError as error:
            return error.least
        raise AssertionError("one byte is enough")

    def run(self, program: Program) -> Tensor:
        def runner(_: Program, inputs: list[Any]) -> Any:
            with programs_run_by(None):
                return program.run(inputs)

        with programs_run_by(runner):
            return self._step(*self._inputs)

    def first_steps(self, program: Program) -> tuple[int, list[Tensor]]:
        """Three steps from the beginning: the highest peak of those after the first, and all that they leave."""
        with torch.no_grad():
            for one, begin in zip(self._tensors(), self._begin, strict=True):
                one.copy_(begin)
        losses = [self.run(program)]
        peaks = [peak(lambda: losses.append(self.run(program))) for _ in range(2)]
        return max(peaks), [*losses, *(one.clone() for one in self._tensors())]


def planned(program: Program) -> int:
    sized = program.recorder.newest_sized
    assert sized is not None
    return bytes_of_call(sized)


def budgets(model: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[tuple[float, int]]:
    """Upstream's budgets, and the peak of loss and gradients with each."""
    for budget in _BUDGETS:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            of = torch.compile(own(lambda *inputs: loss(model, *inputs)), backend="aot_eager")
            of(*inputs).backward()
            model.zero_grad()
            yield budget, peak(lambda: of(*inputs).backward())  # noqa: B023
            model.zero_grad()
        torch._dynamo.reset()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(SIX))
    parser.add_argument("--shares", nargs="*", type=float, default=[1 / 2, 1 / 3])
    parser.add_argument("--limits", type=int, default=0, help="this many, from the least that fits to A")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    columns = "model", "limit, MiB", "of A", "of ordinary", "measured, MiB", "planned, MiB", "nodes", "time"
    table, wrong = Table(*columns), False
    for name in given.models:
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        usual = 0
        if name.startswith(_ISSUE):
            for budget, most in budgets(copy.deepcopy(model), inputs):
                table.add_row(name, f"budget {budget}", "", "", f"{most / _MIB:.2f} ({most / 1e6:.1f} MB)")
        else:
            loop = ordinary(copy.deepcopy(model), inputs, backend="inductor")
            for _ in range(3):
                loop()
            gradients = sum(p.numel() * p.element_size() for p in model.parameters())
            usual = peak(loop) + gradients
            table.add_row(name, "ordinary", "", "1", f"{usual / _MIB:.2f}")
        step = Step(model, inputs)
        _, expected = step.first_steps(step.free)
        whole = lowest = planned(step.free)

        def shares(limit: int) -> tuple[str, str]:
            """A limit beside A, and beside what the ordinary step takes."""
            return f"{limit / whole:.2f}", f"{limit / usual:.2f}" if usual else ""  # noqa: B023

        nodes = str(len(step.free.plan.schedule))
        table.add_row("", "none", *shares(whole), "", f"{whole / _MIB:.2f}", nodes, "1")
        least = step.least()
        limits = [int(whole * share) for share in sorted(given.shares, reverse=True)]
        for limit in [*limits, least]:
            if limit < least:
                table.add_row("", f"{limit / _MIB:.2f}", *shares(limit), "does not fit")
                continue
            fitting = step.within(limit)
            measured, found = step.first_steps(fitting)
            wrong |= _complains(name, limit, fitting, measured, all(map(torch.equal, found, expected)))
            ratio = compare(lambda: step.run(fitting), lambda: step.run(step.free), pairs=7, calls=1).ratio  # noqa: B023
            cells = f"{measured / _MIB:.2f}", f"{planned(fitting) / _MIB:.2f}"
            limited = f"{'least ' if limit == least else ''}{limit / _MIB:.2f}"
            table.add_row("", limited, *shares(limit), *cells, str(len(fitting.plan.schedule)), f"{ratio:.2f}")
        sweep = [whole - (whole - least) * n // max(given.limits - 1, 1) for n in range(given.limits)]
        for limit in sweep:
            fitting = step.within(limit)
            measured, found = step.first_steps(fitting)
            wrong |= _complains(name, limit, fitting, measured, all(map(torch.equal, found, expected)))
            if measured > lowest:
                print(f"{name}: {limit} bytes measure {measured}, a higher limit {lowest}")
                wrong = True
            lowest = min(lowest, measured)
        if sweep:
            told = "as planned, monotone" if not wrong else "not as planned"
            table.add_row("", f"{len(sweep)} limits", "", "", told)
        torch._dynamo.reset()
    Console(width=140).print(table)
    return int(wrong)


def _complains(name: str, limit: int, program: Program, measured: int, same: bool) -> bool:
    """Print what is wrong with a program within a limit; whether anything is."""
    faults = {
        "other numbers": not same,
        f"takes {measured}": measured > limit,
        f"planned {planned(program)}, measured {measured}": measured != planned(program),
    }
    found = [what for what, is_so in faults.items() if is_so]
    if found:
        print(f"{name} at {limit} bytes: {', '.join(found)}")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
