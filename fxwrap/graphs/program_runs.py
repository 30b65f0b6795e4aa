"""The hook around a program's run: *a runner* replaces ``Program.run`` on one thread.

Compiled code cannot pass what a feature wants to a program (a rehearsal in other memory, a clock). So the feature
installs a runner, which has it::

    compiled code --> Program.run(inputs) --> runner(program, inputs) --> what the feature does, or the program itself
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .memory.locks import after_fork, drop_other_threads

if TYPE_CHECKING:
    from .program import Program

Runner = Callable[["Program", list[Any]], Any]
# By thread: called with a program and its inputs, and returns the program's outputs.
RUNNERS: dict[int, Runner] = {}
after_fork(functools.partial(drop_other_threads, RUNNERS))


@contextlib.contextmanager
def programs_run_by(runner: Runner | None) -> Iterator[None]:
    """Inside of the context, ``runner`` runs this thread's programs. With None they run as without a runner."""
    thread = threading.get_ident()
    before = RUNNERS.pop(thread, None)
    if runner is not None:
        RUNNERS[thread] = runner
    try:
        yield
    finally:
        RUNNERS.pop(thread, None)
        if before is not None:
            RUNNERS[thread] = before


@contextlib.contextmanager
def calls_run_by(runner: Runner) -> Iterator[None]:
    """The same for whole calls: their backwards run on this thread, too, and on none of autograd's."""
    with torch.autograd.set_multithreading_enabled(False), programs_run_by(runner):
        yield
