"""``fxwrap.explain``: compile a function afresh, run it, and report what was decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .compile_afresh import compile_afresh
from .report import Explanation
from .target import explain_for


def explain(
    fn: Callable[..., Any],
    *args: Any,
    fxwrap_options: Mapping[str, Any] | None = None,
    calls: int = 1,
    target: str | torch.device | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compile ``fn`` afresh, run it on the arguments and return everything that was decided.

    Args:
        fn: a function or module; one that is compiled already is unwrapped.
        fxwrap_options: options as for ``torch.compile(..., options=...)``.
        calls: how often it runs. A single call only warms up; from the third on most programs replay. The time and
            the memory of each call but the first, which compiles, are measured.
        target: another device than that of the arguments (``docs/cuda_target.md``). One that is not there ("cuda:90",
            "xpu"): the function is compiled for it in another process, and never runs. "cpu" or a registered device:
            a copy of the function's model is compiled and run there. A training graph has its backward graph with it.
    """
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    fn = getattr(fn, "_orig_mod", fn)
    if target is not None:
        return explain_for(target, fn, args, kwargs, fxwrap_options, calls)
    return compile_afresh(fn, args, kwargs, fxwrap_options, calls)
