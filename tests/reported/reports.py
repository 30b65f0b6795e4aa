"""A public report on CUDA graph trees, as a test has it; and the page that is made of them, docs/reported.md.

The body of a test runs in two ways. In the test it is compiled with fxwrap. In ``test_trees``, on hostcuda and in a
process of its own, it is compiled with ``mode="reduce-overhead"``; what happens is compared with what the test says::

    python -m hostcuda tests/reported/reports.py 170604 152887    # what graph trees do
    python tests/reported/reports.py                              # writes docs/reported.md
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
PAGE = ROOT / "docs" / "reported.md"
sys.path[:0] = [path for path in (str(FOLDER.parent), str(FOLDER)) if path not in sys.path]

import torch  # noqa: E402
from conftest import assert_same, inductor  # noqa: E402
from faults import bytes_in_use  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch._inductor.cudagraph_trees import reset_cudagraph_trees  # noqa: E402

import fxwrap  # noqa: E402


class Wrong(AssertionError):
    """Other numbers than those of Inductor's own wrapper."""


@dataclass
class Way:
    """How the body of a test compiles: with graph trees here, with fxwrap in ``Ours``."""

    device: torch.device

    def compile(self, fn: Callable[..., Any], options: Any = None, **settings: Any) -> Callable[..., Any]:
        """Options are fxwrap's."""
        return torch.compile(fn, mode="reduce-overhead", **settings)

    def both(
        self, fn: Callable[..., Any], options: Any = None, **settings: Any
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """A function compiled, and compiled by Inductor with its default wrapper; a module is copied for that."""
        theirs = inductor(fn, **settings)
        return self.compile(fn, options, **settings), theirs

    def randn(self, *size: int, **settings: Any) -> torch.Tensor:
        return torch.randn(*size, device=self.device, **settings)

    def same(self, got: Any, expected: Any) -> None:
        """Compare bit for bit."""
        try:
            assert_same(got, expected)
        except AssertionError as error:
            raise Wrong(*error.args) from error

    def replays(self, least: int) -> None:
        """So many calls of programs were replays."""

    def recordings(self, most: int) -> None:
        """So many recordings have been made."""

    def kept(self, most: int) -> None:
        """A program keeps so many recordings."""

    def forget(self) -> None:
        """Hold nothing that has been compiled."""

    def memory(self) -> int:
        """Bytes that are allocated on the device."""
        return bytes_in_use(self.device)

    def falls_back(self, why: str) -> None:
        """All programs run through Inductor's own wrapper, and the report says why."""

    def runs_eagerly(self, why: str) -> None:
        """All programs run eagerly, and the report says why."""

    def verdicts(self, *expected: str) -> None:
        """What becomes of the partitions of the only program."""


@dataclass
class Ours(Way):
    compiled: Callable[..., Any]  # the fixture
    made: list[Any] = field(default_factory=list)

    def compile(self, fn: Callable[..., Any], options: Any = None, **settings: Any) -> Callable[..., Any]:
        self.made.append(self.compiled(fn, **({"options": options} if options else {}), **settings))
        return self.made[-1]

    def _counters(self) -> list[Any]:
        assert not any(made.compilation.fallbacks for made in self.made)
        return [program.counters for program in self._programs()]

    def _programs(self) -> list[Any]:
        return [program for made in self.made for program in made.programs]

    def replays(self, least: int) -> None:
        counters = self._counters()
        assert sum(one.replays for one in counters) >= least, [one.to_dict() for one in counters]

    def recordings(self, most: int) -> None:
        counters = self._counters()
        assert sum(sum(one.recordings.values()) for one in counters) <= most, [one.to_dict() for one in counters]

    def kept(self, most: int) -> None:
        for program in self._programs():
            assert len(program.specializations.recordings()) <= most

    def forget(self) -> None:
        self.made.clear()

    def runs_eagerly(self, why: str) -> None:
        for one in self._counters():
            assert not one.replays and any(why in reason for reason in one.eager), one.to_dict()

    def falls_back(self, why: str) -> None:
        reasons = [reason for made in self.made for reason in made.compilation.fallbacks]
        assert reasons and all(why in reason for reason in reasons) and not self._programs(), reasons

    def verdicts(self, *expected: str) -> None:
        (program,) = self._programs()
        assert [partition.verdict.value for partition in program.plan.partitions] == list(expected)


def parameters_of(f: Any) -> list[torch.nn.Parameter]:
    """The parameters of a module that was compiled."""
    return list(getattr(f, "fn", getattr(f, "_orig_mod", f)).parameters())


@dataclass(frozen=True)
class Report:
    """
    Args:
        number: of pytorch's issue.
        symptom: what the thread says, in one line.
        seen: how the test ends with graph trees of torch 2.14.1 on hostcuda: ``right, 3 captures``; or ``wrong``,
            ``raises``, ``crashes``, and words of the message.
        trees: the same for readers.
        fxwrap: what the test asserts.
    """

    number: int
    symptom: str
    seen: str
    trees: str
    fxwrap: str
    body: Callable[[Way], None]

    @property
    def module(self) -> str:
        return self.body.__module__


def reported(
    number: int, *, symptom: str, seen: str, trees: str, fxwrap: str
) -> Callable[[Callable[[Way], None]], Callable[..., None]]:
    """A test of a report. Its body gets the way to compile."""

    def make(body: Callable[[Way], None]) -> Callable[..., None]:
        def test(compiled: Any, device: torch.device) -> None:
            body(Ours(device, compiled))

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.report = Report(number, symptom, seen, trees, fxwrap, body)  # type: ignore[attr-defined]
        return test

    return make


def reports() -> list[Report]:
    """All, in the order of files and lines."""
    modules = [importlib.import_module(path.stem) for path in sorted(FOLDER.glob("test_reported_*.py"))]
    return [test.report for module in modules for test in vars(module).values() if hasattr(test, "report")]


# -- steps of training ---------------------------------------------------------------------------------------------


@dataclass
class Steps:
    """How the loop of a report trains: eagerly, or in the way of a subclass."""

    def make(
        self, make_optimizer: Callable[..., torch.optim.Optimizer]
    ) -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
        """A step of a small model, and its optimizer."""
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = make_optimizer(model.parameters())
        return self.step_of(model, optimizer), optimizer

    def step_of(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
        update = self.update_of(optimizer)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            update()
            optimizer.zero_grad()
            return loss.detach()

        return step

    def update_of(self, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        return lambda: optimizer.step()  # a scheduler that comes later replaces ``step``


class UpdatesCompiled(Steps):
    """With the optimizer's step compiled by itself."""

    def update_of(self, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        return torch.compile(super().update_of(optimizer))


@dataclass
class StepsCompiled(Steps):
    """With ``fxwrap.train_step``."""

    made: Any = None

    def step_of(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
        self.made = fxwrap.train_step(model, lambda model, x: model(x).square().mean(), optimizer)
        return self.made


@dataclass(frozen=True)
class TrainingReport:
    """
    Args:
        number, symptom: as in ``Report``.
        ours: what the test asserts of ``fxwrap.train_step``.
        inductor: what becomes of ``torch.compile(optimizer.step)`` in the same loop with torch 2.13.
    """

    number: int
    symptom: str
    inductor: str
    ours: str
    body: Callable[[Steps], Any]


def reported_training(
    number: int, *, symptom: str, graphs: int, inductor: str, ours: str, programs: int = 1
) -> Callable[[Callable[[Steps], Any]], Callable[[], None]]:
    """A test of a report on steps of training. Its body is a loop that yields what a user sees.

    Args:
        graphs: so many graphs of the optimizer's step does torch 2.13 compile.
        programs: so many does ``fxwrap.train_step``.
    """

    def make(body: Callable[[Steps], Any]) -> Callable[[], None]:
        def test() -> None:
            expected, steps = list(body(Steps())), StepsCompiled()
            torch.testing.assert_close(list(body(steps)), expected)
            stats = fxwrap.stats(steps.made)
            assert stats["programs"] == programs and not stats["fallbacks"], stats
            before = counters["stats"]["unique_graphs"]
            torch.testing.assert_close(list(body(UpdatesCompiled())), expected)
            if torch.__version__.startswith("2.13"):
                assert counters["stats"]["unique_graphs"] - before == graphs

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.training = TrainingReport(number, symptom, inductor, ours, body)  # type: ignore[attr-defined]
        return test

    return make


def training_reports() -> list[TrainingReport]:
    module = importlib.import_module("test_reported_training")
    return [test.training for test in vars(module).values() if hasattr(test, "training")]


# -- with graph trees ----------------------------------------------------------------------------------------------


def _counters() -> list[int]:
    import hostcuda

    return [hostcuda.counter(name) for name in ("captures", "graph_launches")]


def _seen(body: Callable[[Way], None]) -> str:
    """How a body ends with graph trees; a crash ends the process."""
    torch._dynamo.reset()
    reset_cudagraph_trees()
    torch.manual_seed(0)
    before = _counters()
    try:
        body(Way(torch.device("cuda", 0)))
    except Wrong as error:
        return f"wrong {error}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    captures, launches = (now - then for now, then in zip(_counters(), before, strict=True))
    return f"right, {captures} captures, {launches} launches"


def seen_with_trees() -> dict[int, str]:
    """How the body of each report ends, by its number: one after another in a process of their own. Where that
    crashes, the rest runs in another one."""
    ended: dict[int, str] = {}
    left = [one.number for one in reports()]
    while left:
        command = [sys.executable, __file__, *map(str, left)]
        run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        for line in run.stdout.splitlines():
            number, _, outcome = line.partition(" ")
            if number.isdigit():
                ended[int(number)] = outcome
        crashed = next((number for number in left if ended.get(number, "begins") == "begins"), None)
        if crashed is not None:
            ended[crashed] = f"crashes, {run.returncode}: {run.stderr[-300:]}"
        left = [number for number in left if number not in ended]
    return ended


def _print_seen(numbers: list[int]) -> None:
    for one in reports():
        if one.number in numbers:
            print(one.number, "begins", flush=True)
            print(one.number, _seen(one.body).partition("\n")[0], flush=True)


# -- the page ------------------------------------------------------------------------------------------------------

_TITLES = {
    "outputs": "Outputs and gradients", "mutation": "Mutation", "partitions": "Partitions", "sizes": "Sizes",
    "threads": "Threads", "memory": "Memory",
}  # fmt: skip
_HEAD = """# Public reports

pytorch's issues have reports on CUDA graph trees (`mode="reduce-overhead"`), graph partition, memory planning and
dynamic shapes. Each row is one of them, and a test of a program like the reported one, written anew from the
description. It runs on the CPU, on the simulated device and on [hostcuda](../hostcuda/README.md). Results are
Inductor's default wrapper's, bit for bit.

The third column says what graph trees of torch 2.14.1 did in the same test on hostcuda, in a process of their own; a
test compares it with what they do. "As reported" is the message or the behaviour of the report. "Not seen" means that
the report's symptom did not show: it may be repaired, or need a GPU, the whole model or another version of torch.

`tests/reported/reports.py` makes this page from the tests.
"""


_TRAINING = """## Training

The optimizer's step, compiled by itself, on the CPU with torch 2.13, and `fxwrap.train_step` in the same loop. Losses
are the eager loop's ([tests](../tests/reported/test_reported_training.py)).

| report | symptom | `torch.compile(optimizer.step)` | `fxwrap.train_step` |
|---|---|---|---|"""
_MANY_SIZES = """## The same program, many sizes

A server's and a trainer's mix of sizes (#188150, #196385), 500 calls each, by
`python -m hostcuda benchmarks/many_sizes.py` (2026-11-30, torch 2.14.1, nothing computed, on a machine with other
work). "server" draws 1 to 64 rows, small numbers more often; "trainer" one of eight lengths, forward and backward;
"behind" has an operator of dynamic size beside the network. Captures and launches are the device's count, with those
of rehearsals, which find out what products take and never run: one for each size. Memory is what torch reserves in
the end; host time is the median of the last 250 calls, and "later" that of the same calls when the mix has run twice
more.

| mix | | captures | launches | MiB | host time, us | later |
|---|---|---|---|---|---|---|
| server | Inductor | 0 | 0 | 40 | 399 | 414 |
| server | graph trees | 51 | 440 | 42 | 160 | 150 |
| server | fxwrap | 112 | 440 | 42 | 120 | 87 |
| server | fxwrap, `buckets` of 1, 2, 4, ..., 64 | 20 | 493 | 42 | 144 | 147 |
| trainer | Inductor | 0 | 0 | 72 | 5,822 | 5,408 |
| trainer | graph trees | 17 | 984 | 50 | 951 | 948 |
| trainer | fxwrap | 37 | 984 | 50 | 785 | 822 |
| behind | Inductor | 0 | 0 | 40 | 368 | 372 |
| behind | graph trees | 101 | 878 | 42 | 480 | 374 |
| behind | fxwrap | 112 | 439 | 76 | 308 | 242 |

For the server 45 recordings are made, four of them again, since the arena has grown once: it grows by a little more
than it must. A new recording tells the native units of the others of its outputs, so that their next replay does not
go through Python. In "behind", 34 MiB are an arena that a call's result has kept: the frame of
`torch.compile`'s own wrapper is in a reference cycle then, and keeps it until Python collects garbage.

For a server choose `buckets`: seven recordings serve all sizes, and nearly every call is a replay from the start.
A trainer's few lengths are recorded once each. A part of a program that reads no dynamic size is recorded again for
each size.
"""


def _link(number: int) -> str:
    return f"[#{number}](https://github.com/pytorch/pytorch/issues/{number})"


def page() -> str:
    lines = [_HEAD]
    rows = reports()
    for theme, title in _TITLES.items():
        lines += [f"## {title}\n", "| report | symptom | graph trees, torch 2.14.1 | fxwrap |", "|---|---|---|---|"]
        for one in rows:
            if one.module == f"test_reported_{theme}":
                test = f"[test](../tests/reported/{one.module}.py)"
                lines.append(f"| {_link(one.number)} | {one.symptom} | {one.trees} | {one.fxwrap} ({test}) |")
        lines.append("")
    lines.append(_TRAINING)
    for one in training_reports():
        lines.append(f"| {_link(one.number)} | {one.symptom} | {one.inductor} | {one.ours} |")
    lines.append("")
    return "\n".join([*lines, _MANY_SIZES])


if __name__ == "__main__":
    if sys.argv[1:]:
        _print_seen([int(number) for number in sys.argv[1:]])
    else:
        PAGE.write_text(page())
