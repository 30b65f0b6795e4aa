"""Triton kernels that the fake driver launches, run by Triton's interpreter over the same memory.

Triton compiles them for sm_90 with its own ptxas, and loads the cubin with the driver; its bytes identify the kernel.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import inspect
import json
import os
import struct
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

REGISTRY = Path(os.environ.get("HOSTCUDA_REGISTRY", os.path.expanduser("~/.cache/hostcuda/kernels")))
VERBOSE = "HOSTCUDA_KERNELS" in os.environ
_LANGUAGE = threading.RLock()
_known: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {}
_TYPE = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint
)
seconds: dict[str, float] = {}


def install() -> None:
    from . import runtime

    runtime().hostcuda_set_callback(ctypes.cast(_callback, ctypes.c_void_p))


def identity(cubin: bytes) -> str:
    from . import runtime

    return runtime().hostcuda_identity(cubin, len(cubin)).decode()


def after_triton(module: Any) -> None:
    """Remember of every compiled kernel which function it is."""
    init = module.CompiledKernel.__init__

    @functools.wraps(init)
    def remember(self: Any, src: Any, *args: Any, **kwargs: Any) -> None:
        init(self, src, *args, **kwargs)
        if isinstance(self.kernel, bytes) and hasattr(getattr(src, "fn", None), "fn"):
            fn = src.fn
            constants = {_name(fn, key): value for key, value in src.constants.items()}
            signature = dict(src.signature)
            which = identity(self.kernel)
            _known[which] = fn, signature, constants
            _store(which, fn, signature, constants)

    module.CompiledKernel.__init__ = remember
    make_ir = module.ASTSource.make_ir

    @functools.wraps(make_ir)
    def make_ir_alone(*args: Any, **kwargs: Any) -> Any:
        with _LANGUAGE:
            return make_ir(*args, **kwargs)

    module.ASTSource.make_ir = make_ir_alone


def _name(fn: Any, key: Any) -> str:
    path = key if isinstance(key, tuple) else (key,)
    first = fn.arg_names[path[0]] if isinstance(path[0], int) else path[0]
    return first if len(path) == 1 else f"{first}.{'.'.join(map(str, path[1:]))}"


def _store(which: str, fn: Any, signature: dict[str, str], constants: dict[str, Any]) -> None:
    """For processes that find the cubin in a cache."""
    try:
        REGISTRY.mkdir(parents=True, exist_ok=True)
        raw = fn.fn
        data = {"file": raw.__code__.co_filename, "name": raw.__name__, "signature": signature, "constants": constants}
        text = json.dumps(data)
        temporary = REGISTRY / f"{which}.{os.getpid()}"
        temporary.write_text(text)
        temporary.rename(REGISTRY / f"{which}.json")
    except Exception:
        if VERBOSE:
            traceback.print_exc()


def _find(which: str) -> tuple[Any, dict[str, str], dict[str, Any]] | None:
    if which not in _known:
        path = REGISTRY / f"{which}.json"
        if not path.exists():
            return None
        data = json.loads(path.read_text())
        function = None
        for module in list(sys.modules.values()):
            if getattr(module, "__file__", None) == data["file"] and hasattr(module, data["name"]):
                function = getattr(module, data["name"])
        if function is None:
            spec = importlib.util.spec_from_file_location(f"hostcuda_{which}", data["file"])
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            function = getattr(module, data["name"])
        while not hasattr(function, "arg_names") or hasattr(function, "configs"):
            function = function.fn
        _known[which] = function, data["signature"], data["constants"]
    return _known[which]


@_TYPE
def _callback(name, image, gx, gy, gz, bx, by, bz, shared, params, layout, count):  # type: ignore[no-untyped-def]
    try:
        found = _find(image.decode())
        if found is None:
            if VERBOSE:
                print(f"hostcuda: {name.decode()} ({image.decode()}) is not known", file=sys.stderr)
            return 1
        eval_frame = sys.modules.get("torch._dynamo.eval_frame")
        before = None
        if eval_frame is not None:
            before = eval_frame.set_eval_frame(None)
        try:
            begin = time.perf_counter()
            places = [(layout[2 * i], layout[2 * i + 1]) for i in range(count)]
            result = _run(*found, (gx, gy, gz), params, places)
            seconds[name.decode()] = seconds.get(name.decode(), 0) + time.perf_counter() - begin
            return result
        finally:
            if eval_frame is not None:
                eval_frame.set_eval_frame(before)
    except BaseException:
        traceback.print_exc()
        return 2


_FORMATS = {
    "i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d", "fp16": "e",
}  # fmt: skip
# Elements of a block that the interpreter is given at once.
_MOST = 1 << 19


def _run(fn: Any, signature: dict[str, str], constants: dict[str, Any], grid: tuple[int, int, int], params: int, places: list[tuple[int, int]]) -> int:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    source = inspect.getsource(fn.fn)
    if "x_grid_barrier" in source:
        return 1  # programs that wait for each other
    raw = ctypes.string_at(params, max((o + s for o, s in places), default=0))
    given = iter(places)
    arguments: dict[str, Any] = {}

    def read(kind: str) -> Any:
        offset, size = next(given)
        data = raw[offset : offset + size]
        if kind.startswith("*"):
            ty = tl.str_to_ty(kind, None)
            return tl.tensor(interpreter.TensorHandle(np.array([int.from_bytes(data, "little")], dtype=np.uint64), ty), ty)
        if kind == "bf16":
            raise NotImplementedError("bf16 scalars")
        value = struct.unpack("<" + _FORMATS[kind], data[: struct.calcsize("<" + _FORMATS[kind])])[0]
        ty = tl.str_to_ty(kind, None)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=interpreter._get_np_dtype(ty)), ty), ty)

    def value_of(name: str, kind: Any) -> Any:
        if isinstance(kind, (tuple, list)):
            return tl.tuple([value_of(f"{name}.{i}", k) for i, k in enumerate(kind)])
        if kind == "constexpr":
            return constants.get(name)
        if kind.startswith("tensordesc"):
            raise NotImplementedError("tensor descriptors")
        return read(kind)

    for name in fn.arg_names:
        arguments[name] = value_of(name, signature[name])
    grid = _fewer_programs(fn, source, grid, arguments)
    with _LANGUAGE:
        function = _interpretable(fn.fn)
        annotated = {n for n, a in inspect.get_annotations(fn.fn).items() if a is tl.constexpr or "constexpr" in str(a)}
        for name, value in arguments.items():
            if signature[name] == "constexpr" and name not in annotated:
                arguments[name] = interpreter._implicit_cvt(value)
        from triton.runtime.jit import JITFunction

        call, JITFunction.__call__ = JITFunction.__call__, _call_device_function
        reduce, interpreter.ReduceOps.generic_reduce = interpreter.ReduceOps.generic_reduce, _reduce_halves
        scope = interpreter._patch_lang(function)
        try:
            interpreter.interpreter_builder.set_grid_dim(*grid)
            for x in range(grid[0]):
                for y in range(grid[1]):
                    for z in range(grid[2]):
                        interpreter.interpreter_builder.set_grid_idx(x, y, z)
                        with np.errstate(all="ignore"):
                            function(**arguments)
        finally:
            scope.restore()
            JITFunction.__call__ = call
            interpreter.ReduceOps.generic_reduce = reduce
    return 0


def _fewer_programs(fn: Any, source: str, grid: tuple[int, int, int], arguments: dict[str, Any]) -> tuple[int, int, int]:
    """Inductor's kernels look at their block sizes only: larger blocks, and fewer of them, compute the same."""
    name = fn.fn.__name__
    if not name.startswith(("triton_poi_", "triton_per_", "triton_red_")) or "RSPLIT" in arguments or "tl.program_id" not in source:
        return grid
    result = list(grid)
    elements = 1
    for block in ("XBLOCK", "YBLOCK", "ZBLOCK", "R0_BLOCK", "R1_BLOCK"):
        if block in arguments:
            elements *= arguments[block]
    if "R0_BLOCK: tl.constexpr" in source and name.startswith("triton_per_"):
        for line in source.splitlines():
            if "R0_BLOCK: tl.constexpr =" in line:
                elements *= int(line.rsplit("=", 1)[1])
    for axis, block in enumerate(("XBLOCK", "YBLOCK", "ZBLOCK")):
        if block not in arguments or f"tl.program_id({axis})" not in source or "tl.num_programs" in source:
            continue
        letter = block[0].lower()
        masked = f"{letter}index < {letter}numel" in source
        while result[axis] > 1 and elements < _MOST and (masked or result[axis] % 2 == 0):
            arguments[block] *= 2
            elements *= 2
            result[axis] = (result[axis] + 1) // 2
    return tuple(result)  # type: ignore[return-value]


def _reduce_halves(self: Any, input: Any) -> Any:
    """ReduceOps.generic_reduce, which goes element by element: what combines two elements combines two halves."""
    import numpy as np

    original_axis = self.axis
    input, axis = self.unravel(input, self.axis)
    shape = input[0].handle.data.shape
    data = [np.moveaxis(a.handle.data, axis, 0) for a in input]
    while data[0].shape[0] > 1:
        half = data[0].shape[0] // 2
        odd = [d[2 * half :] for d in data]
        low = [self.to_tensor(np.ascontiguousarray(d[:half]).reshape(-1), a.dtype) for d, a in zip(data, input)]
        high = [self.to_tensor(np.ascontiguousarray(d[half : 2 * half]).reshape(-1), a.dtype) for d, a in zip(data, input)]
        combined = self.combine_fn.fn(*low, *high)
        combined = combined if isinstance(combined, tuple) else tuple(combined) if hasattr(combined, "values") else (combined,)
        new = [c.handle.data.reshape((half, *d.shape[1:])) for c, d in zip(combined, data)]
        data = [np.concatenate([n, o]) if len(o) else n for n, o in zip(new, odd)]
    result = []
    for d, a in zip(data, input):
        d = d[0]
        if self.keep_dims:
            d = np.expand_dims(d, axis) if original_axis is not None else np.reshape(d, [1] * len(shape))
        elif original_axis is None:
            d = d.item()
        result.append(self.to_tensor(d, a.dtype))
    return result


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _interpretable(self.fn)(*args, **kwargs)


@functools.cache
def _interpretable(function: Any) -> Any:
    """The function rewritten for the interpreter, in a copy of its globals. (From fxwrap/testing/triton_interpreter.py.)"""
    import triton.language as tl
    from triton.runtime import interpreter

    names = dict(function.__globals__)
    if "libdevice" in names:
        names["libdevice"] = _libdevice()
    names = {"tl": tl, "core": tl.core, **names}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__module__ = function.__kwdefaults__, function.__module__
    copy.__annotations__ = inspect.get_annotations(function)
    return interpreter.FunctionRewriter(copy).rewrite_ast()


@functools.cache
def _libdevice() -> Any:
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    def elementwise(function: Any) -> Any:
        def apply(*args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, tl.tensor)]
            operands = [torch.from_numpy(np.ascontiguousarray(a.handle.data)) if isinstance(a, tl.tensor) else torch.tensor(getattr(a, "value", a)) for a in args]
            widest = max(tensors, key=lambda a: a.handle.data.size)
            value = function(*operands)
            dtype = tl.int1 if value.dtype == torch.bool else tensors[0].handle.dtype
            data = value.numpy().reshape(widest.handle.data.shape)
            ty = tl.block_type(dtype, list(data.shape)) if widest.type.is_block() else dtype
            return tl.tensor(interpreter.TensorHandle(data, dtype), ty)

        return apply

    names = "erf erfc exp exp2 expm1 log log1p log2 log10 pow rsqrt sin cos tan sqrt tanh sinh cosh asin acos atan atan2 floor ceil trunc round abs isnan isinf signbit fmod lgamma".split()
    found = {name: elementwise(getattr(torch, name)) for name in names}
    for name in ("mul", "add", "sub", "div"):
        found[f"{name}_rn"] = elementwise(getattr(torch, name))
    found["fma"] = found["fma_rn"] = elementwise(lambda a, b, c: a * b + c)
    found["copysign"], found["hypot"], found["nextafter"] = (elementwise(getattr(torch, n)) for n in ("copysign", "hypot", "nextafter"))
    found["sqrt_rn"] = found["sqrt"]
    found["llrint"] = found["nearbyint"] = found["rint"] = found["round"]
    found["isinfd"], found["isnand"] = found["isinf"], found["isnan"]
    found["finitef"] = found["isfinited"] = elementwise(torch.isfinite)
    return types.SimpleNamespace(**found)
