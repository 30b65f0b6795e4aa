"""Which operators become host graphs, and whether they compute what Inductor's own wrapper computes.

    python benchmarks/coverage.py                        # every operator of torch's own table, forward and backward
    python benchmarks/coverage.py --dynamic --every 5    # a fifth of them, with dynamic shapes
    python benchmarks/coverage.py --modules              # torch.nn modules instead
    python benchmarks/coverage.py --only 'fft|linalg'    # by name
    python -m hostcuda benchmarks/coverage.py --device cuda --every 4     # on the emulated device

Each entry is compiled by both, called three times (for fxwrap: warm-up, recording, replay) with the same seeds, and
compared bit for bit, gradients included. Entries run in worker processes; what is done is kept in a file
(``--results``), so that a run that was cut goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# Results without a value: memory as it was found.
UNDEFINED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
    "resize_as_",
}  # fmt: skip

CALLS = 3


@dataclass(frozen=True)
class Outcome:
    """What became of one entry.

    ``verdict``: "equal", "different", "fell back", "fxwrap failed", "Inductor failed", "crashed", "nothing compiled"
    (Dynamo handed nothing to either, and the numbers are equal), or "no sample".
    """

    name: str
    verdict: str
    reason: str = ""
    backward: bool = False
    replays: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Case:
    """A function and what to call it with. ``make`` returns the same numbers at every call."""

    function: Callable[..., Any]
    make: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    parameters: Callable[[], Iterable[Any]] = tuple


# -- entries -------------------------------------------------------------------------------------------------------


def operator_entries(device: str) -> dict[str, Callable[[], Case | None]]:
    from torch.testing._internal.common_methods_invocations import op_db

    entries: dict[str, Callable[[], Case | None]] = {}
    for op in op_db:
        if op.supports_dtype(torch.float32, device) and op.name.split(".")[-1] not in UNDEFINED:
            variant = f" ({op.variant_test_name})" if op.variant_test_name else ""
            entries[op.name + variant] = _operator_case(op, device)
    return entries


def _operator_case(op: Any, device: str) -> Callable[[], Case | None]:
    def case() -> Case | None:
        samples = list(op.sample_inputs(device, torch.float32, requires_grad=op.supports_autograd))
        if not samples:
            return None
        sample = samples[len(samples) // 2]

        def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
            fresh = torch.utils._pytree.tree_map(_clone, (sample.input, sample.args, sample.kwargs))
            return (fresh[0], *fresh[1]), fresh[2]

        return Case(lambda *args, **kwargs: op.op(*args, **kwargs), make)

    return case


def module_entries(device: str) -> dict[str, Callable[[], Case | None]]:
    from torch.testing._internal.common_modules import module_db

    return {
        f"{info.name} ({'training' if training else 'evaluation'})": _module_case(info, training, device)
        for info in module_db
        for training in (False, True)
        if torch.float32 in info.dtypes
    }


def _module_case(info: Any, training: bool, device: str) -> Callable[[], Case | None]:
    def case() -> Case | None:
        inputs = info.module_inputs_func(
            info, device=device, dtype=torch.float32, requires_grad=training, training=training
        )
        inputs = [sample for sample in inputs if sample.forward_input is not None]
        if not inputs:
            return None
        sample = inputs[len(inputs) // 2]
        construct = sample.constructor_input
        torch.manual_seed(0)
        module = info.module_cls(*construct.args, **construct.kwargs).to(device, torch.float32).train(training)
        if any(map(torch.nn.parameter.is_lazy, module.parameters())):
            # A lazy module gets its parameters at its first call.
            module(*sample.forward_input.args, **sample.forward_input.kwargs)
        state = copy.deepcopy(module.state_dict())

        def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
            module.load_state_dict(copy.deepcopy(state))
            return torch.utils._pytree.tree_map(_clone, (sample.forward_input.args, sample.forward_input.kwargs))

        return Case(lambda *args, **kwargs: module(*args, **kwargs), make, module.parameters)

    return case


def _clone(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    clone = value.detach().clone()
    if clone.stride() != value.stride():
        with contextlib.suppress(RuntimeError):
            clone = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).copy_(value.detach())
    return clone.requires_grad_(value.requires_grad)


# -- one entry -----------------------------------------------------------------------------------------------------


def examine(name: str, make_case: Callable[[], Case | None], dynamic: bool) -> Outcome:
    """Compile an entry with both, call it, compare."""
    import functools

    from fxwrap.backend import fxwrap
    from fxwrap.graphs.compilation import Compilation

    start = time.monotonic()
    torch.manual_seed(0)
    random.seed(0)
    case = make_case()
    if case is None:
        return Outcome(name, "no sample")
    compilation = Compilation()
    with contextlib.suppress(Exception):
        calls(case, case.function)  # what an operator caches at its first call is there for both
    expected = attempt(case, "inductor", dynamic)
    if isinstance(expected, BaseException):
        return Outcome(name, "Inductor failed", _first_line(expected), seconds=time.monotonic() - start)
    got = attempt(case, functools.partial(fxwrap, compilation=compilation), dynamic)
    replays = sum(program.counters.replays for program in compilation.programs)
    backward = any(len(gradients) > 0 for _, gradients in expected)

    def outcome(verdict: str, reason: str = "") -> Outcome:
        return Outcome(name, verdict, reason, backward, replays, round(time.monotonic() - start, 2))

    if isinstance(got, BaseException):
        return outcome("fxwrap failed", _first_line(got))
    for call, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for what, a, b in zip(("result", "gradient"), mine, theirs, strict=True):
            difference = compare(a, b)
            if difference:
                return outcome("different", f"{what} of call {call + 1}: {difference}")
    if compilation.fallbacks:
        return outcome("fell back", "; ".join(" ".join(reason.split()) for reason in compilation.fallbacks))
    return outcome("equal" if compilation.programs else "nothing compiled")


def attempt(case: Case, backend: Any, dynamic: bool) -> Any:
    """Results and gradients of each call, or the exception."""
    torch._dynamo.reset()
    # A function object of its own: two backends on one code object disturb each other's guards.
    function = torch.compile(lambda *args, **kwargs: case.function(*args, **kwargs), backend=backend, dynamic=dynamic)
    try:
        return calls(case, function)
    except Exception as error:
        return error


@contextlib.contextmanager
def everything_in_graphs() -> Iterator[None]:
    """Have Dynamo compile what reads numbers and sizes out of data, and what torch's table seeds in a wrapper.

    Seeds are set here before every call; the table's wrapper is no code that Dynamo takes.
    """
    from torch.testing._internal import common_methods_invocations

    def unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    settings = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with (
        torch._dynamo.config.patch(settings),
        mock.patch.object(common_methods_invocations, "wrapper_set_seed", unseeded),
    ):
        yield


def calls(case: Case, function: Callable[..., Any]) -> list[tuple[list[Any], list[Any]]]:
    outcomes = []
    for call in range(CALLS):
        args, kwargs = case.make()
        torch.manual_seed(call)
        random.seed(call)
        results = leaves(function(*args, **kwargs))
        inputs = [t for t in leaves((args, kwargs, list(case.parameters()))) if t.requires_grad and t.is_leaf]
        chosen = [t for t in results if t.requires_grad]
        gradients: list[Any] = []
        if inputs and chosen:
            weights = [torch.ones_like(t) for t in chosen]
            gradients = [g for g in torch.autograd.grad(chosen, inputs, weights, allow_unused=True) if g is not None]
        outcomes.append(([t.detach().clone() for t in results], [g.detach().clone() for g in gradients]))
    return outcomes


def leaves(value: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def compare(mine: list[Any], theirs: list[Any]) -> str:
    """What differs first; empty if nothing does. NaN equals NaN."""
    if len(mine) != len(theirs):
        return f"{len(mine)} tensors, expected {len(theirs)}"
    for position, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"tensor {position} is {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
        x, y = plain(a), plain(b)
        if not torch.equal(x.isnan(), y.isnan()) or not torch.equal(x.nan_to_num(), y.nan_to_num()):
            wrong = (x != y) & ~(x.isnan() & y.isnan())
            return f"tensor {position} differs in {int(wrong.sum())} of {x.numel()} elements"
    return ""


def plain(tensor: Any) -> Any:
    """A dense real tensor with the same numbers."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


# -- all of them ---------------------------------------------------------------------------------------------------


def work(names: list[str], arguments: argparse.Namespace) -> None:
    """In a worker process: examine entries, a line of JSON each on standard output."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    entries = (module_entries if arguments.modules else operator_entries)(arguments.device)
    for name in names:
        print(json.dumps({"begun": name}), flush=True)
        try:
            with everything_in_graphs():
                outcome = examine(name, entries[name], arguments.dynamic or None)
            if outcome.verdict == "Inductor failed":
                # Perhaps only at what Dynamo would have left out.
                outcome = examine(name, entries[name], arguments.dynamic or None)
        except Exception as error:
            outcome = Outcome(name, "no sample", _first_line(error))
        print(json.dumps(asdict(outcome)), flush=True)


def outcomes(names: list[str], arguments: argparse.Namespace) -> Iterator[Outcome]:
    """Outcomes in the order in which workers have them; a crash costs the entry that was begun."""
    left = list(names)
    while left:
        flags = ["--modules"] * arguments.modules + ["--dynamic"] * arguments.dynamic
        flags += ["--device", arguments.device]
        emulated = ["-m", "hostcuda"] if "hostcuda" in sys.modules else []
        with tempfile.TemporaryDirectory(prefix="fxwrap-coverage-") as cache:
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(arguments.cache or cache)}
            # A process takes a part: what torch remembers of hundreds of compilations slows it down.
            part = left[: arguments.part]
            worker = subprocess.Popen(
                [sys.executable, *emulated, __file__, *flags, "--work", json.dumps(part)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            assert worker.stdout is not None
            begun = ""
            try:
                for line in worker.stdout:
                    with contextlib.suppress(json.JSONDecodeError, TypeError):
                        fields = json.loads(line)
                        if "begun" in fields:
                            begun = fields["begun"]
                        else:
                            begun = ""
                            left.remove(fields["name"])
                            yield Outcome(**fields)
                worker.wait()
            finally:
                worker.kill()  # whoever reads may have had enough
                worker.wait()
            if worker.returncode != 0 and not begun:
                raise SystemExit(f"the worker ended with {worker.returncode} before it began an entry")
            if begun:
                left.remove(begun)
                yield Outcome(begun, "crashed", f"the process ended with {worker.returncode}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", action="store_true", help="torch.nn modules instead of operators")
    parser.add_argument("--device", default="cpu", help="where operands lie")
    parser.add_argument("--dynamic", action="store_true", help="compile with dynamic=True")
    parser.add_argument("--only", metavar="REGEX", default="", help="entries whose name matches")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one of N entries, chosen by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="stop after so long; the order is shuffled by --seed")
    parser.add_argument("--at-least", type=int, default=0, metavar="N", help="entries that --seconds waits for")
    parser.add_argument("--results", type=Path, help="file of what is done, read first and added to")
    parser.add_argument("--cache", type=Path, help="of kernels, and kept; without it, each worker begins with none")
    parser.add_argument("--part", type=int, default=40, help="entries that one worker process takes")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.work is not None:
        work(json.loads(arguments.work), arguments)
        return 0

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    names = list((module_entries if arguments.modules else operator_entries)(arguments.device))
    names = [name for name in names if re.search(arguments.only, name)]
    chooser = random.Random(arguments.seed)
    if arguments.every > 1:
        names = sorted(chooser.sample(names, max(1, len(names) // arguments.every)))
    if arguments.seconds:
        chooser.shuffle(names)
    done = _read(arguments.results)
    found = [done[name] for name in names if name in done]
    todo = [name for name in names if name not in done]
    console = Console(stderr=True)
    deadline = time.monotonic() + arguments.seconds if arguments.seconds else None
    columns = (TextColumn("{task.description:40.40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress, contextlib.ExitStack() as stack:
        file = stack.enter_context(open(arguments.results, "a")) if arguments.results else None
        task = progress.add_task("", total=len(names), completed=len(found))
        for outcome in outcomes(todo, arguments):
            found.append(outcome)
            progress.update(task, advance=1, description=outcome.name)
            if file is not None:
                print(json.dumps(asdict(outcome)), file=file, flush=True)
            if outcome.verdict not in ("equal", "nothing compiled", "Inductor failed", "no sample"):
                progress.console.print(f"{outcome.name}: {outcome.verdict}: {outcome.reason}", soft_wrap=True)
            if deadline is not None and time.monotonic() > deadline and len(found) >= arguments.at_least:
                break
    show(found)
    return 1 if any(o.verdict in ("different", "fell back", "fxwrap failed", "crashed") for o in found) else 0


def _read(path: Path | None) -> dict[str, Outcome]:
    if path is None or not path.exists():
        return {}
    lines = path.read_text().splitlines()
    return {outcome.name: outcome for outcome in (Outcome(**json.loads(line)) for line in lines if line)}


def show(found: list[Outcome]) -> None:
    """The table: how many of each verdict, then every entry that is not equal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    counts = Counter(outcome.verdict for outcome in found)
    table = Table(title=f"torch {torch.__version__}: {len(found)} entries", show_header=True)
    for column in ("verdict", "entries", "with backward", "replayed"):
        table.add_column(column, justify="left" if column == "verdict" else "right")
    for verdict, count in counts.most_common():
        of = [outcome for outcome in found if outcome.verdict == verdict]
        table.add_row(verdict, str(count), str(sum(o.backward for o in of)), str(sum(o.replays > 0 for o in of)))
    console.print(table)
    for outcome in sorted(found, key=lambda o: (o.verdict, o.name)):
        if outcome.verdict != "equal":
            console.print(f"{outcome.verdict}: {outcome.name}: {outcome.reason}", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
