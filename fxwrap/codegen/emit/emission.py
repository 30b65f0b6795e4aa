"""FxwrapCodegen: the wrapper codegen that Inductor instantiates, which emits a host graph and compiles it."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch._inductor.codegen.common import FileBackedGraphModule
from torch._inductor.codegen.wrapper import KernelCallLine, KernelDefinitionLine, PythonWrapperCodegen
from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen
from torch._inductor.utils import ValueWithLineMap
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from ...errors import EmissionError, FxwrapError, PipelineError
from ...host_graph.user_code import described, owner_of
from ...passes.analysis.windows import used_outside
from ...pipeline import REWRITES, compile_host_graph
from ...plan import PartitionGraph
from ...stages import Rewrite
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

    Subclass it to see or transform what Inductor emits. ``compile_graph`` takes the whole host graph and returns the
    callable that runs. ``passes`` adds graph passes, and ``compile_partition`` compiles partitions another way; with
    these the rest of the pipeline stays.

    Attributes:
        uuid: the version of a subclass, which is a part of the caches' key. What a subclass without one compiles is
            not cached if the subclass changes anything.
    """

    uuid: str | None = None
    supports_caching = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.supports_caching = not without_uuid(cls, FxwrapCodegen)

    def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
        """Turn a host graph into the callable that runs it, ``callable(*inputs) -> outputs``."""
        outside = used_outside(V.graph.orig_gm, versions.as_strided_counts_from_storage())
        request = current_request()
        inputs = replace(request.inputs, used_outside=outside)
        request = replace(request, inputs=inputs, compile_partition=self._partition_hook())
        return compile_host_graph(gm, request, self._rewrites())

    def _rewrites(self) -> Iterator[Rewrite]:
        # Launches are lowered first. Torch knows that a launch has an effect, but not that a portable Triton call
        # has one: dead code elimination would drop the call.
        yield Rewrite("launches", lower_launches, lint=False)
        yield from REWRITES
        for graph_pass in self.passes():
            yield Rewrite(getattr(graph_pass, "__name__", repr(graph_pass)), graph_pass)

    def passes(self) -> Iterable[Callable[[GraphModule], GraphModule | None]]:
        """Passes over the host graph, which run in order before the analysis.

        A pass takes a valid host graph and must leave one: it edits the graph in place, or returns another one.
        """
        return ()

    def compile_partition(self, graph: PartitionGraph) -> Callable[..., Any] | None:
        """Compile one partition another way, or return None to run it as usual.

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
            # The call names only buffers. Inductor's IR of the kernel is known while the call is written.
            line.scheduled = versions.scheduled_nodes(line.device)  # type: ignore[attr-defined]
        elif isinstance(line, KernelDefinitionLine):
            self.kernel_definitions[line.kernel_name] = line
        super().writeline(line)

    @functools.cached_property
    def kernel_definitions(self) -> dict[str, Any]:
        """Kernels of the whole program by name: a subgraph may call a kernel that another part defines."""
        parent = getattr(self, "parent_wrapper", None)
        return {} if parent is None else parent.kernel_definitions

    # Where Inductor emits graphs, it copies misaligned inputs before the program runs. Such a copy misses what the
    # program writes to an overlapping input. So they are copied at their first use, as by Inductor's Python wrapper.
    # Older versions neither have nor call the two methods.

    def register_alignment_check_inputs(self) -> None:
        PythonWrapperCodegen.register_alignment_check_inputs(self)

    def codegen_deferred_alignment_copies(self, *args: Any, **kwargs: Any) -> None:
        PythonWrapperCodegen.codegen_deferred_alignment_copies(self, *args, **kwargs)

    # Inductor writes these as strings with loops in them. A branch has a line class in every version.

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
        try:
            return self._emit(is_inference)
        except (FxwrapError, OSError):
            raise
        except Exception as error:
            raise _failure(error) from error

    def _emit(self, is_inference: bool) -> tuple[Any, None]:
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
            if not callable(compiled):
                raise EmissionError(
                    f"{type(self).__name__}.compile_graph",
                    expected="a callable that runs the graph, callable(*inputs) -> outputs",
                    got=repr(compiled),
                    remedy="return what runs it, such as gm.forward; this graph runs through Inductor's own wrapper",
                )
            if caching() and not self.is_subgraph:  # type: ignore[misc,truthy-function]
                text = as_module(compiled, gm)
                write_module(text)
                return ValueWithLineMap(text, []), None
        return HostGraphModule(gm, compiled), None


def _failure(error: Exception) -> FxwrapError:
    """An unexpected error of emission, as one of the user's code or of fxwrap's."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_user = [code for code in codes if owner_of(code.co_filename) == "user"]
    owners = [owner for code in codes if (owner := owner_of(code.co_filename)) != "torch"]
    if owners[-1:] == ["user"]:
        name = getattr(of_user[0], "co_qualname", of_user[0].co_name)  # from Python 3.11 on
        return PipelineError(
            f"{name}, which is the user's, raises {described(error)}",
            remedy="mend it: fxwrap only calls it; without strict=True the graph runs through Inductor's own wrapper",
        )
    return EmissionError(
        f"emission failed with {described(error)}",
        remedy="the graph runs through Inductor's own wrapper; please report this",
    )


class HostGraphModule(FileBackedGraphModule):
    """The compiled program as Inductor's type, where nothing is cached."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.call: Any = boxed(self.compiled_fn)  # type: ignore[method-assign]
