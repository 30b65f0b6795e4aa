"""Reductions and scans with any function: what combines two elements combines two halves of a block.

They replace methods of the interpreter's ``ReduceOps`` and ``ScanOps``, which go element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .functions import interpretable


def _combined(self: Any, first: Sequence[Any], second: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """The arrays that combining two lists of arrays gives."""
    import numpy as np

    shape = first[0].shape

    def tensors(arrays: Sequence[Any]) -> list[Any]:
        flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
        return [self.to_tensor(array, dtype) for array, dtype in zip(flat, types, strict=True)]

    combine = interpretable(self.combine_fn.fn)
    found = combine(*tensors(first), *tensors(second))
    if not isinstance(found, tuple):
        found = tuple(found) if hasattr(found, "values") else (found,)
    return [part.handle.data.reshape(shape) for part in found]


def summed(self: Any, input: Any) -> Any:
    """In an order that depends on the number of elements only: NumPy's depends on how they lie in memory, too."""
    import numpy as np

    if self.axis is None:
        value = np.add.reduce(np.ascontiguousarray(input.handle.data).reshape(-1))
        value = np.reshape(value, [1] * input.handle.data.ndim) if self.keep_dims else value
    else:
        last = np.ascontiguousarray(np.moveaxis(input.handle.data, self.axis, -1))
        value = np.add.reduce(last, axis=-1)
        value = np.expand_dims(value, self.axis) if self.keep_dims else value
    return self.to_tensor(value, input.dtype)


def reduced(self: Any, input: Any) -> Any:
    import numpy as np

    whole = self.axis is None
    input, axis = self.unravel(input, self.axis)
    rank, types = len(input[0].handle.data.shape), [part.dtype for part in input]
    data = [np.moveaxis(part.handle.data, axis, 0) for part in input]
    while len(data[0]) > 1:
        half = len(data[0]) // 2
        rest = [array[2 * half :] for array in data]
        data = _combined(self, [a[:half] for a in data], [a[half : 2 * half] for a in data], types)
        data = [np.concatenate([a, b]) if len(b) else a for a, b in zip(data, rest, strict=True)]
    result = []
    for array, dtype in zip(data, types, strict=True):
        value = array[0]
        if self.keep_dims:
            value = np.reshape(value, [1] * rank) if whole else np.expand_dims(value, axis)
        elif whole:
            value = value.item()
        result.append(self.to_tensor(value, dtype))
    return result


def scanned(self: Any, input: Any) -> Any:
    """Each step takes in twice as many elements before each: as many steps as the logarithm of their number."""
    import numpy as np

    types = [part.dtype for part in input]
    data = [np.moveaxis(part.handle.data, self.axis, 0).copy() for part in input]
    step = 1
    while step < len(data[0]):
        found = _combined(self, [a[:-step] for a in data], [a[step:] for a in data], types)
        data = [np.concatenate([a[:step], b]) for a, b in zip(data, found, strict=True)]
        step *= 2
    return [self.to_tensor(np.moveaxis(a, 0, self.axis), dtype) for a, dtype in zip(data, types, strict=True)]
