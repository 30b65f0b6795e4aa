"""Recordings made ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import FxwrapError, InputError
from .explain import report, total

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

    Returns:
        How many recordings were made.

    Raises:
        FxwrapError: ``fn`` calls nothing that was compiled with fxwrap.
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
        for call in sorted(calls, key=lambda call: -sum(tensor.nbytes for tensor in _tensors(call))):
            for _ in range(_CALLS):
                before = _recordings(), _warm_ups()
                fn(*_fresh(call))
                if (_recordings(), _warm_ups()) == before:
                    break
    if _calls() == ran:
        raise FxwrapError(
            f"{fn!r} called no program",
            expected='a function compiled with backend="fxwrap", or one that calls such a function',
            remedy='compile it: torch.compile(fn, backend="fxwrap")',
        )
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


def _tensors(call: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(call)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _fresh(call: tuple[Any, ...]) -> Any:
    def copy(value: Any) -> Any:
        return (
            value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
        )

    return torch.utils._pytree.tree_map(copy, call)


def _type_of(devices: set[torch.device]) -> str:
    return next((device.type for device in devices), "cuda")
