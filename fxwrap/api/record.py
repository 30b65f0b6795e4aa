"""Recordings made ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..checked.copies import Copies
from ..codegen.dynamo.report import compilations_of
from ..errors import FxwrapError, InputError
from ..host_graph.tensors import has_address
from .report import report, total

# A recording may show what the next one has to do otherwise; a program that is never done is one that runs eagerly.
_CALLS = 16


def record(fn: Callable[..., Any], *examples: Any) -> int:
    """Call ``fn`` with examples until nothing is left to record, the largest first: then arenas grow once.

    ::

        fxwrap.record(decode, *[(torch.zeros(batch, 1, dtype=torch.long),) for batch in (1, 2, 4, 8)])

    ``fn`` does what it always does: what it writes (buffers, a file) is written at each call; results are dropped;
    the state of random number generators is put back. For training pass a function that runs the backward, too. The
    mode of the calls to come (``torch.no_grad``, ``torch.inference_mode``, autocast) has to be the present one.

    Args:
        fn: what ``torch.compile`` returned, or a function that calls compiled code.
        examples: arguments of one call each: a tuple of positional ones, or a single one. Every call gets copies, so
            that none is taken for an input that stays where it is; what does (a cache) ``fn`` had better know itself.
            Copies lie in memory as the examples do: slices, expanded tensors, and tensors that share memory.

    Returns:
        How many recordings were made.

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
    everything = report()  # until the end: what is counted must not be collected meanwhile
    made, ran = _recordings(), _calls()
    with torch.random.fork_rng(devices=[d.index or 0 for d in devices], device_type=_type_of(devices)):
        for call in sorted(calls, key=_bytes, reverse=True):
            example = _Example(call)
            for _ in range(_CALLS):
                before = _recordings(), _warm_ups()
                fn(*example.copied())
                if (_recordings(), _warm_ups()) == before:
                    break
    if _calls() == ran:
        raise _no_program(fn)
    made = _recordings() - made
    del everything
    return made


def _recordings() -> int:
    return sum(_counts()["recordings"].values())


def _warm_ups() -> int:
    return sum(n for reason, n in _counts()["eager"].items() if reason == "warm-up")


def _calls() -> int:
    counts = _counts()
    return int(counts["replays"]) + sum(counts["recordings"].values()) + sum(counts["eager"].values())


def _counts() -> dict[str, Any]:
    return total([graph.program for graph in report().graphs])


def _no_program(fn: Callable[..., Any]) -> FxwrapError:
    compilations, story = compilations_of(fn)
    reasons = [reason.splitlines()[0] for one in compilations for reason in one.fallbacks]
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
    return sum(tensor.nbytes for tensor in _tensors(call) if has_address(tensor))  # nobody counts a sparse one's


class _Example:
    """Arguments of a call, to be copied for each: what Dynamo and a program ask of the copies is as it was."""

    def __init__(self, call: tuple[Any, ...]) -> None:
        leaves, self._structure = tree_flatten(call)
        self._leaves: list[Any] = leaves
        self._tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self._laid_out = Copies([value for value in self._tensors.values() if _is_laid_out(value)])

    def copied(self) -> Any:
        """The arguments with other tensors: one for each object, and those that share memory share it again."""
        laid_out = iter(self._laid_out.make())
        made: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for key, value in self._tensors.items():
                copy = _like(value, next(laid_out)) if _is_laid_out(value) else value.detach().clone()
                made[key] = copy.requires_grad_(value.requires_grad)
        return tree_unflatten([made.get(id(leaf), leaf) for leaf in self._leaves], self._structure)


def _is_laid_out(value: torch.Tensor) -> bool:
    """Whether it is a view of bytes and nothing else: not so a tensor of a class that holds others."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and has_address(value)
    return plain and not (value.is_nested or value.is_quantized)


def _like(value: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """A copy with what torch knows of a tensor besides its numbers: which sizes vary, but no address that stays."""
    if type(value) is torch.nn.Parameter:
        made = torch.nn.Parameter(made, value.requires_grad)
    vars(made).update({name: noted for name, noted in vars(value).items() if "static_input" not in name})
    return made


def _type_of(devices: set[torch.device]) -> str:
    return next((device.type for device in devices), "cuda")
