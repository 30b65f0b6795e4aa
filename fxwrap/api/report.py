"""``fxwrap.report``: the decisions about compiled code, read from the programs that run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from ..codegen.dynamo.report import compilations_of
from ..errors import FxwrapError
from ..graphs.compilation import HasPrograms, live_compilations
from ..graphs.program import Program
from ..inspection.document import Document
from ..inspection.explanation import Explanation, name_of


def report(fn: Callable[..., Any] | HasPrograms | None = None) -> Explanation:
    """Report the decisions about compiled code that is in use. Compiles and runs nothing.

    Args:
        fn: what ``torch.compile`` returned, or ``fxwrap.aot_compile`` or ``fxwrap.load``, or a method of theirs; None
            for all programs. Functions that ``fn`` calls are included if they were compiled during a call of ``fn``
            (an optimizer's step, at which Dynamo breaks the graph).

    Raises:
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    if fn is None:
        return Explanation.of(live_compilations(), "all that is compiled")
    if isinstance(fn, HasPrograms):
        programs, name = fn.fxwrap_programs()
        return Explanation(programs, Document(function=name))
    compilations, story = compilations_of(fn)
    if not compilations:
        raise FxwrapError(
            f"{fn!r} has no program",
            expected='a function compiled with backend="fxwrap" that was called at least once',
            got=story.why_nothing,
            remedy=story.remedy
            or "fxwrap.explain(fn, ...) compiles it and tells more; torch.compile(fn, fullgraph=True) raises at "
            "what cannot be compiled; without an argument all programs are shown",
        )
    return Explanation.of(compilations, name_of(fn), story)


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
