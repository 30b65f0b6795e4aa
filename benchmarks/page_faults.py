"""Page faults of a steady call on the CPU: fxwrap beside Inductor's own wrapper.

    python benchmarks/page_faults.py                       # six models from 10 MiB to 2 GiB; --times adds their times
    python benchmarks/page_faults.py --models step-384 --calls 20

Memory that a process gets from the system is zeroed page by page, when it is touched first: a minor fault each
time. A loop pays for that at every call where memory returns to the system in between. Each side runs in a process
of its own, on one thread, until it is steady; then minor faults are counted (``getrusage``) for some calls: shown
are the fewest, the median and the most. What Inductor's wrapper allocates lies in the C library's heap, whose free
end returns to the system now and then, so its numbers differ from call to call and from process to process.

"peak" is the most that is resident in these calls above what is resident between compiling and them, with freed
memory given back (``malloc_trim``, ``fxwrap.release``). "kept" is what fxwrap keeps between calls. "planned" is
what its plans take at most. With ``--times`` both sides run in one process, in turn: "ratio" is the median of
fxwrap's time divided by Inductor's, and in brackets are the quartiles.

A "step" is forward, gradients and update in one function; "training" is a compiled forward with its backward. The
exit code is 1 if fxwrap's fewest faults are more than Inductor's by over 100.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch.nn.functional as F
from memory_peak import in_a_process
from torch import Tensor, nn

WARM, ALLOWED = 6, 100
SIDES = ("inductor", "fxwrap")


class Attention(nn.Module):
    """A layer of a transformer, whose scores are all in memory."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def mlp(layers: int, width: int, batch: int) -> tuple[nn.Module, Tensor]:
    parts = (part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)))
    return nn.Sequential(*parts), torch.randn(batch, width)


def transformer(layers: int, width: int, batch: int, length: int) -> tuple[nn.Module, Tensor]:
    blocks = (Attention(width, max(1, width // 64)) for _ in range(layers))
    return nn.Sequential(*blocks), torch.randn(batch, length, width)


@dataclass(frozen=True)
class Model:
    """Attributes: mode: "inference", "training" or "step"."""

    mode: str
    make: Callable[[], tuple[nn.Module, Tensor]]


MODELS = {
    "mlp": Model("inference", lambda: mlp(4, 256, 5000)),
    "transformer": Model("inference", lambda: transformer(2, 384, 8, 256)),
    "transformer-training": Model("training", lambda: transformer(2, 256, 8, 256)),
    "step-256": Model("step", lambda: transformer(2, 256, 4, 128)),
    "step-384": Model("step", lambda: transformer(3, 384, 8, 256)),
    "step-2-gib": Model("step", lambda: mlp(64, 64, 40000)),
    # For tests: of these sizes the first call takes most of the time.
    "small": Model("inference", lambda: mlp(3, 32, 50000)),
    "small-training": Model("training", lambda: mlp(3, 32, 30000)),
    "small-step": Model("step", lambda: mlp(3, 32, 50000)),
}
SHOWN = [name for name in MODELS if not name.startswith("small")]


def step_of(model: Model, backend: str) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """A call of a model or a training step, and what ``torch.compile`` returned."""
    torch.manual_seed(0)
    module, x = model.make()
    parameters = list(module.parameters())
    if model.mode == "inference":
        compiled = torch.compile(lambda x: module(x), backend=backend)
        return torch.no_grad()(lambda: compiled(x)), compiled
    if model.mode == "training":
        compiled = torch.compile(lambda x: module(x).square().mean(), backend=backend)

        def train() -> Tensor:
            loss = compiled(x)
            loss.backward()
            with torch.no_grad():
                torch._foreach_add_(parameters, [parameter.grad for parameter in parameters], alpha=-1e-3)
            module.zero_grad(set_to_none=True)
            return loss.detach()

        return train, compiled

    def step(x: Tensor) -> Tensor:
        loss = module(x).square().mean()
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            torch._foreach_add_([parameter.detach() for parameter in parameters], gradients, alpha=-1e-3)
        return loss.detach()

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    return lambda: compiled(x), compiled


def settings() -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.trace_autograd_ops = True


def resident(which: str) -> int:
    """Bytes: "VmRSS" is what is resident now, "VmHWM" the most since ``clear_refs``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which))


def resting() -> int:
    """Bytes that stay resident when all that is free is given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident("VmRSS")


def measure(name: str, backend: str, calls: int) -> dict[str, Any]:
    """One side, in this process."""
    settings()
    step, compiled = step_of(MODELS[name], backend)
    for _ in range(WARM):
        step()
    if backend == "fxwrap":
        import fxwrap

        fxwrap.release(compiled)
    before = resting()
    for _ in range(WARM):  # fxwrap records again
        step()
    resting()
    for _ in range(WARM):
        step()
    Path("/proc/self/clear_refs").write_text("5")
    counts = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(calls):
        step()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    result: dict[str, Any] = {"peak": resident("VmHWM") - before}
    result["faults"] = [after - before for before, after in itertools.pairwise(counts)]
    if backend == "fxwrap":
        graphs = fxwrap.report(compiled).graphs
        assert all(graph.counters["replays"] >= calls for graph in graphs), [graph.counters for graph in graphs]
        plans = [graph.memory for graph in graphs if graph.memory]
        result["planned"] = max((plan.peak for plan in plans), default=0)
        result["kept"] = max((getattr(plan, "kept", 0) for plan in plans), default=0)
    return result


def ratios(name: str, pairs: int) -> list[float]:
    """Quartiles of fxwrap's time divided by Inductor's, of calls in turn in this process."""
    settings()
    steps = [step_of(MODELS[name], backend)[0] for backend in SIDES]
    for step in steps:
        for _ in range(WARM):
            step()

    def once(step: Callable[[], Any]) -> float:
        begin = time.process_time()
        step()
        return time.process_time() - begin

    found = []
    for turn in range(pairs):
        times = {side: once(steps[side]) for side in ((0, 1) if turn % 2 else (1, 0))}
        found.append(times[1] / times[0])
    return statistics.quantiles(found, n=4, method="inclusive")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=SHOWN, choices=MODELS)
    parser.add_argument("--calls", type=int, default=12, help="that are counted (default: %(default)s)")
    parser.add_argument("--times", action="store_true", help="compare times, too")
    parser.add_argument("--pairs", type=int, default=20, help="calls of each side for that (default: %(default)s)")
    parser.add_argument("--measure", nargs=3, metavar=("MODEL", "SIDE", "CALLS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        name, side, calls = args.measure
        found = {"ratio": ratios(name, int(calls))} if side == "both" else measure(name, side, int(calls))
        print(json.dumps(found))
        return
    from rich.console import Console
    from rich.table import Table

    both = [f"{side} {what}" for side in SIDES for what in ("faults", "peak, MiB")]
    columns = ["model", "", *both, "planned", "kept", *(["ratio"] if args.times else [])]
    table = Table(*columns, title=f"a call, one thread, torch {torch.__version__}")
    more = []
    for name in args.models:
        sides = [in_a_process(__file__, name, side, str(args.calls)) for side in SIDES]
        if min(sides[1]["faults"]) > min(sides[0]["faults"]) + ALLOWED:
            more.append(name)
        row = [name, MODELS[name].mode]
        for side in sides:
            counts = sorted(side["faults"])
            row.append(" / ".join(f"{count:,}" for count in (counts[0], statistics.median_low(counts), counts[-1])))
            row.append(f"{side['peak'] >> 20:,}")
        row += [f"{sides[1][what] >> 20:,}" for what in ("planned", "kept")]
        if args.times:
            low, middle, high = in_a_process(__file__, name, "both", str(args.pairs))["ratio"]
            row.append(f"{middle:.3f} [{low:.3f}, {high:.3f}]")
        table.add_row(*row)
        print(" | ".join(row), file=sys.stderr, flush=True)
    Console(width=140).print(table)
    print(f"more faults than Inductor: {', '.join(more) or 'none'}")
    sys.exit(bool(more))


if __name__ == "__main__":
    main()
