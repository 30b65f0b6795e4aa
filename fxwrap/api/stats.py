"""Counters, for one compiled function or for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from .report import report, total


def stats(fn: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Count what programs did: replays, recordings, eager runs, fallbacks, each with its reason.

    Args:
        fn: what ``torch.compile`` returned; None for all programs that are alive.

    Returns:
        ``programs``, ``replays``, and ``recordings``, ``eager``, ``fallbacks``, ``events`` and ``not_stored`` (what
        every process compiles, because no cache can hold it) by reason.

    Raises:
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    known = report(fn)
    result = total([graph.program for graph in known.graphs])
    for name, reasons in (("fallbacks", known.fallbacks), ("not_stored", known.not_stored)):
        result[name] = dict(Counter(reason.splitlines()[0] for reason in reasons))
    return result
