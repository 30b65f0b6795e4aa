"""``p.grad`` around a step that is one program: kept where the step reads it, else left alone.

::

    zero_grad(); backward(); step()              reads no p.grad from before: p.grad is None after a call
    zero_grad(); backward()    (no step yet)     makes p.grad: the program returns it
    backward(); step(); zero_grad()              p.grad is None before and after
    zero_grad(set_to_none=False); backward()     writes to p.grad, which stays the tensor that it is
    backward()                 (no step yet)     adds to p.grad

Whether p.grad is there is a fact of a program only if the step reads it. To find out, it is there in a trace; if it
was used, and is not there in truth, the trace is made once more without it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from ..codegen.wrapped_tensors import Wrapping, wrapping_of

grad_of = attrgetter("grad")


def layout_of(grad: torch.Tensor | None) -> object:
    """What a program is made for of a gradient; None if there is none."""
    return None if grad is None else (grad.dtype, grad.shape, grad.stride(), wrapping_of(grad))


@dataclass(frozen=True, eq=False)
class Before:
    """The gradients that parameters have before a call.

    Attributes:
        real: what p.grad is.
        grads: what it is in a trace.
    """

    parameters: Sequence[torch.Tensor]
    real: Sequence[torch.Tensor | None]
    grads: Sequence[torch.Tensor | None]

    @classmethod
    def of(cls, parameters: Sequence[torch.Tensor]) -> Before:
        grads = list(map(grad_of, parameters))
        return cls(parameters, grads, grads)

    def with_any(self) -> Before:
        """The same, where each parameter that may get a gradient has one, which takes no memory.

        It is the parameter's own memory: a trace reads no values, and one that uses it makes no program.
        """
        grads = [
            parameter.detach() if grad is None and parameter.requires_grad else grad
            for parameter, grad in zip(self.parameters, self.real, strict=True)
        ]
        return Before(self.parameters, self.real, grads)

    def entries(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, bool]]:
        """Each parameter, its p.grad in the trace, and whether that is there in truth."""
        for parameter, real, grad in zip(self.parameters, self.real, self.grads, strict=True):
            yield parameter, grad, real is not None

    def with_grad(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The gradients of ``tensors``, each behind its parameter."""
        return [(parameter, grad) for parameter, grad, _ in self.entries() if grad is not None]

    def tensors(self) -> list[torch.Tensor]:
        return [grad for grad in self.grads if grad is not None]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the context p.grad is what it is in a trace; then what it was."""
        try:
            self._set(self.grads)
            yield
        finally:
            self._set(self.real)

    def _set(self, grads: Sequence[torch.Tensor | None]) -> None:
        for parameter, grad in zip(self.parameters, grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = None  # a fake one has to go first
                parameter.grad = grad

    def restore(self) -> None:
        """Put p.grad back."""
        self._set(self.real)


@dataclass(frozen=True, eq=False)
class Gradients:
    """What a program does to ``p.grad``.

    Attributes:
        there: for parameters whose p.grad the program uses, its layout; None where there is none.
        cleared: those that have none afterwards.
        dropped: those that have one in the loop, which an optimizer has used, and that the step clears before it
            reads it: none, either.
        made: those that get one; the program returns its parts.
        wrapped: how these gradients are made of their parts.
    """

    there: Sequence[tuple[torch.Tensor, object]]
    cleared: Sequence[torch.Tensor]
    dropped: Sequence[torch.Tensor]
    made: Sequence[torch.Tensor]
    wrapped: Sequence[Wrapping]

    def fit(self) -> bool:
        """Whether the gradients that a call uses are there, as they were traced, and no others."""
        return all(layout_of(parameter.grad) == there for parameter, there in self.there)

    def read(self, dropped: Sequence[torch.Tensor]) -> bool:
        """Whether a call uses gradients that the one before has dropped."""
        return bool(self.there) and bool({id(parameter) for parameter, _ in self.there} & set(map(id, dropped)))

    @functools.cached_property
    def parts_made(self) -> int:
        """How many tensors the program returns for these."""
        return sum(wrapping.count for wrapping in self.wrapped)

    def give_up(self) -> None:
        """Before a call, let go of gradients that it makes anew and does not read.

        A program that finds its outputs in use copies them from then on.
        """
        for parameter in self.made:
            parameter.grad = None

    def apply(self, made: Sequence[torch.Tensor]) -> None:
        """Set p.grad after a call, to tensors that are made of these."""
        for parameter in self.cleared:
            parameter.grad = None
        for parameter in self.dropped:
            parameter.grad = None
        parts = iter(made)
        for parameter, wrapping in zip(self.made, self.wrapped, strict=True):
            parameter.grad = wrapping.around(parts)
