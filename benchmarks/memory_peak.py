"""Peak memory of a step: fxwrap against Inductor's own wrapper with its default reuse of buffers.

    python benchmarks/memory_peak.py                     # ten models and a U-Net on the CPU
    python benchmarks/memory_peak.py --models gpt2 unet --modes training
    python benchmarks/memory_peak.py --device hostsim    # on the simulated accelerator (examples/hostsim)

Each side runs in a process of its own: the model is compiled and run until it replays; then the most bytes that are
allocated at any time during four more steps are taken, less what was allocated before compiling (parameters, inputs).
On the CPU they come from the profiler's memory events, which are recorded from the beginning; on an accelerator from
its allocator's statistics, with what the pools of graphs keep. A training step is the loss, computed inside of the
compiled function, its backward, and gradients set to None. fxwrap records once more after it has found which inputs
stay and what cannot be captured, so that the pools of earlier attempts are not counted. Predicted is what
``report(...).graphs[0].predicted`` says, from plans made before anything was recorded, against what was measured.
Planned is the largest plan of one program, without what operators allocate: its arena, or, on the CPU, the most of
its own storages that are there at one time; the bound is what is alive at most.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "hostsim")]
WARM, STEPS = 16, 4


class UNet(nn.Module):
    """Two levels down and up again, with skip connections."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.up = nn.ModuleList(
            nn.Conv2d(i, o, 3, padding=1) for i, o in ((6 * width, 2 * width), (3 * width, width))
        )
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = skips.pop()
        for layer in self.up:
            x = F.relu(layer(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1)))
        return self.last(x)


def unet() -> tuple[nn.Module, Callable[[], dict[str, Any]]]:
    return UNet(), lambda: {"x": torch.randn(2, 3, 32, 32)}


def models() -> dict[str, Callable[[], Any]]:
    from models import MODELS

    return {**MODELS, "unet": unet}


def loss_of(outputs: Any) -> Tensor:
    values = outputs.to_tuple() if hasattr(outputs, "to_tuple") else (outputs,)
    return sum(v.float().square().mean() for v in values if isinstance(v, Tensor) and v.requires_grad)  # type: ignore


class CpuMemory:
    """The profiler's memory events, from the beginning on."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        with self._profile:
            yield

    def mark(self, name: str) -> None:
        with torch.profiler.record_function(name):
            pass

    def peaks(self) -> tuple[int, int]:
        """Bytes before compiling; the most in the steady steps."""
        events = self._profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        marks = {e.name(): e.start_ns() for e in events if e.name() in ("compile", "steady", "end")}
        allocated = peak = before = 0
        for when, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
            if when < marks["compile"]:
                before += change
            if when >= marks["steady"]:
                peak = max(peak, allocated)
            allocated += change
            if marks["steady"] <= when <= marks["end"]:
                peak = max(peak, allocated)
        return before, peak


class AcceleratorMemory:
    """The allocator's statistics, and what the pools of graphs keep beside what is allocated in them."""

    def __init__(self, device: str) -> None:
        self._module = torch.get_device_module(device)
        self._before = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        yield

    def mark(self, name: str) -> None:
        torch.accelerator.synchronize()
        if name == "compile":
            self._before = torch.accelerator.memory_allocated()
        elif name == "steady":
            torch.accelerator.reset_peak_memory_stats()
        else:
            self._peak = torch.accelerator.max_memory_allocated() + self._free_in_pools()

    def _free_in_pools(self) -> int:
        """Bytes in which operators work while a graph is replayed: the most that was allocated at one time while it
        was captured, or, where nobody counts that, all that is set aside."""
        if hasattr(self._module, "memory_snapshot"):
            segments = [s for s in self._module.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
            return sum(segment["total_size"] - segment["allocated_size"] for segment in segments)
        from fxwrap.graphs.memory.shared_state import SHARED

        stats = [self._module.pool_stats(pool) for pool in SHARED.arenas.pools()]
        return sum(one["peak_allocated"] - one["allocated"] for one in stats)

    def peaks(self) -> tuple[int, int]:
        return self._before, self._peak


def settings_of(device: str) -> dict[str, Any]:
    """Inductor's settings that a registered device needs."""
    from fxwrap.devices import device_support

    support = device_support(device)
    return dict(support.config) if support is not None else {}


def measure(name: str, mode: str, side: str, device: str) -> dict[str, Any]:
    """One side, in this process."""
    torch.set_num_threads(1)
    if device == "hostsim":
        from hostsim.inductor import register

        register()
    memory = CpuMemory() if device == "cpu" else AcceleratorMemory(device)
    with_settings = {"options": settings_of(device)} if side == "inductor" else {}

    def build() -> tuple[Callable[[], None], Any, nn.Module]:
        torch.manual_seed(0)
        model, fresh = models()[name]()
        model = model.train(mode == "training").to(device)
        inputs = {key: value.to(device) for key, value in fresh().items()}
        gc.collect()
        memory.mark("compile")

        def step_of(**values: Any) -> Any:
            return model(**values) if mode == "inference" else loss_of(model(**values))

        compiled = torch.compile(step_of, backend=side, **with_settings)

        def step() -> None:
            with torch.set_grad_enabled(mode == "training"):
                model.zero_grad(set_to_none=True)
                result = compiled(**inputs)
                if mode == "training":
                    result.backward()

        return step, compiled, model

    # fxwrap measures what library calls take with the profiler, and cannot while that is used here.
    build()[0]()
    torch._dynamo.reset()
    gc.collect()
    with memory.watch():
        step, compiled, model = build()
        for _ in range(WARM):
            step()
        if side == "fxwrap":
            import fxwrap

            # The allocator gets all of it back, or the next arena lies in a block of the last, which was larger.
            fxwrap.release()
            model.zero_grad(set_to_none=True)
            gc.collect()
            if device != "cpu":
                torch.accelerator.empty_cache()
            for _ in range(WARM):
                step()
        gc.collect()
        memory.mark("steady")
        for _ in range(STEPS):
            step()
        memory.mark("end")
    before, peak = memory.peaks()
    result = {"peak": peak - before}
    if side == "fxwrap":
        reports = fxwrap.report(compiled).graphs
        predicted = [one for report in reports for one in report.predicted]
        plans = [report.memory for report in reports if report.memory]
        result["planned"] = max((plan.peak for plan in plans), default=0)
        result["worst"] = max((plan.peak / plan.lower_bound for plan in plans if plan.lower_bound), default=1.0)
        result["predicted"] = max((one.total for one in predicted), default=0)
        result["replays"] = min(report.counters["replays"] for report in reports)
    return result


def in_a_process(script: str, *args: str, **environment: str) -> dict[str, Any]:
    """What one side of a script's comparison prints, measured in a process of its own."""
    command = [sys.executable, script, "--measure", *args]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise SystemExit(f"{' '.join(args)} failed:\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="default: all")
    parser.add_argument("--modes", nargs="+", default=["inference", "training"], choices=["inference", "training"])
    parser.add_argument("--device", default="cpu", help="cpu, hostsim, or an accelerator")
    parser.add_argument("--measure", nargs=4, metavar=("MODEL", "MODE", "SIDE", "DEVICE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    from rich.console import Console
    from rich.table import Table

    columns = ("model", "mode", "Inductor", "fxwrap", "ratio", "predicted", "planned", "planned / bound", "replays")
    table = Table(*columns, title=f"peak bytes above the model, {args.device}, torch {torch.__version__}")
    worse = []
    for name in args.models or models():
        for mode in args.modes:
            theirs = in_a_process(__file__, name, mode, "inductor", args.device)
            ours = in_a_process(__file__, name, mode, "fxwrap", args.device)
            ratio = ours["peak"] / theirs["peak"]
            if ratio > 1:
                worse.append(f"{name} ({mode})")
            error = f"{(ours['predicted'] - ours['peak']) / ours['peak']:+.1%}"
            row = [
                name,
                mode,
                f"{theirs['peak']:,}",
                f"{ours['peak']:,}",
                f"{ratio:.3f}",
                error,
                f"{ours['planned']:,}",
            ]
            table.add_row(*row, f"{ours['worst']:.3f}", str(ours["replays"]))
            print(" ".join(row), f"{ours['worst']:.3f}", ours["replays"], file=sys.stderr, flush=True)
    Console(width=120).print(table)
    print(f"needs more than Inductor: {', '.join(worse) or 'none'}")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
