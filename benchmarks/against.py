"""This tree against another checkout of fxwrap: the time of a step of ten models, inference and training.

    python benchmarks/against.py ../before                        # is this tree slower than the one at ../before?
    python benchmarks/against.py ../before --models gpt2 bert --modes inference

Each tree has a process of its own, which compiles a model, warms up, and then runs some steps whenever it is asked
to. They are asked in turn, so that one of them runs at a time; the ratios are those of neighbouring turns, this
tree's time by the other's. Times are those of the processor, so that whatever else the machine does counts for less,
and both run on the same one: on a rented machine two of them differ by a half at times.
A training step is the loss, computed inside of the compiled function, its backward, and gradients set to None.

Processes differ by a few percent in where their memory lies, which more turns do not change; the mean over all models
does, and --rounds, which starts each of them anew. Exit code 1 if the geometric mean of all ratios is above 1 by more
than the tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timing import geometric_mean

ROOT = Path(__file__).resolve().parent.parent
MODES = ("inference", "training")
WARM = 20
# Seconds of steps before every turn that nobody counts: whoever has waited has lost its caches to the other.
AWAKE = 0.004


# -- the worker -----------------------------------------------------------------------------------------------------


def step_of(name: str, mode: str) -> Callable[[], None]:
    """One step of a model, compiled."""
    import torch
    from memory_peak import loss_of, models

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, fresh = models()[name]()
    model, inputs = model.train(mode == "training"), fresh()

    def run(**values: Any) -> Any:
        return model(**values) if mode == "inference" else loss_of(model(**values))

    compiled = torch.compile(run, backend="fxwrap")

    def inference() -> None:
        with torch.no_grad():
            compiled(**inputs)

    def training() -> None:
        model.zero_grad(set_to_none=True)
        compiled(**inputs).backward()

    return inference if mode == "inference" else training


def work(name: str, mode: str) -> None:
    """Compile, then answer on standard output: to every number of steps that comes in, the seconds they took."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no answer
    import fxwrap

    step = step_of(name, mode)
    for _ in range(WARM):
        step()
    gc.collect()
    gc.freeze()
    print(json.dumps(str(Path(fxwrap.__file__).resolve().parent.parent)), file=answers)
    for line in sys.stdin:
        gc.collect()
        begin = time.perf_counter()
        while time.perf_counter() - begin < AWAKE:
            step()
        begin = time.process_time()
        for _ in range(int(line)):
            step()
        print(json.dumps(time.process_time() - begin), file=answers)


# -- who asks -------------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A process that has a model compiled by one tree."""

    process: subprocess.Popen[str]
    errors: Path
    what: str

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.what} failed:\n{self.errors.read_text()[-3000:]}")
        return json.loads(line)

    def seconds(self, steps: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return float(self.answer())


@contextlib.contextmanager
def worker(tree: Path, name: str, mode: str, cache: Path, seed: int) -> Iterator[Worker]:
    """Compiled and warm. What is compiled is kept for the next time, for each tree by itself.

    Args:
        seed: of Python's hashes, on which the order of sets depends.
    """
    kept = cache / hashlib.sha256(str(tree).encode()).hexdigest()[:12]
    kept.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "TORCHINDUCTOR_CACHE_DIR": str(kept),
        # Nothing else runs while somebody is timed.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": str(seed),
    }
    command = [sys.executable, __file__, str(tree), "--work", name, mode]
    with tempfile.NamedTemporaryFile("w", suffix=".log") as errors:
        process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            made = Worker(process, Path(errors.name), f"{name}, {mode}, in {tree}")
            used = made.answer()
            if used != str(tree):
                raise SystemExit(f"{made.what} ran the fxwrap of {used}")
            yield made
        finally:
            process.kill()
            process.communicate()


@dataclass(frozen=True)
class Found:
    """Medians in microseconds a step, and the median of the ratios of neighbouring turns."""

    this: float
    other: float
    ratio: float


def turns(this: Worker, other: Worker, pairs: int, steps: int) -> list[tuple[float, float]]:
    """Seconds of each, one at a time; neither always goes first."""
    for one in (this, other):
        one.seconds(steps)
    measured = []
    for turn in range(pairs):
        if turn % 2:
            b, a = other.seconds(steps), this.seconds(steps)
        else:
            a, b = this.seconds(steps), other.seconds(steps)
        measured.append((a, b))
    return measured


def compare(this: Path, other: Path, name: str, mode: str, args: argparse.Namespace) -> Found:
    """One model: all turns of all rounds."""
    measured = []
    for number in range(args.rounds):
        made = functools.partial(worker, name=name, mode=mode, cache=args.cache, seed=number)
        with made(this) as first, made(other) as second:
            measured += turns(first, second, args.pairs, args.steps)
    return Found(
        statistics.median(a for a, _ in measured) / args.steps * 1e6,
        statistics.median(b for _, b in measured) / args.steps * 1e6,
        statistics.median(a / b for a, b in measured),
    )


def means(found: dict[tuple[str, str], Found]) -> dict[str, float]:
    """Of the ratios, by mode, and of all."""
    by_mode = {mode: [one.ratio for (_, its), one in found.items() if its == mode] for mode in MODES}
    return {
        **{mode: geometric_mean(ratios) for mode, ratios in by_mode.items() if ratios},
        "all": geometric_mean([one.ratio for one in found.values()]),
    }


def show(found: dict[tuple[str, str], Found], this: Path, other: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "mode", title=f"microseconds a step: {this} by {other}")
    for column in ("this tree", "the other", "ratio"):
        table.add_column(column, justify="right")
    for (name, mode), one in found.items():
        table.add_row(name, mode, f"{one.this:,.1f}", f"{one.other:,.1f}", f"{one.ratio:.3f}")
    table.add_section()
    for which, mean in means(found).items():
        table.add_row("geometric mean", which, "", "", f"{mean:.4f}")
    Console(width=120).print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the other checkout")
    parser.add_argument("--this", type=Path, default=ROOT, help="instead of the tree that this file is in")
    parser.add_argument("--models", nargs="+", help="default: the ten of tests/models.py")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--pairs", type=int, default=150, help="turns of each tree (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="new processes for each model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of the mean of all (default: %(default)s)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(tempfile.gettempdir()) / "fxwrap-against",
        help="where what Inductor compiles is kept between runs (default: %(default)s)",
    )
    parser.add_argument("--work", nargs=2, metavar=("MODEL", "MODE"), help=argparse.SUPPRESS)
    parser.add_argument("--processor", type=int, help="on which both run (default: the last)")
    args = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0)) if args.processor is None else args.processor})
    if args.work:
        work(*args.work)
        return 0
    sys.path.insert(0, str(ROOT / "tests"))
    from models import MODELS

    this, other = args.this.resolve(), args.path.resolve()
    found: dict[tuple[str, str], Found] = {}
    for name in args.models or MODELS:
        for mode in args.modes:
            one = found[name, mode] = compare(this, other, name, mode, args)
            line = f"{name} {mode}: {one.this:,.1f} / {one.other:,.1f} us, {one.ratio:.3f}"
            print(line, file=sys.stderr, flush=True)
    show(found, this, other)
    return int(means(found)["all"] > 1 + args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
