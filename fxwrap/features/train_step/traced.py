"""The function that is compiled for a training step: loss, gradients and update, over the caller's own tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .optimizers import Update

# Added to the norm of all gradients before it divides: what ``torch.nn.utils.clip_grad_norm_`` adds.
_EPSILON = 1e-6


@dataclass(eq=False)
class Slots:
    """What the traced function reads at each call, in plain lists, which Dynamo's guards go through quickly.

    ``fill`` replaces what is in them: a checkpoint that was loaded has other tensors for the same function.

    Attributes:
        parameters: those that get gradients.
        updates: for each group the functional form, the positions of its parameters in ``parameters``, its lists of
            state, and its settings.
        gradients: where gradients are added up, by position; empty unless there are several micro-batches.
    """

    parameters: list[torch.Tensor] = field(default_factory=list)
    updates: list[tuple[Callable[..., Any], list[int], list[list[torch.Tensor | None]], dict[str, Any]]] = field(
        default_factory=list
    )
    gradients: list[torch.Tensor] = field(default_factory=list)

    def fill(self, updates: Sequence[Update]) -> None:
        self.parameters[:] = dict.fromkeys(p for update in updates for p in update.params)
        place = {parameter: n for n, parameter in enumerate(self.parameters)}
        self.updates[:] = [
            (u.function, [place[p] for p in u.params], [list(state) for state in u.states], dict(u.settings))
            for u in updates
        ]

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors in them."""
        yield from (*self.parameters, *self.gradients)
        for _, _, states, settings in self.updates:
            values = itertools.chain(*states, settings.values())
            yield from (value for value in values if isinstance(value, torch.Tensor))


def traced_step(
    model: torch.nn.Module,
    loss: Callable[..., Any],
    slots: Slots,
    clip_norm: float | None,
    micro_batches: int,
    average: Callable[[Sequence[torch.Tensor | None]], list[torch.Tensor | None]] | None,
) -> Callable[..., Any]:
    """The step as a function of the batch, to be compiled as one graph.

    Args:
        clip_norm: the largest norm of all gradients together; None for any.
        micro_batches: how many calls make one update; this is the function of the last of them.
        average: averages gradients over processes.
    """
    parameters, updates, sums = slots.parameters, slots.updates, slots.gradients

    def step(*batch: Any, **more: Any) -> Any:
        outputs, gradients = _gradients(model, loss, parameters, micro_batches, batch, more)
        with torch.no_grad():
            if micro_batches > 1:
                pairs = zip(sums, gradients, strict=True)
                gradients = [None if gradient is None else total + gradient for total, gradient in pairs]
            if average is not None:
                gradients = average(gradients)
            if clip_norm is not None:
                gradients = _clipped(gradients, clip_norm)
            for function, places, states, settings in updates:
                used = [n for n, place in enumerate(places) if gradients[place] is not None]
                function(
                    # Dynamo refuses to trace an optimizer over parameters that a graph has gradients of.
                    [parameters[places[n]].detach() for n in used],
                    [gradients[places[n]] for n in used],
                    *[[state[n] for n in used] if state else [] for state in states],
                    **settings,
                )
            for total in sums:
                total.zero_()
        return outputs

    return step


def traced_micro_batch(
    model: torch.nn.Module, loss: Callable[..., Any], slots: Slots, micro_batches: int
) -> Callable[..., Any]:
    """A step's part for a micro-batch that is not the last: gradients are added to ``slots.gradients``."""
    parameters, sums = slots.parameters, slots.gradients

    def step(*batch: Any, **more: Any) -> Any:
        outputs, gradients = _gradients(model, loss, parameters, micro_batches, batch, more)
        with torch.no_grad():
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total.add_(gradient)
        return outputs

    return step


def _gradients(
    model: torch.nn.Module,
    loss: Callable[..., Any],
    parameters: Sequence[torch.Tensor],
    micro_batches: int,
    batch: Sequence[Any],
    more: dict[str, Any],
) -> tuple[Any, Sequence[torch.Tensor | None]]:
    """What ``loss`` returns, detached, and the gradients of ``parameters``; None for those that are not used."""
    outputs = loss(model, *batch, **more)
    value = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
    shared = value / micro_batches if micro_batches > 1 else value
    gradients = torch.autograd.grad(shared, parameters, allow_unused=True)
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs), gradients


def _clipped(gradients: Sequence[torch.Tensor | None], clip_norm: float) -> list[torch.Tensor | None]:
    """Gradients scaled down so that their norm is at most ``clip_norm``, as ``clip_grad_norm_`` does it."""
    norm = torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
    scale = torch.clamp(clip_norm / (norm + _EPSILON), max=1.0)
    return [None if gradient is None else gradient * scale for gradient in gradients]
