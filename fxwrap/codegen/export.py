"""A method of a module, traced ahead of time by ``torch.export``, through Inductor to a program."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from ..compilation import Compilation
from ..errors import StorageError
from ..host_graph.nodes import output_values
from ..options import Options
from ..plan import ProgramPlan
from .inductor import compile_with_inductor


@dataclass(frozen=True)
class CompiledMethod:
    """
    Attributes:
        weights: parameters and buffers by name: the program takes them in this order, before its other inputs.
        inputs: names and fake values of the other inputs.
        arguments, results: how ``(args, kwargs)`` and what is returned are nested, with "*" for each value.
        ranges: bounds of symbolic sizes.
        guards: what Inductor has taken for granted of symbolic sizes.
    """

    plan: ProgramPlan
    weights: Mapping[str, torch.Tensor]
    inputs: Sequence[tuple[str, Any]]
    arguments: Any
    results: Any
    ranges: Mapping[sympy.Symbol, tuple[int, int | None]]
    guards: Sequence[sympy.Basic]


def compile_method(
    name: str, method: torch.export.ExportedProgram, options: Options, patches: dict[str, Any]
) -> CompiledMethod:
    """Compile what ``torch.export`` has traced; gradients are not computed.

    Raises:
        StorageError: it does not become one program.
    """
    takes = inspect.signature(method.module).parameters
    module: Any = method.module(check_guards=False) if "check_guards" in takes else method.module()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [(node.name, node.meta["val"]) for node in placeholders]
    module.graph.set_codegen(CodeGen())  # takes and returns a flat list
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    output.args = (tuple(pytree.tree_leaves(output.args[0])),)
    module.recompile()
    # What AOTAutograd lifts to the program's first inputs, in its order.
    weights = {**dict(module.named_parameters(remove_duplicate=False))}
    weights.update(module.named_buffers(remove_duplicate=False))
    environments = {size.node.shape_env for _, value in inputs for size in _symbolic_sizes(value)}
    known = {id(guard) for env in environments for guard in env.guards}
    compilation = Compilation()
    functorch: Any = torch._functorch.config
    with torch.no_grad(), functorch.patch(enable_autograd_cache=False):
        settings = {**patches, "fx_graph_cache": False}
        compile_with_inductor(module, [value for _, value in inputs], options, settings, compilation)
    if compilation.fallbacks or len(compilation.programs) != 1:
        raise StorageError(
            f"method {name!r}",
            expected="one program",
            got="; ".join(compilation.fallbacks) or f"{len(compilation.programs)} programs",
        )
    ranges = {
        symbol: (int(bounds.lower), None if bounds.upper > 1 << 62 else int(bounds.upper))
        for symbol, bounds in method.range_constraints.items()
    }
    guards = [guard.expr for env in environments for guard in env.guards if id(guard) not in known]
    for guard in guards:
        if isinstance(guard, sympy.Eq) and guard.lhs in ranges and guard.rhs.is_number:
            low, high = ranges[guard.lhs]
            raise StorageError(
                f"method {name!r}: size {guard.lhs}",
                expected=f"a size that may vary, from {low} to {high}",
                got=f"code for {guard.rhs} alone: Inductor has asked for its value",
                remedy="export the method with that size as a constant, or report it",
            )
    program, calls = compilation.programs[0], method.call_spec
    arguments, results = (pytree.tree_unflatten(["*"] * s.num_leaves, s) for s in (calls.in_spec, calls.out_spec))
    if len(output_values(program.plan.graph)) != calls.out_spec.num_leaves:
        raise StorageError(f"method {name!r}", expected="a program that returns what the method returns")
    # Weights stay where they are: nobody has to guess that.
    plan = replace(program.plan, static_inputs=frozenset(range(len(weights))))
    return CompiledMethod(plan, weights, inputs, arguments, results, ranges, guards)


def _symbolic_sizes(value: Any) -> list[torch.SymInt]:
    if not isinstance(value, torch.Tensor):
        return [value] if isinstance(value, torch.SymInt) else []
    return [size for size in (*value.size(), *value.stride()) if isinstance(size, torch.SymInt)]
