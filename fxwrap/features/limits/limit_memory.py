"""``fxwrap.limit_memory``: another limit for what is compiled already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...api.report import report
from ...backend import parsed
from ...errors import MemoryLimitError
from ...graphs.compilation import HasPrograms


def limit_memory(fn: Callable[..., Any] | HasPrograms, limit: int | str | None) -> None:
    """Set the most bytes that a call of compiled code may take beside its inputs. Nothing is compiled.

    The next call plans within the limit and records again. What is compiled later has the limit of the option
    ``memory_limit``. With this option, and with ``train_step``, each of Inductor's loops on the CPU is a launch of
    its own: a program that was compiled without them does not reach as low.

    Args:
        fn: what ``torch.compile`` or ``fxwrap.train_step`` returned, after its first call.
        limit: bytes, or a size such as "6GiB"; None for no limit.

    Raises:
        OptionError: ``limit`` is no size.
        MemoryLimitError: a graph of ``fn`` runs through Inductor's own wrapper.
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    nbytes = parsed({"memory_limit": limit})[0].memory_limit if limit is not None else 0
    explanation = report(fn)
    if nbytes and explanation.fallbacks:
        raise MemoryLimitError(
            "memory_limit cannot be held: a graph runs through Inductor's own wrapper, which has no limit",
            expected="a function whose graphs fxwrap has planned",
            got="; ".join(explanation.fallbacks),
            remedy="compile what has no such graph in a function of its own",
        )
    for graph in explanation.graphs:
        graph.program.set_memory_limit(nbytes)
