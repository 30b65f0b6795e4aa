"""The wrapper codegen that Inductor instantiates: where its lines become a host graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch._inductor.codegen.common import FileBackedGraphModule
from torch._inductor.codegen.wrapper_fxir import WrapperFxCodegen
from torch.fx import GraphModule

from ..compiler import compile_host_graph
from ..passes.view_copies import view_needless_copies
from ..plan import PartitionGraph
from .converter import HostGraphConverter
from .request import current_request
from .triton_kernels import lower_launches


class FxwrapCodegen(WrapperFxCodegen):
    """Emits Inductor's program as a host graph and compiles it.

    Subclass it to see or transform what Inductor emits: ``compile_graph`` gets the whole host graph and
    returns what runs; ``passes`` adds graph passes and ``compile_partition`` compiles partitions some other way;
    both keep the rest of the line.
    """

    def compile_graph(self, gm: GraphModule) -> Callable[..., Any]:
        """Turn a host graph into the callable that runs it, ``callable(*inputs) -> outputs``."""
        # Lowered first: torch does not know that a portable Triton call has an effect, and a pass that drops dead
        # code would drop it; of launches torch does know.
        gm = view_needless_copies(lower_launches(gm))
        for graph_pass in self.passes():
            gm = graph_pass(gm) or gm
        return compile_host_graph(gm, replace(current_request(), compile_partition=self._partition_hook()))

    def passes(self) -> Iterable[Callable[[GraphModule], GraphModule | None]]:
        """Passes over the host graph, run in order before it is analysed.

        A pass gets a valid host graph and leaves one: it edits in place, or returns another GraphModule.
        """
        return ()

    def compile_partition(self, graph: PartitionGraph) -> Callable[..., Any] | None:
        """Compile one partition some other way, or return None to have it run as usual.

        Args:
            graph: the partition as a GraphModule with its signature; ``graph.partition`` has the verdict.

        Returns:
            A function of the signature's inputs that returns a sequence of its outputs and writes the inputs that
            the signature says it updates. For a captured partition it is called while a device graph captures.
        """
        return None

    def _partition_hook(self) -> Callable[[PartitionGraph], Callable[..., Any] | None] | None:
        overridden = type(self).compile_partition is not FxwrapCodegen.compile_partition
        return self.compile_partition if overridden else None

    def _generate(self, is_inference: bool) -> tuple[FileBackedGraphModule, None]:
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
        return HostGraphModule(gm, self.compile_graph(gm)), None


class HostGraphModule(FileBackedGraphModule):
    """What Inductor gets back. Takes its arguments as a list and empties it, as Inductor's own wrapper does,
    so that the caller does not keep inputs alive while the program runs."""

    def call(self, args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        run = getattr(self.compiled_fn, "run", None)
        return run(inputs) if run is not None else self.compiled_fn(*inputs)
