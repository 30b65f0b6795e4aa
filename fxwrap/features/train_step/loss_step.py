"""``train_step(model, loss, optimizer)``: the loop of one loss and one optimizer, as a written step.

::

    optimizer.zero_grad()          at the first of ``accumulate`` calls
    loss(model, ...).backward()    at each
    clip_grad_norm_(...)           at the last
    optimizer.step()
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...errors import TrainStepError
from .losses import loss_among, must_train
from .refusals import of_modules, refusals
from .written.averaged import no_sync
from .written.gradients import layout_of
from .written.messages import refused
from .written.written_step import WrittenStep


class TrainStep(WrittenStep):
    """A training step; ``step(*batch)`` makes it. See ``fxwrap.train_step``.

    ``fxwrap.report``, ``stats``, ``release`` and others take it as a compiled function.

    Attributes:
        model, optimizer: as given.
        micro_batches: how many calls since the last update have added their gradients; 0 unless ``accumulate``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[..., Any],
        optimizer: Optimizer,
        clip_norm: float | None,
        accumulate: int,
        group: dist.ProcessGroup | None,
        dynamic: bool | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, Optimizer) or not callable(loss):
            raise TrainStepError(
                "wrong arguments of train_step",
                expected="a module, a function loss(model, *batch), and a torch.optim optimizer",
                got=", ".join(type(given).__name__ for given in (model, loss, optimizer)),
            )
        if type(accumulate) is not int or accumulate < 1:
            raise TrainStepError("accumulate of train_step", expected="an int of at least 1", got=repr(accumulate))
        if clip_norm is not None and not (_is_number(clip_norm) and clip_norm > 0):
            raise TrainStepError("clip_norm of train_step", expected="a number above 0, or None", got=repr(clip_norm))
        self.model, self.optimizer, self.micro_batches = model, optimizer, 0
        self._loss, self._clip_norm, self._accumulate = loss, clip_norm, accumulate
        # Where gradients of several calls are added up. They stay, as recordings know their addresses.
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._with_gradient: list[torch.Tensor] = []  # of the last trace
        name = f"the training of {type(model).__name__} with {type(optimizer).__name__}"
        if reasons := [*of_modules(model.modules()), *refusals(loss, optimizer)]:
            raise refused(name, reasons)
        given: dict[str, torch.nn.Module | Optimizer] = {"model": model, "optimizer": optimizer}
        super().__init__(self._update, loss, given, group, dynamic, options)
        self.__name__ = name

    # It makes states by itself, so that a limit holds for the first call, too.
    _first_call_is_written = False
    _fxwrap_without = "a step that was not called yet"

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._accumulate == 1:
            return super()._call(args, kwargs)
        if self._begins():
            self._show_sums()
        result = super()._call(args, kwargs)
        self.micro_batches = 0 if self._ends() else self.micro_batches + 1
        return result

    def _begins(self) -> bool:
        return self.micro_batches == 0

    def _ends(self) -> bool:
        return self.micro_batches + 1 == self._accumulate

    def _modes(self) -> object:
        return super()._modes(), self._begins(), self._ends()

    def _trained(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _show_sums(self) -> None:
        for parameter in self._trained():
            total = self._sums.get(parameter)
            if total is not None and parameter.grad is total:
                continue
            if total is None or layout_of(total) != layout_of(parameter):
                total = self._sums[parameter] = torch.zeros_like(parameter)
            parameter.grad = total

    def _update(self, *batch: Any, **more: Any) -> Any:
        """The loop."""
        optimizer, parameters = self.optimizer, self._trained()
        begins, ends = self._begins(), self._ends()
        sums = [p.grad for p in parameters] if self._accumulate > 1 and begins else []
        if begins:
            optimizer.zero_grad()
        with contextlib.nullcontext() if ends else no_sync():
            outputs = self._loss(self.model, *batch, **more)
            value = loss_among(outputs, parameters)
            share = value / self._accumulate if self._accumulate > 1 else value
            share.backward(inputs=parameters)
        must_train(parameters)
        self._with_gradient = [p for p in parameters if p.grad is not None]
        for parameter, total in zip(parameters, sums, strict=False):
            if total is not None and parameter.grad is not None:
                with torch.no_grad():
                    total.copy_(parameter.grad)
                parameter.grad = None  # that of a trace has to go first
                parameter.grad = total
        if ends:
            if self._clip_norm is not None:  # of those that were frozen within an update, too
                every = [p for group in optimizer.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(every, self._clip_norm)
            optimizer.step()
        return outputs

    def _updated_later(self) -> Mapping[Optimizer, Sequence[torch.Tensor]]:
        """Its state is made now: with it, the programs of micro-batches are compiled once."""
        return {} if self._ends() else {self.optimizer: self._with_gradient}

    def _fxwrap_afresh(self, options: Mapping[str, Any] | None) -> TrainStep:
        options = {**(self._options or {}), **(options or {})}
        how = self._clip_norm, self._accumulate, None, self._dynamic
        afresh = TrainStep(self.model, self._loss, self.optimizer, *how, options)
        return self._as_rehearsed(afresh)

    @contextlib.contextmanager
    def _fxwrap_rehearsal(self) -> Iterator[None]:
        micro_batches = self.micro_batches
        try:
            with super()._fxwrap_rehearsal():
                yield
        finally:
            self.micro_batches = micro_batches

    def __repr__(self) -> str:
        return f"<fxwrap.TrainStep of {type(self.model).__name__} with {type(self.optimizer).__name__}>"


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
