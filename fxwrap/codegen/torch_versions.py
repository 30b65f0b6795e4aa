"""What differs between torch versions in Inductor, tried by feature."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import sympy
import torch
from torch._inductor import config, ir, sizevars
from torch._inductor.codegen import cpp_utils
from torch._inductor.codegen.common import IndentedBuffer
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen, pexpr
from torch._inductor.select_algorithm import extern_kernels as _extern_kernels

from ..errors import EmissionError
from ..host_graph.user_code import module_path, module_stack

# Names of devices in C++. Where torch has no such table, a device's op overrides have the name.
CPP_DEVICE_NAMES: dict[str, str] = getattr(cpp_utils, "DEVICE_TO_ATEN", {})

# Operators that give a tensor the storage of another: ``tensor.data = ...``. The second is of torch 2.14.
SETS_STORAGE = tuple(
    getattr(torch.ops.aten, name) for name in ("set_", "shallow_copy_data_") if hasattr(torch.ops.aten, name)
)


@contextlib.contextmanager
def redirect_writeline(wrapper: PythonWrapperCodegen, code: IndentedBuffer) -> Iterator[None]:
    """A context in which a wrapper line prints into ``code``."""
    context = wrapper.set_writeline(code, code.writeline) if _takes_buffer() else None
    if context is None:
        context = wrapper.set_writeline(code.writeline)  # type: ignore[call-arg,arg-type]
    with context:
        yield


@functools.cache
def _takes_buffer() -> bool:
    return len(signature(PythonWrapperCodegen.set_writeline).parameters) >= 3


def python_expression(expression: Any) -> str:
    """The Python text of a kernel argument: an expression of sizes, a number, a named value."""
    inner = getattr(expression, "inner", None)  # SymbolicCallArg
    if inner is not None:
        return str(inner)
    if isinstance(expression, sympy.Basic):
        return pexpr(expression)
    return repr(expression)


def scheduled_nodes(device: torch.device) -> list[Any]:
    """The IR nodes in the kernel whose call Inductor is writing."""
    from torch._inductor.virtualized import V

    scheduler = V.graph.scheduler
    # C++ kernels are written when a group of loops is complete: the scheduler's current node is a later one.
    group = getattr(scheduler.get_backend(device), "kernel_group", None)
    scheduled = getattr(group, "scheduled_nodes", None) or [scheduler.current_node]
    return [part.node for node in scheduled if node is not None for part in node.get_nodes() if part.node is not None]


def _ir_nodes(line: Any) -> list[Any]:
    """The IR nodes behind a wrapper line."""
    node = getattr(line, "node", None)
    return [node] if node is not None else list(getattr(line, "scheduled", ()))


def stack_traces(line: Any) -> list[str]:
    """The user's stack traces behind a wrapper line, newest frame last; empty where torch keeps none."""
    traces: dict[str, None] = {}
    for node in _ir_nodes(line):
        getter = getattr(node, "get_stack_traces", None)
        with contextlib.suppress(Exception):
            traces.update(dict.fromkeys(getter() if getter is not None else ()))
    return [trace for trace in traces if trace]


def _fx_nodes(line: Any) -> list[torch.fx.Node]:
    nodes = (origin for node in _ir_nodes(line) for origin in getattr(node, "origins", None) or ())
    return list(dict.fromkeys(nodes))


def origin(line: Any, function: Any) -> torch.fx.Node | None:
    """The node of Inductor's input graph that a wrapper line computes, or else one there that calls ``function``."""
    owner: Any = getattr(line, "node", None)
    node = owner.get_origin_node() if hasattr(owner, "get_origin_node") else None
    # Inductor names none for an operator with several results.
    return node if node is not None else next((node for node in _fx_nodes(line) if node.target is function), None)


def origins(line: Any) -> list[str]:
    """Names of the nodes of Inductor's input graph that a wrapper line comes from."""
    return [node.name for node in _fx_nodes(line)]


def module_path_of(line: Any) -> str:
    """The path of the innermost module that the first of these nodes is from; empty if none is from a module."""
    return next((module_path(node) for node in _fx_nodes(line) if module_stack(node)), "")


def input_sources(gm: torch.fx.GraphModule) -> dict[str, str]:
    """Dynamo's expressions for the inputs of its graph, of locals ``L`` and globals ``G``.

    The keys are an input's position, and the name of an attribute that holds a parameter. An input of a graph of
    torch.export's has its name.
    """

    def expression(source: Any) -> str:
        name = getattr(source, "name", "")  # a method in some versions
        return str(name() if callable(name) else name)

    sources = {}
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        known = expression(getattr(node.meta.get("grapharg"), "source", None))
        sources[str(position)] = known or str(node.target)
    attributes: dict[str, Any] = getattr(gm, "_param_name_to_source", None) or {}
    return {**sources, **{name: expression(source) for name, source in attributes.items()}}


def input_name(placeholder: torch.fx.Node, names: Mapping[str, str]) -> str:
    """What the user's code calls an input of a graph of AOTAutograd's; empty if that is unknown.

    Args:
        names: what it calls the inputs of the graph that AOTAutograd got, by the keys of ``input_sources``.
    """

    def name(described: Any) -> str:
        match type(described).__name__:
            case "ParamAOTInput" | "BufferAOTInput":
                return names.get(described.target, described.target)
            case "PlainAOTInput":
                return names.get(str(described.idx), "")
            case "TangentAOTInput":
                return name(described.output)
            case "PlainAOTOutput":
                return f"grad_outputs[{described.idx}]"
            case "SubclassGetAttrAOTInput" | "SubclassGetAttrAOTOutput":
                return f"{base}.{described.attr}" if (base := name(described.base)) else ""
            case "ViewBaseAOTInput" | "SyntheticBaseAOTInput":
                return f"{base}._base" if (base := name(described.base_of)) else ""
        return ""

    return name(placeholder.meta.get("desc"))


def operators(line: Any) -> list[str]:
    """The operators behind a wrapper line, as torch names them."""
    overloads = [getattr(node, "op_overload", None) for node in _ir_nodes(line)]
    targets = [overload for overload in overloads if overload is not None] or [
        node.target for node in _fx_nodes(line) if node.op == "call_function"
    ]
    return list(dict.fromkeys(map(str, targets)))


def prefix_asserts(wrapper: PythonWrapperCodegen) -> list[str]:
    """Asserts on inputs that come before the first line: NaN asserts, and in some versions those on sizes."""
    lines = map(str.strip, wrapper.prefix.getvalue().splitlines())
    return [line for line in lines if line.startswith(("assert_size_stride(", "assert "))]


def scalar_asserts() -> list[tuple[set[str], str, str]]:
    """Asserts on data-dependent sizes: the names that each uses, its condition as Python, its message.

    Inductor does not emit them where it emits graphs.
    """
    from torch._inductor.virtualized import V

    if not config.scalar_asserts:
        return []
    is_range_bound: Any = getattr(sizevars, "is_range_bound", None)
    skips_ranges = is_range_bound is not None and getattr(config, "unsafe_skip_scalar_range_asserts", False)
    asserts = []
    for operation in V.graph.operations:
        if not isinstance(operation, ir.AssertScalar) or (skips_ranges and is_range_bound(operation.scalar)):
            continue
        # Not simplified: Inductor assumes what is asserted, and would simplify the condition to True.
        text = V.graph.wrapper_code.codegen_python_sizevar(operation.scalar, simplify=False)
        names = {str(symbol) for symbol in operation.get_free_symbol_uses(unbacked_only=False)}
        asserts.append((names, text, operation.msg))
    return asserts


def load_function(tuner: Any) -> None:
    """Load the Python function of a Triton kernel, which is missing if another process has compiled the kernel."""
    if hasattr(tuner, "_ensure_kernel_loaded"):
        tuner._ensure_kernel_loaded()
    elif tuner.fn.fn is None:
        tuner.fn = tuner._reload_kernel().fn


def wrap_for_graph(tuner: Any) -> Any:
    """A Triton kernel in the form that graphs call; it is entered into torch's table of such kernels."""
    from torch._library.triton import wrap_triton

    load_function(tuner)
    return wrap_triton(tuner.fn)


@functools.cache
def is_plain_view(overload: torch._ops.OpOverload) -> bool:
    """Whether an operator always returns a view of its first argument, and does nothing else.

    Operators that torch composes of others (``reshape``, ``contiguous``) may return a copy under the same schema.
    """
    schema = overload._schema
    composed = torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
    return overload.namespace == "aten" and overload.is_view and len(schema.returns) == 1 and not composed


def registered_operators() -> list[str]:
    """Names of all operators that are registered with torch, with their overloads."""
    return torch._C._dispatch_get_all_op_names()


def is_extern_kernel(function: Callable[..., Any]) -> bool:
    """Whether Inductor's wrapper calls a Python function for a library kernel (``torch.addmm``, ...)."""
    return any(function is kernel for kernel in vars(_extern_kernels).values())


def library_functions() -> dict[str, Callable[..., Any]]:
    """The Python functions that Inductor's wrapper calls for library kernels, by name."""
    return {f"extern_kernels.{name}": f for name, f in vars(_extern_kernels).items() if callable(f)}


def symbolic_value(symbol: sympy.Expr) -> Any:
    """A torch.SymInt (or SymFloat, SymBool) for ``symbol``.

    It is the traced graph's own if an input has one: for the ragged size of a jagged tensor no other can be made.
    """
    from torch._inductor.virtualized import V

    for placeholder in V.graph.orig_gm.graph.find_nodes(op="placeholder"):
        value = placeholder.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr == symbol:
            return value
    env = V.graph.sizevars.shape_env
    if getattr(symbol, "is_integer", False):
        return env.create_symintnode(symbol, hint=None)
    return env.create_symfloatnode(symbol, hint=None)


def as_strided_counts_from_storage() -> bool:
    """Whether Inductor counts the offset of ``as_strided`` from the start of an input's storage, as torch does."""
    from torch._inductor.virtualized import V

    return hasattr(V.graph, "graph_input_storage_offsets")


def static_inputs(gm: torch.fx.GraphModule, phase: str, positions: Iterable[int]) -> frozenset[int]:
    """Positions of the inputs that stay where they are, in the graph that Inductor gets.

    Args:
        positions: AOTAutograd's. For an inference graph they count the tokens of ordered effects as its first inputs.
            Such tokens are made inside of the graph by now. For a forward graph they do not.

    Raises:
        EmissionError: they name no tensors.
    """
    tokens = len(gm.graph.find_nodes(op="call_function", target=torch.ops.prims._make_token.default))
    before = tokens if phase == "inference" else 0
    # Inductor counts all that a backward graph gets of its forward graph, with sizes. AOTAutograd counts all that a
    # parameter of a tensor subclass is made of: for a DTensor, the object that stands for its mesh.
    ignored = {
        n
        for n, node in enumerate(gm.graph.find_nodes(op="placeholder"))
        if not isinstance(node.meta.get("val"), torch.Tensor) and (phase == "backward" or not _is_size(node))
    }
    return _named(gm, "static", {position - before for position in positions} - ignored, other=("Tangent",))


def _is_size(placeholder: torch.fx.Node) -> bool:
    return isinstance(placeholder.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def donated_inputs(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Positions of the inputs that the backward graph being compiled may overwrite, as AOTAutograd says.

    Raises:
        EmissionError: they name no saved tensors.
    """
    from torch._inductor.utils import get_donated_idxs

    return _named(gm, "donated", get_donated_idxs() or (), other=("Tangent", "Plain", "Param", "Buffer"))


@contextlib.contextmanager
def overwriting_nothing_saved() -> Iterator[None]:
    """Inside, Inductor lets no kernel write over what the forward has saved. What is to be read again has to stay."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    if metadata is None:
        yield
        return
    donated, metadata.bw_donated_idxs = metadata.bw_donated_idxs, None
    try:
        yield
    finally:
        metadata.bw_donated_idxs = donated


def _named(
    gm: torch.fx.GraphModule, what: str, positions: Iterable[int], other: Sequence[str] = ()
) -> frozenset[int]:
    """Check that positions name inputs of the graph that are tensors, and none of a kind that cannot be meant.

    Args:
        other: the beginnings of the names of AOTAutograd's descriptions of those kinds.
    """
    placeholders, found = gm.graph.find_nodes(op="placeholder"), frozenset(positions)
    for position in found:
        node = placeholders[position] if 0 <= position < len(placeholders) else None
        meant = node is not None and isinstance(node.meta.get("val"), torch.Tensor)
        if node is None or not meant or type(node.meta.get("desc")).__name__.startswith(tuple(other)):
            names = ", ".join(one.name for one in placeholders)
            raise EmissionError(
                f"AOTAutograd's positions of {what} inputs",
                expected=f"positions of such tensors among {names}",
                got=f"{sorted(found)}; {position} is {'none' if node is None else node.name}",
                remedy="the graph runs through Inductor's own wrapper; please report this",
            )
    return found


def saved_outputs(gm: torch.fx.GraphModule) -> dict[int, str]:
    """The outputs of a forward graph that only backward gets: names in AOTAutograd's joint graph, by position.

    Neither what the user gets is one, nor what AOTAutograd returns beside it: written inputs, and the tensors that
    the user gets views of. The result is empty if torch does not describe the outputs.
    """
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    described = zip(output.args[0], output.meta.get("desc") or (), strict=False)
    return {
        position: str(value)
        for position, (value, described_as) in enumerate(described)
        if type(described_as).__name__ == "SavedForBackwardsAOTOutput"
    }


def without_dependent_launches() -> dict[str, Any]:
    """Inductor's setting that makes every kernel wait for the one before it, where torch has another way."""
    return {"triton.enable_pdl": False} if hasattr(config.triton, "enable_pdl") else {}


def is_no_failure(error: BaseException) -> bool:
    """Whether an exception of a compilation tells Dynamo to begin anew, or to skip a frame."""
    from torch._dynamo import exc

    return isinstance(error, (exc.RestartAnalysis, exc.SkipFrame))


def own_caches() -> dict[str, Any]:
    """Arguments of ``torch.compile`` that isolate a compilation from Dynamo's caches; none before torch 2.13.

    The compilation then neither uses nor fills the caches of functions that other code calls, and does not count
    towards their limit of recompilations.
    """
    return {"isolate_recompiles": True} if "isolate_recompiles" in signature(torch.compile).parameters else {}


@contextlib.contextmanager
def one_loop_a_launch() -> Iterator[None]:
    """A context in which each C++ kernel of Inductor's is one loop nest, so that they can be ordered one by one.

    Otherwise loops that follow one another, such as all updates of an optimizer, are one function, which needs all
    of its buffers at one time. Compilations on other threads get smaller functions meanwhile, and the same numbers.
    """
    before = CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM
    CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM = 0
    try:
        yield
    finally:
        CppScheduling.MAX_FUSED_KERNEL_ARGS_NUM = before


def captures_loops() -> bool:
    """Whether torch's CUDA build makes nodes of branches and loops in CUDA graphs: from 2.14 on."""
    try:
        nodes = importlib.import_module("torch._higher_order_ops.cudagraph_conditional_nodes")
    except ImportError:
        return False
    return hasattr(nodes, "while_loop_node")
