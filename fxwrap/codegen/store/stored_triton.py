"""Triton kernels of a saved program: their machine code is loaded, or their source is compiled, and launched.

Nothing here imports Inductor or Dynamo; Triton itself is needed, for its launcher. ``export_triton`` writes what is
read here.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import json
import linecache
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import StorageError
from ..torch_runtime import device_guard

Data = Any  # what JSON can hold


def triton_version() -> str:
    """Of the Triton that is installed; empty if none is."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return ""


def target_of(device: torch.device) -> list[Any]:
    """What Triton compiles for on a device: its backend, the device's architecture, threads in a warp.

    Raises:
        RuntimeError: Triton has no driver for the device.
    """
    from triton.runtime import driver

    with _current(device):
        target = driver.active.get_current_target()
    return [target.backend, target.arch, target.warp_size]


def stored_launcher(
    known: Mapping[str, Any], source: str, binary: bytes | None, device: torch.device
) -> Callable[..., None]:
    """What launches a kernel on its device's current stream, with the arguments of a launch in a host graph.

    Args:
        known: what ``export_triton.triton_to_data`` has found.
        source: the kernel's module as Inductor wrote it; it runs if there is no ``binary``.
        binary: machine code for the device.

    Raises:
        StorageError: the grid is no formula.
        Exception: whatever Triton raises where it cannot compile or load the kernel.
    """
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import driver

    names: Sequence[str] = known["names"]
    function: Any = types.SimpleNamespace(__name__=known["function"], arg_names=names)
    if binary is None:
        function = _function(source, known["function"])
    constants = {tuple(path): _constant(value) for path, value in known["constants"]}
    attributes = {tuple(path): value for path, value in known["attributes"]}
    code = ASTSource(function, dict(known["signature"]), constants, attributes)
    with _current(device):
        if binary is None:
            target = driver.active.get_current_target()
            compiled: Any = triton.compile(code, target=target, options=dict(known["options"]))
        else:
            compiled = _loaded(code, known["metadata"], binary)
        run = compiled.run  # which gives the machine code to the device
    grid = grid_function(known["grid"], known["parameters"])
    scratch = any(getattr(compiled.metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))
    places = {name: position for position, name in enumerate(known["parameters"])}
    given = [(place, places[name]) for place, name in enumerate(names) if name in places]
    fixed = [None if name in places else constants[place,] for place, name in enumerate(names)]
    stream, index = driver.active.get_current_stream, device.index if device.index is not None else 0

    def allocate(size: int, alignment: int, of: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    # The machine code lives as long as what Triton made of it.
    def launch(*args: Any, kernel: Any = compiled) -> None:
        values = list(fixed)
        for place, position in given:
            values[place] = args[position]
        if scratch:
            triton.set_allocator(allocate)  # it is each thread's own
        with _current(device):
            hooks = None, None, None
            run(*grid(*args), stream(index), kernel.function, kernel.packed_metadata, *hooks, *values)

    return launch


def _current(device: torch.device) -> Any:
    """A context in which a device is the current one."""
    guard = device_guard(device.type)
    return contextlib.nullcontext() if guard is None else guard(device.index or 0)


def _loaded(code: Any, metadata: Data, binary: bytes) -> Any:
    """What Triton makes of an entry in its own cache: two files, one of them machine code."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.compiler.compiler import make_backend

    extension = make_backend(GPUTarget(**metadata["target"])).binary_ext
    with tempfile.TemporaryDirectory(prefix="fxwrap-") as folder:
        files = {name: str(Path(folder, name)) for name in ("kernel.json", f"kernel.{extension}")}
        Path(files["kernel.json"]).write_text(json.dumps(metadata))
        Path(files[f"kernel.{extension}"]).write_bytes(binary)
        return CompiledKernel(code, files, metadata["hash"])


def _constant(value: Data) -> Any:
    if isinstance(value, dict):
        import triton.language as tl

        return tl.dtype(value["dtype"])
    return value


# -- source ---------------------------------------------------------------------------------------------------------


def _function(source: str, name: str) -> Any:
    """The Triton function in a module that Inductor has written, without what Inductor puts around it."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    # Triton, and its interpreter, read the source of a function again.
    file = f"<{name} {digest}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    tree = ast.parse(source)
    scope: dict[str, Any] = {"__name__": f"fxwrap.kernels.{digest}"}
    body = []
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("torch._inductor"):
            _import(statement, scope)
        elif not isinstance(statement, ast.Expr):  # triton_helpers.set_driver_to_gpu()
            if isinstance(statement, ast.FunctionDef):
                statement.decorator_list = [d for d in statement.decorator_list if not _is_heuristic(d)]
            body.append(statement)
    tree.body = body
    exec(compile(tree, file, "exec"), scope)
    return scope[name]


def _is_heuristic(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("triton_heuristics.")


def _import(statement: ast.ImportFrom, scope: dict[str, Any]) -> None:
    """What a kernel's module imports from Inductor, as far as kernels themselves call it."""
    helpers = _helpers()
    for one in statement.names:
        if one.name == "triton_helpers":
            scope[one.asname or one.name] = helpers
        elif str(statement.module).endswith(".triton_helpers"):
            scope[one.asname or one.name] = getattr(helpers, one.name)


@functools.cache
def _helpers() -> Any:
    """Torch's functions for kernels, which import nothing of the package around them, outside of that package."""
    package = types.ModuleType("fxwrap.kernel_helpers")
    package.__path__ = [str(Path(torch.__file__).parent / "_inductor" / "runtime")]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.triton_helpers")


# -- grids ----------------------------------------------------------------------------------------------------------

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Eq, ast.Load)
_FORMULA = (ast.Expression, ast.Tuple, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, *_ARITHMETIC)
_FUNCTIONS = {"max": max, "min": min}


def check_formula(tree: ast.AST, names: Sequence[str]) -> None:
    """Raise unless a tree is arithmetic on whole numbers and on ``names``.

    Raises:
        StorageError: naming what else is there.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=function), keywords=[]) if function in _FUNCTIONS:
                continue
            case ast.Name(id=name) if name in names or name in _FUNCTIONS:
                continue
            case ast.Constant(value=value) if type(value) is int:
                continue
        if not isinstance(node, _FORMULA):
            raise StorageError(
                f"a grid with {ast.unparse(node) or type(node).__name__!r}",
                expected=f"+, -, *, //, %, if, {', '.join(_FUNCTIONS)}, whole numbers and {', '.join(names)}",
            )


def grid_function(grid: Sequence[str], parameters: Sequence[str]) -> Callable[..., tuple[int, int, int]]:
    """How many blocks a launch has on each axis, from its arguments.

    Args:
        grid: a formula for each axis.
        parameters: names of the arguments, in order.

    Raises:
        StorageError: there is anything but arithmetic in it.
    """
    if len(grid) != 3 or not all(name.isidentifier() for name in parameters):
        raise StorageError(f"the grid {grid}", expected="three formulas, of names")
    try:
        formulas = [ast.parse(one, mode="eval") for one in grid]
    except (SyntaxError, RecursionError) as error:
        raise StorageError(f"the grid {grid}", expected="formulas", got=str(error)) from error
    for formula in formulas:
        check_formula(formula, parameters)
    text = f"lambda {', '.join(parameters)}: ({', '.join(ast.unparse(formula) for formula in formulas)})"
    return eval(text, {"__builtins__": {}, **_FUNCTIONS})  # type: ignore[no-any-return]
