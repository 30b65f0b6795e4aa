"""``fxwrap.explain``: compiles a function anew, runs it, and reports every decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..inspection.explanation import Explanation
from .compile_afresh import compile_afresh
from .target import explain_for


def explain(
    fn: Callable[..., Any],
    *args: Any,
    fxwrap_options: Mapping[str, Any] | None = None,
    calls: int = 1,
    target: str | torch.device | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compile ``fn`` anew, run it on the arguments, and report every decision.

    Its memory is that of one call. ``fxwrap.record(fn, *examples, dry_run=True)`` tells what recordings of several
    sizes would keep.

    Args:
        fn: a function or module; a compiled one is unwrapped.
        fxwrap_options: options as for ``torch.compile(..., options=...)``.
        calls: how often it runs. One call only warms up; most programs replay from the third call on. The time and
            the memory of each call except the first, which compiles, are measured.
        target: a device other than that of the arguments (``docs/cuda_target.md``). For a device that this machine
            lacks ("cuda:90", "xpu"), the function is compiled in another process and never runs. On "cpu" or a
            registered device, a copy of the function's model is compiled and runs. A training graph comes with its
            backward graph.
    """
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    fn = getattr(fn, "_orig_mod", fn)
    if target is not None:
        return explain_for(target, fn, args, kwargs, fxwrap_options, calls)
    return compile_afresh(fn, args, kwargs, fxwrap_options, calls)
