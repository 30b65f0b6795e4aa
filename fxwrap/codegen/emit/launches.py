"""Wrapper lines that launch compiled kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch._inductor.codegen.wrapper import KernelCallLine, KernelDefinitionLine, PythonWrapperCodegen
from torch._inductor.codegen.wrapper_fxir import TritonKernel
from torch._inductor.virtualized import V
from torch.fx import Node

from ...devices import KernelCall, kernel_kind
from ...errors import EmissionError
from ...host_graph.nodes import Kernel, launch
from .. import torch_versions as versions
from .kernels import load_kernels, loaded_kernel
from .triton_kernels import TritonLauncher, TunedLaunch, argument_names, declared_writes, written_arguments
from .values import NodeEmitter

log = logging.getLogger(__name__)


class LaunchEmitter(NodeEmitter):
    """Loads the program's kernels, and emits a node for each launch."""

    def _load_kernels(self) -> None:
        """Load every kernel definition in one module, so that they compile side by side as Inductor's do."""
        of_program = getattr(self.wrapper, "kernel_definitions", {})
        by_name: dict[str, Any] = {}
        for line in self.lines:
            if isinstance(line, KernelDefinitionLine):
                by_name[line.kernel_name] = line
            elif isinstance(line, KernelCallLine) and line.kernel_name in of_program:
                by_name[line.kernel_name] = of_program[line.kernel_name]
        definitions = list(by_name.values())
        code = [
            PythonWrapperCodegen._format_kernel_definition(line.kernel_name, line.kernel_body, metadata=line.metadata)
            for line in definitions
        ]
        if any(getattr(line, "triton", False) for line in self.lines):
            # Printing a call would write it, too: descriptors name the module.
            self.wrapper.write_triton_header_once()
        prologue = [self.wrapper.imports.getvalue(), self.wrapper.header.getvalue()]
        self._definitions = "\n".join([*prologue, *code])
        self.module = load_kernels(self._definitions)
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
        self._note(self.gm.graph.call_function(launch, (self._constant(kernel.name, kernel), *args)))

    def _argument(self, arg: Any) -> Any:
        text = arg if isinstance(arg, str) else versions.python_expression(arg)
        return self.reader.value(text)

    def _kernel(
        self, line: Any, language: str, load: Callable[[], Callable[..., Any]], writes: tuple[int, ...]
    ) -> Kernel:
        """The Kernel of a launch; all launches of a kernel share it. It is an attribute of the graph module."""
        name = line.kernel_name
        kernel = getattr(self.gm, name, None)
        if not isinstance(kernel, Kernel):
            types = tuple(line.arg_types) if line.arg_types is not None and not line.triton else None
            source = self._sources.get(name, "")
            kernel = Kernel(name, language, source, line.device, load(), writes, self._definitions, types)
            setattr(self.gm, name, kernel)
        return kernel

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
        writes = written_arguments(tuner, line.triton_meta, names, declared_writes(line, names))
        kernel = self._kernel(line, "triton", lambda: TritonLauncher(tuner, line.device), writes)
        node = self._portable_call(line, tuner, TunedLaunch.of(kernel, tuner, names, args))
        if node is None:
            node = self.gm.graph.call_function(launch, (self._constant(kernel.name, kernel), *args))
        self._note(node)

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
            # Remove the arithmetic that the attempt has added, from the graph and from torch's table of sizes.
            while (node := next(iter(reversed(self.gm.graph.nodes)))) is not last:
                self.gm.graph.erase_node(node)
            self.expr_to_proxy.clear()
            self.expr_to_proxy.update(sizes)
            return None

    def _lookup_args(self, args: Any, raw_args: Any = None) -> tuple[Any, ...]:
        """The launch's arguments as they were read: torch's table of names has no views and no values of scalars.

        Sizes stay expressions, because the grid is computed from them.
        """
        return tuple(
            value if isinstance(arg, str) else getattr(arg, "inner_expr", arg)
            for arg, value in zip(args, self._launch_args, strict=True)
        )
