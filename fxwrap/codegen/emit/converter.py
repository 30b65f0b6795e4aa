"""EMIT: turns the wrapper lines of one Inductor program into a host graph.

This file decides how each line is read: by a method (``_line_`` and its class), as text, or not at all. The nodes it
becomes are made in the file of its kind: ``calls.py`` (library calls), ``launches.py`` (kernels), ``subgraphs.py``;
``values.py`` gives every node its fake value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch._inductor import config, ir
from torch._inductor.codegen.common import IndentedBuffer
from torch._inductor.codegen.wrapper import WrapperLine
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node

from ...errors import EmissionError
from ...host_graph.nodes import Kind, require
from ...host_graph.user_code import place_of
from .. import torch_versions as versions
from ..garbage import no_garbage_collection
from ..request import current_request
from .calls import CallEmitter
from .launches import LaunchEmitter
from .statements import StatementReader, UndefinedName, assigned_names
from .subgraphs import SubgraphEmitter

# Lines that are refused, and why. Lines with a ``_line_...`` method are read by it, and all others as text.
LINES_REFUSED = {
    "AllocFromPoolLine": "Inductor's own memory planning, which fxwrap switches off",
    "DeallocFromPoolLine": "Inductor's own memory planning, which fxwrap switches off",
    "EnterCudaMemPoolContextLine": "memory pools inside the compiled region",
    "ExitCudaMemPoolContextLine": "memory pools inside the compiled region",
    "DualWrapperCodeLine": "a line of the C++ wrapper",
    "EnterKernelProfileScopeLine": "a line of the C++ wrapper",
    "ExitKernelProfileScopeLine": "a line of the C++ wrapper",
}


class SymbolTable(dict):
    """The converter's table of size expressions. It looks up local variables of the wrapper by name, too."""

    def __init__(self, names: dict[str, Any], proxy: Callable[[Node], Any]) -> None:
        super().__init__()
        self._names, self._proxy = names, proxy

    def _by_name(self, key: object) -> Node | None:
        variable = self._names.get(str(key)) if isinstance(key, sympy.Symbol) else None
        return variable if isinstance(variable, Node) else None

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or self._by_name(key) is not None

    def __missing__(self, key: Any) -> Any:
        node = self._by_name(key)
        if node is None:
            raise KeyError(key)
        return self._proxy(node)


class HostGraphConverter(SubgraphEmitter, LaunchEmitter, CallEmitter):
    """Converts one Inductor program to a host graph. An instance is used once.

    A line is read as the text that Inductor's Python wrapper would run (see ``statements``). Kernel definitions and
    kernel calls are read as objects: their text does not say which arguments a kernel writes, nor where it runs.
    """

    def generate(self) -> GraphModule:
        """The host graph.

        Raises:
            EmissionError: naming every line that has no form in a host graph.
        """
        names: dict[str, Any] = self.buffer_to_node  # type: ignore[assignment]
        self.expr_to_proxy = SymbolTable(names, lambda node: torch.fx.Proxy(node, tracer=self.tracer))
        self._constants = {}
        self.gm._register_create_node_hook(self._infer_value)
        try:
            self._generate_graph_inputs()
            self._generate_graph_constants()
            self._generate_graph_input_shapes()
            self._name_symbols()
            # Printing lines can add imports to the wrapper's module: it is loaded afterwards.
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
            self._name_inputs()
        finally:
            self.gm._unregister_create_node_hook(self._infer_value)
        self.gm.recompile()
        return self.gm

    def _generate_graph_inputs(self) -> None:
        for name, value in self.graph_inputs.items():
            # Two inputs can be one symbol: the ragged size of two jagged tensors. The first one is named after it.
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
            elif (opaque := getattr(value, "value", None)) is not None:
                node.meta["val"] = opaque  # a process group, a generator, an object of C++

    def _name_symbols(self) -> None:
        for expression, proxy in self.expr_to_proxy.items():
            if isinstance(expression, sympy.Symbol):
                self.buffer_to_node.setdefault(str(expression), proxy.node)

    def _name_inputs(self) -> None:
        """Note what the user's code calls each input, for reports; not a name that something else has, too."""
        if self.is_subgraph:
            return
        compilation = current_request().compilation
        known = compilation.lines.inputs if compilation is not None and compilation.lines is not None else {}
        placeholders = V.graph.orig_gm.graph.find_nodes(op="placeholder")
        names = {str(node.target): versions.input_name(node, known) for node in placeholders}
        taken = Counter([*names.values(), *(node.name for node in self.gm.graph.nodes)])
        # Kernels may read an input by another node (``aligned``); sizes have the names of their symbols.
        own = {node.target: node for node in self.gm.graph.find_nodes(op="placeholder")}
        for placeholder, name in names.items():
            node = own.get(placeholder) or self.buffer_to_node.get(placeholder)
            if name and taken[name] == 1 and isinstance(node, Node):
                node.meta["user_name"] = name

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
                # A line that only lacks what a refused line defines is not reported.
                if not (isinstance(error, UndefinedName) and error.name in lost):
                    failures.append(self._describe_failure(error))
                lost |= assigned_names(text) if isinstance(text, str) else set()
        if failures:
            raise EmissionError(
                "\n  ".join([f"{len(failures)} wrapper line(s) have no form in a host graph:", *failures]),
                remedy="report the lines; without strict=True the graph runs through Inductor's own wrapper; take "
                "this code out of the compiled region (torch.compiler.disable), and fxwrap runs the rest",
            )

    def _describe_failure(self, error: EmissionError) -> str:
        """The error of the present line, with its operator and its line of user code."""
        kind = type(self._line).__name__
        named = not isinstance(self._line, WrapperLine) or kind in error.subject
        parts = [error.subject if named else f"{error.subject} ({kind})"]
        if operators := versions.operators(self._line):
            parts.append(f"operator {', '.join(operators)}")
        if where := place_of(self._trace(), versions.module_path_of(self._line)):
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
        """Emit the pending asserts whose names are all defined by now."""
        ready = [entry for entry in self._pending_asserts if entry[0] <= self.reader.names.keys()]
        self._pending_asserts = [entry for entry in self._pending_asserts if entry not in ready]
        for _, condition, message in ready:
            node = self.gm.graph.call_function(require, (self.reader.value(condition), message))
            node.meta["kind"] = Kind.CHECK

    def _handler(self, line: Any) -> Callable[[Any], None] | None:
        return getattr(self, f"_line_{type(line).__name__}", None)

    def _text_of(self, line: Any) -> str | EmissionError:
        """The Python that Inductor's wrapper would run for a line; empty for a line that has a handler."""
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
        # A deferred line may be empty. A LineContext is a source position without code.
        return str(line() or "") if callable(line) else ""

    def _skip(self, line: Any) -> None:
        """A line without an effect of its own in a host graph."""

    # Allocations and kernels name their device: a line that enters a device's context adds nothing.
    _line_EnterDeviceContextManagerLine = _skip
    _line_ExitDeviceContextManagerLine = _skip
    _line_EnterSubgraphLine = _skip
    _line_ExitSubgraphLine = _skip
    _line_CommentLine = _skip
    _line_NullLine = _skip
    _line_KernelDefinitionLine = _skip  # all kernels were loaded before the first line
    # A host graph frees nothing: the planner computes live ranges from uses.
    _line_FreeLine = _skip
    _line_FreeIfNotReusedLine = _skip

    def _line_EnterCudaStreamContextLine(self, line: Any) -> None:
        self._refuse_streams()

    _line_ExitCudaStreamContextLine = _skip  # the line that enters it was refused

    def _line_EnterDeviceContextManagerWithStreamInfoLine(self, line: Any) -> None:
        if line.num_streams > 1:
            self._refuse_streams()

    _line_ExitDeviceContextManagerWithStreamInfoLine = _skip

    def _refuse_streams(self) -> None:
        raise EmissionError(
            "user streams inside the compiled region",
            expected="a graph that runs on one stream",
            got=type(self._line).__name__,
        )

    def _outputs(self) -> Any:
        self._line = None
        values = []
        for reference in self.wrapper.get_output_refs():
            value = self.reader.value(reference)
            values.append(value)
            if config.nan_asserts and isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor):
                self.reader.run(f"assert not {reference}.isnan().any().item()")
                self.reader.run(f"assert not {reference}.isinf().any().item()")
        # By the convention of Inductor's FX wrapper one output is returned bare, except by a subgraph.
        return values[0] if len(values) == 1 and not self.is_subgraph else values
