"""A program of a written step, and what it is for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....graphs.compilation import Compilation
from .arguments import Kind
from .gradients import Gradients
from .traced_call import Outputs
from .watched import Facts


@dataclass(frozen=True, eq=False)
class StepProgram:
    """What was compiled for one trace.

    Attributes:
        facts, kind: what it is for: of what the code reaches, and of the arguments.
        varying: the dimensions of arguments whose sizes may be others, if ``sizes_hold``.
        having: the parameters whose p.grad is an input.
        taken: which tensors of a call are inputs; None for all.
        memory: where it writes to arguments, or to what shares their memory, how they lie in it.
        outputs: makes what the step returns of the tensors that the program returns.
        compilation: keeps its programs in reports.
        modes: what modules' ``training`` is afterwards, where the step sets it.
        rounding: of the least precise numbers in it, relative; 0 where no call is checked.
    """

    run: Callable[..., Sequence[torch.Tensor]]
    facts: Facts
    kind: Kind
    varying: Sequence[Collection[int]]
    sizes_hold: Callable[[Sequence[torch.Tensor]], bool]
    gradients: Gradients
    having: Sequence[torch.Tensor]
    taken: Sequence[int] | None
    memory: tuple[Any, ...] | None
    outputs: Outputs
    compilation: Compilation
    autocast: bool
    modes: Sequence[tuple[dict[str, Any], bool]]
    rounding: float

    def inputs_of(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return given if self.taken is None else [given[place] for place in self.taken]
