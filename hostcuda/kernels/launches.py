"""Called by the device for each launch of a Triton kernel.

Triton compiles them for sm_90 with its own ptxas and loads the cubin with the driver; a hash of the cubin tells which
function it is (registry.py).
"""

from __future__ import annotations

import ctypes
import sys
import time
import traceback
from typing import Any

from ..library import runtime
from . import interpreter, registry

_COMPUTED, _SKIPPED, _FAILED = 0, 1, 2
# name, hash, grid, block, bytes of shared memory, parameters, their places and their number
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
)
# What computing took, by kernel: where an hour went.
seconds: dict[str, float] = {}
# Why kernels were not computed; hostcuda.skipped() has how often.
reasons: dict[str, str] = {}


def install() -> None:
    runtime().hostcuda_set_callback(ctypes.cast(_callback, ctypes.c_void_p))


@_CALLBACK
def _callback(name, image, gx, gy, gz, bx, by, bz, shared, params, layout, count):  # type: ignore[no-untyped-def]
    """Called by the device when a launch's turn comes, in whichever thread runs the work."""
    kernel = name.decode()
    try:
        found = registry.find(image.decode())
        if found is None:
            reasons[kernel] = "nothing tells which function it was compiled from"
            return _SKIPPED
        places = [(layout[2 * i], layout[2 * i + 1]) for i in range(count)]
        begin = time.perf_counter()
        try:
            with _uncompiled():
                interpreter.run(found, (gx, gy, gz), params, places)
        finally:
            seconds[kernel] = seconds.get(kernel, 0.0) + time.perf_counter() - begin
        return _COMPUTED
    except NotImplementedError as error:
        reasons[kernel] = str(error)
        return _SKIPPED
    except BaseException:
        traceback.print_exc()
        return _FAILED


class _uncompiled:
    """A launch may come from code that Dynamo has compiled: it must not compile the interpreter, too."""

    def __enter__(self) -> None:
        self._module = sys.modules.get("torch._dynamo.eval_frame")
        self._before: Any = self._module.set_eval_frame(None) if self._module is not None else None

    def __exit__(self, *_: Any) -> None:
        if self._module is not None:
            self._module.set_eval_frame(self._before)
