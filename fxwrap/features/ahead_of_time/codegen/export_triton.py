"""Converts Triton kernels to data for a saved program; ``stored_triton`` reads it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.runtime.triton_helpers import get_constexprs
from torch._inductor.runtime.triton_heuristics import GridExpr
from torch.fx import Node

from ....codegen import torch_versions as versions
from ....codegen.emit.triton_kernels import TritonLauncher
from ....errors import StorageError
from ....host_graph.nodes import Kernel
from ....host_graph.sizes import hint, hinted_layout
from .stored_triton import check_formula


@dataclass(frozen=True)
class StoredTriton:
    """A Triton kernel as data.

    Attributes:
        source: text of the module that Inductor wrote for the kernel.
        binary: machine code, and the extension of its file; None where there is none (an interpreter).
        data: everything else that a launch needs, as data that JSON can hold.
    """

    source: str
    binary: tuple[bytes, str] | None
    data: Mapping[str, Any]


def triton_to_data(kernel: Kernel, args: Sequence[Any]) -> StoredTriton:
    """A kernel in its fastest configuration, as data with which it is launched without Inductor.

    A kernel that is not tuned yet is tuned now, on zeros.

    Args:
        args: the arguments of a launch in a host graph.

    Raises:
        StorageError: it cannot be stored.
    """
    assert isinstance(kernel.call, TritonLauncher)
    tuner = kernel.call.tuner
    chosen = _tuned(kernel, tuner, args)
    versions.load_function(tuner)
    # Kernels of the static launcher lack what Triton's own launcher needs.
    with config.patch(use_static_triton_launcher=False):
        result = tuner._precompile_config(chosen)
    compiled, names = result.kernel, list(tuner.fn.arg_names)
    code, parameters = compiled.src, list(result._get_arg_lists(names, get_constexprs(tuner.fn))[1])
    extension = next(name for name, form in compiled.asm.items() if form is compiled.kernel)
    metadata = {name: value for name, value in compiled.metadata._asdict().items() if name not in _LOCAL}
    target = compiled.metadata.target
    data = {
        "function": tuner.fn.__name__,
        "names": names,
        "parameters": parameters,
        "signature": [[name, _type(kernel, kind)] for name, kind in code.signature.items()],
        "constants": [[list(path), _constant(kernel, value)] for path, value in code.constants.items()],
        "attributes": [[list(path), value] for path, value in code.attrs.items()],
        "grid": _grid(result, parameters),
        "config": {**chosen.kwargs, "num_warps": chosen.num_warps, "num_stages": chosen.num_stages},
        "options": tuner._create_compile_options(chosen, result.compile_meta),
        "target": [target.backend, target.arch, target.warp_size],
        "metadata": {**metadata, "target": vars(target)},
    }
    # A kernel whose only form is Triton's own (ttir) has no machine code: its source is interpreted.
    binary = (bytes(compiled.kernel), extension) if extension != "ttir" else None
    return StoredTriton(_source(kernel), binary, data)


# Metadata with paths of the machine that compiled the kernel.
_LOCAL = ("extern_libs", "target")


def _tuned(kernel: Kernel, tuner: Any, args: Sequence[Any]) -> Any:
    """The configuration that runs: the only one, or the fastest."""
    if not tuner.launchers:
        tuner.precompile()
    later = any(tuner.inductor_meta.get(how) for how in ("coordinate_descent_tuning", "combo_tuning_groups"))
    if later or len(tuner.launchers) > 1:
        kernel.call(*(sample(arg) for arg in args))
    (launcher,) = tuner.launchers
    return launcher.config


def sample(arg: Any) -> Any:
    """An argument to measure with: a number of the size of compilation, or a tensor of zeros.

    Zeros are valid as indices and as semaphores.
    """
    value = arg.meta.get("val") if isinstance(arg, Node) else arg
    if isinstance(value, torch.Tensor):
        if (layout := hinted_layout(value)) is not None:
            return torch.empty_strided(*layout, dtype=value.dtype, device=value.device).zero_()
    elif isinstance(value, torch.SymInt) and (number := hint(value)) is not None:
        return number
    elif not isinstance(arg, Node):
        return arg
    raise StorageError(
        f"the argument {arg} of a kernel that is not tuned yet",
        expected="sizes that do not depend on data",
        remedy="run the method once, compiled, before it is saved",
    )


def _type(kernel: Kernel, kind: Any) -> str:
    if not isinstance(kind, str):
        raise StorageError(f"kernel {kernel.name} with an argument of type {kind}", expected="pointers and numbers")
    return kind


def _constant(kernel: Kernel, value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    import triton.language as tl

    if isinstance(value, tl.dtype) and value.is_ptr() is False:
        return {"dtype": value.name}
    raise StorageError(f"kernel {kernel.name} with the constant {value!r}", expected="numbers, strings and dtypes")


def _source(kernel: Kernel) -> str:
    """The text within ``async_compile.triton(name, text, ...)``."""
    call = ast.parse(kernel.source.strip(), mode="eval").body
    texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant)] if isinstance(call, ast.Call) else []
    if len(texts) < 2:
        raise StorageError(f"kernel {kernel.name}", expected="a kernel whose source is in the wrapper's text")
    return str(texts[1]).lstrip()


def _grid(result: Any, parameters: Sequence[str]) -> list[str]:
    """The grid as one formula for each axis, in terms of the launch's arguments."""
    grid = GridExpr.from_meta(result.inductor_meta, result.config)
    variables: dict[str, ast.expr] = {}
    for line in grid.prefix:
        name, _, text = line.partition("=")
        variables[name.strip()] = _inlined(text, variables)
    formulas = [_inlined(str(axis), variables) for axis in (grid.x_grid, grid.y_grid, grid.z_grid)]
    for formula in formulas:
        check_formula(formula, parameters)
    return list(map(ast.unparse, formulas))


def _inlined(text: str, variables: Mapping[str, ast.expr]) -> ast.expr:
    """An expression in which variables are replaced by their values."""

    class Inline(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return copy.deepcopy(variables.get(node.id, node))

    expression: ast.expr = Inline().visit(ast.parse(text.strip(), mode="eval").body)
    return expression
