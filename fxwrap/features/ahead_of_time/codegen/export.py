"""Compiles a method of a module to a program ahead of time, from a trace of ``torch.export``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from ....codegen.inductor import compile_with_inductor
from ....errors import StorageError
from ....graphs.compilation import Compilation
from ....graphs.program import Program
from ....host_graph.nodes import output_values
from ....options import Options
from ....pipeline import with_static_inputs
from ....plan import ProgramPlan
from ....torch_private.functions import is_plain_memory
from .packed_weights import PackingCalls, is_packed, packing_calls

# The lowest and the highest value of a symbol; None where there is no bound.
Bounds = tuple[int | None, int | None]


@dataclass(frozen=True)
class TracedMethod:
    """A method as ``torch.export`` has traced it.

    Attributes:
        module: takes the values of ``passed``, and returns the results that are no constants, both as flat lists.
        weights: parameters and buffers by name; the program takes them in this order, before its other inputs.
        inputs: names of the other inputs, each with its fake value or with the constant that is compiled in.
        arguments, results: nesting of ``(args, kwargs)`` and of the results, with "*" for each value.
        constants: results that are constants, by position.
        ranges: bounds of the symbolic sizes and numbers of inputs.
        guards: other conditions on symbolic sizes that tracing has assumed.
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
        """Names and fake values of the inputs that the program takes beside weights."""
        return [(name, value) for name, value in self.inputs if not is_constant(value)]


@dataclass(frozen=True)
class CompiledMethod:
    """A method that is compiled to a program.

    Attributes:
        program: takes the weights, and then the values of ``traced.passed``.
        weights: the weights that the program takes, by name.
        frozen: the other weights, whose values are compiled in.
        packed: the calls that made constants which only a library can read.
        guards: conditions on symbolic sizes that tracing and Inductor have assumed.
        narrowing: those of Inductor's that sizes within the declared ranges may not meet.
    """

    traced: TracedMethod
    program: Program
    weights: Mapping[str, torch.Tensor]
    frozen: Mapping[str, torch.Tensor]
    packed: PackingCalls
    guards: Sequence[sympy.Basic]
    narrowing: Sequence[sympy.Basic]

    @property
    def plan(self) -> ProgramPlan:
        return self.program.plan

    @property
    def devices(self) -> Sequence[torch.device | None]:
        """Where the program expects its inputs; None for a number."""
        return [getattr(node.meta.get("val"), "device", None) for node in self.plan.placeholders]

    @property
    def written(self) -> Sequence[bool]:
        """Whether the program writes to an input, for each."""
        facts, written = self.plan.facts, self.plan.facts.all_written()
        return [bool(facts.of(node) & written) for node in self.plan.placeholders]


def is_constant(value: Any) -> bool:
    """Whether a value is compiled in, because it is no tensor and no symbolic number."""
    return value is None or type(value) in (int, float, bool, str)


def _plain(value: Any) -> Any:
    """A symbolic number with only one possible value, as a plain number; any other value itself."""
    return int(value) if isinstance(value, torch.SymInt) and value.node.expr.is_Integer else value


def traced_method(name: str, method: torch.export.ExportedProgram) -> TracedMethod:
    """The method behind an exported program, with flat inputs and results and without constants among them.

    Raises:
        StorageError: an input, a result, a weight or a guard has no form that can be stored.
    """
    module: Any = method.module()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [(node.name, _plain(node.meta.get("val"))) for node in placeholders]
    for input_name, value in inputs:
        if not (is_constant(value) or isinstance(value, (torch.Tensor, torch.SymInt))):
            raise StorageError(
                f"input {input_name!r} of {name!r}, of type {type(value).__name__}", expected="a tensor or a constant"
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
            subject = f"a result of {name!r} of type {type(value).__name__}"
            raise StorageError(subject, expected="a tensor or a constant")
    output.args = (tuple(value for place, value in enumerate(returned) if place not in constants),)
    module.recompile()
    # AOTAutograd makes them the program's first inputs, in this order.
    weights = {**dict(module.named_parameters(remove_duplicate=False))}
    weights.update(module.named_buffers(remove_duplicate=False))
    for weight, tensor in weights.items():
        _check_weight(name, weight, tensor)
    ranges, guards = _conditions(method, inputs, environments)
    calls = method.call_spec
    arguments, results = (pytree.tree_unflatten(["*"] * s.num_leaves, s) for s in (calls.in_spec, calls.out_spec))
    return TracedMethod(name, module, weights, inputs, arguments, results, constants, ranges, guards)


def compile_method(traced: TracedMethod, options: Options, patches: dict[str, Any]) -> CompiledMethod:
    """Compile a method without gradients.

    Raises:
        StorageError: it does not become one program.
    """
    name, ranges, inputs = traced.name, traced.ranges, [value for _, value in traced.passed]
    environments = _environments(traced.passed)
    of_tracing = {id(guard) for env in environments for guard in env.guards}
    with packing_calls(bool(patches.get("freezing", config.freezing))) as packed:
        compilation, frozen = _compiled(traced, inputs, options, patches)
        if not compilation.programs and not compilation.fallbacks:
            # Inductor returns a graph without work unchanged, unless the cache bundles the code of every graph.
            with _functorch.patch(bundled_autograd_cache=True):
                compilation, frozen = _compiled(traced, inputs, options, patches)
    if compilation.fallbacks or len(compilation.programs) != 1:
        raise StorageError(
            f"method {name!r}",
            expected="one program",
            got="; ".join(compilation.fallbacks) or f"{len(compilation.programs)} programs",
        )
    guards = [guard.expr for env in environments for guard in env.guards if id(guard) not in of_tracing]
    for guard in guards:
        if isinstance(guard, sympy.Eq) and guard.lhs in ranges and guard.rhs.is_number:
            low, high = ranges[guard.lhs]
            raise StorageError(
                f"method {name!r}: size {guard.lhs}",
                expected=f"a size that may vary, from {low} to {high}",
                got=f"code for {guard.rhs} alone: Inductor has asked for its value",
                remedy="export the method with that size as a constant, or report it",
            )
    program: Program = compilation.programs.pop()  # this one never runs, and reports need not show it
    plan = program.plan
    weights = {weight: tensor for weight, tensor in traced.weights.items() if weight not in frozen}
    if len(plan.placeholders) != len(weights) + len(inputs):
        raise _merged(traced)
    if len(output_values(plan.graph)) + len(traced.constants) != len(pytree.tree_leaves(traced.results)):
        raise StorageError(f"method {name!r}", expected="a program that returns what the method returns")
    for node in plan.graph.graph.find_nodes(op="get_attr"):
        if is_packed(getattr(plan.graph, str(node.target))):
            node.meta.pop("val", None)  # its layout is no size and stride; nothing plans with it
    # Weights stay at their addresses.
    program = with_static_inputs(program, range(len(weights)))
    narrowing = [guard for guard in dict.fromkeys(guards) if not _implied(guard, _values(ranges))]
    return CompiledMethod(traced, program, weights, frozen, packed, [*traced.guards, *guards], narrowing)


_functorch: Any = torch._functorch.config


def _merged(traced: TracedMethod) -> StorageError:
    """The error for inputs that AOTAutograd has merged: they share memory, and one of them is written."""
    return StorageError(
        f"method {traced.name!r} writes to a weight that shares memory with another",
        expected="weights with memory of their own, as far as they are written",
        got=", ".join(_sharing(traced.weights)),
        remedy="register one of them, and make the others of it in forward",
    )


def _compiled(
    traced: TracedMethod, inputs: Sequence[Any], options: Options, patches: dict[str, Any]
) -> tuple[Compilation, dict[str, torch.Tensor]]:
    """The compilation of a method, and the weights whose values are compiled in."""
    compilation = Compilation()
    context: Any = TracingContext(detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True))
    settings = {**patches, "fx_graph_cache": False}
    with torch.no_grad(), _functorch.patch(enable_autograd_cache=False), tracing(context):
        try:
            compile_with_inductor(traced.module, inputs, options, settings, compilation)
        except Exception as error:
            metadata = context.fw_metadata
            if metadata is not None and len(metadata.input_info) < len(traced.weights) + len(inputs):
                # Inputs were merged. Freezing confuses them then, and may fail on their shapes.
                raise _merged(traced) from error
            raise
    # Inductor replaces frozen weights by None in AOTAutograd's list of all weights.
    remaining = context.params_flat or traced.weights
    frozen = {name: w for (name, w), value in zip(traced.weights.items(), remaining, strict=True) if value is None}
    return compilation, frozen


def _environments(inputs: Sequence[tuple[str, Any]]) -> list[Any]:
    """The shape environments of inputs, which have the guards on their symbolic sizes."""
    by_id = {id(env): env for _, value in inputs for size in _symbolic_sizes(value) if (env := size.node.shape_env)}
    return list(by_id.values())


def _restore_guards(name: str, method: Any, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Move the guards of ``torch.export`` from the module's code to the inputs' shape environment.

    A program that was read from a file has its guards only as code that the module calls. A call of that code with
    symbolic sizes guards on them again.
    """
    calls = [node for node in module.graph.nodes if node.op == "call_module" and str(node.target) == "_guards_fn"]
    for node in calls:
        try:
            module.get_submodule(str(node.target))(*inputs)
        except Exception as error:  # torch 2.11 writes code in which NaN is undefined
            got = f"{type(error).__name__}: {error}"
            raise StorageError(f"method {name!r}", expected="conditions that can be evaluated", got=got) from error
        module.graph.erase_node(node)
    guarded = any(env.guards for env in _environments([("", value) for value in inputs]))
    if getattr(method, "_guards_code", None) and not calls and not guarded:
        raise StorageError(
            f"method {name!r}",
            expected="conditions on sizes that can be stored",
            got="; ".join(method._guards_code),
            remedy="export it again, in the process that saves it",
        )


def _conditions(
    method: torch.export.ExportedProgram, inputs: Sequence[tuple[str, Any]], environments: Sequence[Any]
) -> tuple[dict[sympy.Symbol, Bounds], list[sympy.Basic]]:
    """Ranges of the inputs' symbols, and the guards that these ranges do not imply.

    A number that the method reads from a tensor (``item()``) has a symbol, too; the program itself checks its range.
    """
    constraints = method.range_constraints
    of_inputs: set[Any] = set()
    for _, value in inputs:
        of_inputs.update(*(size.node.expr.free_symbols for size in _symbolic_sizes(value)))
    ranges = {symbol: _bounds(constraints[symbol]) for symbol in constraints if symbol in of_inputs}
    guards: list[Any] = []
    for size, bounds in constraints.items():
        if not isinstance(size, sympy.Symbol):  # a derived dimension
            low, high = _bounds(bounds)
            guards += [] if low is None else [sympy.Ge(size, low)]
            guards += [] if high is None else [sympy.Le(size, high)]
    guards += [env.replace(guard.expr) for env in environments for guard in env.guards]
    symbols: Any = {symbol: constraints[symbol] for symbol in constraints if isinstance(symbol, sympy.Symbol)}
    return ranges, [guard for guard in dict.fromkeys(guards) if not _implied(guard, symbols)]


def _bounds(values: Any) -> Bounds:
    """The bounds of a range of values; a bound beyond 2**62 counts as none."""
    low, high = (int(bound) if abs(bound) <= 1 << 62 else None for bound in (values.lower, values.upper))
    return low, high


def _values(ranges: Mapping[sympy.Symbol, Bounds]) -> dict[sympy.Symbol, Any]:
    """Bounds as ranges of values; ``_bounds`` backwards."""
    return {
        symbol: ValueRanges(-int_oo if low is None else low, int_oo if high is None else high)
        for symbol, (low, high) in ranges.items()
    }


def _implied(guard: sympy.Basic, ranges: dict[sympy.Symbol, Any]) -> bool:
    if guard == sympy.true:
        return True
    values = bound_sympy(guard, ranges)  # type: ignore[arg-type]
    return bool(values.is_singleton() and values.lower == sympy.true)


def _bake_in(node: torch.fx.Node, value: Any) -> None:
    """Replace an input by a constant."""
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
    """Names of the weights that share a storage with another weight."""
    storages: dict[int, list[str]] = {}
    for name, tensor in weights.items():
        storages.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return [name for names in storages.values() if len(names) > 1 for name in names]


def _symbolic_sizes(value: Any) -> list[torch.SymInt]:
    if not isinstance(value, torch.Tensor):
        return [value] if isinstance(value, torch.SymInt) else []
    return [size for size in (*value.size(), *value.stride()) if isinstance(size, torch.SymInt)]
