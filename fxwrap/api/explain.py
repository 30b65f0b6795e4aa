"""``fxwrap.explain`` for the device of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..inspection.explanation import Explanation
from .compile_afresh import compile_afresh, unwrapped


def explain(
    fn: Callable[..., Any],
    *args: Any,
    fxwrap_options: Mapping[str, Any] | None = None,
    calls: int = 1,
    **kwargs: Any,
) -> Explanation:
    """Compile ``fn`` anew, run it on the arguments, and report every decision.

    ``features/target/explain.py`` has all that a user can ask for, and what the arguments are.
    """
    return compile_afresh(unwrapped(fn), args, kwargs, fxwrap_options, calls)
