"""``fxwrap.record``: makes recordings ahead of time, before the calls that will replay them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..codegen.dynamo.report import compilations_of
from ..errors import FxwrapError, InputError
from ..graphs.compilation import live_compilations
from ..graphs.copies import Copies
from ..graphs.program import WARM_UPS, Program
from ..graphs.program_runs import calls_run_by
from ..host_graph.tensors import has_address
from .compile_afresh import rehearsal_of
from .report import report, total

COMPILES = "fxwrap.record compiles for all examples first"
# The largest number of calls of one example: a recording may lead to another, and some programs always run eagerly.
_CALLS = 16


def record(fn: Callable[..., Any], *examples: Any) -> int:
    """Call ``fn`` with examples until no call makes a recording. The largest comes first, so that arenas grow once.

    ``features/bill/record.py`` has all that a user can ask for, and what the arguments are.

    Returns:
        The number of recordings that were made.

    Raises:
        FxwrapError: ``fn`` calls nothing that was compiled with fxwrap, or runs through Inductor's own wrapper.
        InputError: there are no examples.
    """
    calls = ExampleCalls(examples)
    alive = live_compilations()  # until the end, because the counters of their programs are compared
    recordings, ran = _recordings(), _calls()
    with rehearsal_of(fn):
        calls.make(fn, lambda: (_recordings(), _warm_ups()), compiles_only())
    if _calls() == ran:
        raise no_program(fn)
    recordings = _recordings() - recordings
    del alive
    return recordings


@contextlib.contextmanager
def compiles_only() -> Iterator[None]:
    """Programs that this thread calls replay if they can. Else they run eagerly, and that is no warm-up."""

    def without_recording(program: Program, inputs: list[Any]) -> Any:
        return program.run_without_unit(inputs, COMPILES)

    with calls_run_by(without_recording):
        yield


class ExampleCalls:
    """Calls with copies of examples: tuples of positional arguments, or single ones.

    Raises:
        InputError: there are no examples.
    """

    def __init__(self, examples: Sequence[Any]) -> None:
        if not examples:
            raise InputError("record() has nothing to call", expected="arguments of at least one call", got="none")
        self._calls = [example if isinstance(example, tuple) else (example,) for example in examples]

    def make(
        self,
        fn: Callable[..., Any],
        progress: Callable[[], object],
        compiling: contextlib.AbstractContextManager[Any],
    ) -> None:
        """Make each call, the largest first, until it makes no progress.

        Before that, each is made once, to compile: if one of them compiles code with dynamic sizes, Dynamo prefers
        that for the others. Nothing is recorded then, and no arena grows for code that is not called again.

        Args:
            compiling: entered for these first calls, whose programs it keeps from recording.
        """
        tensors = [tensor for call in self._calls for tensor in _tensors(call)]
        devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
        device_type = next((device.type for device in devices), "cuda")
        with torch.random.fork_rng(devices=[d.index or 0 for d in devices], device_type=device_type):
            examples = list(map(_Example, sorted(self._calls, key=_bytes, reverse=True)))
            if len(examples) > 1:
                with compiling:
                    for example in examples:
                        fn(*example.copied())
            for example in examples:
                for _ in range(_CALLS):
                    before = progress()
                    fn(*example.copied())
                    if progress() == before:
                        break


def _recordings() -> int:
    return sum(_counts()["recordings"].values())


def _warm_ups() -> int:
    eager = _counts()["eager"]
    return sum(eager.get(reason, 0) for reason in WARM_UPS)


def _calls() -> int:
    counts = _counts()
    return int(counts["replays"]) + sum(counts["recordings"].values()) + sum(counts["eager"].values())


def _counts() -> dict[str, Any]:
    return total([graph.program for graph in report().graphs])


def no_program(fn: Callable[..., Any]) -> FxwrapError:
    compilations, story = compilations_of(fn)
    reasons = [reason.splitlines()[0] for compilation in compilations for reason in compilation.fallbacks]
    if reasons:
        return FxwrapError(
            f"{fn!r} called no program",
            expected="a function that fxwrap could plan",
            got=f"Inductor's own wrapper runs it: {'; '.join(dict.fromkeys(reasons))}",
            remedy='the option "strict" raises the error itself; there is nothing to record in what Inductor runs',
        )
    return FxwrapError(
        f"{fn!r} called no program",
        expected='a function compiled with backend="fxwrap", or one that calls such a function',
        got="" if compilations else story.why_nothing,
        remedy=("" if compilations else story.remedy) or 'compile it: torch.compile(fn, backend="fxwrap")',
    )


def _tensors(call: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]


def _bytes(call: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(call) if has_address(tensor))  # sparse tensors do not count


class _Example:
    """The arguments of a call. Dynamo and a program treat their copies as they treat the originals."""

    def __init__(self, call: tuple[Any, ...]) -> None:
        leaves, self._structure = tree_flatten(call)
        self._leaves: list[Any] = leaves
        self._tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self._laid_out = Copies([value for value in self._tensors.values() if _is_laid_out(value)])

    def copied(self) -> Any:
        """The arguments with copies of their tensors; copies share memory where the originals do."""
        laid_out = iter(self._laid_out.make())
        copies: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for key, value in self._tensors.items():
                copy = _with_marks(next(laid_out), value) if _is_laid_out(value) else value.detach().clone()
                copies[key] = copy.requires_grad_(value.requires_grad)
        return tree_unflatten([copies.get(id(leaf), leaf) for leaf in self._leaves], self._structure)


def _is_laid_out(value: torch.Tensor) -> bool:
    """Whether a tensor is only a view of bytes; a subclass that wraps other tensors is not."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and has_address(value)
    return plain and not (value.is_nested or value.is_quantized)


def _with_marks(copy: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """A copy with the marks of its original (``mark_dynamic``), except that its address stays."""
    if type(original) is torch.nn.Parameter:
        copy = torch.nn.Parameter(copy, original.requires_grad)
    vars(copy).update({name: mark for name, mark in vars(original).items() if "static_input" not in name})
    return copy
