"""SHOW: what was decided about a function, from the very objects that run."""

from __future__ import annotations

import functools
import itertools
import json
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ..backend import fxwrap as backend
from ..codegen.dynamo import with_own_code
from ..codegen.dynamo_story import DynamoStory, known_of
from ..codegen.torch_runtime import allocations
from ..codegen.torch_versions import own_caches
from ..compilation import Compilation, live_compilations
from ..errors import FxwrapError
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


@dataclass(frozen=True)
class GraphReport:
    """One host graph and what was decided about it."""

    program: Program

    @property
    def phase(self) -> str:
        """inference, forward or backward."""
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
        """The newest plan; None if no shape was planned."""
        return self.program.newest_plan

    @property
    def predicted(self) -> tuple[Prediction, ...]:
        """The memory of the newest shape that is known, by device: that of a forward is with its backward, as soon as
        that has run, and that of a backward is with its forward."""
        return tuple(predictions(self.program))

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels, with their source; those of branches and loops, too."""
        return tuple(kernels_of(self.graph))

    @property
    def unit(self) -> str:
        """What the newest recording runs natively, a line for each step; empty if there is none that does."""
        return "\n".join(unit_of(self.program))

    @property
    def counters(self) -> dict[str, Any]:
        return self.program.counters.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """As plain data: ``document.GraphData``."""
        return dict(graph_data(self.program))


class Explanation:
    """Everything decided about a function. Print it, read ``graphs``, or take it along as data.

    Attributes:
        graphs: one report per host graph, in the order in which they were compiled; empty if the explanation was read
            from a file: ``to_dict()["graphs"]`` has all that is known of them.
    """

    def __init__(self, programs: Sequence[Program], about: Facts | None = None) -> None:
        self.graphs = list(map(GraphReport, programs))
        self._about = about if about is not None else Facts()
        self._document: Document | None = None

    @classmethod
    def of(
        cls,
        compilations: Sequence[Compilation],
        dynamo: DynamoStory | None = None,
        calls: Sequence[CallData] = (),
    ) -> Explanation:
        """What is known of compilations, what Dynamo made of their function, and calls that were measured."""
        facts = Facts.of(compilations, dynamo, calls)
        return cls([program for one in compilations for program in one.programs], facts)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Explanation:
        """What ``to_dict`` gave, perhaps in another process.

        Raises:
            InputError: it is something else, or of another version of fxwrap.
        """
        return cls._of_document(checked(document))

    @classmethod
    def _of_document(cls, known: Document) -> Explanation:
        found = cls([], Facts.from_document(known))
        found._document = known
        return found

    @classmethod
    def load(cls, path: str | Path) -> Explanation:
        """Read what ``save`` wrote. Raises InputError if it is something else."""
        return cls._of_document(read(Path(path)))

    @property
    def fallbacks(self) -> list[str]:
        """Graphs that run through Inductor's own wrapper, with the reason."""
        return list(self._about.fallbacks)

    @property
    def not_stored(self) -> list[str]:
        """Why no cache could hold what was compiled; empty where nobody asked for it."""
        return list(self._about.not_stored)

    @property
    def dynamo(self) -> DynamoStory:
        """Graph breaks and functions that were not compiled, with Dynamo's reasons; nothing of them where all
        programs were asked for."""
        return self._about.dynamo

    def to_document(self) -> Document:
        if self._document is not None:
            return self._document
        return document_of([graph.program for graph in self.graphs], self._about)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, for JSON, as it is at this moment: ``fxwrap.inspection.document.Document``."""
        return dict(self.to_document())

    def diff(self, other: Explanation) -> Difference:
        """What is different in ``other``: print it; it is false if nothing is."""
        return difference(self.to_document(), other.to_document())

    def save(self, path: str | Path) -> None:
        """Write the data as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1))

    def to_html(self, path: str | Path, title: str = "fxwrap") -> None:
        """Write a page to look through: memory, partitions, the host graph, kernels. One file; it needs no network.

        Raises:
            FxwrapError: the library that draws is missing (``pip install 'fxwrap[page]'``).
        """
        from .page import page_of

        Path(path).write_text(page_of(self.to_document(), title), encoding="utf-8")

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
        write_picture(shown, Path(path), width, height)

    def memory_snapshot(self, path: str | Path, graph: int = 0) -> None:
        """Write the plan of one graph as a pickled snapshot for pytorch.org/memory_viz: a microsecond is a step.

        Raises:
            InputError: there is no such graph, or it has no plan.
        """
        from .memory_snapshot import snapshot_of

        _, memory = planned_graph(self.to_document(), graph)
        Path(path).write_bytes(pickle.dumps(snapshot_of(memory)))

    def __str__(self) -> str:
        return text_of(self.to_document())

    __repr__ = __str__


def explain(
    fn: Callable[..., Any],
    *args: Any,
    fxwrap_options: Mapping[str, Any] | None = None,
    calls: int = 1,
    target: str | torch.device | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compile ``fn`` afresh, run it on the arguments and return everything that was decided.

    Args:
        fn: a function or module; one that is compiled already is unwrapped.
        fxwrap_options: options as for ``torch.compile(..., options=...)``.
        calls: how often it runs. A single call only warms up; from the third on most programs replay. The time and
            the memory of each call but the first, which compiles, are measured.
        target: another device than that of the arguments (``docs/cuda_target.md``). One that is not there ("cuda:90",
            "xpu"): the function is compiled for it in another process, and never runs. "cpu" or a registered device:
            a copy of the function's model is compiled and run there. A training graph has its backward graph with it.
    """
    compilation = Compilation()
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)
    fn = getattr(fn, "_orig_mod", fn)
    if target is not None:
        from .target import explain_for

        return explain_for(target, fn, args, kwargs, fxwrap_options, calls)
    compiled = torch.compile(
        with_own_code(fn),
        backend=functools.partial(backend, compilation=compilation),
        options=dict(fxwrap_options) if fxwrap_options else None,
        **own_caches(),
    )
    compiled(*args, **kwargs)
    measured = [_measured(functools.partial(compiled, *args, **kwargs)) for _ in range(1, calls)]
    compilations, story = known_of(compiled)
    return Explanation.of(list(dict.fromkeys([compilation, *compilations])), story, measured)


def _measured(run: Callable[[], Any]) -> CallData:
    """Time and memory of a call."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    before = _reset_peak() if accelerator is not None else None
    begin = time.perf_counter()
    if accelerator is None:
        changes = allocations(run)
        allocated = {"cpu": max(itertools.accumulate(changes), default=0)} if changes is not None else {}
    else:
        run()
        torch.accelerator.synchronize()
        peak = torch.accelerator.memory.max_memory_allocated() if before is not None else 0
        allocated = {str(accelerator): peak - before} if before is not None else {}
    return {"us": (time.perf_counter() - begin) * 1e6, "allocated_bytes": allocated}


def _reset_peak() -> int | None:
    """Bytes of the accelerator that are allocated now; None where it does not tell."""
    try:
        torch.accelerator.memory.reset_peak_memory_stats()
        return torch.accelerator.memory.memory_allocated()
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def report(fn: Callable[..., Any] | None = None) -> Explanation:
    """What was decided about code that is compiled and in use; compiles and runs nothing.

    Args:
        fn: what ``torch.compile`` returned; None for everything that is alive. What a function calls is included
            if it was compiled in a call of that function (an optimizer's step, at which Dynamo breaks the graph).

    Raises:
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    if fn is None:
        return Explanation.of(live_compilations())
    compilations, story = known_of(fn)
    if not compilations:
        raise FxwrapError(
            f"{fn!r} has no program",
            expected='a function compiled with backend="fxwrap" that was called at least once',
            got=story.why_nothing,
            remedy="fxwrap.explain(fn, ...) compiles it and tells more; torch.compile(fn, fullgraph=True) raises at "
            "what cannot be compiled; without an argument all programs are shown",
        )
    return Explanation.of(compilations, story)


def total(programs: list[Program]) -> dict[str, Any]:
    """Add up the counters of programs."""
    result: dict[str, Any] = {"programs": len(programs), "replays": 0}
    sums: dict[str, Counter[str]] = {name: Counter() for name in ("recordings", "eager", "events")}
    for program in programs:
        counters = program.counters.to_dict()
        result["replays"] += counters["replays"]
        for name, counter in sums.items():
            counter.update(counters[name])
    return {**result, **{name: dict(counter) for name, counter in sums.items()}, "fallbacks": {}, "not_stored": {}}
