"""``fxwrap.record``: makes recordings ahead of time, before the calls that will replay them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, overload

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..checked.copies import Copies
from ..codegen.dynamo.report import compilations_of
from ..errors import FxwrapError, InputError
from ..graphs.memory.take_memory import empty_cache
from ..graphs.program import WARM_UP, compiles_only
from ..host_graph.tensors import has_address
from .memory.bill import Bill
from .memory.rehearsal import Rehearsal
from .report import report, total

# The largest number of calls of one example: a recording may lead to another, and some programs always run eagerly.
_CALLS = 16


@overload
def record(fn: Callable[..., Any], *examples: Any, dry_run: Literal[False] = False) -> int: ...
@overload
def record(fn: Callable[..., Any], *examples: Any, dry_run: Literal[True]) -> Bill: ...
def record(fn: Callable[..., Any], *examples: Any, dry_run: bool = False) -> int | Bill:
    """Call ``fn`` with examples until no call makes a recording. The largest comes first, so that arenas grow once.

    ::

        fxwrap.record(decode, *[(torch.zeros(batch, 1, dtype=torch.long),) for batch in (1, 2, 4, 8)])

    Each call has its usual side effects (on buffers, on files). Results are dropped, and the states of random number
    generators are restored. For training, pass a function that also runs the backward. The modes of later calls
    (``torch.no_grad``, ``torch.inference_mode``, autocast) must be active here as well.

    Args:
        fn: what ``torch.compile`` returned, or a function that calls compiled code.
        examples: the arguments of one call each: a tuple of positional arguments, or a single one. Every call gets
            copies, so that no example is taken for an input whose address stays. An input whose address does stay,
            such as a cache, should be held by ``fn`` itself. Copies have the strides of the examples, and share
            memory where the examples do.
        dry_run: find out what recordings would keep, without a capture. The calls compile, warm up and compute as
            usual, and need the memory that recordings would keep, until this returns. What is recorded already is
            left alone, and is not in the bill. An operator whose capture fails is only found by a capture.

    Returns:
        The number of recordings that were made; with ``dry_run`` the bill.

    Raises:
        FxwrapError: ``fn`` calls nothing that was compiled with fxwrap, or runs through Inductor's own wrapper.
        InputError: there are no examples.
    """
    if not examples:
        raise InputError("record() has nothing to call", expected="arguments of at least one call", got="none")
    calls = [example if isinstance(example, tuple) else (example,) for example in examples]
    devices = {
        tensor.device for call in calls for tensor in _tensors(call) if tensor.device.type not in ("cpu", "meta")
    }
    if dry_run:
        return _rehearse(fn, calls, devices)
    alive = report()  # keeps all programs alive until the end, because their counters are compared
    recordings, ran = _recordings(), _calls()
    _call(fn, calls, devices, lambda: (_recordings(), _counts()["eager"].get(WARM_UP)))
    if _calls() == ran:
        raise _no_program(fn)
    recordings = _recordings() - recordings
    del alive
    return recordings


def _rehearse(fn: Callable[..., Any], calls: list[tuple[Any, ...]], devices: Collection[torch.device]) -> Bill:
    rehearsal = Rehearsal()
    try:
        with rehearsal.under_way():
            _call(fn, calls, devices, lambda: rehearsal.progress)
        if not rehearsal.rehearsed:
            raise _no_program(fn)
        return rehearsal.bill()
    finally:
        rehearsal.end()
        empty_cache()


def _call(
    fn: Callable[..., Any],
    calls: list[tuple[Any, ...]],
    devices: Collection[torch.device],
    progress: Callable[[], object],
) -> None:
    """Make each call, the largest first, until it makes no progress.

    Before that, each is made once, to compile: if one of them compiles code with dynamic sizes, Dynamo prefers that
    for the others. Nothing is recorded then, and no arena grows for code that is not called again.
    """
    device_type = next((device.type for device in devices), "cuda")
    with torch.random.fork_rng(devices=[d.index or 0 for d in devices], device_type=device_type):
        examples = list(map(_Example, sorted(calls, key=_bytes, reverse=True)))
        if len(examples) > 1:
            with compiles_only():
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


def _calls() -> int:
    counts = _counts()
    return int(counts["replays"]) + sum(counts["recordings"].values()) + sum(counts["eager"].values())


def _counts() -> dict[str, Any]:
    return total([graph.program for graph in report().graphs])


def _no_program(fn: Callable[..., Any]) -> FxwrapError:
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
        remedy='compile it: torch.compile(fn, backend="fxwrap")',
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
