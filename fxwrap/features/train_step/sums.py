"""Where a training step adds up the gradients of micro-batches: in ``p.grad``, as the ordinary loop does.

::

    optimizer.zero_grad()       a call that begins an update does not read what p.grad holds, but writes it
    loss(...).backward()        a later call of the same update adds to it
    loss(...).backward()
    optimizer.step()            the last call leaves the gradients of which the update was made: averaged, clipped

A parameter that has had no gradient in an update, or is frozen, has the p.grad None, and is not updated. A step that
makes an update at every call keeps no gradients: it neither reads nor writes p.grad.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch

# In a text with a character for each parameter: whether it has had a gradient since the last update. A text, since
# Dynamo guards it by one comparison.
HAD, HAD_NOT = "1", "0"
_grad = attrgetter("grad")


class Sums:
    """The sums of one step.

    Attributes:
        tensors: by parameter; they stay, as compiled code knows their addresses.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._parameters, self._frozen = list[torch.Tensor](), list[torch.Tensor]()
        self._had, self._shown = "", list[torch.Tensor | None]()

    def fill(self, parameters: Sequence[torch.Tensor], frozen: Sequence[torch.Tensor]) -> None:
        """Take other parameters. The tensors of those that stay are kept, with what they hold.

        Args:
            frozen: the other parameters of the optimizer, which get no gradients.
        """
        self._frozen = list(frozen)
        known = dict(zip(self._parameters, zip(self.tensors, self._had, strict=True), strict=True))
        kept = [known.get(p, (None, HAD_NOT)) for p in parameters]
        self._parameters = list(parameters)
        self.tensors[:] = [
            total if total is not None and _alike(total, p) else torch.zeros_like(p)
            for (total, _), p in zip(kept, parameters, strict=True)
        ]
        self._note("".join(had for _, had in kept))

    def before(self, begins: bool) -> str:
        """Which parameters have had a gradient in this update. Takes what the caller has done to ``p.grad``.

        Args:
            begins: whether the call is the first of an update.
        """
        if begins:
            for parameter in self._frozen:
                parameter.grad = None
            return HAD_NOT * len(self._parameters)
        if not self._are_shown():
            grads = list(map(_grad, self._parameters))
            with torch.no_grad():
                for total, grad in zip(self.tensors, grads, strict=True):
                    if grad is not None and grad is not total:
                        total.copy_(grad)
            self._note("".join(HAD_NOT if grad is None else HAD for grad in grads))
        return self._had

    def after(self, had: str) -> None:
        """Show the sums as ``p.grad``.

        Args:
            had: which parameters have had a gradient by now.
        """
        if had != self._had:
            self._note(had)
        if not self._are_shown():
            for parameter, shown in zip(self._parameters, self._shown, strict=True):
                parameter.grad = shown

    def _note(self, had: str) -> None:
        self._had = had
        self._shown = [total if has == HAD else None for total, has in zip(self.tensors, had, strict=True)]

    def _are_shown(self) -> bool:
        return all(map(is_, map(_grad, self._parameters), self._shown))


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype, one.device) == (
        other.shape,
        other.stride(),
        other.dtype,
        other.device,
    )
