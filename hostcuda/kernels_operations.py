"""What the interpreter does element by element in Python, done for whole blocks.

Changes Triton's copy of the interpreter (kernels_language.py) only.
"""

from __future__ import annotations

import math
from typing import Any


def improve(interpreter: Any) -> None:
    """Replace what is slow."""
    from . import kernels_scans

    builder = interpreter.InterpreterBuilder
    builder.cast_impl = _faster_casts(interpreter, builder.cast_impl)
    builder.create_erf = _erf(interpreter)
    builder.create_assert = _assert
    # It compares sizes of types, at every operation; results are converted all the same.
    interpreter.TensorHandle.__post_init__ = lambda self: None
    # Parts of blocks, which scans combine, have any size.
    interpreter.tl.core.validate_block_shape = math.prod
    interpreter.ReduceOps.generic_reduce = kernels_scans.reduced
    interpreter.ScanOps.generic_scan = kernels_scans.scanned
    _call_device_functions()


def _faster_casts(interpreter: Any, usual: Any) -> Any:
    """bfloat16 is the upper half of float32."""
    import numpy as np

    tl = interpreter.tl

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        given, wanted = src.dtype.scalar, dst_type.scalar
        if given == tl.bfloat16 and wanted.is_floating():
            wide = (src.data.astype(np.uint32) << 16).view(np.float32)
            if wanted == tl.bfloat16:
                return src
            if wanted in (tl.float32, tl.float64, tl.float16):
                return interpreter.TensorHandle(wide.astype(interpreter._get_np_dtype(wanted), copy=False), wanted)
        elif wanted == tl.bfloat16 and given in (tl.float32, tl.float64, tl.float16):
            return interpreter.TensorHandle(to_bfloat16(src.data), wanted)
        return usual(self, src, dst_type)

    return cast


def to_bfloat16(data: Any) -> Any:
    """To the nearest, ties to even, as sm_80 and later round; NaN stays NaN."""
    import numpy as np

    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)


def _erf(interpreter: Any) -> Any:
    import numpy as np
    import torch

    def erf(self: Any, arg: Any) -> Any:
        data = torch.erf(torch.from_numpy(np.ascontiguousarray(arg.data))).numpy()
        return interpreter.TensorHandle(data.reshape(arg.data.shape), arg.dtype.scalar)

    return erf


def _assert(self: Any, condition: Any, message: str) -> None:
    """Of a block, every element."""
    assert bool(condition.data.all()), f"device-side assert: {message}"


def _call_device_functions() -> None:
    """A kernel that is interpreted calls functions that are compiled otherwise."""
    from triton.runtime.jit import JITFunction

    from . import kernels_interpreter

    usual = JITFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kernels_interpreter.interpreting():
            return usual(self, *args, **kwargs)
        return kernels_interpreter.interpretable(self.fn)(*args, **kwargs)

    JITFunction.__call__ = call
