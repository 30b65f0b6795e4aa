"""``fxwrap.explain``: the one function; what ``target`` and ``measure`` ask for is of the features of these names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import InputError
from ..hooks import EXPLAINERS, imported
from ..inspection.explanation import Explanation
from .compile_afresh import compile_afresh, unwrapped


def explain(
    fn: Callable[..., Any],
    *args: Any,
    fxwrap_options: Mapping[str, Any] | None = None,
    calls: int = 1,
    target: str | torch.device | None = None,
    measure: bool = False,
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
            device that is registered with fxwrap, a copy of the function's model is compiled and runs. A training
            graph comes with its backward graph.
        measure: time each launch and library call (``docs/report.md``). The function is called at least five times,
            and once more; in that call each program runs some ten times on the same inputs. What these runs write to
            inputs is taken back, and so are random numbers. Other effects of custom operators happen each time.

    Raises:
        InputError: ``measure`` with a ``target``.
        DeviceError: the target is unknown, is a CUDA or XPU device that this machine has, or needs for compiling what
            the machine lacks.
        UnsupportedModelError: the model cannot be copied to the target, or its tensors are not on the CPU.
        FxwrapError: compiling for the target failed.
    """
    work = unwrapped(fn), args, kwargs, fxwrap_options, calls
    if target is not None and measure:
        raise InputError(
            "measure and target",
            expected="times of the device of the arguments, or decisions for another one",
            got=f"measure=True, target={str(target)!r}",
            remedy="leave one of them out",
        )
    if target is not None:
        return _of_feature("target", *work, str(target))
    return _of_feature("measure", *work) if measure else compile_afresh(*work)


def _of_feature(name: str, *work: Any) -> Explanation:
    if name not in EXPLAINERS:
        raise InputError(
            f"explain with {name}",
            expected=f"the feature {name}",
            got="a fxwrap without it",
            remedy=f"leave {name} out, or install all of fxwrap",
        )
    explanation: Explanation = imported(EXPLAINERS[name])(*work)
    return explanation
