"""A method of a module, traced ahead of time by ``torch.export``, through Inductor to a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import bound_sympy

from ...compilation import Compilation
from ...errors import StorageError
from ...host_graph.nodes import output_values
from ...options import Options
from ...plan import ProgramPlan
from ..inductor import compile_with_inductor
from ..torch_runtime import is_plain_memory
from .packed_weights import PackingCalls, is_packed, packing_calls

# The lowest and the highest value of a symbol; None for none.
Bounds = tuple[int | None, int | None]


@dataclass(frozen=True)
class TracedMethod:
    """
    Attributes:
        module: takes what ``passed`` has, and returns what is no constant; both flat.
        weights: parameters and buffers by name: the program takes them in this order, before its other inputs.
        inputs: names of the other inputs, and their fake values, or constants, which are compiled in.
        arguments, results: how ``(args, kwargs)`` and what is returned are nested, with "*" for each value.
        constants: results that are always the same, by their number.
        ranges: bounds of the symbolic sizes and numbers of inputs; None where there is none.
        guards: what tracing has taken for granted of symbolic sizes beside that.
    """

    name: str
    module: torch.fx.GraphModule
    weights: Mapping[str, torch.Tensor]
    inputs: Sequence[tuple[str, Any]]
    arguments: Any
    results: Any
    constants: Mapping[int, Any]
    ranges: Mapping[sympy.Symbol, Bounds]
    guards: Sequence[sympy.Basic]

    @property
    def passed(self) -> Sequence[tuple[str, Any]]:
        """Inputs that the program takes."""
        return [(name, value) for name, value in self.inputs if not is_constant(value)]


@dataclass(frozen=True)
class CompiledMethod:
    """
    Attributes:
        weights: those that the program takes, by name.
        frozen: the others: their values are compiled in.
        packed: how constants were made that no one but a library can read.
        guards: what tracing and Inductor have taken for granted of symbolic sizes.
    """

    traced: TracedMethod
    plan: ProgramPlan
    weights: Mapping[str, torch.Tensor]
    frozen: Mapping[str, torch.Tensor]
    packed: PackingCalls
    guards: Sequence[sympy.Basic]


def is_constant(value: Any) -> bool:
    return value is None or type(value) in (int, float, bool, str)


def _plain(value: Any) -> Any:
    """A symbolic number that is always the same, as that."""
    return int(value) if isinstance(value, torch.SymInt) and value.node.expr.is_Integer else value


def traced_method(name: str, method: torch.export.ExportedProgram) -> TracedMethod:
    """What ``torch.export`` has traced, made flat, without constants among inputs and results.

    Raises:
        StorageError: an input, a result, a weight or a guard has no form that can be stored.
    """
    module: Any = method.module()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [(node.name, _plain(node.meta.get("val"))) for node in placeholders]
    for known, value in inputs:
        if not (is_constant(value) or isinstance(value, (torch.Tensor, torch.SymInt))):
            raise StorageError(
                f"input {known!r} of {name!r}, of type {type(value).__name__}", expected="a tensor or a constant"
            )
    environments = _environments(inputs)
    _restore_guards(name, method, module, [value for _, value in inputs])
    for node, (_, value) in zip(placeholders, inputs, strict=True):
        if is_constant(value):
            _bake_in(node, value)
    module.graph.set_codegen(CodeGen())  # takes and returns a flat list
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    returned = pytree.tree_leaves(output.args[0])
    constants = {place: value for place, value in enumerate(returned) if not isinstance(value, torch.fx.Node)}
    for value in constants.values():
        if not is_constant(value):
            what = f"a result of {name!r} of type {type(value).__name__}"
            raise StorageError(what, expected="a tensor or a constant")
    output.args = (tuple(value for place, value in enumerate(returned) if place not in constants),)
    module.recompile()
    # What AOTAutograd lifts to the program's first inputs, in its order.
    weights = {**dict(module.named_parameters(remove_duplicate=False))}
    weights.update(module.named_buffers(remove_duplicate=False))
    for weight, tensor in weights.items():
        _check_weight(name, weight, tensor)
    ranges, guards = _conditions(method, inputs, environments)
    calls = method.call_spec
    arguments, results = (pytree.tree_unflatten(["*"] * s.num_leaves, s) for s in (calls.in_spec, calls.out_spec))
    return TracedMethod(name, module, weights, inputs, arguments, results, constants, ranges, guards)


def compile_method(traced: TracedMethod, options: Options, patches: dict[str, Any]) -> CompiledMethod:
    """Compile a method; gradients are not computed.

    Raises:
        StorageError: it does not become one program.
    """
    name, ranges, inputs = traced.name, traced.ranges, [value for _, value in traced.passed]
    environments = _environments(traced.passed)
    known = {id(guard) for env in environments for guard in env.guards}
    with packing_calls(bool(patches.get("freezing", config.freezing))) as packed:
        compilation, frozen = _compiled(traced, inputs, options, patches)
        if not compilation.programs and not compilation.fallbacks:
            # Inductor hands a graph without work back as it is, but where its caches are to hold the code of all.
            with _functorch.patch(bundled_autograd_cache=True):
                compilation, frozen = _compiled(traced, inputs, options, patches)
    if compilation.fallbacks or len(compilation.programs) != 1:
        raise StorageError(
            f"method {name!r}",
            expected="one program",
            got="; ".join(compilation.fallbacks) or f"{len(compilation.programs)} programs",
        )
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
    plan = compilation.programs[0].plan
    weights = {weight: tensor for weight, tensor in traced.weights.items() if weight not in frozen}
    if len(plan.placeholders) != len(weights) + len(inputs):
        raise _merged(traced)
    if len(output_values(plan.graph)) + len(traced.constants) != len(pytree.tree_leaves(traced.results)):
        raise StorageError(f"method {name!r}", expected="a program that returns what the method returns")
    for node in plan.graph.graph.find_nodes(op="get_attr"):
        if is_packed(getattr(plan.graph, str(node.target))):
            node.meta.pop("val", None)  # a layout that is no size and stride, which nothing plans with
    # Weights stay where they are: nobody has to guess that.
    plan = replace(plan, static_inputs=frozenset(range(len(weights))))
    return CompiledMethod(traced, plan, weights, frozen, packed, [*traced.guards, *guards])


_functorch: Any = torch._functorch.config


def _merged(traced: TracedMethod) -> StorageError:
    """AOTAutograd makes one input of those that share memory where one of them is written."""
    return StorageError(
        f"method {traced.name!r} writes to a weight that shares memory with another",
        expected="weights with memory of their own, as far as they are written",
        got=", ".join(_sharing(traced.weights)),
        remedy="register one of them, and make the others of it in forward",
    )


def _compiled(
    traced: TracedMethod, inputs: Sequence[Any], options: Options, patches: dict[str, Any]
) -> tuple[Compilation, dict[str, torch.Tensor]]:
    """What a method was compiled to, and the weights whose values were compiled in."""
    compilation = Compilation()
    context: Any = TracingContext(detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True))
    settings = {**patches, "fx_graph_cache": False}
    with torch.no_grad(), _functorch.patch(enable_autograd_cache=False), tracing(context):
        try:
            compile_with_inductor(traced.module, inputs, options, settings, compilation)
        except Exception as error:
            seen = context.fw_metadata
            if seen is not None and len(seen.input_info) < len(traced.weights) + len(inputs):
                raise _merged(
                    traced
                ) from error  # freezing takes inputs for others then, and may fail on their shapes
            raise
    # Inductor lets go of what it has frozen, in the list that AOTAutograd has made of all weights.
    kept = context.params_flat or traced.weights
    frozen = {name: w for (name, w), value in zip(traced.weights.items(), kept, strict=True) if value is None}
    return compilation, frozen


def _environments(inputs: Sequence[tuple[str, Any]]) -> list[Any]:
    """What holds the guards on the symbolic sizes of inputs."""
    found = {id(env): env for _, value in inputs for size in _symbolic_sizes(value) if (env := size.node.shape_env)}
    return list(found.values())


def _restore_guards(name: str, method: Any, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Have the inputs' environment know what ``torch.export`` has guarded on, and the module not check it.

    A program that was read from a file has guards as code alone, which the module calls. Called with symbolic sizes,
    that guards on them again.
    """
    calls = [node for node in module.graph.nodes if node.op == "call_module" and str(node.target) == "_guards_fn"]
    for node in calls:
        try:
            module.get_submodule(str(node.target))(*inputs)
        except Exception as error:  # torch 2.11 writes code that knows no NaN
            got = f"{type(error).__name__}: {error}"
            raise StorageError(f"method {name!r}", expected="conditions that can be evaluated", got=got) from error
        module.graph.erase_node(node)
    known = any(env.guards for env in _environments([("", value) for value in inputs]))
    if getattr(method, "_guards_code", None) and not calls and not known:
        raise StorageError(
            f"method {name!r}",
            expected="conditions on sizes that can be stored",
            got="; ".join(method._guards_code),
            remedy="export it again, in the process that saves it",
        )


def _conditions(
    method: torch.export.ExportedProgram, inputs: Sequence[tuple[str, Any]], environments: Sequence[Any]
) -> tuple[dict[sympy.Symbol, Bounds], list[sympy.Basic]]:
    """Ranges of the inputs' symbols, and the guards that they do not imply.

    A number that the method reads from a tensor (``item()``) has a symbol, too: the program itself checks that one.
    """
    known = method.range_constraints
    of_inputs: set[Any] = set()
    for _, value in inputs:
        of_inputs.update(*(size.node.expr.free_symbols for size in _symbolic_sizes(value)))
    ranges = {symbol: _bounds(known[symbol]) for symbol in known if symbol in of_inputs}
    guards: list[Any] = []
    for size, bounds in known.items():
        if not isinstance(size, sympy.Symbol):  # a derived dimension
            low, high = _bounds(bounds)
            guards += [] if low is None else [sympy.Ge(size, low)]
            guards += [] if high is None else [sympy.Le(size, high)]
    guards += [env.replace(guard.expr) for env in environments for guard in env.guards]
    own: Any = {symbol: known[symbol] for symbol in known if isinstance(symbol, sympy.Symbol)}
    return ranges, [guard for guard in dict.fromkeys(guards) if not _implied(guard, own)]


def _bounds(known: Any) -> Bounds:
    """Those of a range that are numbers: beyond 2**62 there is none."""
    low, high = (int(bound) if abs(bound) <= 1 << 62 else None for bound in (known.lower, known.upper))
    return low, high


def _implied(guard: sympy.Basic, ranges: dict[sympy.Symbol, Any]) -> bool:
    if guard == sympy.true:
        return True
    found = bound_sympy(guard, ranges)  # type: ignore[arg-type]
    return bool(found.is_singleton() and found.lower == sympy.true)


def _bake_in(node: torch.fx.Node, value: Any) -> None:
    """Put a constant in place of an input."""
    for user in list(node.users):
        user.args = map_arg(user.args, lambda arg: value if arg is node else arg)
        user.kwargs = map_arg(user.kwargs, lambda arg: value if arg is node else arg)
    node.graph.erase_node(node)


def _check_weight(method: str, name: str, tensor: torch.Tensor) -> None:
    if not is_plain_memory(tensor):
        raise StorageError(
            f"weight {name!r} of {method!r}: {type(tensor).__name__} of {tensor.dtype}, {tensor.layout}",
            expected="a tensor that is plain memory",
            remedy="keep its parts as buffers, and make it of them in forward",
        )


def _sharing(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of weights that share a storage with another one."""
    storages: dict[int, list[str]] = {}
    for name, tensor in weights.items():
        storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [name for names in storages.values() if len(names) > 1 for name in names]


def _symbolic_sizes(value: Any) -> list[torch.SymInt]:
    if not isinstance(value, torch.Tensor):
        return [value] if isinstance(value, torch.SymInt) else []
    return [size for size in (*value.size(), *value.stride()) if isinstance(size, torch.SymInt)]
