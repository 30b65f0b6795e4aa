"""Where features meet the line, which calls these hooks and imports no feature.

``graphs/program_runs.py`` has the hooks around a program's run; ``devices.DeviceSupport`` is what a device registers.

Hooks that are dicts have a "module:name" for the name of an option, an argument or a method. A feature's package sets
it when ``import fxwrap`` imports the package; the module that it names is imported at its first use, so that
``import fxwrap`` stays quick. Hooks that are lists hold functions; a feature's module adds them when it is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch.fx import GraphModule

if TYPE_CHECKING:
    from .options import Options


class AroundGraph(Protocol):
    """What a feature does around one graph of Dynamo's, from its compilation to its calls."""

    def compiling(self) -> AbstractContextManager[Any]:
        """A context for the compilation."""

    def check(self, gm: GraphModule, phase: str) -> None:
        """Called with each graph that Inductor gets, of phase "inference", "forward" or "backward"; may raise."""

    def wrapped(self, compiled: Callable[..., Any], compilation: Any, options: Options) -> Callable[..., Any]:
        """The function that is called in place of the compiled graph; the graph itself where nothing is to be done.

        ``compilation`` is a ``graphs.compilation.Compilation``, which has the graph's programs.
        """


class ReportSection(Protocol):
    """What a feature adds to a report: what it found out about programs, made of its data in the document."""

    def text(self, program: str) -> str:
        """What it says of a program, by the program's name; empty if nothing."""

    def html(self, program: str) -> str:
        """The same for the page: elements of HTML."""


# A factory, (graph, options) -> AroundGraph, by the option that asks for it.
AROUND_GRAPHS: dict[str, str] = {}
# By name of the option that asks for it: the subclass of ``Program`` that a host graph is made into.
PROGRAMS: dict[str, str] = {}
# By name of the option that asks for it: the subclass of ``Arena`` in which the program's recordings lie.
ARENAS: dict[str, str] = {}
# Called by ``fxwrap.release`` when recordings have ended. A feature adds to it when it has something to free.
AFTER_RELEASE: list[Callable[[], object]] = []
# How a feature explains a function, by the argument of ``fxwrap.explain`` that asks for it:
# (fn, args, kwargs, options, calls) -> Explanation; that of ``target`` gets the target's name, too.
EXPLAINERS: dict[str, str] = {}
# Methods that a feature adds to reports, by name: functions whose first argument is the ``Explanation``.
REPORT_METHODS: dict[str, str] = {}
# A factory, (data) -> ReportSection, by the key of the data in ``Document.sections``.
REPORT_SECTIONS: dict[str, str] = {}


def imported(where: str) -> Any:
    """What "module:name" or "module:Class.name" names."""
    module, _, name = where.partition(":")
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def report_sections(data: Mapping[str, Any]) -> list[ReportSection]:
    """The sections of a report; those of features that are not here are left out.

    Args:
        data: that of each section, by its key.
    """
    return [imported(where)(data[key]) for key, where in REPORT_SECTIONS.items() if key in data]


def class_for(options: Options, classes: dict[str, str], ordinary: Any) -> Any:
    """The class that a program's options ask for, of ``PROGRAMS`` or ``ARENAS``; by default the ordinary one.

    ``parse_options`` has refused options that ask for two.
    """
    return next((imported(where) for name, where in classes.items() if options.is_set(name)), ordinary)


def around_graph(gm: GraphModule, options: Options) -> list[AroundGraph]:
    """What features do around a graph, the innermost first."""
    return [imported(where)(gm, options) for name, where in AROUND_GRAPHS.items() if options.is_set(name)]
