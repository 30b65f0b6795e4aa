"""A launch's parameters, read from the bytes that the device got, as the interpreter takes them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from . import language
from .names import mapped
from .registry import Kernel

Places = Sequence[tuple[int, int]]


def read(kernel: Kernel, address: int, places: Places) -> dict[str, Any]:
    """Each argument of a kernel: constants as they are, numbers and pointers as tensors of one element.

    Args:
        places: offset and size of each parameter, as the cubin has them.

    Raises:
        NotImplementedError: an argument is of a kind that the interpreter is not given.
    """
    size = max((offset + size for offset, size in places), default=0)
    raw, given = ctypes.string_at(address, size) if size else b"", iter(places)
    return {
        name: _argument(kernel.constants, name, kernel.signature[name], raw, given)
        for name in kernel.function.arg_names
    }


def _argument(constants: dict[str, Any], name: str, kind: Any, raw: bytes, given: Iterator[tuple[int, int]]) -> Any:
    tl = language.interpreter().tl
    if isinstance(kind, (tuple, list)):
        return tl.tuple([_argument(constants, f"{name}.{i}", part, raw, given) for i, part in enumerate(kind)])
    if kind == "constexpr":
        return mapped(constants.get(name))
    if kind.startswith("tensordesc"):
        raise NotImplementedError("a tensor descriptor is an argument")
    offset, size = next(given)
    return _tensor(kind, raw[offset : offset + size])


def _tensor(kind: str, data: bytes) -> Any:
    import numpy as np

    interpreter = language.interpreter()
    ty = interpreter.tl.str_to_ty(kind, None)
    dtype = interpreter._get_np_dtype(ty)
    value = np.frombuffer(data[: dtype.itemsize], dtype=dtype).copy()
    return interpreter.tl.tensor(interpreter.TensorHandle(value, ty), ty)
