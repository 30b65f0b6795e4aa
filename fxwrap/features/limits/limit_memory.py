"""``fxwrap.limit_memory``: another limit for what is compiled already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...api.report import report
from ...errors import MemoryLimitError
from ...graphs.compilation import HasPrograms
from ...options import option_value


def limit_memory(fn: Callable[..., Any] | HasPrograms, limit: int | str | None) -> None:
    """Set the most bytes that a call of compiled code may take beside its inputs. Nothing is compiled.

    The next call plans within the limit and records again. What is compiled later has the limit of the option
    ``memory_limit``. Programs that were compiled with this option, or by ``train_step``, keep loops on the CPU as
    separate launches, which can be moved. Others can be limited, too, but not as far.

    Args:
        fn: what ``torch.compile`` or ``fxwrap.train_step`` returned, after its first call.
        limit: bytes, or a size such as "6GiB"; None for no limit.

    Raises:
        OptionError: ``limit`` is no size.
        MemoryLimitError: a graph of ``fn`` runs through Inductor's own wrapper.
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    nbytes = option_value("memory_limit", limit) if limit is not None else 0
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
