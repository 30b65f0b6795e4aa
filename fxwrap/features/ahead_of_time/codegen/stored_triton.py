"""Launches the Triton kernels of a saved program: loads their machine code, or compiles their source.

Nothing here imports Inductor or Dynamo. Triton itself is needed, for its launcher. ``export_triton`` writes the data.
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

from ....errors import StorageError
from ....torch_private.functions import device_guard

Data = Any  # what JSON can hold


def triton_version() -> str:
    """The version of the installed Triton; empty if there is none."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return ""


def target_of(device: torch.device) -> list[Any]:
    """Triton's target for a device: backend, architecture, threads in a warp.

    Raises:
        RuntimeError: Triton has no driver for the device.
    """
    from triton.runtime import driver

    with _current(device):
        target = driver.active.get_current_target()
    return [target.backend, target.arch, target.warp_size]


def stored_launcher(
    data: Mapping[str, Any], source: str, binary: bytes | None, device: torch.device
) -> Callable[..., None]:
    """A function that launches a kernel on its device's current stream; it takes the arguments of a launch node.

    Args:
        data: ``export_triton.StoredTriton.data`` of the kernel.
        source: the kernel's module as Inductor wrote it; it is compiled if there is no ``binary``.
        binary: machine code for the device.

    Raises:
        StorageError: the grid is no formula.
        Exception: Triton's error where it cannot compile or load the kernel.
    """
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import driver

    names: Sequence[str] = data["names"]
    function: Any = types.SimpleNamespace(__name__=data["function"], arg_names=names)
    if binary is None:
        function = _function(source, data["function"])
    constants = {tuple(path): _constant(value) for path, value in data["constants"]}
    attributes = {tuple(path): value for path, value in data["attributes"]}
    code = ASTSource(function, dict(data["signature"]), constants, attributes)
    with _current(device):
        if binary is None:
            target = driver.active.get_current_target()
            compiled: Any = triton.compile(code, target=target, options=dict(data["options"]))
        else:
            compiled = _loaded(code, data["metadata"], binary)
        run = compiled.run  # loads the machine code onto the device
    grid = grid_function(data["grid"], data["parameters"])
    scratch = any(getattr(compiled.metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))
    places = {name: position for position, name in enumerate(data["parameters"])}
    passed = [(place, places[name]) for place, name in enumerate(names) if name in places]
    fixed = [None if name in places else constants[place,] for place, name in enumerate(names)]
    stream, index = driver.active.get_current_stream, device.index if device.index is not None else 0

    def allocate(size: int, alignment: int, of: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    # ``compiled`` owns the machine code, so that the function keeps it alive.
    def launch(*args: Any, kernel: Any = compiled) -> None:
        values = list(fixed)
        for place, position in passed:
            values[place] = args[position]
        if scratch:
            triton.set_allocator(allocate)  # each thread has its own allocator
        with _current(device):
            hooks = None, None, None
            run(*grid(*args), stream(index), kernel.function, kernel.packed_metadata, *hooks, *values)

    return launch


def _current(device: torch.device) -> Any:
    """A context in which a device is the current one."""
    guard = device_guard(device.type)
    return contextlib.nullcontext() if guard is None else guard(device.index or 0)


def _loaded(code: Any, metadata: Data, binary: bytes) -> Any:
    """A compiled kernel, loaded as Triton loads an entry of its cache: from two files, one of them machine code."""
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
    """The Triton function of a module that Inductor has written, without Inductor's imports and decorators."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    # Triton and its interpreter read a function's source through linecache.
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
    """Execute an import from Inductor in a kernel's module, as far as kernels call what it imports."""
    helpers = _helpers()
    for alias in statement.names:
        if alias.name == "triton_helpers":
            scope[alias.asname or alias.name] = helpers
        elif str(statement.module).endswith(".triton_helpers"):
            scope[alias.asname or alias.name] = getattr(helpers, alias.name)


@functools.cache
def _helpers() -> Any:
    """Inductor's module of functions for kernels, imported without the package around it, which it does not need."""
    package = types.ModuleType("fxwrap.kernel_helpers")
    package.__path__ = [str(Path(torch.__file__).parent / "_inductor" / "runtime")]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.triton_helpers")


# -- grids ----------------------------------------------------------------------------------------------------------

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Eq, ast.Load)
_FORMULA = (ast.Expression, ast.Tuple, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, *_ARITHMETIC)
_FUNCTIONS = {"max": max, "min": min}


def check_formula(tree: ast.AST, names: Sequence[str]) -> None:
    """Check that a tree is arithmetic on integers and on ``names``.

    Raises:
        StorageError: naming anything else in the tree.
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
    """A function that computes a launch's number of blocks on each axis from its arguments.

    Args:
        grid: a formula for each axis.
        parameters: names of the arguments, in order.

    Raises:
        StorageError: a formula is more than arithmetic.
    """
    if len(grid) != 3 or not all(name.isidentifier() for name in parameters):
        raise StorageError(f"the grid {grid}", expected="three formulas, of names")
    try:
        formulas = [ast.parse(axis, mode="eval") for axis in grid]
    except (SyntaxError, RecursionError) as error:
        raise StorageError(f"the grid {grid}", expected="formulas", got=str(error)) from error
    for formula in formulas:
        check_formula(formula, parameters)
    text = f"lambda {', '.join(parameters)}: ({', '.join(ast.unparse(formula) for formula in formulas)})"
    return eval(text, {"__builtins__": {}, **_FUNCTIONS})  # type: ignore[no-any-return]
