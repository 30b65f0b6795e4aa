"""Every decision about a function, as one object: printed, read, compared, drawn, saved as data."""

from __future__ import annotations

import functools
import inspect
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from ..codegen.dynamo.report import DynamoReport
from ..codegen.dynamo.search import BOUND
from ..errors import InputError
from ..graphs.compilation import Compilation
from ..graphs.program import Program
from ..hooks import REPORT_METHODS, imported
from ..host_graph.nodes import Kernel
from ..host_graph.typed_json import from_data, to_data
from ..passes.memory.planner import Prediction
from ..plan import MemoryPlan, Partition
from .document import SCHEMA, CallData, Document, kernels_of, unit_of
from .memory_map import predictions


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
        return predictions(self.program)

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


class Explanation:
    """Every decision about a function. Print it, read ``graphs``, or save it as data.

    Attributes:
        graphs: one report for each host graph, in the order of compilation; empty if the explanation was read from a
            file: then ``to_dict()["graphs"]`` has everything about them.
    """

    def __init__(self, programs: Sequence[Program], document: Document | None = None) -> None:
        """An explanation of programs; without any, of what a document says.

        Args:
            document: everything besides the graphs of programs.
        """
        self.graphs = list(map(GraphReport, programs))
        self._document = document or Document()

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
        programs = [program for compilation in compilations for program in compilation.programs]
        document = Document(
            function=function,
            compile_us=sum(compilation.seconds for compilation in compilations) * 1e6,
            fallbacks=tuple(reason for compilation in compilations for reason in compilation.fallbacks),
            not_stored=tuple(reason for compilation in compilations for reason in compilation.not_stored),
            dynamo=dynamo or DynamoReport(),
            calls=tuple(calls),
        )
        return cls(programs, document)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Explanation:
        """An explanation from what ``to_dict`` returned, in this or another process.

        Raises:
            InputError: the data is no report, or is one of another version of fxwrap.
        """
        schema = document.get("schema") if isinstance(document, Mapping) else None
        got = repr(schema) if schema is not None else "data without a schema"
        if schema == SCHEMA:
            try:
                return cls([], from_data(Document, document, foreign=True))
            except (TypeError, ValueError) as error:
                got = str(error)
        raise InputError(
            "this is not a report that can be read here",
            expected=f"a document with schema {SCHEMA!r}",
            got=got,
            remedy="write it with this version of fxwrap: fxwrap.explain(...).to_dict()",
        )

    @classmethod
    def load(cls, path: str | Path) -> Explanation:
        """Read a file that ``save`` has written. Raises InputError for any other file."""
        try:
            data = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError) as error:  # no JSON, or no text
            got = f"{type(error).__name__}: {error}"
            remedy = "python -m fxwrap explain --json writes one, and so does fxwrap.explain(...).save"
            raise InputError(f"{path} is no report", expected="JSON", got=got, remedy=remedy) from error
        return cls.from_dict(data)

    @property
    def fallbacks(self) -> list[str]:
        """Graphs that run through Inductor's own wrapper, with the reason."""
        return list(self._document.fallbacks)

    @property
    def not_stored(self) -> list[str]:
        """Why no cache could hold a compiled graph; empty if all could be stored, or none was to be stored."""
        return list(self._document.not_stored)

    @property
    def dynamo(self) -> DynamoReport:
        """Graph breaks and functions that were not compiled, with Dynamo's reasons; empty if ``fn`` was None."""
        return self._document.dynamo

    def to_document(self) -> Document:
        """The present state as frozen data, of which everything that is shown is made."""
        return self._document.of(graph.program for graph in self.graphs) if self.graphs else self._document

    def with_section(self, key: str, data: Any) -> Explanation:
        """The same explanation with what a feature has found out (``hooks.REPORT_SECTIONS``), as plain data."""
        document = replace(self._document, sections={**self._document.sections, key: data})
        return Explanation([graph.program for graph in self.graphs], document)

    def to_dict(self) -> dict[str, Any]:
        """The present state as plain data, for JSON: ``fxwrap.inspection.document.Document``."""
        data: dict[str, Any] = to_data(self.to_document())
        return data

    def save(self, path: str | Path) -> None:
        """Write the data as JSON."""
        in_a_folder(path).write_text(json.dumps(self.to_dict(), indent=1))

    def __getattr__(self, name: str) -> Any:
        """A method that a feature adds (``hooks.REPORT_METHODS``): ``diff``, ``to_html``, ``memory_picture``."""
        if name in REPORT_METHODS:
            return types.MethodType(imported(REPORT_METHODS[name]), self)
        raise AttributeError(f"a report has no {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *REPORT_METHODS]

    def __str__(self) -> str:
        from .text import text_of  # with rich, which nothing else on the way of a call needs

        return text_of(self.to_document())

    __repr__ = __str__


def in_a_folder(path: str | Path) -> Path:
    """The path of a file; its folder is made if it is not there."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return Path(path)
