"""libdevice's functions, which the interpreter lacks: torch has the same ones."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from . import language

_AS_IN_TORCH = """
abs acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmax fmin fmod
hypot isinf isnan ldexp lgamma log log10 log1p log2 nextafter pow round rsqrt signbit sin sinh sqrt tan tanh trunc
"""
# Rounded to the nearest, which the others are, too.
_ROUNDED = {"mul_rn": "mul", "add_rn": "add", "sub_rn": "sub", "div_rn": "div", "sqrt_rn": "sqrt"}
_OTHERWISE = {
    "rint": "round",
    "nearbyint": "round",
    "llrint": "round",
    "isinfd": "isinf",
    "isnand": "isnan",
    "finitef": "isfinite",
    "isfinited": "isfinite",
    "fabs": "abs",
    "j0": "special.bessel_j0",
    "j1": "special.bessel_j1",
    "y0": "special.bessel_y0",
    "y1": "special.bessel_y1",
    "cyl_bessel_i0": "special.i0",
    "cyl_bessel_i1": "special.i1",
}


@functools.cache
def functions() -> types.SimpleNamespace:
    import torch

    def named(name: str) -> Any:
        return functools.reduce(getattr, name.split("."), torch)

    found = {name: elementwise(named(name)) for name in _AS_IN_TORCH.split() if hasattr(torch, name)}
    found |= {name: elementwise(named(other)) for name, other in {**_ROUNDED, **_OTHERWISE}.items()}
    found["tgamma"] = elementwise(
        lambda a: torch.lgamma(a).exp() * torch.where((a < 0) & (a.floor() % 2 != 0), -1, 1)
    )
    found["fma"] = found["fma_rn"] = elementwise(lambda a, b, c: a * b + c)
    # C's rounds halves away from zero, torch's to even.
    found["round"] = elementwise(lambda a: torch.trunc(a + torch.copysign(torch.tensor(0.5, dtype=a.dtype), a)))
    return types.SimpleNamespace(**found)


def elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's, for tensors of the interpreter's and numbers."""
    import numpy as np
    import torch

    interpreter = language.interpreter()
    tl = interpreter.tl

    def operand(arg: Any) -> Any:
        if isinstance(arg, tl.tensor):
            return torch.from_numpy(np.ascontiguousarray(arg.handle.data))
        return torch.tensor(getattr(arg, "value", arg))

    def apply(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, tl.tensor)]
        value = function(*map(operand, args))
        widest = max(tensors, key=lambda tensor: tensor.handle.data.size)
        dtype = tl.int1 if value.dtype == torch.bool else tensors[0].handle.dtype
        data = value.numpy().reshape(widest.handle.data.shape)
        ty = tl.block_type(dtype, list(data.shape)) if widest.type.is_block() else dtype
        return tl.tensor(interpreter.TensorHandle(data, dtype), ty)

    return apply
