"""Counters, for one compiled function or for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..codegen.dynamo import owners_of
from ..errors import FxwrapError
from ..graphs.counters import COUNTERS
from ..owner import live_owners
from .explain import total


def stats(fn: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Count what programs did: replays, recordings, eager runs, fallbacks, each with its reason.

    Args:
        fn: what ``torch.compile`` returned; None for all programs that are alive.

    Returns:
        ``programs``, ``replays``, and ``recordings``, ``eager``, ``fallbacks`` and ``events`` by reason.

    Raises:
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    if fn is None:
        owners = live_owners()
    else:
        owners = owners_of(fn)
        if not owners:
            raise FxwrapError(
                f"stats: {fn!r} has no program",
                expected='a function compiled with backend="fxwrap" that was called at least once',
                remedy="call stats() without an argument for all programs",
            )
    result = total([program for owner in owners for program in owner.programs])
    for owner in owners:
        for reason in owner.fallbacks:
            subject = reason.splitlines()[0]
            result["fallbacks"][subject] = result["fallbacks"].get(subject, 0) + 1
    if fn is None:
        result["fallbacks"] = dict(COUNTERS.to_dict()["fallbacks"])
    return result
