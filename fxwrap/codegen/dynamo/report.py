"""Reports what Dynamo did with a function, in Dynamo's words: graph breaks, skipped functions, compiled frames."""

from __future__ import annotations

import inspect
import linecache
import types
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import config, external_utils, trace_rules
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

from ...graphs.compilation import Compilation, HasCompilations
from . import collection as dynamo
from .collection import RESUMED
from .search import Search


@dataclass(frozen=True)
class Break:
    """A graph break: Dynamo ended a graph before its function ended.

    Attributes:
        reason: Dynamo's message.
        user_line: as ``file, line number: code``.
    """

    reason: str
    user_line: str


@dataclass(frozen=True)
class Skipped:
    """A function that Dynamo does not compile. Functions that it calls may be compiled."""

    function: str
    user_line: str
    reason: str


@dataclass(frozen=True)
class Full:
    """A function that Dynamo does not compile again, since it has compiled it as often as it may.

    Calls that none of that code fits run as ordinary Python, whatever the backend.

    Attributes:
        setting: the limit, in ``torch._dynamo.config``.
        compiled: how often it was compiled, by any backend.
    """

    function: str
    user_line: str
    setting: str
    compiled: int

    def __str__(self) -> str:
        return (
            f"not compiled again: {self.function}, {self.user_line}\n"
            f"  Dynamo has compiled it {self.compiled} times, as often as it may "
            f"(torch._dynamo.config.{self.setting}): calls that none of this code fits run as "
            "ordinary Python, with every backend"
        )


@dataclass(frozen=True)
class Frame:
    """A function, or the rest of one after a graph break, and the number of its graphs.

    Attributes:
        user_line: empty where the function is not the user's.
    """

    function: str
    user_line: str
    graphs: int


@dataclass(frozen=True)
class DynamoReport:
    """What Dynamo did with a function since the last ``torch._dynamo.reset()``, at which it forgets everything.

    Attributes:
        seen: whether Dynamo has seen the function, or any that it calls.
        full: the functions that Dynamo does not compile again.
        without: why there is no program yet of what is compiled without Dynamo.
    """

    breaks: tuple[Break, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    frames: tuple[Frame, ...] = ()
    seen: bool = False
    full: tuple[Full, ...] = ()
    without: str = ""

    def __str__(self) -> str:
        """Each graph break, each skipped function, and each that is not compiled again, with its reason."""
        breaks = [f"graph break at {place.user_line}\n  {place.reason}" for place in self.breaks]
        skipped = [f"not compiled: {s.function}, {s.user_line}\n  {s.reason}" for s in self.skipped]
        return "\n".join([*breaks, *skipped, *map(str, self.full)])

    @property
    def why_nothing(self) -> str:
        """The reason for which there is no program, for an error's ``got``."""
        if told := self.without or str(self):
            return told
        if not self.seen:
            return (
                "one that Dynamo has not seen: not compiled, not called, forgotten at torch._dynamo.reset(), or "
                "compiling is switched off (TORCH_COMPILE_DISABLE, torch.compiler.set_stance)"
            )
        return "one that was compiled for others only: with another backend, or for other values"

    @property
    def remedy(self) -> str:
        """What to do if there is no program because of a limit of Dynamo's; empty for other reasons."""
        if not self.full:
            return ""
        settings = " and ".join(dict.fromkeys(f"torch._dynamo.config.{full.setting}" for full in self.full))
        return (
            f"set {settings} to more than the number of models, or of sizes, that share the code, and then call "
            "torch._dynamo.reset(), which forgets all compiled code; torch.compile(..., dynamic=True) takes any size "
            "with one compilation, and isolate_recompiles=True, in versions of torch that have it, gives each "
            "compiled function a limit of its own"
        )


def compilations_of(compiled: Any) -> tuple[list[Compilation], DynamoReport]:
    """The compilations whose programs a function's calls run, the oldest first, and Dynamo's report of the function.

    Dynamo made them while the function was running, or made them for another function and serves them from its
    caches: modules of one class share compilations, and so do functions that call the same function.
    """
    if isinstance(compiled, HasCompilations):
        return compiled._fxwrap_compilations(), DynamoReport(without=compiled._fxwrap_without)
    search = Search(compiled)
    references = [reference for compilation in search.compilations for _, reference in compilation.pieces]
    pieces = [code for reference in references if (code := reference())]
    asked_for = [compilation for compilation in search.compilations if search.asked_for(compilation)]
    seen = [*search.codes, *(code for compilation in asked_for for code in compilation.skipped)]
    # Dynamo notes the functions that it sees while it is switched off, too.
    without = [code for code in dict.fromkeys(seen) if not (config.disable or _debug_get_cache_entry_list(code))]
    skipped = [Skipped(_name(code), _place(code), _why_skipped(code)) for code in without if _is_users(code)]
    if not (skipped or search.is_compiled):
        skipped = _skipped_of_torch(without)
    places = [(code.co_filename, code.co_firstlineno, _last_line(code)) for code in {*seen, *pieces}]
    breaks = [
        Break(_brief(noted.reason), _user_line(noted.user_stack[-1].filename, noted.user_stack[-1].lineno))
        for noted in graph_break_reasons
        for frame in noted.user_stack[:1]
        if any(file == frame.filename and first <= (frame.lineno or 0) <= last for file, first, last in places)
    ]
    report = DynamoReport(
        tuple(dict.fromkeys(breaks)),
        tuple(skipped),
        tuple(Frame(_name(code), _place(code), count) for code, count in Counter(pieces).items()),
        bool(search.codes) and not config.disable,
        tuple(Full(_name(code), _line_of(code), *reached) for code, reached in search.full.items()),
    )
    return search.compilations, report


def _skipped_of_torch(codes: list[types.CodeType]) -> list[Skipped]:
    """Functions of torch's that Dynamo skipped, the first for each reason: one rule may skip many."""
    first: dict[str, types.CodeType] = {}
    for code in codes:
        if Path(code.co_filename).is_relative_to(Path(torch.__file__).parent):
            first.setdefault(_why_skipped(code), code)
    remedy = 'torch.compile(module, backend="fxwrap") compiles a module of such a class, module.compile() does not'
    modules = Path(torch.nn.__file__).parent
    return [
        Skipped(
            _name(code),
            _line_of(code),
            f"{why}; {remedy}" if Path(code.co_filename).is_relative_to(modules) else why,
        )
        for why, code in first.items()
    ]


def _why_skipped(code: types.CodeType) -> str:
    """Dynamo's reason to skip a function, or the likely one where it keeps none."""
    key = code.co_filename, code.co_firstlineno, code.co_name
    for metrics in reversed(get_compilation_metrics()):
        if metrics.fail_reason and key == (metrics.co_filename, metrics.co_firstlineno, metrics.co_name):
            return _brief(metrics.fail_reason)
    rule = trace_rules.check_verbose(code)
    if rule.skipped:
        return f"Dynamo does not compile this file: {rule.reason}"
    if inspect.CO_GENERATOR & code.co_flags:
        return "Dynamo does not compile generators; one that a compiled function runs through is compiled with it"
    return "Dynamo found nothing to compile: no tensor, or no operation on one"


def _brief(reason: str) -> str:
    """The first paragraph of Dynamo's message; the rest is for its developers."""
    return reason.split("\n\n", maxsplit=1)[0].strip()


def _name(code: types.CodeType) -> str:
    name, _, line = code.co_name.removeprefix(RESUMED).rpartition("_at_")
    if code.co_filename == dynamo.__file__:
        return "what is explained"
    if code.co_filename == external_utils.__file__:
        return "the function in which Dynamo wraps all modules of torch's own classes"
    return f"{name} after line {line}" if code.co_name.startswith(RESUMED) else code.co_name


def _place(code: types.CodeType) -> str:
    return _line_of(code) if _is_users(code) else ""


def _line_of(code: types.CodeType) -> str:
    return _user_line(code.co_filename, code.co_firstlineno)


def _user_line(file: str, number: int | None) -> str:
    return f"{file}, line {number}: {linecache.getline(file, number or 0).strip()}"


def _last_line(code: types.CodeType) -> int:
    return max((line for *_, line in code.co_lines() if line is not None), default=code.co_firstlineno)


def _is_users(code: types.CodeType) -> bool:
    inside = [Path(torch.__file__).parent, Path(__file__).parents[1]]
    return not any(Path(code.co_filename).is_relative_to(folder) for folder in inside)
