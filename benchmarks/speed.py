"""How fast a call is: fxwrap and what one would pick instead, one after the other on the same models.

    python benchmarks/speed.py                                     # all models, on the GPU if there is one
    python benchmarks/speed.py --models mlp gru --seconds 20
    python benchmarks/speed.py --alternatives inductor cpp_wrapper fxwrap --start --memory
    python benchmarks/speed.py --json benchmarks/results/DATE-cpu.json --picture docs/speed-cpu.svg

fxwrap is there three times: compiled (a call goes through Dynamo's frame), bound (``fxwrap.bind``; in a training step
the loss is bound) and ahead of time (``fxwrap.aot_compile``; inference only). Beside it are eager and Inductor's
wrappers and, for inference, "inductor unsafe", whose guards are not evaluated (``torch.compiler.set_stance``),
AOTInductor's package and ONNX Runtime. ``alternatives.py`` has them; what is not installed is left out.

All alternatives of a model live in one process, compiled from copies of one module, each with code of its own. They
are timed in turn, in random order, for a few milliseconds each. A ratio is fxwrap's time divided by the other's
in the same turn; shown are the median and, in brackets, the quartiles. "fxwrap" is compiled twice: "itself" is the
ratio of the two, which is 1.00 on a machine that is perfectly quiet. (Two processes that take turns differ from each
other twice as much.) On one thread of a CPU it is the processor's time that is taken, else that of a clock.

Numbers are compared with those of Inductor's Python wrapper, of a training step the losses and parameters of the
first steps; on one thread of a CPU fxwrap's are the same bit for bit, and in inference all others' are within 1e-3 of
the largest. Exit code 1 if they are not, or if fxwrap failed.

Parts of a call (inference): Dynamo's guards and dispatch, AOTAutograd's layer, and the wrapper with what Inductor has
around it, each called with what it was given; on an accelerator the device's time is in them. Kernels and ATen are
what Inductor's Python wrapper calls on a CPU, called alone with the same operands and in the same order, operators
below autograd, all of it through Python; "rest" is what is left of the wrapper, which is below zero for one that
calls operators by a shorter way than Python's.

With --start: seconds from the import of torch to the end of the first call, making the model not counted, in new
processes with an Inductor cache for each alternative, first empty, then full. With --memory: the most bytes during
some steady calls above those of the model, in a process for each alternative, as benchmarks/memory_peak.py counts
them. Both are of what ``torch.compile`` makes, and of eager.
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
from alternatives import (  # noqa: E402
    AGAIN,
    ALTERNATIVES,
    EXACT,
    OURS,
    OWN,
    REFERENCE,
    defaults,
    prepared,
    why_not,
)
from speed_models import WORKLOADS, Workload  # noqa: E402
from speed_parts import parts_of  # noqa: E402
from speed_tables import means, progress, show, show_parts, show_processes  # noqa: E402
from torch import Tensor, nn  # noqa: E402

_IN_PARTS = (REFERENCE, "cpp_wrapper", OURS)
# Seconds that one alternative runs in a turn; calls before them that nobody counts; calls until all is recorded.
_SLOT, _AWAKE, _WARM = 0.005, 0.1, 16
# Calls whose results are compared, with one more in the context in which calls are timed. The first ones compile.
_CHECKED = 3
# The largest difference of numbers that need not be the same bit for bit.
_TOLERANCE = 1e-3


# -- alternatives ---------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """One alternative of one model, compiled and warm."""

    name: str
    step: Callable[[], Any]
    results: list[Tensor]  # of the first calls
    functions: list[Any]  # what torch.compile returned, or fxwrap made of it, or made ahead of time
    around: Callable[[], contextlib.AbstractContextManager[Any]]  # what makes the context of timed calls
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


def build(name: str, workload: Workload, template: nn.Module, inputs: tuple[Any, ...], device: str) -> Side:
    """Compile an alternative on a copy of a model, and call it until it is steady."""
    module = copy.deepcopy(template)
    around = contextlib.nullcontext if name == AGAIN else ALTERNATIVES[name].around
    step, functions = prepared(name, workload, module, inputs, device)

    def result() -> Tensor:
        return torch.as_tensor(step()).detach().clone()  # ONNX Runtime's are arrays

    results = [result() for _ in range(_CHECKED)]
    with around():
        results.append(result())
        if workload.training:
            results += [parameter.detach().clone() for parameter in module.parameters()]
        for _ in range(_WARM):
            step()
    if name == "graph by hand":
        step = captured(step, workload)
    return Side(name, step, results, functions, around)


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


# Before any row sets another.
_DEFAULT_THREADS = torch.get_num_threads()


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
    around: Mapping[Any, Callable[[], contextlib.AbstractContextManager[Any]]] | None = None,
    least: int = 12,
) -> dict[Any, list[float]]:
    """Time all functions again and again, in random order: who runs after whom makes a difference.

    Args:
        around: what makes the context of a function's turn, by name; a name may be missing.

    Returns:
        Microseconds a call, by name and turn.
    """

    def turn_of(name: Any, calls: int) -> float:
        with (around or {}).get(name, contextlib.nullcontext)():
            return slot(functions[name], calls, device, clock)

    calls = {name: max(1, int(_SLOT * 1e6 / min(turn_of(name, 5) for _ in range(3)))) for name in functions}
    us, order = {name: list[float]() for name in functions}, random.Random(0)
    gc.collect()
    gc.freeze()
    end, turn = time.perf_counter() + seconds, 0
    while turn < least or time.perf_counter() < end:
        for name in order.sample(list(functions), len(functions)):
            us[name].append(turn_of(name, calls[name]))
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
            if workload.training and alternative != AGAIN and not ALTERNATIVES[alternative].trains:
                continue
            try:
                sides.append(build(alternative, workload, template, inputs, args.device))
            except Exception as error:
                message, *_ = str(error).strip().splitlines() or [""]
                failed[alternative] = f"{type(error).__name__}: {message[:200]}"
                print(f"{name}, {alternative}: {failed[alternative]}", file=sys.stderr)
        if not sides:
            raise SystemExit(f"{name}: no alternative ran")
        by_name = {side.name: side for side in sides}
        steps, around = ({side.name: getattr(side, what) for side in sides} for what in ("step", "around"))
        timed = take_turns(steps, args.seconds, args.device, clock, around)
        for side in sides:
            side.us = timed[side.name]
        reference = by_name.get(REFERENCE, sides[0])
        own = [by_name[name] for name in OWN if name in by_name]
        return {
            "group": workload.group,
            "turns": len(sides[0].us),
            "alternatives": {
                side.name: {
                    "us": round(statistics.median(side.us), 3),
                    "us_quartiles": quartiles(side.us),
                    "difference": difference(side.results, reference.results),
                    **ratios(own, side),
                    **({"not_replayed": not_replayed(side)} if side.name in OWN[1:] else {}),
                }
                for side in sides
            },
            "failed": failed,
            **({"not_replayed": not_replayed(by_name[OURS])} if OURS in by_name else {}),
            **({} if workload.training else {"parts": parts(sides, args)}),
        }


def ratios(own: list[Side], other: Side) -> dict[str, Any]:
    """Quartiles of the time of each of fxwrap's sides by another's: ``ratio`` of what is compiled, ``ratios`` of the
    others by name."""
    by_name = {
        side.name: quartiles([a / b for a, b in zip(side.us, other.us, strict=True)])
        for side in own
        if side is not other
    }
    compiled = by_name.pop(OURS, None)
    return {**({"ratio": compiled} if compiled else {}), **({"ratios": by_name} if by_name else {})}


def not_replayed(side: Side, calls: int = 10) -> dict[str, int]:
    """What fxwrap does in a few more calls that is no replay, or goes around what is bound, by reason; and what fell
    back to Inductor."""
    import fxwrap

    def counted() -> Counter[str]:
        counters = (fxwrap.stats(function) for function in side.functions)
        return sum((Counter(some["eager"]) + Counter(some.get("ordinary", {})) for some in counters), Counter())

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


def in_processes(args: argparse.Namespace) -> list[str]:
    """The alternatives that are measured in processes of their own."""
    return [name for name in args.alternatives if ALTERNATIVES[name].ahead is None]


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
                for number, alternative in enumerate(in_processes(args)):
                    got = in_a_process("start", name, alternative, args, f"{folder}/{number}")
                    if got is not None:
                        found.setdefault(alternative, {}).setdefault(caches, []).append(round(got["seconds"], 3))
    return found


# -- the command ----------------------------------------------------------------------------------------------------


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
    parser.add_argument("--models", nargs="+", metavar="MODEL", choices=WORKLOADS)
    parser.add_argument("--alternatives", nargs="+", metavar="ONE", choices=ALTERNATIVES)
    parser.add_argument("--max-autotune", action="store_true", help="with max-autotune, too")
    parser.add_argument("--seconds", type=float, default=8.0, help="of timing, a model (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU, in most rows (default: %(default)s)")
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
    if args.models is None:
        args.models = [name for name, one in WORKLOADS.items() if args.device == "cpu" or not one.all_threads]
    torch.set_num_threads(args.threads)
    torch._logging.set_logs(all=logging.ERROR)
    if args.one:
        what, name, alternative = args.one
        print(json.dumps({"start": first_call, "memory": peak}[what](name, alternative, args.device)))
        return 0
    asked = args.alternatives or defaults(args.device, args.max_autotune)
    without = {name: why for name in asked if (why := why_not(name, args.device))}
    for name, why in without.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    args.alternatives = [name for name in asked if name not in without]
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
        args.threads = _DEFAULT_THREADS if WORKLOADS[name].all_threads else found["threads"]
        torch.set_num_threads(args.threads)
        try:
            row = found["models"][name] = {"threads": args.threads, **measure(name, args)}
        except ModuleNotFoundError as missing:
            print(f"{name}: skipped: {missing}", file=sys.stderr)
            continue
        if args.start:
            row["start"] = starts(name, args)
        if args.memory:
            peaks = {one: in_a_process("memory", name, one, args) for one in in_processes(args)}
            row["peak_bytes"] = {one: got["bytes"] for one, got in peaks.items() if got is not None}
        print(f"{name}: {progress(row)}", file=sys.stderr, flush=True)
    found["means"] = means(found["models"], OURS)
    found["means_of"] = {name: means(found["models"], name) for name in OWN[1:] if name in args.alternatives}
    show(found)
    show_parts(found["models"], _IN_PARTS)
    show_processes(found["models"], in_processes(args))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.picture:
        from speed_picture import picture

        args.picture.write_text(picture(found))
    if wrong := list(wrong_numbers(found)):
        print(f"failed, or has other numbers: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def wrong_numbers(found: dict[str, Any]) -> Iterator[str]:
    """The models and alternatives with numbers other than the reference's, and where fxwrap failed."""
    for model, row in found["models"].items():
        exact = found["device"] == "cpu" and row["threads"] == 1
        yield from (f"{model}, {name}" for name in OWN if name in row["failed"])
        for name, entry in row["alternatives"].items():
            # AdamW divides by what may be next to nothing: a training step's rounding may differ by any amount.
            allowed = 0.0 if name in EXACT and exact else _TOLERANCE
            if entry["difference"] > allowed and (name in OWN or not WORKLOADS[model].training):
                yield f"{model}, {name}"


if __name__ == "__main__":
    sys.exit(main())
