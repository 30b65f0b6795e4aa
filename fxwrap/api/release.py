"""Memory given back on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..graphs.memory.shared_state import SHARED
from .report import report


def release(fn: Callable[..., Any] | None = None) -> int:
    """End recordings and give the memory of theirs back; the next call records again, and counts that.

    Live outputs keep their memory. What another thread runs at this moment stays. On an accelerator the
    memory goes to its caching allocator; ``torch.accelerator.empty_cache()`` hands it on to the driver.

    Args:
        fn: what ``torch.compile`` returned; None for everything that is alive. Arenas are shared, so that one which
            other functions use stays.

    Returns:
        Bytes that were given back, those under outputs that are kept among them.

    Raises:
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    reports = report(fn).graphs
    before = SHARED.arenas.kept()
    for graph in reports:
        graph.program.release()
    SHARED.arenas.give_back()
    return before - SHARED.arenas.kept()
