"""Decides how much of a forward is saved for its backward, so that both together stay within ``memory_limit``.

::

    saved                 all that is costly                                     nothing
    backward repeats      what is cheap                                    all of the forward
    budget of torch's     1.0 -----------------------|---------------------------- 0.0
                              takes more than the limit   stays within it: the highest such budget is taken

AOTAutograd's partitioner decides what is saved, by a budget that is a share of what can be saved. Its bytes, and
those of the kernels around it, are known when both programs are compiled. So they are compiled until that is known; a
forward and a backward that are within the limit at once are compiled once, as without a limit. In further attempts no
kernel writes over what is saved: the backward may have to read it again (``passes/memory/rematerialise.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch._functorch import config

from ..graphs.compilation import Compilation
from ..graphs.program import Program

log = logging.getLogger(__name__)

Compiled = TypeVar("Compiled")
# Budgets between all and nothing that are tried by bisection.
_STEPS = 3


def saved_within_limit(compile_once: Callable[[], Compiled], compilation: Compilation) -> Compiled:
    """Compile until forward and backward are within ``memory_limit`` at the sizes of the example.

    If no budget is low enough, that of all and nothing is taken which takes less: the first call raises, and says how
    much it takes.
    """
    highest = float(config.activation_memory_budget)
    attempts = _Attempts(compile_once, compilation)
    first = attempts.at(highest, keeps_saved=False)
    if first.within or not highest or all(one.plan.phase != "backward" for one in first.programs):
        return first.compiled
    taken = attempts.at(0.0)
    if not taken.within:
        taken = min(first, taken, key=lambda one: one.least)
    low, high = 0.0, highest
    for _ in range(_STEPS if taken.within else 0):
        tried = attempts.at(middle := (low + high) / 2)
        if tried.within:
            low, taken = middle, tried
        else:
            high = middle
    compilation.programs[attempts.before :] = taken.programs
    compilation.not_stored[attempts.not_stored :] = taken.not_stored
    return taken.compiled


@dataclass(frozen=True)
class _Compiled(Generic[Compiled]):
    """What was compiled with one budget, and whether it is within the limit."""

    compiled: Compiled
    programs: Sequence[Program]
    not_stored: Sequence[str]
    within: bool

    @property
    def least(self) -> int:
        """The lowest limit that it keeps."""
        return max(one.recorder.least_as_compiled() for one in self.programs)


class _Attempts(Generic[Compiled]):
    """Compiles with budgets. What an earlier one has added to the compilation is taken out of it."""

    def __init__(self, compile_once: Callable[[], Compiled], compilation: Compilation) -> None:
        self._compile_once, self._compilation = compile_once, compilation
        self.before, self.not_stored = len(compilation.programs), len(compilation.not_stored)

    def at(self, budget: float, keeps_saved: bool = True) -> _Compiled[Compiled]:
        made = self._compilation
        made.keeps_saved = keeps_saved
        del made.programs[self.before :], made.not_stored[self.not_stored :]
        with config.patch(activation_memory_budget=budget, force_non_lazy_backward_lowering=True):
            compiled = self._compile_once()
        programs, not_stored = made.programs[self.before :], made.not_stored[self.not_stored :]
        within = all(one.recorder.is_within_limit() for one in programs)
        log.info("saved for the backward: budget %.3f: %s memory_limit", budget, "within" if within else "above")
        return _Compiled(compiled, programs, not_stored, within)
