"""``fxwrap.stats``: counters of one compiled function, or of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from ..graphs.compilation import HasPrograms
from .report import report, total


def stats(fn: Callable[..., Any] | HasPrograms | None = None) -> dict[str, Any]:
    """The numbers of replays, recordings, eager runs and fallbacks, by reason.

    Args:
        fn: what ``torch.compile``, ``fxwrap.aot_compile`` or ``fxwrap.load`` returned; None for all programs.

    Returns:
        ``programs`` and ``replays``; and by reason ``recordings``, ``eager``, ``fallbacks``, ``events`` and
        ``not_stored`` (graphs that every process compiles, because no cache can hold them). Of a bound function
        ``ordinary``, too: calls through what ``torch.compile`` returned.

    Raises:
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    explanation = report(fn)
    result = total([graph.program for graph in explanation.graphs])
    for name, reasons in (("fallbacks", explanation.fallbacks), ("not_stored", explanation.not_stored)):
        result[name] = dict(Counter(reason.splitlines()[0] for reason in reasons))
    ordinary = getattr(fn, "ordinary_calls", None)  # of fxwrap.bind
    return result if ordinary is None else {**result, "ordinary": dict(ordinary)}
