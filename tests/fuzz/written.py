"""Training programs of ``training.py`` with the step as it is written: ``fxwrap.train_step(step)``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from own_operators import HOST_WORK
from torch import nn
from training import OurSide, Step, Training, difference
from within_limit import DifferenceError

import fxwrap
from fxwrap.graphs.devices.runtime import runtime_for


class WrittenSide(OurSide):
    """The loop, written by the user."""

    def __init__(self, training: Training, device: torch.device) -> None:
        # A limit that nothing fits into would be that of all that is compiled later, too.
        super().__init__(dataclasses.replace(training, limit=None) if training.limit == 1 else training, device)

    def make_step(self, limit: int | None = None) -> Any:
        training, model, optimizer, loss_of = self.training, self.model, self.optimizer, self.loss
        limit = limit or training.limit  # type: ignore[assignment]
        options = dict(training.options)
        if runtime_for(self.device).frozen_addresses:
            options["eager_ops"] = HOST_WORK
        self.limit = limit if isinstance(limit, int) else 0
        clip_norm, accumulate = training.clip_norm, training.accumulate

        def step(begins: bool, ends: bool, *batch: Any) -> Any:
            if begins:
                optimizer.zero_grad()
            outputs = loss_of(model, *batch)
            value = outputs[0] if isinstance(outputs, tuple) else outputs
            (value / accumulate).backward()
            if ends:
                if clip_norm is not None:
                    parameters = [p for group in optimizer.param_groups for p in group["params"]]
                    nn.utils.clip_grad_norm_(parameters, clip_norm)
                optimizer.step()
            return outputs

        return fxwrap.train_step(step, memory_limit=limit, dynamic=training.dynamic, options=options)

    @property
    def _flags(self) -> tuple[bool, bool]:
        """Whether a call begins an update, and whether it ends one."""
        place = self.done % self.training.accumulate
        return place == 0, place == self.training.accumulate - 1

    def _call(self, batch: tuple[Any, ...]) -> None:
        self.seen.append(self._within_limit(lambda: self.step(*self._flags, *batch)))

    def _limit_to(self, limit: int | None) -> None:
        self.limit = limit or 0
        fxwrap.limit_memory(self.step, limit)

    def _do_limit(self, number: int, step: Step) -> None:
        if self._programs():
            super()._do_limit(number, step)

    def _do_no_limit(self, number: int, step: Step) -> None:
        if self._programs():
            super()._do_no_limit(number, step)

    def _do_report(self, number: int, step: Step) -> None:
        if self._programs():
            super()._do_report(number, step)

    def _do_release(self, number: int, step: Step) -> None:
        if self._programs():
            super()._do_release(number, step)

    def _changes_nothing(self, act: Callable[[tuple[Any, ...]], Any], number: int, step: Step) -> None:
        super()._changes_nothing(lambda batch: act((*self._flags, *batch)), number, step)

    def _do_wrong_batch(self, number: int, step: Step) -> None:
        """It raises, and has changed nothing; the other side does nothing."""
        if not self.done:
            return
        x, *others = self.batch(number, step)
        before = self._snapshot()
        with contextlib.suppress(Exception):
            self.step(*self._flags, x[:, 1:], *others)
            raise SystemExit("a wrong batch is trained on")
        for (name, got), (_, expected) in zip(self._snapshot(), before, strict=True):
            if (why := difference(got, expected, 0.0)) is not None:
                raise DifferenceError(f"a wrong batch has changed {name}: {why}")
