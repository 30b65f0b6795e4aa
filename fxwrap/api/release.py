"""``fxwrap.release``: ends recordings and frees their memory on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..graphs.compilation import HasPrograms
from ..graphs.memory.shared_state import SHARED
from ..graphs.program import Program
from ..hooks import AFTER_RELEASE
from ..torch_private.native_library import kept_memory
from .report import report


def release(fn: Callable[..., Any] | HasPrograms | None = None) -> int:
    """End recordings and free their memory. The next call records again, and counts as a recording.

    Live outputs keep their memory. Recordings that another thread runs at this moment do not end. On an accelerator
    the memory returns to the caching allocator; ``torch.accelerator.empty_cache()`` returns it to the driver. On the
    CPU it is what is kept for temporaries: as much as the largest of all remaining recordings needs stays.
    What features keep for programs that are gone is freed, too (C++ kernels of saved files).

    Args:
        fn: what ``torch.compile``, ``fxwrap.aot_compile`` or ``fxwrap.load`` returned; None for all programs. An
            arena that other functions also use is not freed.

    Returns:
        The number of bytes that were freed, including those under live outputs.

    Raises:
        FxwrapError: ``fn`` was never compiled with fxwrap.
    """
    reports = report(fn).graphs
    programs = [graph.program for graph in reports]
    before = _kept(programs)
    for program in programs:
        program.release()
    SHARED.arenas.give_back()
    for free in AFTER_RELEASE:
        free()
    return before - _kept(programs)


def _kept(programs: Sequence[Program]) -> int:
    on_the_cpu = kept_memory() if programs else 0
    return SHARED.arenas.kept() + on_the_cpu
