"""EMIT: Inductor's wrapper lines -> host graph."""

from __future__ import annotations

import logging
import operator
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._higher_order_ops.effects import has_effects
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._inductor import config, ir
from torch._inductor.codegen.common import IndentedBuffer
from torch._inductor.codegen.wrapper import (
    KernelCallLine,
    KernelDefinitionLine,
    PythonWrapperCodegen,
    WrapperLine,
)
from torch._inductor.codegen.wrapper_fxir import FxConverter, TritonKernel
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node
from torch.fx.node import has_side_effect

from ...devices import KernelCall, kernel_kind
from ...errors import EmissionError
from ...host_graph.nodes import (
    Kernel,
    Kind,
    aligned,
    last_frame,
    launch,
    output_node,
    reinterpret,
    require,
    switch,
    while_loop,
)
from .. import torch_versions as versions
from ..garbage import no_garbage_collection
from ..torch_runtime import empty_strided_cpu
from .kernels import load_kernels, loaded_kernel
from .out_forms import OutForm, out_form
from .sizes import symbolic_form
from .statements import StatementReader, UndefinedName, assigned_names
from .triton_kernels import (
    TritonLauncher,
    TunedLaunch,
    argument_names,
    is_descriptor,
    known_writes,
    written_arguments,
)

log = logging.getLogger(__name__)


# Lines whose Python says all there is to know. They are read as text, as is any other line with ``codegen`` that has
# no ``_line_...`` method below and is not in ``LINES_REFUSED``. The set serves a test, which compares the three with
# the lines of the torch that is installed.
LINES_READ_AS_TEXT = frozenset(
    [
        "AllocateLine",
        "AssertAlignmentLine",
        "AssertDivByZeroLine",
        "AssertSizeStrideLine",
        "DynamicScalarLine",
        "ExternKernelAllocLine",
        "ExternKernelMultiOutLine",
        "ExternKernelOutLine",
        "GroupedAssertSizeStrideLine",
        "IndexPutFallbackLine",
        "MultiOutputLine",
        "ReinterpretLine",
        "ReuseLine",
        "ScatterFallbackLine",
        "SymbolicCallArgLine",
        "UnbackedSymbolDefsLine",
    ]
)
LINES_REFUSED = {
    "AllocFromPoolLine": "Inductor's own memory planning, which fxwrap switches off",
    "DeallocFromPoolLine": "Inductor's own memory planning, which fxwrap switches off",
    "EnterCudaMemPoolContextLine": "memory pools inside the compiled region",
    "ExitCudaMemPoolContextLine": "memory pools inside the compiled region",
    "DualWrapperCodeLine": "a line of the C++ wrapper",
    "EnterKernelProfileScopeLine": "a line of the C++ wrapper",
    "ExitKernelProfileScopeLine": "a line of the C++ wrapper",
}


@dataclass
class WhileLoopLine(WrapperLine):
    """A loop over subgraphs, which Inductor's Python wrapper writes out as several plain strings."""

    wrapper: PythonWrapperCodegen
    node: Any
    stacked: bool


@dataclass
class InvokeSubgraphLine(WrapperLine):
    """A call of a subgraph, which Inductor's Python wrapper writes out as several plain strings."""

    wrapper: PythonWrapperCodegen
    node: Any


@dataclass
class ChosenSubgraphLine(WrapperLine):
    """A call of the subgraph that autotuning chose for an operator: a matrix product whose sums are made in parts.

    Attributes:
        graph: its name.
        inputs: the arguments, as the wrapper's Python.
        outputs: the names of its results.
    """

    wrapper: PythonWrapperCodegen
    graph: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class SymbolTable(dict):
    """The converter's table of size expressions, which also knows the wrapper's local variables by name."""

    def __init__(self, names: dict[str, Any], proxy: Callable[[Node], Any]) -> None:
        super().__init__()
        self._names, self._proxy = names, proxy

    def _by_name(self, key: object) -> Node | None:
        found = self._names.get(str(key)) if isinstance(key, sympy.Symbol) else None
        return found if isinstance(found, Node) else None

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._by_name(key) is not None

    def __missing__(self, key: Any) -> Any:
        node = self._by_name(key)
        if node is None:
            raise KeyError(key)
        return self._proxy(node)


class HostGraphConverter(FxConverter):
    """Converts one Inductor program. Used once.

    Lines are read as the text Inductor's Python wrapper would run (see ``statements``), except kernel
    definitions and calls, whose text says too little: which arguments a kernel writes, where it runs.

    Raises:
        EmissionError: naming every line that has no form in a host graph.
    """

    wrapper: PythonWrapperCodegen

    def generate(self) -> GraphModule:
        names: dict[str, Any] = self.buffer_to_node  # type: ignore[assignment]
        self.expr_to_proxy = SymbolTable(names, lambda node: torch.fx.Proxy(node, tracer=self.tracer))
        self._line: Any = None
        self._predicted: Any = None  # the fake value of a node that is about to be copied
        self._handles: dict[str, Node] = {}
        self.gm._register_create_node_hook(self._infer_value)
        try:
            self._generate_graph_inputs()
            self._generate_graph_constants()
            self._generate_graph_input_shapes()
            self._name_symbols()
            # Printing lines can add imports to the wrapper's module, so it is loaded after that.
            lines = [(line, self._text_of(line)) for line in self.lines]
            self._load_kernels()
            self.reader = StatementReader(
                self.gm.graph,
                names,
                vars(self.module),
                self._rewrites(),
                self._finish_call,
                self._name_value,
            )
            self._pending_asserts = versions.scalar_asserts()
            with no_garbage_collection():
                self._read_lines([(text, text) for text in versions.prefix_asserts(self.wrapper)])
                self._read_lines(lines)
                self.gm.graph.output(self._outputs())
        finally:
            self.gm._unregister_create_node_hook(self._infer_value)
        self.gm.recompile()
        return self.gm

    def _generate_graph_inputs(self) -> None:
        for name, value in self.graph_inputs.items():
            # Two inputs can be one symbol: the ragged size of two jagged tensors. The first has its name.
            names_symbol = isinstance(value, sympy.Symbol) and value not in self.expr_to_proxy
            node = self.gm.graph.placeholder(str(value) if names_symbol else name)
            self.buffer_to_node[name] = node
            if isinstance(value, (int, float, sympy.Integer, sympy.Float)):
                node.meta["val"] = value
            elif isinstance(value, sympy.Expr):
                node.meta["val"] = versions.symbolic_value(value)
                if value not in self.expr_to_proxy:
                    self._generate_size_proxy(node, value)
            elif isinstance(value, ir.TensorBox):
                node.meta["val"] = self._get_buffer(value).get_example()  # type: ignore[union-attr]
            elif (known := getattr(value, "value", None)) is not None:
                node.meta["val"] = known  # a process group, a generator, an object of C++

    def _name_symbols(self) -> None:
        for expression, proxy in self.expr_to_proxy.items():
            if isinstance(expression, sympy.Symbol):
                self.buffer_to_node.setdefault(str(expression), proxy.node)

    def _generate_graph_constants(self) -> None:
        for name, value in {**V.graph.constants, **V.graph.torchbind_constants}.items():
            setattr(self.gm, name, value)
            node = self.buffer_to_node[name] = self.gm.graph.create_node("get_attr", name)
            if isinstance(value, torch.Tensor):
                node.meta["val"] = V.fake_mode.from_tensor(value)

    # -- lines ---------------------------------------------------------------------------------------

    def _read_lines(self, lines: Iterable[tuple[Any, str | EmissionError]]) -> None:
        failures: list[str] = []
        lost: set[str] = set()  # what refused lines would have defined
        for line, text in lines:
            self._line = line
            try:
                self._read_line(line, text)
                if self._pending_asserts:
                    self._emit_scalar_asserts()
            except EmissionError as error:
                # A line that only misses what a refused line defines is no offender of its own.
                if not (isinstance(error, UndefinedName) and error.name in lost):
                    failures.append(self._describe_failure(error))
                lost |= assigned_names(text) if isinstance(text, str) else set()
        if failures:
            raise EmissionError(
                "\n  ".join([f"{len(failures)} wrapper line(s) have no form in a host graph:", *failures]),
                remedy="report the lines; without strict=True the graph runs through Inductor's own wrapper; with "
                "this code out of the compiled region (torch.compiler.disable) the rest of it runs here",
            )

    def _describe_failure(self, error: EmissionError) -> str:
        """What is wrong with the present line, on which operator, in which line of the user's."""
        kind = type(self._line).__name__
        named = not isinstance(self._line, WrapperLine) or kind in error.subject
        parts = [error.subject if named else f"{error.subject} ({kind})"]
        if operators := versions.operators(self._line):
            parts.append(f"operator {', '.join(operators)}")
        if (traces := versions.stack_traces(self._line)) and (where := last_frame(traces[0])):
            parts.append(where)
        if error.expected:
            parts.append(f"expected: {error.expected}")
        return "\n    ".join(parts)

    def _read_line(self, line: Any, text: str | EmissionError) -> None:
        if isinstance(text, EmissionError):
            raise text
        handler = self._handler(line)
        if handler is not None:
            handler(line)
        else:
            self.reader.run(text)

    def _emit_scalar_asserts(self) -> None:
        """Make the asserts on numbers that are known by now."""
        known = [entry for entry in self._pending_asserts if entry[0] <= self.reader.names.keys()]
        self._pending_asserts = [entry for entry in self._pending_asserts if entry not in known]
        for _, condition, message in known:
            node = self.gm.graph.call_function(require, (self.reader.value(condition), message))
            node.meta["kind"] = Kind.CHECK

    def _handler(self, line: Any) -> Callable[[Any], None] | None:
        return getattr(self, f"_line_{type(line).__name__}", None)

    def _text_of(self, line: Any) -> str | EmissionError:
        """The Python that Inductor's wrapper would run for a line; empty for lines with a handler here."""
        self._line = line
        if self._handler(line) is not None:
            return ""
        if isinstance(line, str):
            return line
        if (reason := LINES_REFUSED.get(type(line).__name__)) is not None:
            return EmissionError(f"wrapper line {type(line).__name__}", expected=f"a graph without it: {reason}")
        if isinstance(line, WrapperLine):
            if not hasattr(line, "codegen"):
                return EmissionError(f"wrapper line {type(line).__name__}", expected="a line that prints as Python")
            code = IndentedBuffer()
            try:
                with versions.redirect_writeline(self.wrapper, code):
                    line.codegen(code)
            except Exception as error:
                return EmissionError(
                    f"wrapper line {type(line).__name__} does not print: {type(error).__name__}: {error}",
                    expected="a line that prints as Python",
                )
            return code.getvalue()
        # A deferred line may turn out to be empty; LineContexts are source positions without code.
        return str(line() or "") if callable(line) else ""

    def _skip(self, line: Any) -> None:
        """A line without an effect of its own in a host graph."""

    # Devices are kept on allocations and kernels, so entering one says nothing new.
    _line_EnterDeviceContextManagerLine = _skip
    _line_ExitDeviceContextManagerLine = _skip
    _line_EnterSubgraphLine = _skip
    _line_ExitSubgraphLine = _skip
    _line_CommentLine = _skip
    _line_NullLine = _skip
    _line_KernelDefinitionLine = _skip  # all kernels were loaded before the first line
    # A name that goes out of scope frees nothing here: the planner computes live ranges from uses.
    _line_FreeLine = _skip
    _line_FreeIfNotReusedLine = _skip

    # -- subgraphs -----------------------------------------------------------------------------------

    def _line_ConditionalLine(self, line: Any) -> None:
        node = line.node
        self._control_flow(switch, node.predicate, node.operands, node.false_subgraph, node.true_subgraph)

    def _line_SwitchLine(self, line: Any) -> None:
        node = line.node
        self._control_flow(switch, node.selector, node.operands, *node.branches)

    def _line_WhileLoopLine(self, line: Any) -> None:
        node = line.node
        operands = node.carried_inputs, node.additional_inputs
        stacked = (True,) if line.stacked else ()
        self._control_flow(while_loop, node.cond_subgraph, node.body_subgraph, *operands, *stacked)

    def _control_flow(self, function: Callable[..., Any], *args: Any) -> None:
        """Emit a call of subgraphs that is decided on the host."""
        owner = self._line.node
        node = self.gm.graph.create_node("call_function", function, tuple(map(self._operand, args)))
        node.meta["val"] = _results_by_index(owner)
        node.meta["outside_plan"] = "its subgraphs allocate what it returns"
        self._note(node)
        self.reader.assign(owner.get_name(), node)

    def _operand(self, arg: Any) -> Any:
        if isinstance(arg, (tuple, list)):
            return tuple(map(self._operand, arg))
        if isinstance(arg, ir.Subgraph):
            return self._subgraph(arg)
        return self.reader.value(arg.codegen_reference()) if isinstance(arg, ir.IRNode) else arg

    def _subgraph(self, subgraph: Any) -> Node:
        """The constant node that holds a subgraph, which is a host graph of its own."""
        name = subgraph.graph.name
        return self._held(name, self.subgms[name])

    def _held(self, name: str, value: Any) -> Node:
        """The constant node that holds ``value``."""
        if name not in self._handles:
            setattr(self.gm, name, value)
            self._handles[name] = self.gm.graph.create_node("get_attr", name)
        return self._handles[name]

    def _line_InvokeSubgraphLine(self, line: Any) -> None:
        name, inputs = line.node.get_name(), map(self._operand, line.node.inputs)
        self.reader.assign(name, self._copied(line.node.subgraph.graph.name, inputs, name, line.node.subgraph.name))

    def _line_ChosenSubgraphLine(self, line: Any) -> None:
        results = self._copied(line.graph, map(self.reader.value, line.inputs), line.outputs[0], line.graph)
        for name, result in zip(line.outputs, results, strict=True):
            self.reader.assign(name, result)

    def _copied(self, graph: str, inputs: Iterable[Any], prefix: str, constants: str) -> Any:
        """Copy a subgraph's nodes into this graph, where they are planned and captured like others; its results.

        Args:
            prefix, constants: how names of its nodes and of its constants begin here.
        """
        subgraph = self.subgms[graph]
        placeholders = [node for node in subgraph.graph.nodes if node.op == "placeholder"]
        values: dict[Node, Any] = dict(zip(placeholders, inputs, strict=True))
        for node in subgraph.graph.nodes:
            if node.op == "get_attr":
                value = getattr(subgraph, str(node.target))
                own = isinstance(value, Kernel)  # kernels have names of their own, constants those of their graph
                values[node] = self._held(value.name if own else f"{constants}_{node.target}", value)
                values[node].meta.update(node.meta)
            elif node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                self._predicted = node.meta.get("val")
                values[node] = copy = self.gm.graph.create_node(
                    "call_function", node.target, args, kwargs, name=f"{prefix}_{node.name}"
                )
                self._predicted = None
                copy.meta = {**node.meta, **copy.meta}
        (results,) = output_node(subgraph).args
        return torch.fx.map_arg(results, values.__getitem__)

    def _line_EnterCudaStreamContextLine(self, line: Any) -> None:
        self._refuse_streams()

    _line_ExitCudaStreamContextLine = _skip  # entering it was refused

    def _line_EnterDeviceContextManagerWithStreamInfoLine(self, line: Any) -> None:
        if line.num_streams > 1:
            self._refuse_streams()

    def _line_ExitDeviceContextManagerWithStreamInfoLine(self, line: Any) -> None:
        pass

    def _refuse_streams(self) -> None:
        raise EmissionError(
            "user streams inside the compiled region",
            expected="a graph that runs on one stream",
            got=type(self._line).__name__,
        )

    # -- kernels -------------------------------------------------------------------------------------

    def _load_kernels(self) -> None:
        """Load every kernel definition in one module, so that they compile side by side as Inductor's do."""
        known = getattr(self.wrapper, "kernel_definitions", {})
        found: dict[str, Any] = {}
        for line in self.lines:
            if isinstance(line, KernelDefinitionLine):
                found[line.kernel_name] = line
            elif isinstance(line, KernelCallLine) and line.kernel_name in known:
                found[line.kernel_name] = known[line.kernel_name]
        definitions = list(found.values())
        code = [
            PythonWrapperCodegen._format_kernel_definition(line.kernel_name, line.kernel_body, metadata=line.metadata)
            for line in definitions
        ]
        if any(getattr(line, "triton", False) for line in self.lines):
            # As printing a call would have done: descriptors name the module.
            self.wrapper.write_triton_header_once()
        prologue = [self.wrapper.imports.getvalue(), self.wrapper.header.getvalue()]
        self._definitions = "\n".join([*prologue, *code])
        self.module: types.ModuleType = load_kernels(self._definitions)
        self._sources = {line.kernel_name: line.kernel_body for line in definitions}

    def _line_KernelCallLine(self, line: Any) -> None:
        if line.triton:
            self._triton_launch(line)
            return
        name = line.kernel_name
        definition = loaded_kernel(self.module, name)
        call = KernelCall(name, self._sources.get(name, ""), line.device, definition, line.arg_types)
        kind = kernel_kind(call)
        if kind is None:
            raise EmissionError(
                f"kernel {name} on {line.device}",
                expected="a Triton kernel, or a kind of kernels that is registered for the device",
                got=f"{name}({', '.join(map(str, line.call_args))})",
                remedy="give kernels=[...] to fxwrap.register_device",
            )
        args = tuple(self._argument(arg) for arg in line.call_args)
        writes = tuple(position for position in kind.writes(call) if position < len(args))
        kernel = self._kernel(line, kind.name, lambda: kind.load(call), writes)
        self._note(self.gm.graph.call_function(launch, (self._handle(kernel), *args)))

    def _argument(self, arg: Any) -> Any:
        text = arg if isinstance(arg, str) else versions.python_expression(arg)
        return self.reader.value(text)

    def _kernel(
        self, line: Any, language: str, load: Callable[[], Callable[..., Any]], writes: tuple[int, ...]
    ) -> Kernel:
        """One Kernel for all launches of it, kept as an attribute of the graph module."""
        name = line.kernel_name
        kernel = getattr(self.gm, name, None)
        if not isinstance(kernel, Kernel):
            types = tuple(line.arg_types) if line.arg_types is not None and not line.triton else None
            known = self._sources.get(name, ""), line.device, load(), writes, self._definitions, types
            kernel = Kernel(name, language, *known)
            setattr(self.gm, name, kernel)
        return kernel

    def _handle(self, kernel: Kernel) -> Node:
        """The constant node that holds a kernel."""
        return self._held(kernel.name, kernel)

    def _triton_launch(self, line: Any) -> None:
        """Emit the portable call, which ``lower_launches`` turns into the tuned launch.

        What has no portable form (a float argument, a kernel autotuned over grids of its own, a template that
        is not Triton) is launched directly: fewer passes understand it, and it runs just the same.
        """
        tuner = loaded_kernel(self.module, line.kernel_name)
        # Inductor's own text for the arguments; whether a CPU scalar is passed by value depends on the device.
        with V.graph.set_current_device(line.device):
            texts = self.wrapper.prepare_triton_kernel_call(line.call_args)
        args = tuple(self._by_value(self.reader.value(text)) for text in texts)
        names = argument_names(tuner, line.triton_meta, line.raw_keys, len(args))
        writes = written_arguments(tuner, line.triton_meta, names, known_writes(line, names))
        kernel = self._kernel(line, "triton", lambda: TritonLauncher(tuner, line.device), writes)
        node = self._portable_call(line, tuner, TunedLaunch.of(kernel, tuner, names, args))
        if node is None:
            node = self.gm.graph.call_function(launch, (self._handle(kernel), *args))
        self._note(node)

    def _by_value(self, arg: Any) -> Any:
        """A number read out of a tensor has no fake value; it must be known to be data-dependent all the same, or a
        device graph would keep the first one."""
        if isinstance(arg, Node) and arg.target is torch.ops.aten.item.default and "val" not in arg.meta:
            env = V.graph.sizevars.shape_env
            source = arg.all_input_nodes[0].meta["val"]
            with env.ignore_fresh_unbacked_symbols():
                if source.dtype is torch.bool:
                    arg.meta["val"] = env.create_unbacked_symbool()
                else:
                    fraction = source.is_floating_point()
                    arg.meta["val"] = env.create_unbacked_symfloat() if fraction else env.create_unbacked_symint()
        return arg

    def _portable_call(self, line: Any, tuner: Any, tuned: TunedLaunch | None) -> Node | None:
        """``triton_kernel_wrapper_mutation`` on exactly the launch's arguments; None where that is impossible."""
        if tuned is None:
            return None
        sizes = dict(self.expr_to_proxy)
        last = next(iter(reversed(self.gm.graph.nodes)))
        self._launch_args = tuned.values
        try:
            if line.kernel_name not in self.kernels:
                self.kernels[line.kernel_name] = TritonKernel(tuner, versions.wrap_for_graph(tuner))
            self._generate_triton_call(line)
            node = next(iter(reversed(self.gm.graph.nodes)))
            tuned.put_into(node)
            return node
        except Exception:
            log.info("%s has no portable form and is launched directly", line.kernel_name, exc_info=True)
            # Take back the arithmetic that was made on the way, and what torch remembers of it.
            while (node := next(iter(reversed(self.gm.graph.nodes)))) is not last:
                self.gm.graph.erase_node(node)
            self.expr_to_proxy.clear()
            self.expr_to_proxy.update(sizes)
            return None

    def _lookup_args(self, args: Any, raw_args: Any = None) -> tuple[Any, ...]:
        """Torch's table of names knows neither views nor values read out of scalars; these are read already.

        Sizes stay expressions, because the grid is computed from them.
        """
        return tuple(
            value if isinstance(arg, str) else getattr(arg, "inner_expr", arg)
            for arg, value in zip(args, self._launch_args, strict=True)
        )

    # -- values --------------------------------------------------------------------------------------

    def _rewrites(self) -> dict[Any, Callable[..., Any]]:
        """Functions of the wrapper's module that have a form of their own in host graphs."""
        module = self.module
        rewrites: dict[Any, Callable[..., Any]] = {module.reinterpret_tensor: self._reinterpret}
        rewrites[torch.empty_strided] = self._allocate
        if (copy := getattr(module, "copy_if_misaligned", None)) is not None:
            rewrites[copy] = self._align
        for name in vars(module):
            if name.startswith("empty_strided_"):
                rewrites[getattr(module, name)] = self._allocate_pinned if "pinned" in name else self._allocate
        return rewrites

    def _reinterpret(self, base: Node, size: Any, stride: Any, offset: Any = 0) -> Node:
        node = self.gm.graph.call_function(reinterpret, (base, size, stride, offset))
        node.meta["call"] = self.module.reinterpret_tensor
        return node

    def _align(self, given: Node) -> Node:
        node = self.gm.graph.call_function(aligned, (given,))
        node.meta["call"] = self.module.copy_if_misaligned
        return node

    def _allocate(self, size: Any, stride: Any, dtype: torch.dtype, device: Any = None, **kwargs: Any) -> Node:
        # The text names at best the device type; the line knows the whole device.
        owner = getattr(self._line, "node", None)
        device = (owner.get_device() if owner is not None else None) or torch.device(device or "cpu")
        return self._new_buffer(size, stride, {"dtype": dtype, "device": device, **kwargs})

    def _new_buffer(self, size: Any, stride: Any, kwargs: dict[str, Any]) -> Node:
        node = self._note(self.gm.graph.call_function(torch.empty_strided, (size, stride), kwargs))
        if kwargs["device"].type == "cpu" and "pin_memory" not in kwargs and empty_strided_cpu is not None:
            node.meta["call"] = empty_strided_cpu
        return node

    def _allocate_pinned(self, size: Any, stride: Any, dtype: torch.dtype) -> Node:
        return self._allocate(size, stride, dtype, pin_memory=True)

    def _finish_call(self, node: Node, function: Any) -> Any:
        """What a call's result is: the node, or the buffers that it was made to write into."""
        self._describe_call(node, function)
        result = self._into_buffers(node)
        self._check_written_results(node)
        return result

    def _check_written_results(self, node: Node) -> None:
        """Assert what a custom operator's ``out=`` form has made of the buffers that it was given.

        Its author may have it resize them, where its fake kernel is wrong; torch's own forms do as their fake kernels
        say. The assert is on what the call returns: of the buffers it would be made before the call.
        """
        overload = node.target
        if not isinstance(overload, torch._ops.OpOverload) or overload.namespace == "aten":
            return
        if getattr(torch.Tag, "out", None) not in overload.tags or "val" not in node.meta:
            return
        results, several = node.meta["val"], isinstance(node.meta["val"], (tuple, list))
        for position, result in enumerate(results if several else (results,)):
            if isinstance(result, torch.Tensor):
                value = self.gm.graph.call_function(operator.getitem, (node, position)) if several else node
                layout = self._sizes(result.size()), self._sizes(result.stride())
                check = self.gm.graph.call_function(self.module.assert_size_stride, (value, *layout, str(overload)))
                check.meta["kind"] = Kind.CHECK

    def _into_buffers(self, node: Node) -> Any:
        """Have a functional operator write into buffers of its own, so that its results are planned.

        ::

            buf3 = aten.topk(x, 2)              values, indices = allocate ..., allocate ...
            buf4 = buf3[0]                 ->   aten.topk.values(x, 2, values=values, indices=indices)
            buf5 = buf3[1]

        Where that is impossible, ``node.meta["outside_plan"]`` says why.
        """
        overload, value = node.target, node.meta.get("val")
        if not isinstance(overload, torch._ops.OpOverload) or value is None:
            return node
        values = value if isinstance(value, (tuple, list)) else (value,)
        if not all(isinstance(result, torch.Tensor) for result in values):
            return node
        form = out_form(overload, values[0].device.type)
        if isinstance(form, OutForm) and not _same_layouts(values, _predicted_results(self._line)):
            form = "Inductor predicts no results like these"
        buffers = self._with_buffers(node, form, values) if isinstance(form, OutForm) else form
        if isinstance(buffers, str):
            node.meta["outside_plan"] = buffers
            return node
        return buffers if isinstance(value, (tuple, list)) else buffers[0]

    def _with_buffers(self, node: Node, form: OutForm, values: Sequence[torch.Tensor]) -> tuple[Node, ...] | str:
        """Make ``node`` the call of its out= form and return the buffers, or say why not."""
        if any(v.layout is not torch.strided or v.is_conj() or v.is_neg() for v in values):
            return "its results have no plain memory"
        try:
            layouts = [(self._sizes(value.size()), self._sizes(value.stride())) for value in values]
        except UndefinedName:
            return "its result's size is data-dependent"
        buffers = []
        for layout, value in zip(layouts, values, strict=True):
            kwargs: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            buffers.append(self._new_buffer(*layout, kwargs))
        buffers[-1].append(node)
        node.target = form.overload
        node.kwargs = {**node.kwargs, **dict(zip(form.results, buffers, strict=True))}
        node.meta["op_overload"] = form.overload
        node.meta.pop("call", None)
        results = tuple(buffer.meta["val"] for buffer in buffers)
        node.meta["val"] = results if len(results) > 1 else results[0]
        return tuple(buffers)

    def _sizes(self, sizes: Sequence[int | torch.SymInt]) -> tuple[Any, ...]:
        return tuple(
            size if isinstance(size, int) else self.reader.value(versions.python_expression(size.node.expr))
            for size in sizes
        )

    def _describe_call(self, node: Node, function: Any) -> None:
        """Attach to a call what analysis and execution need beyond its target."""
        self._note(node)
        if function is print:
            has_side_effect(print)  # or dead code elimination would drop it
            return
        if _is_assert(function):
            node.meta["kind"] = Kind.CHECK
            has_side_effect(function)
            return
        if is_descriptor(function):
            node.meta["kind"] = Kind.VIEW
            return
        overload = getattr(getattr(self._line, "node", None), "op_overload", None)
        is_operator = isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
        if isinstance(overload, torch._ops.OpOverload) and node.meta.get("kind") is None:
            if isinstance(function, torch._ops.OpOverloadPacket):
                node.meta["op_overload"] = overload
            elif not is_operator and callable(function) and function in versions.extern_kernels():
                # Inductor's wrapper calls a Python binding (torch.addmm); the graph shows the operator.
                node.meta["call"] = function
                node.target = overload
        if isinstance(function, torch._ops.OpOverload):
            node.meta["op_overload"] = function
            if versions.is_plain_view(function) or _is_view_here(node):
                node.meta["kind"] = Kind.VIEW
        if has_effects(node.meta.get("op_overload", node.target)):
            node.meta["effect"] = True  # what nothing in its schema shows

    def _note(self, node: Node) -> Node:
        """Remember which user code the line comes from."""
        traces = versions.stack_traces(self._line)
        if traces:
            node.meta["stack_trace"] = traces[0]
        if names := versions.origins(self._line):
            node.meta["origins"] = names
        if module := versions.module_path(self._line):
            node.meta["module"] = module
        return node

    def _infer_value(self, node: Node) -> None:
        """Give a new node a fake value, by running it on its operands' fake values.

        Values serve display, symbolic arithmetic and the verifier's view of aliasing; nothing that executes
        depends on them, so an operator that has no fake form only stays without one.
        """
        if node.op != "call_function" or "val" in node.meta or node.meta.get("kind") is Kind.CHECK:
            return
        without_value = (launch, switch, while_loop, print, triton_kernel_wrapper_mutation)
        if node.target in without_value or _is_assert(node.target):
            return
        if node.target is reinterpret and "val" not in node.args[0].meta:  # type: ignore[union-attr]
            return
        missing = [arg for arg in node.all_input_nodes if "val" not in arg.meta]
        overload = node.target
        data_dependent = isinstance(overload, torch._ops.OpOverload) and (
            torch.Tag.data_dependent_output in overload.tags or torch.Tag.dynamic_output_shape in overload.tags
        )
        if missing or data_dependent or not callable(overload):
            self._value_from_layout(node)
            return
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        try:
            # What an operator asks of sizes on the way is nothing that the program relies on.
            with V.fake_mode, torch.no_grad(), V.graph.sizevars.shape_env.suppress_guards():
                node.meta["val"] = symbolic_form(overload)(*args, **kwargs)
        except Exception:
            self._value_from_layout(node)

    def _value_from_layout(self, node: Node) -> None:
        """The value Inductor's layout predicts: data-dependent sizes have names there."""
        if self._predicted is not None:
            node.meta["val"] = _apart(self._predicted)
            return
        owner = getattr(self._line, "node", None)
        symbol = getattr(owner, "sym", None)
        if symbol is not None:
            node.meta["val"] = versions.symbolic_value(symbol)
            return
        origin = owner.get_origin_node() if owner is not None and hasattr(owner, "get_origin_node") else None
        if origin is not None and "val" in origin.meta:
            node.meta["val"] = origin.meta["val"]
            return
        if node.target is torch.ops.aten.item.default:
            self._by_value(node)
        elif (example := _example(owner)) is not None:
            node.meta["val"] = example

    def _name_value(self, name: str, node: Node) -> None:
        """A data-dependent size has one name in Inductor's program; give its node that value."""
        symbol = self._unbacked().get(name)
        if symbol is not None:
            node.meta["val"] = versions.symbolic_value(symbol)

    def _unbacked(self) -> dict[str, Any]:
        env = V.graph.sizevars.shape_env
        return {str(symbol): symbol for symbol in env.var_to_range if env.is_unbacked_symint(symbol)}

    def _outputs(self) -> Any:
        self._line = None
        values = []
        for reference in self.wrapper.get_output_refs():
            value = self.reader.value(reference)
            values.append(value)
            if config.nan_asserts and isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor):
                self.reader.run(f"assert not {reference}.isnan().any().item()")
                self.reader.run(f"assert not {reference}.isinf().any().item()")
        # The convention of Inductor's FX wrapper: one output comes bare, except from a subgraph.
        return values[0] if len(values) == 1 and not self.is_subgraph else values


def _is_assert(function: Any) -> bool:
    # A custom operator may be called so, too, and returns something.
    is_operator = isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    return not is_operator and getattr(function, "__name__", "").startswith("assert_")


def _is_view_here(node: Node) -> bool:
    """Whether a call of ``reshape`` needs no copy: its operand's layout, which is known, decides."""
    if node.target is not torch.ops.aten.reshape.default:
        return False
    result, operand = node.meta.get("val"), node.args[0].meta.get("val")  # type: ignore[union-attr]
    if not isinstance(result, torch.Tensor) or not isinstance(operand, torch.Tensor):
        return False
    return result.untyped_storage()._cdata == operand.untyped_storage()._cdata


def _example(owner: Any) -> Any:
    """The fake value that a node of Inductor's IR predicts; None where it has no layout."""
    try:
        return owner.get_example()
    except Exception:
        return None


def _predicted_results(line: Any) -> list[Any]:
    """The fake values of what Inductor's IR says a call returns; it lays its own kernels out by them."""
    owner = getattr(line, "node", None)
    outputs = getattr(owner, "outputs", None) or [owner]
    return [_example(output) for output in outputs]


def _same_layouts(values: Sequence[torch.Tensor], others: Sequence[Any]) -> bool:
    """Whether tensors are alike in size, stride, type and device, by all that is known of symbolic sizes."""
    same = V.graph.sizevars.statically_known_list_equals

    def layout(tensor: torch.Tensor) -> list[Any]:
        return [n if isinstance(n, int) else n.node.expr for n in (*tensor.size(), *tensor.stride())]

    return len(values) == len(others) and all(
        isinstance(other, torch.Tensor)
        and (value.dtype, value.device, value.dim()) == (other.dtype, other.device, other.dim())
        and same(layout(value), layout(other))
        for value, other in zip(values, others, strict=True)
    )


def _results_by_index(owner: Any) -> list[Any]:
    """The fake values of what a control-flow node returns, at the positions by which ``getitem`` asks for them.

    ``owner.outputs`` leaves out carried values that the loop writes in place: the program reads their buffers, and
    asks for no element. So an output's place in that list is not its index.
    """
    results = {output.indices[0][1]: _example(output) for output in owner.outputs}
    return [results.get(index) for index in range(max(results, default=-1) + 1)]


def _apart(value: Any) -> Any:
    """Fake values like these, in storages of their own."""
    with V.fake_mode:
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=t.device), value
        )
