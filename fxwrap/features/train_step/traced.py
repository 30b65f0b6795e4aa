"""The function that is compiled for a training step: loss, gradients and update, over the caller's own tensors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .losses import loss_among, must_train
from .numbers import ReadingNumbers
from .optimizers import Update
from .sums import HAD, HAD_NOT, Sums

# Added to the norm of all gradients before it divides: what ``torch.nn.utils.clip_grad_norm_`` adds.
_EPSILON = 1e-6


# A functional form, positions of parameters, lists of state, settings, numbers.
_Update = tuple[
    Callable[..., Any], list[int], list[list[torch.Tensor | None]], dict[str, Any], Sequence[torch.Tensor]
]
_Average = Callable[[Sequence[torch.Tensor | None]], list[torch.Tensor | None]]


@dataclass(eq=False)
class Slots:
    """What the traced function reads at each call, in plain lists, which Dynamo's guards go through quickly.

    ``fill`` replaces what is in them: a checkpoint that was loaded has other tensors for the same function.

    Attributes:
        parameters: those that get gradients.
        updates: for each group the functional form, the positions of its parameters in ``parameters``, its lists of
            state, its settings, and those of them that are read by ``ReadingNumbers``.
        sums: where gradients are added up, by position; empty unless there are several micro-batches.
        hooks: the number of times that hooks of modules have changed, as a text: code is compiled for each.
    """

    parameters: list[torch.Tensor] = field(default_factory=list)
    updates: list[_Update] = field(default_factory=list)
    sums: Sums = field(default_factory=Sums)
    hooks: list[str] = field(default_factory=lambda: ["0"])

    def fill(self, updates: Sequence[Update]) -> None:
        self.parameters[:] = dict.fromkeys(p for update in updates for p in update.params)
        place = {parameter: n for n, parameter in enumerate(self.parameters)}
        self.updates[:] = [
            (
                u.function,
                [place[p] for p in u.params],
                [list(state) for state in u.states],
                dict(u.settings),
                list(u.numbers),
            )
            for u in updates
        ]

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors in them."""
        yield from (*self.parameters, *self.sums.tensors)
        for _, _, states, settings, _ in self.updates:
            values = itertools.chain(*states, settings.values())
            yield from (value for value in values if isinstance(value, torch.Tensor))


def traced_step(
    model: torch.nn.Module,
    loss: Callable[..., Any],
    slots: Slots,
    clip_norm: float | None,
    average: _Average | None,
) -> Callable[..., Any]:
    """The step as a function of the batch, to be compiled as one graph.

    Args:
        clip_norm: the largest norm of all gradients together; None for any.
        average: averages gradients over processes.
    """
    parameters, updates, hooks = slots.parameters, slots.updates, slots.hooks

    def step(*batch: Any, **more: Any) -> Any:
        assert hooks[0]  # a guard: see ``Slots``
        outputs, gradients = _gradients(model, loss, parameters, 1, batch, more)
        with torch.no_grad():
            _update(parameters, updates, gradients, clip_norm, average)
        return outputs

    return step


def traced_micro_batch(
    model: torch.nn.Module, loss: Callable[..., Any], slots: Slots, micro_batches: int
) -> Callable[..., Any]:
    """A step's part for a micro-batch that is not the last: gradients are added to ``slots.sums``.

    The function takes which parameters have had a gradient before it, and returns which have one after it.

    Args:
        micro_batches: how many calls make one update.
    """
    parameters, sums, hooks = slots.parameters, slots.sums.tensors, slots.hooks

    def step(before: str, /, *batch: Any, **more: Any) -> Any:
        assert hooks[0]  # a guard: see ``Slots``
        outputs, gradients = _gradients(model, loss, parameters, micro_batches, batch, more)
        with torch.no_grad():
            for total, gradient, had in zip(sums, gradients, before, strict=True):
                if gradient is not None and had == HAD:
                    total.add_(gradient)
                elif gradient is not None:
                    total.copy_(gradient)
        return outputs, _had(gradients, before)

    return step


def traced_last_micro_batch(
    model: torch.nn.Module,
    loss: Callable[..., Any],
    slots: Slots,
    micro_batches: int,
    clip_norm: float | None,
    average: _Average | None,
) -> Callable[..., Any]:
    """A step's part for the last micro-batch, which makes the update, and leaves its gradients in ``slots.sums``.

    See ``traced_step`` and ``traced_micro_batch``.
    """
    parameters, updates, sums, hooks = slots.parameters, slots.updates, slots.sums.tensors, slots.hooks

    def step(before: str, /, *batch: Any, **more: Any) -> Any:
        assert hooks[0]  # a guard: see ``Slots``
        outputs, gradients = _gradients(model, loss, parameters, micro_batches, batch, more)
        with torch.no_grad():
            totals: list[torch.Tensor | None] = []
            for total, gradient, had in zip(sums, gradients, before, strict=True):
                if had == HAD:
                    totals.append(total if gradient is None else total + gradient)
                else:
                    totals.append(gradient)
            made_of = _update(parameters, updates, totals, clip_norm, average)
            for total, gradient in zip(sums, made_of, strict=True):
                if gradient is not None and gradient is not total:
                    total.copy_(gradient)
        return outputs, _had(gradients, before)

    return step


def _had(gradients: Sequence[torch.Tensor | None], before: str) -> str:
    pairs = zip(gradients, before, strict=True)
    return "".join([HAD_NOT if gradient is None and had == HAD_NOT else HAD for gradient, had in pairs])


def _update(
    parameters: Sequence[torch.Tensor],
    updates: Sequence[_Update],
    gradients: Sequence[torch.Tensor | None],
    clip_norm: float | None,
    average: _Average | None,
) -> Sequence[torch.Tensor | None]:
    """Update the parameters that have a gradient. Returns the gradients of which the update was made."""
    if average is not None:
        gradients = average(gradients)
    if clip_norm is not None:
        gradients = _clipped(gradients, clip_norm)
    for function, places, states, settings, numbers in updates:
        used = [n for n, place in enumerate(places) if gradients[place] is not None]
        with ReadingNumbers(numbers) if numbers else contextlib.nullcontext():
            function(
                # Dynamo refuses to trace an optimizer over parameters that a graph has gradients of.
                [parameters[places[n]].detach() for n in used],
                [gradients[places[n]] for n in used],
                *[[state[n] for n in used] if state else [] for state in states],
                **settings,
            )
    return gradients


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
    value = loss_among(outputs, parameters)
    shared = value / micro_batches if micro_batches > 1 else value
    gradients = torch.autograd.grad(shared, parameters, allow_unused=True)
    must_train(parameters, gradients)
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs), gradients


def _clipped(gradients: Sequence[torch.Tensor | None], clip_norm: float) -> list[torch.Tensor | None]:
    """Gradients scaled down so that their norm is at most ``clip_norm``, as ``clip_grad_norm_`` does it."""
    norm = torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
    scale = torch.clamp(clip_norm / (norm + _EPSILON), max=1.0)
    return [None if gradient is None else gradient * scale for gradient in gradients]
