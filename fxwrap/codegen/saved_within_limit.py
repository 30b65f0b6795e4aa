"""Decides how much of a forward is saved for its backward, so that both together stay within ``memory_limit``.

::

    saved                 all that is costly                                     nothing
    backward repeats      what is cheap                                    all of the forward
    budget of torch's     1.0 -----------------------|---------------------------- 0.0
                              takes more than the limit   stays within it: the highest such budget is taken

AOTAutograd's partitioner decides what is saved, by a budget that is a share of what can be saved. Its bytes, and
those of the kernels around it, are known when both programs are compiled. So they are compiled until that is known; a
forward and a backward that are within the limit at once are compiled once. What is saved no kernel writes over: the
backward may have to read it again (``passes/memory/rematerialise.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from torch._functorch import config

from ..graphs.compilation import Compilation
from ..graphs.program import Program

log = logging.getLogger(__name__)

Compiled = TypeVar("Compiled")
# Budgets between all and nothing that are tried by bisection.
_STEPS = 3


def saved_within_limit(compile_once: Callable[[], Compiled], compilation: Compilation) -> Compiled:
    """Compile until forward and backward are within ``memory_limit`` at the sizes of the example.

    If no budget is low enough, the one is taken with which least is saved: the first call raises, and says how much
    it takes.
    """
    already, highest = len(compilation.programs), float(config.activation_memory_budget)

    def compiled_at(budget: float) -> tuple[Compiled, list[Program]]:
        del compilation.programs[already:]
        with config.patch(activation_memory_budget=budget, force_non_lazy_backward_lowering=True):
            compiled = compile_once()
        programs = compilation.programs[already:]
        log.info("saved for the backward: budget %.3f, within memory_limit: %s", budget, _are_within(programs))
        return compiled, programs

    compiled, programs = compiled_at(highest)
    if not highest or all(one.plan.phase != "backward" for one in programs) or _are_within(programs):
        return compiled
    compiled, programs = compiled_at(0.0)
    if _are_within(programs):
        low, high = 0.0, highest
        for _ in range(_STEPS):
            tried = compiled_at(middle := (low + high) / 2)
            if _are_within(tried[1]):
                low, (compiled, programs) = middle, tried
            else:
                high = middle
    compilation.programs[already:] = programs
    return compiled


def _are_within(programs: list[Program]) -> bool:
    return all(one.recorder.is_within_limit() for one in programs)
