"""A stage of the pipeline: its time, who is told of it, and the stages that rewrite a host graph."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from torch.fx import GraphModule

from .errors import PipelineError

log = logging.getLogger(__name__)

# ``observer(name, seconds)``: called after each stage, for logs and timing.
Observer = Callable[[str, float], object]
_observers: ContextVar[tuple[Observer, ...]] = ContextVar("fxwrap_observers", default=())
# How often each stage ran, and its seconds including its check, by the stage's name.
Times = dict[str, tuple[int, float]]


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Call ``observer`` after each stage that runs on this thread inside of the context."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


@contextlib.contextmanager
def stage(name: str, took: Times) -> Iterator[None]:
    """Time a stage, with the check of what it has made, and tell the observers."""
    begin = time.perf_counter()
    yield
    seconds = time.perf_counter() - begin
    runs, total = took.get(name, (0, 0.0))
    took[name] = runs + 1, total + seconds
    log.debug("%s: %.1f ms", name, seconds * 1e3)
    for observer in _observers.get():
        observer(name, seconds)


@dataclass(frozen=True)
class Rewrite:
    """A stage that edits the host graph in place, or returns a new one.

    Attributes:
        name: shown in logs, timings and errors.
        lint: whether to run ``Graph.lint`` afterwards, which names a user's pass that breaks the graph.
    """

    name: str
    function: Callable[[GraphModule], GraphModule | None]
    lint: bool = True

    def run(self, graph: GraphModule, took: Times) -> GraphModule:
        """The rewritten graph.

        Raises:
            PipelineError: the graph is invalid afterwards.
        """
        with stage(self.name, took):
            rewritten = self.function(graph) or graph
            try:
                if self.lint:
                    rewritten.graph.lint()
            except Exception as error:
                raise PipelineError(
                    f"pass {self.name!r} leaves an invalid graph",
                    expected="a torch.fx graph that passes its lint()",
                    got=str(error),
                ) from error
        return rewritten
