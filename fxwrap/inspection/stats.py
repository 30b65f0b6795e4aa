"""Counters, for one compiled function or for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .explain import report, total


def stats(fn: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Count what programs did: replays, recordings, eager runs, fallbacks, each with its reason.

    Args:
        fn: what ``torch.compile`` returned; None for all programs that are alive.

    Returns:
        ``programs``, ``replays``, and ``recordings``, ``eager``, ``fallbacks`` and ``events`` by reason.

    Raises:
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    known = report(fn)
    result = total([graph.program for graph in known.graphs])
    for reason in known.fallbacks:
        subject = reason.splitlines()[0]
        result["fallbacks"][subject] = result["fallbacks"].get(subject, 0) + 1
    return result
