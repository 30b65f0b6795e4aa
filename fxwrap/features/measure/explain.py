"""``fxwrap.explain`` with ``measure``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...api.compile_afresh import compile_afresh, unwrapped
from ...errors import InputError
from ...host_graph.typed_json import to_data
from ...inspection.explanation import Explanation
from ..target.explain import explain as without_times
from .stopwatch import Stopwatch

# Most programs replay from the third call on; some record twice.
_CALLS = 5


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
    if not measure:
        return without_times(fn, *args, fxwrap_options=fxwrap_options, calls=calls, target=target, **kwargs)
    if target is not None:
        raise InputError(
            "measure and target",
            expected="times of the device of the arguments, or decisions for another one",
            got=f"measure=True, target={str(target)!r}",
            remedy="leave one of them out",
        )
    watch = Stopwatch()
    explanation = compile_afresh(unwrapped(fn), args, kwargs, fxwrap_options, max(calls, _CALLS), watch.time)
    return explanation.with_section("measured", to_data(watch.measured()))
