"""What the interpreter does element by element in Python, done for whole blocks.

Changes Triton's copy of the interpreter (language.py) only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from . import language, scans
from .functions import interpretable, interpreting


@functools.cache
def interpreter() -> Any:
    """The copy of Triton's interpreter, in which what is slow is replaced."""
    module = language.interpreter()
    _improve(module)
    return module


def _improve(interpreter: Any) -> None:
    builder = interpreter.InterpreterBuilder
    builder.cast_impl = _faster_casts(interpreter, builder.cast_impl)
    builder.create_erf = _erf(interpreter)
    builder.create_assert = _assert
    # It compares sizes of types, at every operation; results are converted all the same.
    interpreter.TensorHandle.__post_init__ = lambda self: None
    # Parts of blocks, which scans combine, have any size.
    interpreter.tl.core.validate_block_shape = math.prod
    interpreter.ReduceOps.generic_reduce = scans.reduced
    interpreter.ReduceOps.sum = scans.summed
    interpreter.ScanOps.generic_scan = scans.scanned
    _less_by_operation(interpreter)
    _call_device_functions()


def _less_by_operation(interpreter: Any) -> None:
    """Triton checks and wraps at every operation, which takes longer than computing small blocks does."""
    import numpy as np

    core, builder = interpreter.tl.core, interpreter.interpreter_builder
    # As it is compiled without debug=True: no operation on integers is made again to see whether it overflows.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    usual, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def np_dtype(type: Any) -> Any:
        found = dtypes.get(type.scalar.name)
        if found is None:
            found = dtypes[type.scalar.name] = usual(type)
        return found

    interpreter._get_np_dtype = np_dtype

    @functools.cache
    def shape_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple(list(map(core.constexpr, shape))), core.constexpr(math.prod(shape))

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape) if type.is_block() else ())

    core.tensor.__init__ = init
    blocks: dict[Any, Any] = {}

    def block(element: Any, shape: tuple[int, ...]) -> Any:
        key = str(element), shape
        if key not in blocks:
            blocks[key] = core.block_type(element, list(shape))
        return blocks[key]

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """As NumPy does it, without copies."""
        shapes = [tuple(x.type.shape) if x.type.is_block() else () for x in (lhs, rhs)]
        if shapes[0] == shapes[1]:
            return lhs, rhs
        shape = np.broadcast_shapes(*shapes)

        def widened(tensor: Any, own: tuple[int, ...]) -> Any:
            if own == shape:
                return tensor
            data = np.broadcast_to(tensor.handle.data.reshape(own), shape)
            handle = interpreter.TensorHandle(data, tensor.handle.dtype)
            return core.tensor(handle, block(tensor.type.scalar, shape))

        return widened(lhs, shapes[0]), widened(rhs, shapes[1])

    interpreter.TritonSemantic.broadcast_impl_value = broadcast


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

    usual = JITFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not interpreting():
            return usual(self, *args, **kwargs)
        return interpretable(self.fn)(*args, **kwargs)

    JITFunction.__call__ = call
