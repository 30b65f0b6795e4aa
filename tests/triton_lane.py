"""Triton kernels on a machine without a GPU: Inductor emits them for CPU tensors, Triton's interpreter runs them.

Everything between Inductor's lowering and the launch is the real thing. Replaced are

* the hash of the Triton backend, for which torch would ask a driver;
* ``async_compile.triton``, which would compile for a GPU: the definition of the kernel is executed, no more;
* the tuner's ``run``: what Inductor would launch on a stream is interpreted in place, on CPU memory.

``TRITON_INTERPRET`` is of no use: with it ``wrap_triton`` returns something without a ``kernel_idx``.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from torch._dynamo.device_interface import CpuInterface
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

Launch = tuple[str, tuple[Any, ...]]  # a kernel's name, and its arguments: tensors as (size, strides, dtype)

# The interpreter patches the modules that a kernel names; the functions a kernel calls name others.
_EVERYWHERE = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


@contextlib.contextmanager
def triton_on_cpu() -> Iterator[list[Launch]]:
    """Have Inductor emit Triton kernels for CPU tensors, and run them.

    Yields:
        The launches so far.
    """
    launches: list[Launch] = []

    def load(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
        tuner = getattr(PyCodeCache.load(source_code), kernel_name)
        return interpreted(tuner, launches)

    with (
        config.patch(cpu_backend="triton"),
        mock.patch("torch.utils._triton.triton_hash_with_backend", lambda: "NONE"),
        # Only for kernels that the user wrote: Dynamo asks whether there is Triton, and for what it compiles.
        mock.patch("torch.utils._triton.has_triton", lambda **_: True),
        mock.patch.object(CpuInterface, "raise_if_triton_unavailable", lambda *_: None, create=True),
        mock.patch.object(triton.runtime.driver, "_active", _Driver()),
        mock.patch.object(AsyncCompile, "triton", load),
        mock.patch.object(triton_helpers, "set_driver_to_cpu", lambda: None),
        mock.patch.object(triton_helpers, "get_backend_options_for_target", lambda target: {}, create=True),
        mock.patch.object(JITFunction, "__call__", _call_device_function),
        # Rewritten functions need names in their modules, which are taken back.
        mock.patch.dict(interpreter.InterpretedFunction.rewritten_fn, clear=True),
        _triton_language_restored(),
    ):
        yield launches


class _Driver:
    """Enough of a Triton driver to analyse a kernel."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def interpreted(tuner: Any, launches: list[Launch]) -> Any:
    """A tuner as it is after compilation, with one configuration; ``run`` interprets the kernel."""
    if not tuner.compile_results:  # else seen before: modules of kernels are cached
        tuner.compile_results = [types.SimpleNamespace(config=tuner.configs[0])]
    choice = tuner.compile_results[0].config
    kernel = interpreter.InterpretedFunction(tuner.fn.fn)
    declared = {parameter.name for parameter in tuner.fn.params if parameter.is_constexpr}
    passed = [name for name in tuner.fn.arg_names if name not in declared]

    def run(*args: Any, stream: Any) -> None:
        launches.append((tuner.fn.__name__, tuple(map(_described, args))))
        _, grid = tuner._interpret_args_grid(args, choice)
        constants = {k: v for k, v in tuner.triton_meta["constants"].items() if k in declared}
        # The grid, where it is an argument, comes last.
        named = dict(zip(passed, args, strict=False))
        names = kernel.fn.__globals__
        libdevice = names.get("libdevice")
        patches = interpreter._patch_lang(_EVERYWHERE)
        try:
            names["libdevice"] = _LIBDEVICE
            kernel.run(grid=grid, warmup=False, **named, **{**constants, **choice.kwargs})
        finally:
            names["libdevice"] = libdevice
            patches.restore()

    tuner.run = run
    return tuner


def _described(arg: Any) -> Any:
    # Not the tensor itself: outputs must not be held.
    return (tuple(arg.size()), arg.stride(), arg.dtype) if isinstance(arg, torch.Tensor) else arg


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Without TRITON_INTERPRET, helpers such as ``tl.sum`` are compiled functions; interpret them, too."""
    return interpreter.InterpretedFunction(self.fn).rewrite()(*args, **kwargs)


@contextlib.contextmanager
def _triton_language_restored() -> Iterator[None]:
    """The interpreter patches Triton's language, and leaves names behind in every module it rewrites."""
    owners = [tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base, triton_helpers]
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in zip(owners, before, strict=True):
            for name in set(vars(owner)) - set(attributes):
                delattr(owner, name)
            for name, value in attributes.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)


def _elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A libdevice function: the interpreter has no ``extern_elementwise``, torch has the same functions."""

    def apply(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, tl.tensor)]
        operands = [torch.from_numpy(np.ascontiguousarray(arg.handle.data)) for arg in tensors]
        data = function(*operands).numpy().reshape(tensors[0].handle.data.shape)
        first = tensors[0]
        return tl.tensor(interpreter.TensorHandle(data, first.handle.dtype), first.type)

    return apply


_LIBDEVICE = types.SimpleNamespace(
    **{name: _elementwise(getattr(torch, name)) for name in ("exp", "rsqrt", "sqrt", "tanh", "erf", "log", "sin")}
)
