"""The wrapper codegen that Inductor instantiates: where its lines become a host graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch._inductor.codegen.common import FileBackedGraphModule
from torch._inductor.codegen.wrapper import KernelCallLine, KernelDefinitionLine, PythonWrapperCodegen
from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen
from torch._inductor.utils import ValueWithLineMap
from torch.fx import GraphModule

from ...pipeline import REWRITES, Stages, compile_host_graph, rewrite
from ...plan import PartitionGraph
from .. import torch_versions as versions
from ..garbage import no_garbage_collection
from ..request import current_request
from ..store.caches import caching, without_uuid, write_module
from ..store.stored_program import as_module, boxed
from .converter import HostGraphConverter
from .subgraphs import ChosenSubgraphLine, InvokeSubgraphLine, WhileLoopLine
from .triton_kernels import lower_launches


class FxwrapCodegen(WrapperFxCodegen):
    """Emits Inductor's program as a host graph and compiles it.

    Subclass it to see or transform what Inductor emits: ``compile_graph`` gets the whole host graph and
    returns what runs; ``passes`` adds graph passes and ``compile_partition`` compiles partitions some other way;
    both keep the rest of the pipeline.

    Attributes:
        uuid: of a subclass, says which version of it this is: what it has compiled is cached under that name. One
            that changes what is compiled, and has none, is not cached.
    """

    uuid: str | None = None
    supports_caching = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.supports_caching = not without_uuid(cls, FxwrapCodegen)

    def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
        """Turn a host graph into the callable that runs it, ``callable(*inputs) -> outputs``."""
        request = replace(current_request(), compile_partition=self._partition_hook())
        return compile_host_graph(gm, request, self.stages())

    def stages(self) -> Stages:
        """What a host graph goes through, in order. Override it to replace stages (``dataclasses.replace``)."""
        # Launches are lowered first: torch does not know that a portable Triton call has an effect, and a pass that
        # drops dead code would drop it; of launches torch does know.
        lowered = rewrite("launches", lower_launches, lint=False)
        own = [rewrite(getattr(one, "__name__", repr(one)), one) for one in self.passes()]
        return Stages(rewrites=(lowered, *REWRITES, *own))

    def passes(self) -> Iterable[Callable[[GraphModule], GraphModule | None]]:
        """Passes over the host graph, run in order before it is analysed.

        A pass gets a valid host graph and leaves one: it edits in place, or returns another GraphModule.
        """
        return ()

    def compile_partition(self, graph: PartitionGraph) -> Callable[..., Any] | None:
        """Compile one partition some other way, or return None to have it run as usual.

        Args:
            graph: ``graph.module`` is the partition as a GraphModule, ``graph.signature`` names its inputs and
                outputs, and ``graph.partition`` has the verdict.

        Returns:
            A function of the signature's inputs that returns a sequence of its outputs and writes the inputs that
            the signature says it mutates. For a captured partition it is called while a device graph captures.
        """
        return None

    def _partition_hook(self) -> Callable[[PartitionGraph], Callable[..., Any] | None] | None:
        overridden = type(self).compile_partition is not FxwrapCodegen.compile_partition
        return self.compile_partition if overridden else None

    def writeline(self, line: Any) -> None:
        if isinstance(line, KernelCallLine):
            # What a kernel computes is known while its call is written; the call itself names buffers only.
            line.scheduled = versions.scheduled_nodes(line.device)  # type: ignore[attr-defined]
        elif isinstance(line, KernelDefinitionLine):
            self.kernel_definitions[line.kernel_name] = line
        super().writeline(line)

    @functools.cached_property
    def kernel_definitions(self) -> dict[str, Any]:
        """Kernels of the whole program by name: a subgraph may call one that another part of it defines."""
        parent = getattr(self, "parent_wrapper", None)
        return {} if parent is None else parent.kernel_definitions

    # Where Inductor emits graphs, its caller copies inputs that are not aligned before the program runs. The copy
    # then misses what the program writes to an input that overlaps one of them. So they are copied where Inductor's
    # Python wrapper copies them: at their first use. Older versions have neither method, and do not call them.

    def register_alignment_check_inputs(self) -> None:
        PythonWrapperCodegen.register_alignment_check_inputs(self)

    def codegen_deferred_alignment_copies(self, *args: Any, **kwargs: Any) -> None:
        PythonWrapperCodegen.codegen_deferred_alignment_copies(self, *args, **kwargs)

    # Inductor writes these as strings with loops in them; a branch has a line of its own in every version.

    def codegen_while_loop(self, while_loop: Any, stack_output: bool) -> None:
        self.writeline(WhileLoopLine(self, while_loop, stack_output))
        for subgraph in (while_loop.cond_subgraph, while_loop.body_subgraph):
            self.codegen_subgraph_common(subgraph)

    def codegen_invoke_subgraph(self, invoke_subgraph: Any) -> None:
        self.writeline(InvokeSubgraphLine(self, invoke_subgraph))
        self.codegen_subgraph_common(invoke_subgraph.subgraph)

    def codegen_subgraph_with_flattened_outputs(
        self, subgraph: Any, outer_inputs: list[str], outer_flattened_outputs: list[str]
    ) -> None:
        line = ChosenSubgraphLine(self, subgraph.graph.name, tuple(outer_inputs), tuple(outer_flattened_outputs))
        self.writeline(line)
        self.codegen_subgraph_common(subgraph)

    def _generate(self, is_inference: bool) -> tuple[Any, None]:
        self.run_wrapper_ir_passes(is_inference)
        converter = HostGraphConverter(
            lines=self.lines,
            prologue="",  # read from the wrapper once its lines are printed
            graph_inputs=self.get_fx_graph_inputs(),
            graph_outputs=self.get_graph_outputs(),
            subgms=self.subgms,
            is_subgraph=self.is_subgraph,  # type: ignore[misc]
        )
        converter.wrapper = self
        gm = converter.generate()
        with no_garbage_collection():
            compiled = self.compile_graph(gm)
            if caching() and not self.is_subgraph:  # type: ignore[misc,truthy-function]
                text = as_module(compiled, gm)
                write_module(text)
                return ValueWithLineMap(text, []), None
        return HostGraphModule(gm, compiled), None


class HostGraphModule(FileBackedGraphModule):
    """What Inductor gets back where nothing is cached."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.call: Any = boxed(self.compiled_fn)  # type: ignore[method-assign]
