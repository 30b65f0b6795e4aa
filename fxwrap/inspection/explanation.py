"""Every decision about a function, as one object: printed, read, compared, drawn, saved as data."""

from __future__ import annotations

import functools
import inspect
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from ..codegen.dynamo.report import DynamoReport
from ..codegen.dynamo.search import BOUND
from ..compilation import Compilation
from ..graphs.program import Program
from ..host_graph.nodes import Kernel
from ..plan import MemoryPlan, Partition, Prediction
from .difference import Difference, difference
from .document import (
    CallData,
    Document,
    Facts,
    checked,
    document_of,
    graph_data,
    kernels_of,
    planned_graph,
    read,
    unit_of,
)
from .memory_map import predictions
from .text import text_of


def name_of(fn: Any) -> str:
    """What a report is about: the class of a module, or the name of a function and its place."""
    for wrapped in (BOUND, "_orig_mod", "_torchdynamo_orig_callable"):
        fn = getattr(fn, wrapped, fn)
    fn = inspect.unwrap(fn)
    fn = fn.func if isinstance(fn, functools.partial) else fn
    name, code = getattr(fn, "__qualname__", type(fn).__qualname__), getattr(fn, "__code__", None)
    return name if code is None else f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})"


@dataclass(frozen=True)
class GraphReport:
    """One host graph and the decisions about it."""

    program: Program

    @property
    def phase(self) -> str:
        """ "inference", "forward" or "backward"."""
        return self.program.plan.phase

    @property
    def graph(self) -> GraphModule:
        """The host graph: it runs as it is, ``graph(*inputs)``; ``graph.code`` is readable."""
        return self.program.plan.graph

    @property
    def partitions(self) -> tuple[Partition, ...]:
        return self.program.plan.partitions

    @property
    def memory(self) -> MemoryPlan | None:
        """The newest memory plan; None if no shape was planned."""
        return self.program.newest_plan

    @property
    def predicted(self) -> tuple[Prediction, ...]:
        """The predicted memory of a call with the newest known shape, by device.

        A forward's prediction includes its backward, once that has run; the backward alone has none then.
        """
        return tuple(predictions(self.program))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels with their source, including those of branches and loops."""
        return tuple(kernels_of(self.graph))

    @property
    def unit(self) -> str:
        """The native steps of the newest recording, a line for each; empty if none runs natively."""
        return "\n".join(unit_of(self.program))

    @property
    def counters(self) -> dict[str, Any]:
        return self.program.counters.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """As plain data: ``document.GraphData``."""
        return dict(graph_data(self.program))


class Explanation:
    """Every decision about a function. Print it, read ``graphs``, or save it as data.

    Attributes:
        graphs: one report for each host graph, in the order of compilation; empty if the explanation was read from a
            file: then ``to_dict()["graphs"]`` has everything about them.
    """

    def __init__(self, programs: Sequence[Program], about: Facts | None = None) -> None:
        self.graphs = list(map(GraphReport, programs))
        self._about = about if about is not None else Facts()
        self._document: Document | None = None

    @classmethod
    def of(
        cls,
        compilations: Sequence[Compilation],
        function: str = "",
        dynamo: DynamoReport | None = None,
        calls: Sequence[CallData] = (),
    ) -> Explanation:
        """An explanation of compilations, with graph breaks and skipped functions, and with measured calls.

        Args:
            function: what was compiled (``name_of``).
        """
        facts = Facts.of(compilations, function, dynamo, calls)
        return cls([program for compilation in compilations for program in compilation.programs], facts)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Explanation:
        """An explanation from what ``to_dict`` returned, in this or another process.

        Raises:
            InputError: the data is no report, or is one of another version of fxwrap.
        """
        explanation = cls([])
        explanation._document = checked(document)
        explanation._about = Facts.from_document(explanation._document)
        return explanation

    @classmethod
    def load(cls, path: str | Path) -> Explanation:
        """Read a file that ``save`` has written. Raises InputError for any other file."""
        return cls.from_dict(read(Path(path)))

    @property
    def fallbacks(self) -> list[str]:
        """Graphs that run through Inductor's own wrapper, with the reason."""
        return list(self._about.fallbacks)

    @property
    def not_stored(self) -> list[str]:
        """Why no cache could hold a compiled graph; empty if all could be stored, or none was to be stored."""
        return list(self._about.not_stored)

    @property
    def dynamo(self) -> DynamoReport:
        """Graph breaks and functions that were not compiled, with Dynamo's reasons; empty if ``fn`` was None."""
        return self._about.dynamo

    def to_document(self) -> Document:
        if self._document is not None:
            return self._document
        return document_of([graph.program for graph in self.graphs], self._about)

    def to_dict(self) -> dict[str, Any]:
        """The present state as plain data, for JSON: ``fxwrap.inspection.document.Document``."""
        return dict(self.to_document())

    def diff(self, other: Explanation) -> Difference:
        """The changes from this report to ``other``: print it; it is false if there are none."""
        return difference(self.to_document(), other.to_document())

    def save(self, path: str | Path) -> None:
        """Write the data as JSON."""
        _in_a_folder(path).write_text(json.dumps(self.to_dict(), indent=1))

    def to_html(self, path: str | Path, title: str = "") -> None:
        """Write an HTML page with memory, partitions, the host graph and kernels: one file that needs no network.

        Args:
            title: what was compiled, by default.

        Raises:
            FxwrapError: the library that draws is missing (``pip install 'fxwrap[page]'``).
        """
        from .page import page_of

        _in_a_folder(path).write_text(page_of(self.to_document(), title), encoding="utf-8")

    def memory_picture(self, path: str | Path, graph: int = 0, width: int = 900, height: int = 360) -> None:
        """Write the memory picture of one graph, as SVG or PNG, by the ending of the name.

        Args:
            graph: its number in ``to_dict()["graphs"]``.
            width, height: pixels of the part with the storages.

        Raises:
            InputError: another ending, no such graph, or one without a plan.
            FxwrapError: the library that draws is missing.
        """
        from .page.memory_picture import write_picture

        shown, _ = planned_graph(self.to_document(), graph)
        write_picture(shown, _in_a_folder(path), width, height)

    def memory_snapshot(self, path: str | Path, graph: int = 0) -> None:
        """Write the memory plan of one graph as a pickled snapshot for pytorch.org/memory_viz.

        A microsecond of the snapshot is one step.

        Raises:
            InputError: there is no such graph, or it has no plan.
        """
        from .memory_snapshot import snapshot_of

        _, memory = planned_graph(self.to_document(), graph)
        _in_a_folder(path).write_bytes(pickle.dumps(snapshot_of(memory)))

    def __str__(self) -> str:
        return text_of(self.to_document())

    __repr__ = __str__


def _in_a_folder(path: str | Path) -> Path:
    """The path of a file; its folder is made if it is not there."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return Path(path)
