"""How fast a call is: fxwrap, Inductor's wrappers and eager, one after the other on the same models.

    python benchmarks/speed.py                                     # all models, on the GPU if there is one
    python benchmarks/speed.py --models mlp gru --seconds 20
    python benchmarks/speed.py --alternatives inductor cpp_wrapper fxwrap --start --memory
    python benchmarks/speed.py --json benchmarks/results/DATE-cpu.json --picture docs/speed-cpu.svg

All alternatives of a model live in one process, compiled from copies of one module, each with code of its own. They
are timed in turn, in random order, for a few milliseconds each. A ratio is fxwrap's time divided by the other's
in the same turn; shown are the median and, in brackets, the quartiles. fxwrap is there twice, compiled twice:
"itself" is the ratio of the two, which is 1.00 on a machine that is perfectly quiet. (Two processes that take turns
differ from each other twice as much.) On one thread of a CPU it is the processor's time that is taken, else that of a
clock.

Numbers are compared with those of Inductor's Python wrapper, of a training step the losses and parameters of the
first steps; on one thread of a CPU fxwrap's are the same bit for bit. Exit code 1 if they are not, or if fxwrap
failed.

Parts of a call (inference): Dynamo's guards and dispatch, AOTAutograd's layer, and the wrapper with what Inductor has
around it, each called with what it was given; on an accelerator the device's time is in them. Kernels and ATen are
what Inductor's Python wrapper calls on a CPU, called alone with the same operands and in the same order, operators
below autograd, all of it through Python; "rest" is what is left of the wrapper, which is below zero for one that
calls operators by a shorter way than Python's.

With --start: seconds from the import of torch to the end of the first call, making the model not counted, in new
processes with an Inductor cache for each alternative, first empty, then full. With --memory: the most bytes during
some steady calls above those of the model, in a process for each alternative, as benchmarks/memory_peak.py counts
them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What is compiled is kept for the next time.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "fxwrap-speed"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_BEGIN = time.perf_counter()
import torch  # noqa: E402
from speed_models import WORKLOADS, Workload, step_of  # noqa: E402
from speed_parts import parts_of  # noqa: E402
from timing import geometric_mean, own  # noqa: E402
from torch import Tensor, nn  # noqa: E402

OURS, AGAIN, REFERENCE = "fxwrap", "itself", "inductor"
_AUTOTUNED = {"max_autotune": True}
# By name: the arguments of torch.compile; None is not compiled.
ALTERNATIVES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    REFERENCE: {"backend": "inductor"},
    "cpp_wrapper": {"backend": "inductor", "options": {"cpp_wrapper": True}},
    "autotuned": {"backend": "inductor", "options": _AUTOTUNED},
    "cpp_wrapper autotuned": {"backend": "inductor", "options": {"cpp_wrapper": True, **_AUTOTUNED}},
    "reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
    "graph by hand": {"backend": "inductor"},
    "fxwrap autotuned": {"backend": "fxwrap", "options": _AUTOTUNED},
    # Nothing is ever recorded: what calls take before recordings, and beyond their limit.
    "fxwrap eager": {"backend": "fxwrap", "options": {"warmup": 1 << 40}},
    OURS: {"backend": "fxwrap"},
}
_WITH_AUTOTUNE = ("autotuned", "cpp_wrapper autotuned", "fxwrap autotuned")
_ON_GPU = ("reduce-overhead", "graph by hand")
_IF_ASKED = ("fxwrap eager",)
_IN_PARTS = (REFERENCE, "cpp_wrapper", OURS)
# Seconds that one alternative runs in a turn; calls before them that nobody counts; calls until all is recorded.
_SLOT, _AWAKE, _WARM = 0.005, 0.1, 16
# Calls whose results are compared.
_CHECKED = 3


# -- alternatives ---------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """One alternative of one model, compiled and warm."""

    name: str
    step: Callable[[], Any]
    results: list[Tensor]  # of the first calls
    functions: list[Any]  # what torch.compile returned
    us: list[float] = field(default_factory=list)  # a call, by turn


@contextlib.contextmanager
def settings(training: bool) -> Iterator[None]:
    """Around whatever a model is compiled or called in."""
    with (
        torch.set_grad_enabled(training),
        torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True),
    ):
        yield


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def compiled_with(name: str, device: str) -> dict[str, Any]:
    """Arguments of torch.compile; on a device out of the tree with the settings of its registration."""
    found = dict(ALTERNATIVES[name] or {})
    if device == "hostsim" and found["backend"] == "inductor":
        from memory_peak import settings_of

        found["options"] = {**settings_of(device), **found.get("options", {})}
    return found


def prepared(
    name: str, workload: Workload, module: nn.Module, inputs: tuple[Any, ...], device: str
) -> tuple[Callable[[], Any], list[Any]]:
    """A step of a model with an alternative, not called yet, and what torch.compile returned for it."""
    functions, name = list[Any](), OURS if name == AGAIN else name

    def compiled(function: Callable[..., Any]) -> Any:
        if ALTERNATIVES[name] is None:
            return function
        made = torch.compile(own(function), fullgraph=True, **compiled_with(name, device))
        functions.append(made)
        return made

    return step_of(module, inputs, workload.training, compiled), functions


def build(name: str, workload: Workload, template: nn.Module, inputs: tuple[Any, ...], device: str) -> Side:
    """Compile an alternative on a copy of a model, and call it until it is steady."""
    module = copy.deepcopy(template)
    step, functions = prepared(name, workload, module, inputs, device)
    results = [step().detach().clone() for _ in range(_CHECKED)]
    if workload.training:
        results += [parameter.detach().clone() for parameter in module.parameters()]
    for _ in range(_WARM):
        step()
    if name == "graph by hand":
        step = captured(step, workload)
    return Side(name, step, results, functions)


def captured(step: Callable[[], Any], workload: Workload) -> Callable[[], Any]:
    """A CUDA graph of a step, with its inputs where they are: nothing but the launch is left.

    Raises:
        ValueError: for a training step, whose capture is a matter of its optimizer.
    """
    if workload.training:
        raise ValueError("only inference is captured by hand")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def difference(got: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of two lists of results, by the largest number of its tensor; 0.0 is bit for bit."""
    largest = 0.0
    for a, b in zip(got, expected, strict=True):
        if not torch.equal(a, b):
            scale = max(float(b.abs().max()), 1e-12)
            largest = max(largest, float((a - b).abs().max()) / scale, 1e-12)
    return largest


# -- timing ---------------------------------------------------------------------------------------------------------


def clock_for(device: str, threads: int) -> Callable[[], float]:
    return time.process_time if device == "cpu" and threads == 1 else time.perf_counter


def slot(function: Callable[[], Any], calls: int, device: str, clock: Callable[[], float]) -> float:
    """Microseconds a call. Whoever has waited has lost its caches to the others: it may run a little first."""
    for _ in range(max(1, int(calls * _AWAKE))):
        function()
    synchronize(device)
    begin = clock()
    for _ in range(calls):
        function()
    synchronize(device)
    return (clock() - begin) / calls * 1e6


def take_turns(
    functions: Mapping[Any, Callable[[], Any]],
    seconds: float,
    device: str,
    clock: Callable[[], float],
    least: int = 12,
) -> dict[Any, list[float]]:
    """Time all functions again and again, in random order: who runs after whom makes a difference.

    Returns:
        Microseconds a call, by name and turn.
    """
    calls = {
        name: max(1, int(_SLOT * 1e6 / min(slot(function, 5, device, clock) for _ in range(3))))
        for name, function in functions.items()
    }
    us, order = {name: list[float]() for name in functions}, random.Random(0)
    gc.collect()
    gc.freeze()
    end, turn = time.perf_counter() + seconds, 0
    while turn < least or time.perf_counter() < end:
        for name in order.sample(list(functions), len(functions)):
            us[name].append(slot(functions[name], calls[name], device, clock))
        turn += 1
    gc.unfreeze()
    return us


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    low, middle, high = (round(value, 4) for value in statistics.quantiles(values, n=4, method="inclusive"))
    return low, middle, high


# -- a model --------------------------------------------------------------------------------------------------------


def made(workload: Workload, device: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    module, inputs = workload.make()
    return module.train(workload.training).to(device), tuple(value.to(device) for value in inputs)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """What one row of the table is made of.

    Returns:
        As it stands in the JSON: microseconds are of one call or step.
    """
    workload, clock = WORKLOADS[name], clock_for(args.device, args.threads)
    torch.compiler.reset()
    sides, failed = list[Side](), dict[str, str]()
    with settings(workload.training):
        template, inputs = made(workload, args.device)
        for alternative in (*args.alternatives, *([AGAIN] if OURS in args.alternatives else [])):
            try:
                sides.append(build(alternative, workload, template, inputs, args.device))
            except Exception as error:
                failed[alternative] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
                print(f"{name}, {alternative}: {failed[alternative]}", file=sys.stderr)
        if not sides:
            raise SystemExit(f"{name}: no alternative ran")
        by_name = {side.name: side for side in sides}
        timed = take_turns({side.name: side.step for side in sides}, args.seconds, args.device, clock)
        for side in sides:
            side.us = timed[side.name]
        reference, ours = by_name.get(REFERENCE, sides[0]), by_name.get(OURS)
        return {
            "group": workload.group,
            "turns": len(sides[0].us),
            "alternatives": {
                side.name: {
                    "us": round(statistics.median(side.us), 3),
                    "us_quartiles": quartiles(side.us),
                    "difference": difference(side.results, reference.results),
                    **({"ratio": ratio(ours, side)} if ours is not None and side is not ours else {}),
                }
                for side in sides
            },
            "failed": failed,
            **({"not_replayed": not_replayed(ours)} if ours is not None else {}),
            **({} if workload.training else {"parts": parts(sides, args)}),
        }


def ratio(ours: Side, other: Side) -> tuple[float, float, float]:
    """Quartiles of fxwrap's time by another's."""
    return quartiles([a / b for a, b in zip(ours.us, other.us, strict=True)])


def not_replayed(side: Side, calls: int = 10) -> dict[str, int]:
    """What fxwrap does in a few more calls that is no replay, by reason, and what fell back to Inductor."""
    import fxwrap

    def counted() -> Counter[str]:
        found = [fxwrap.stats(function) for function in side.functions]
        return sum((Counter(one["eager"]) for one in found), Counter())

    before = counted()
    for _ in range(calls):
        side.step()
    fallbacks = (Counter(fxwrap.stats(function)["fallbacks"]) for function in side.functions)
    return dict(counted() - before + sum(fallbacks, Counter()))


def parts(sides: list[Side], args: argparse.Namespace) -> dict[str, Any]:
    """What a call is made of, by alternative, and of the Python wrapper the kernels and the operators."""
    steps = {side.name: (side.step, side.functions[0]) for side in sides if side.name in _IN_PARTS}
    timed = functools.partial(
        take_turns, seconds=args.seconds / 2, device=args.device, clock=clock_for(args.device, args.threads)
    )
    try:
        return parts_of(steps, REFERENCE if args.device == "cpu" else "", timed)
    except ValueError as error:
        print(f"no parts of a call: {error}", file=sys.stderr)
        return {}


# -- a process for each alternative ---------------------------------------------------------------------------------


def first_call(name: str, alternative: str, device: str) -> dict[str, float]:
    """In a new process: seconds from the import of torch to the end of the first call, without making the model."""
    workload = WORKLOADS[name]
    with settings(workload.training):
        begin = time.perf_counter()
        module, inputs = made(workload, device)
        making = time.perf_counter() - begin
        prepared(alternative, workload, module, inputs, device)[0]()
        synchronize(device)
    return {"seconds": time.perf_counter() - _BEGIN - making}


def peak(name: str, alternative: str, device: str) -> dict[str, float]:
    """In a new process: the most bytes of some steady calls, above those of the model and its inputs."""
    from memory_peak import AcceleratorMemory, CpuMemory

    workload = WORKLOADS[name]
    # fxwrap measures what library calls take with the profiler, and cannot while that is used here.
    with settings(workload.training):
        prepared(alternative, workload, *made(workload, device), device)[0]()
    torch.compiler.reset()
    memory = CpuMemory() if device == "cpu" else AcceleratorMemory(device)
    with settings(workload.training), memory.watch():
        module, inputs = made(workload, device)
        gc.collect()
        memory.mark("compile")
        step, _ = prepared(alternative, workload, module, inputs, device)
        for _ in range(_WARM):
            step()
        gc.collect()
        memory.mark("steady")
        for _ in range(4):
            step()
        memory.mark("end")
    before, most = memory.peaks()
    return {"bytes": most - before}


def in_a_process(what: str, name: str, alternative: str, args: argparse.Namespace, cache: str | None = None) -> Any:
    """What ``first_call`` or ``peak`` gives back in a new process; None if it failed, which is told."""
    command = [sys.executable, __file__, "--one", what, name, alternative]
    command += ["--device", args.device, "--threads", str(args.threads)]
    environment = {**os.environ, **({"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no word"])[-1]
        print(f"{name}, {alternative}, {what}: {why[:200]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def starts(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first result, by alternative: with caches of its own that are empty, and with them full."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for caches, rounds in (("cold", 1), ("warm", args.rounds)):
            for _ in range(rounds):
                for number, alternative in enumerate(args.alternatives):
                    got = in_a_process("start", name, alternative, args, f"{folder}/{number}")
                    if got is not None:
                        found.setdefault(alternative, {}).setdefault(caches, []).append(round(got["seconds"], 3))
    return found


# -- what is shown --------------------------------------------------------------------------------------------------


def means(models: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Geometric means of the ratios, by group and alternative."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in models.values():
        for name, one in row["alternatives"].items():
            if "ratio" in one:
                found.setdefault(row["group"], {}).setdefault(name, []).append(one["ratio"][1])
    return {
        group: {name: geometric_mean(ratios) for name, ratios in by_name.items()} for group, by_name in found.items()
    }


def cell(one: dict[str, Any] | None) -> str:
    if one is None:
        return "-"
    if "ratio" not in one:
        return f"{one['us']:,.1f}"
    low, middle, high = one["ratio"]
    return f"{one['us']:,.1f}\n{middle:.2f} [{low:.2f} {high:.2f}]"


def numbers(row: dict[str, Any]) -> str:
    ours = row["alternatives"].get(OURS)
    if ours is None:
        return "-"
    text = f"within {ours['difference']:.0e}" if ours["difference"] else "bit for bit"
    return "; ".join([text, *(f"{count} of 10 calls: {why}" for why, count in row["not_replayed"].items())])


def show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = [
        name
        for name in (*ALTERNATIVES, AGAIN)
        if any(name in row["alternatives"] for row in found["models"].values())
    ]
    names.sort(key=lambda name: name in (OURS, AGAIN))
    title = (
        f"microseconds a call, and fxwrap's time by it; {found['machine']}, torch {found['torch']}, {found['commit']}"
    )
    table = Table("model", box=None, padding=(0, 1))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("numbers")
    mean = means(found["models"])
    for group in dict.fromkeys(row["group"] for row in found["models"].values()):
        for name, row in found["models"].items():
            if row["group"] == group:
                table.add_row(name, *(cell(row["alternatives"].get(one)) for one in names), numbers(row))
        if mean.get(group) and sum(row["group"] == group for row in found["models"].values()) > 1:
            cells = (f"{mean[group][one]:.3f}" if one in mean[group] else "" for one in names)
            table.add_row(f"[bold]{group}[/]", *cells, "geometric mean", end_section=True)
    # As wide as it has to be: what it prints is read by programs, too.
    console = Console(width=max(40 + 24 * len(names), 100))
    console.print(title, table, highlight=False, sep="\n")


def show_parts(models: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("call", "Dynamo", "AOTAutograd", "wrapper", "kernels", "ATen", "rest")
    table = Table("model", "", title="parts of a call, in microseconds", box=None, padding=(0, 1))
    for column in columns:
        table.add_column(column, justify="right")
    for model, row in models.items():
        found = row.get("parts", {})
        calls = [found[part]["us"] for part in ("kernels", "operators") if part in found]
        for name in (one for one in _IN_PARTS if one in found):
            its = found[name]
            its_own = (its["call"], its["dynamo"], its["aot"], its["wrapper"])
            shared = (*calls, its["wrapper"] - sum(calls)) if calls else ()
            table.add_row(model, name, *(f"{value:,.1f}" for value in (*its_own, *shared)))
    if table.rows:
        Console(width=120).print(table)


def show_processes(models: dict[str, Any], alternatives: list[str]) -> None:
    """What was measured in processes of their own: seconds to the first result, and peaks of memory."""
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "", title="a process each", box=None, padding=(0, 1))
    for name in alternatives:
        table.add_column(name, justify="right")
    for model, row in models.items():
        for caches in ("cold", "warm"):
            seconds = [row.get("start", {}).get(name, {}).get(caches) for name in alternatives]
            if any(seconds):
                cells = (f"{statistics.median(some):.2f}" if some else "-" for some in seconds)
                table.add_row(model, f"first call, s, caches {caches}", *cells)
        peaks = [row.get("peak_bytes", {}).get(name) for name in alternatives]
        if any(most is not None for most in peaks):
            table.add_row(model, "peak, bytes", *("-" if most is None else f"{most:,}" for most in peaks))
    if table.rows:
        Console(width=60 + 24 * len(alternatives)).print(table)


def described(device: str, threads: int) -> str:
    if device in ("cuda", "xpu"):
        return str(torch.get_device_module(device).get_device_name())
    if device != "cpu":
        return device
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def commit() -> str:
    """Of the fxwrap that is imported, which need not be the one that lies beside this file."""
    import fxwrap

    command = ["git", "-C", str(Path(fxwrap.__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="MODEL", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--alternatives", nargs="+", metavar="ONE", choices=ALTERNATIVES)
    parser.add_argument("--max-autotune", action="store_true", help="with max-autotune, too")
    parser.add_argument("--seconds", type=float, default=8.0, help="of timing, a model (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda", "xpu", "hostsim"], help="default: the GPU, or the CPU")
    parser.add_argument("--start", action="store_true", help="the first call of new processes, caches empty and full")
    parser.add_argument("--rounds", type=int, default=3, help="warm starts (default: %(default)s)")
    parser.add_argument("--memory", action="store_true", help="peak memory of a call, in processes of their own")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the ratios as SVG")
    parser.add_argument("--one", nargs=3, metavar=("WHAT", "MODEL", "ALTERNATIVE"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured, with the date")
    args = parser.parse_args(argv)
    if args.device is None:
        from gpu_place import first_gpu

        args.device = first_gpu() or "cpu"
    if args.device == "hostsim":
        from gpu_place import HOSTSIM

        sys.path.insert(0, str(HOSTSIM))
        from hostsim.inductor import register

        register()
    if args.alternatives is None:
        left_out = (
            *_IF_ASKED,
            *(() if args.max_autotune else _WITH_AUTOTUNE),
            *(() if args.device == "cuda" else _ON_GPU),
        )
        args.alternatives = [name for name in ALTERNATIVES if name not in left_out]
    torch.set_num_threads(args.threads)
    torch._logging.set_logs(all=logging.ERROR)
    if args.one:
        what, name, alternative = args.one
        print(json.dumps({"start": first_call, "memory": peak}[what](name, alternative, args.device)))
        return 0
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": args.device,
        "machine": described(args.device, args.threads),
        "threads": args.threads,
        "clock": clock_for(args.device, args.threads).__name__,
        "seconds": args.seconds,
        "models": {},
    }
    for name in args.models:
        try:
            row = found["models"][name] = measure(name, args)
        except ModuleNotFoundError as missing:
            print(f"{name}: skipped: {missing}", file=sys.stderr)
            continue
        if args.start:
            row["start"] = starts(name, args)
        if args.memory:
            peaks = {one: in_a_process("memory", name, one, args) for one in args.alternatives}
            row["peak_bytes"] = {one: got["bytes"] for one, got in peaks.items() if got is not None}
        line = ", ".join(f"{one} {cell(values)}".replace("\n", " ") for one, values in row["alternatives"].items())
        print(f"{name}: {line}; {numbers(row)}", file=sys.stderr, flush=True)
    found["means"] = means(found["models"])
    show(found)
    show_parts(found["models"])
    show_processes(found["models"], args.alternatives)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.picture:
        from speed_picture import picture

        args.picture.write_text(picture(found))
    exact = args.device == "cpu" and args.threads == 1
    wrong = [
        name
        for name, row in found["models"].items()
        if OURS in row["failed"]
        or row["alternatives"].get(OURS, {"difference": 0.0})["difference"] > (0.0 if exact else 1e-3)
    ]
    if wrong:
        print(f"fxwrap failed, or has other numbers: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
