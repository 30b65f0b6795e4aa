"""A Triton backend for devices on host memory: it compiles kernels with Triton's front end and interprets them.

It is registered in ``triton.backends``, as a vendor's backend is, so that all of Inductor's machinery works: the
tuner compiles, benchmarks and chooses, and launches use the options of the chosen configuration. ``TRITON_INTERPRET``
would skip all of that. It does not need hostsim, and is beside that package: tests of fxwrap use it on the CPU, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.compiler.code_generator  # noqa: F401 (keeps functions of the language that are replaced later)
import triton.language as tl
from triton.backends import Backend, backends
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource
from triton.language.extra.cuda import libdevice
from triton.runtime import driver, interpreter
from triton.runtime.jit import JITFunction


@dataclasses.dataclass(frozen=True)
class Launch:
    """One run of a kernel.

    Attributes:
        kernel: the kernel's name.
        grid: the number of instances in each dimension.
        arguments: the arguments by name; tensors as (size, strides, dtype), because they must not be kept alive.
        options: the options of the compilation: ``num_warps``, ``num_stages``, ...
    """

    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


def run_now(function: Callable[..., None], *args: Any) -> None:
    function(*args)


@contextlib.contextmanager
def interpreted_triton(
    device_type: str, *, launch: Callable[..., None] = run_now, current_device: Callable[[], int] = lambda: 0
) -> Iterator[list[Launch]]:
    """A context in which Triton kernels run on a device on host memory.

    Kernels that were compiled inside of the context must not be launched outside of it. Inductor has to compile in
    this process (``compile_threads=1``), because the context does not reach others.

    Args:
        launch: ``launch(function, *args)`` runs ``function(*args)`` on the device's current stream, with CPU tensors
            over the same memory, or records it while that stream captures.

    Yields:
        The list of runs so far; a captured launch adds one at each replay.
    """
    launches: list[Launch] = []

    class Driver(_Driver):
        def __init__(self) -> None:
            self.device_type, self.get_current_device = device_type, current_device
            self.launcher_cls = functools.partial(_Launcher, launch, launches)

    class Compiler(_Compiler):
        @staticmethod
        def supports_target(target: GPUTarget) -> bool:
            return target.backend == device_type

    make_ir = ASTSource.make_ir

    @functools.wraps(make_ir)  # torch looks at its parameters
    def make_ir_alone(*args: Any, **kwargs: Any) -> Any:
        with _LANGUAGE:
            return make_ir(*args, **kwargs)

    with (
        mock.patch.dict(backends, {device_type: Backend(Compiler, Driver)}, clear=True),
        mock.patch.object(driver, "_active", Driver()),
        mock.patch.object(ASTSource, "make_ir", make_ir_alone),
        # Decides whether a user's kernel is a Triton kernel. Torch caches the earlier answer, and some versions
        # allow listed devices only.
        mock.patch("torch.utils._triton.has_triton", lambda **_: True),
    ):
        yield launches


class _Driver(DriverBase):
    """Triton's driver for the device."""

    device_type: str
    get_current_device: Callable[[], int]

    @classmethod
    def is_active(cls) -> bool:
        return True

    @property
    def utils(self) -> Any:
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**20}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        # Without a module nothing is unloaded when a kernel is freed, possibly outside of the context.
        module, function, registers, spills, most_threads = None, None, 0, 0, 2**20
        return module, function, registers, spills, most_threads

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(self.device_type, "", 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device(self.device_type, self.get_current_device())

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is compiled to C++")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("the time that the interpreter takes says nothing about kernels")


class _Options(types.SimpleNamespace):
    """The options of a configuration. All of them are part of the compiled kernel's identity."""

    def hash(self) -> str:
        return hashlib.sha256(repr(sorted(vars(self).items(), key=repr)).encode()).hexdigest()


class _Compiler(BaseBackend):
    """Triton's front end only: a kernel that it refuses would not compile for any target."""

    binary_ext = "ttir"

    def hash(self) -> str:
        return f"interpreter-{self.target.backend}"

    def parse_options(self, options: dict[str, Any]) -> _Options:
        defaults = {"num_warps": 4, "num_ctas": 1, "num_stages": 3, "cluster_dims": (1, 1, 1), "ir_override": None}
        chosen = {name: value for name, value in options.items() if value is not None}
        return _Options(**{**dataclasses.asdict(interpreter.InterpreterOptions()), **defaults, **chosen})

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any = None) -> None:
        stages["ttir"] = self._finish

    def _finish(self, module: Any, metadata: dict[str, Any]) -> bytes:
        metadata.update(name=module.get_entry_func_name(), shared=0, warp_size=32)
        return str(module).encode()

    def load_dialects(self, context: Any) -> None:
        pass

    def get_codegen_implementation(self, options: Any) -> dict[str, Any]:
        return {"min_dot_size": lambda *types: (1, 1, 1)}

    def get_module_map(self) -> dict[str, types.ModuleType]:
        return {"triton.language.extra.libdevice": libdevice}

    def pack_metadata(self, metadata: Any) -> Any:
        return metadata


class _Launcher:
    """The function that Inductor's launcher calls, with a grid and all arguments of the kernel, and its constants."""

    def __init__(self, launch: Callable[..., None], launches: list[Launch], source: Any, metadata: Any) -> None:
        self._launch, self._launches = launch, launches
        self._kernel: JITFunction = source.fn
        self._options = {name: value for name, value in metadata._asdict().items() if name not in ("hash", "target")}

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *more: Any) -> None:
        _packed, _launch_metadata, _enter_hook, _exit_hook, *args = more
        # Otherwise Dynamo would compile the interpreter when a launch is outside of compiled code.
        run = torch.compiler.disable(self._run) if "torch._dynamo" in sys.modules else self._run
        if x * y * z > 0:
            self._launch(functools.partial(run, (x, y, z)), *args)

    def _run(self, grid: tuple[int, int, int], *args: Any) -> None:
        named = dict(zip(self._kernel.arg_names, args, strict=True))
        described = {name: _described(arg) for name, arg in named.items()}
        self._launches.append(Launch(self._kernel.__name__, grid, described, self._options))
        with _LANGUAGE, mock.patch.object(JITFunction, "__call__", _call_device_function):
            interpretable = _interpretable(self._kernel.fn)
            interpreter.GridExecutor(interpretable, self._kernel.arg_names, grid)(**named)


# Interpreting replaces functions of Triton's language, which another thread may use to compile.
_LANGUAGE = threading.RLock()


def _described(arg: Any) -> Any:
    if hasattr(arg, "block_shape"):  # a tensor descriptor
        return _described(arg.base), tuple(arg.block_shape)
    return (tuple(arg.size()), arg.stride(), arg.dtype) if isinstance(arg, torch.Tensor) else arg


def _call_device_function(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    return _interpretable(self.fn)(*args, **kwargs)


@functools.cache
def _interpretable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function rewritten for the interpreter, with a copy of its globals, which the interpreter changes."""
    names = dict(function.__globals__)
    if "libdevice" in names:
        names["libdevice"] = _LIBDEVICE
    # The interpreter replaces the functions of the modules that it finds here; device functions name others.
    names = {"tl": tl, "core": tl.core, **names}
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__module__ = function.__kwdefaults__, function.__module__
    copy.__annotations__ = inspect.get_annotations(function)
    return interpreter.FunctionRewriter(copy).rewrite_ast()


def _elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A libdevice function: the interpreter has no ``extern_elementwise``, torch has the same functions."""

    def apply(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, tl.tensor)]
        operands = [torch.from_numpy(np.ascontiguousarray(arg.handle.data)) for arg in tensors]
        first = tensors[0]
        data = function(*operands).numpy().reshape(first.handle.data.shape)
        return tl.tensor(interpreter.TensorHandle(data, first.handle.dtype), first.type)

    return apply


def _libdevice(names: Sequence[str]) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{name: _elementwise(getattr(torch, name)) for name in names})


_LIBDEVICE = _libdevice(["erf", "exp", "log", "log1p", "pow", "rsqrt", "sin", "sqrt", "tanh"])
