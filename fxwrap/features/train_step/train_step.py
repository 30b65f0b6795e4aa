"""``fxwrap.train_step``: forward, loss, gradients and the optimizer's update as one program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NoReturn, overload

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...backend import parsed
from ...errors import TrainStepError, limit_among
from ...options import refuse_unknown
from .codegen.averaging import averaging
from .codegen.tracing import compiled_step, faults_of_forward, mark_static, why_not_traced
from .first_rates import FirstRates
from .group import begin_alike, check_group
from .optimizers import Numbers, updates_of
from .refusals import refusals
from .snapshot import Snapshot
from .traced import Slots, traced_last_micro_batch, traced_micro_batch, traced_step
from .unchanged import kept
from .written.written_step import WrittenStep


@overload
def train_step(
    model: torch.nn.Module,
    loss: Callable[..., Any],
    optimizer: Optimizer,
    *,
    clip_norm: float | None = None,
    accumulate: int = 1,
    memory_limit: int | str | None = None,
    group: dist.ProcessGroup | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> TrainStep: ...


@overload
def train_step(
    step: Callable[..., Any],
    /,
    *,
    modules: Sequence[torch.nn.Module] = (),
    optimizers: Sequence[Optimizer] = (),
    memory_limit: int | str | None = None,
    group: dist.ProcessGroup | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> WrittenStep: ...


@overload
def train_step(
    *,
    modules: Sequence[torch.nn.Module] = (),
    optimizers: Sequence[Optimizer] = (),
    memory_limit: int | str | None = None,
    group: dist.ProcessGroup | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], WrittenStep]: ...


def train_step(
    model: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Optimizer | None = None,
    *,
    modules: Sequence[torch.nn.Module] = (),
    optimizers: Sequence[Optimizer] = (),
    clip_norm: float | None = None,
    accumulate: int = 1,
    memory_limit: int | str | None = None,
    group: dist.ProcessGroup | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    **unknown: NoReturn,
) -> TrainStep | WrittenStep | Callable[[Callable[..., Any]], WrittenStep]:
    """Make a function that trains by one step, as one program.

    A step as it is written, with any losses, optimizers and updates of other tensors::

        def step(real, noise):
            d_optimizer.zero_grad()
            d_loss = ...
            d_loss.backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            ...
            return d_loss, g_loss

        step = fxwrap.train_step(step)
        for real in batches:
            losses = step(real, torch.randn(64, 128))

    A call means what a call of the function means. The first one runs as it is written, and makes the states of
    optimizers; the next is traced, compiled and replayed: Python runs in it for the last time. What Python decides
    (arguments that are no tensors, sizes, modes, hooks, settings, numbers that the code names) is compared at each
    call, and traced anew where it differs. What it returns is returned, detached. docs/training.md says what a
    replay does not see.

    For one loss and one optimizer a function of the loss is enough::

        step = fxwrap.train_step(model, lambda model, x, y: F.cross_entropy(model(x), y), optimizer)
        for x, y in batches:
            value = step(x, y)

    which means the following, and takes a tenth of its time on the host::

        optimizer.zero_grad()
        value = loss(model, x, y)
        value.backward()
        optimizer.step()

    Parameters, buffers and ``optimizer.state`` stay the objects that they are and are written in place. Between
    steps they can be read, saved, loaded, evaluated and changed; so can learning rates and other settings of the
    optimizer, parameter groups, ``requires_grad`` and ``model.train()``. ``p.grad`` is neither read nor written (with
    ``accumulate``, and where a written step reads it: it holds what it holds in the ordinary loop).

    Args:
        model: a step as it is written (a function, or a method); or the module that ``loss`` gets as its first
            argument. Without any of them this is a decorator: ``@fxwrap.train_step(memory_limit="6GiB")``.
        loss: ``loss(model, *batch)`` returns the loss, a tensor of one element with a gradient, or a tuple with the
            loss in front; all are returned detached.
        optimizer: one of ``torch.optim`` whose update Dynamo can trace (docs/training.md has the list). Parameters
            that it does not have get no gradients.
        modules, optimizers: of a written step: those that are not found in its closure, its globals and what it is a
            method of.
        clip_norm: with ``loss``: the largest norm of all gradients together, as for
            ``torch.nn.utils.clip_grad_norm_``.
        accumulate: with ``loss``: how many calls make one update. Gradients are averages over as many micro-batches.
        memory_limit: the most memory that a step may take beside parameters, state and batch: bytes, or "6GiB".
        group: the processes that train together, each with batches of its own, such as
            ``torch.distributed.group.WORLD`` (which is None before ``init_process_group``). Now, all take over
            parameters and buffers of the first. Updates are made of averages of all processes' gradients, so that
            parameters stay equal; a written step averages them at the end of each ``backward()``.
        dynamic: as for ``torch.compile``: None for sizes that have varied.
        options: as for ``torch.compile(..., backend="fxwrap")``.

    Raises:
        OptionError: ``memory_limit`` is no size, or an option is wrong.
        TrainStepError: something cannot be part of one program; the error names all of it. What is found only when
            the step is compiled is raised by its first call, of a written step by its second, which then has changed
            nothing. Or an argument is wrong.
        MemoryLimitError: raised by a call that needs more than ``memory_limit``, before anything runs.
        TypeError: there is no such argument.
    """
    refuse_unknown(unknown, train_step)
    if memory_limit is not None:
        options = {**(options or {}), "memory_limit": memory_limit}
    if model is None and loss is None and optimizer is None:
        given: dict[str, Any] = {"modules": modules, "optimizers": optimizers, "group": group, "dynamic": dynamic}
        given |= {"clip_norm": clip_norm, "accumulate": accumulate, "options": options}
        return lambda step: train_step(step, **given)
    if loss is None and not isinstance(model, torch.nn.Module) and (callable(model) or optimizer is None):
        if optimizer is not None:
            raise TrainStepError(
                "optimizer of train_step",
                expected="a loss, too; or a step as it is written, whose optimizers are found",
                got="a function and an optimizer",
                remedy="leave it out, or give those that are not found: train_step(step, optimizers=[...])",
            )
        alone = {"clip_norm": clip_norm is not None, "accumulate": accumulate != 1}
        if wrong := [name for name, given in alone.items() if given]:
            raise TrainStepError(
                f"{', '.join(wrong)} of train_step",
                expected="a model, a loss and an optimizer",
                got="a step as it is written",
                remedy="write it in the step, such as torch.nn.utils.clip_grad_norm_",
            )
        return WrittenStep(model, modules, optimizers, group, dynamic, options)
    if modules or optimizers:
        raise TrainStepError(
            "modules and optimizers of train_step",
            expected="a step as it is written: train_step(step, modules=[...], optimizers=[...])",
            got="a model, a loss and an optimizer",
            remedy="leave them out",
        )
    return TrainStep(model, loss, optimizer, clip_norm, accumulate, group, dynamic, options)  # type: ignore[arg-type]


class TrainStep:
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
        if group is not None:
            check_group(group)
        parsed(options)  # wrong options are known now, and not at the first call
        self.model, self.optimizer, self.micro_batches = model, optimizer, 0
        self._loss, self._accumulate = loss, accumulate
        self._settings, self._options = (clip_norm, accumulate, group, dynamic), options
        self._refuse(refusals(model, loss, optimizer))
        if group is not None:
            begin_alike([model], [optimizer], accumulate, group)
        self._slots, self._numbers = Slots(), Numbers()
        self._seen: Snapshot | None = None
        self._first_rates: FirstRates | None = None
        average = averaging(group) if group is not None else None
        parts = [traced_step(model, loss, self._slots, clip_norm, average)]
        if accumulate > 1:
            parts = [
                traced_last_micro_batch(model, loss, self._slots, accumulate, clip_norm, average),
                traced_micro_batch(model, loss, self._slots, accumulate),
            ]
        self._fxwrap_compiled, bound = zip(*(compiled_step(part, options, dynamic) for part in parts), strict=True)
        self._last, self._earlier = bound[0], bound[-1]

    def __call__(self, *batch: Any, **more: Any) -> Any:
        if self._first_rates is not None:
            self._first_rates = self._first_rates.follow()
        if self._seen is None or not self._seen.holds(self.optimizer):
            self._look_again()
        try:
            if self._accumulate == 1:
                return self._last(*batch, **more)
            return self._micro_batch(batch, more)
        except Exception as error:
            if (limit := limit_among(error)) is not None:
                raise limit from limit.__cause__
            if not (reason := why_not_traced(error)):
                raise
            self._seen = None
            faults = faults_of_forward(self.model, self._loss, batch, more)
            raise self._refused(faults or [reason]) from error

    def _micro_batch(self, batch: tuple[Any, ...], more: dict[str, Any]) -> Any:
        sums, is_last = self._slots.sums, self.micro_batches + 1 == self._accumulate
        part = self._last if is_last else self._earlier
        outputs, had = part(sums.before(begins=self.micro_batches == 0), *batch, **more)
        sums.after(had)
        self.micro_batches = 0 if is_last else self.micro_batches + 1
        return outputs

    def _fxwrap_afresh(self, options: Mapping[str, Any] | None) -> TrainStep:
        options = {**(self._options or {}), **(options or {})}
        return TrainStep(self.model, self._loss, self.optimizer, *self._settings, options)

    @contextlib.contextmanager
    def _fxwrap_rehearsal(self) -> Iterator[None]:
        """Inside the context, calls change no parameter, state, buffer, gradient or random number for longer."""
        self._look_again()  # states that are missing are made, of zeros
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads, micro_batches, first_rates = [p.grad for p in parameters], self.micro_batches, self._first_rates
        shown = (grad for grad in grads if grad is not None)
        try:
            with kept([*self.model.parameters(), *self.model.buffers(), *self._slots.tensors(), *shown]):
                yield
        finally:
            self.micro_batches, self._first_rates = micro_batches, first_rates
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad

    def __repr__(self) -> str:
        return f"<fxwrap.TrainStep of {type(self.model).__name__} with {type(self.optimizer).__name__}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """What ``copy.copy``, ``copy.deepcopy``, ``pickle`` and ``torch.save`` ask for."""
        raise TrainStepError(
            f"a copy of {self!r}",
            expected="copies of its model and its optimizer",
            got="the step itself, whose program writes the tensors of this model and this optimizer",
            remedy=(
                "copy both at once, copy.deepcopy((model, optimizer)), or save their state_dict(), and make another "
                "step of them with fxwrap.train_step; keep a step outside of a module that is copied"
            ),
        )

    def _look_again(self) -> None:
        """Take what the optimizer has now: parameters, state, settings. State that is missing is made."""
        self._refuse(refusals(self.model, self._loss, self.optimizer))
        frozen = [p for group in self.optimizer.param_groups for p in group["params"] if not p.requires_grad]
        if self.micro_batches and any(parameter.grad is not None for parameter in frozen):
            self._refuse(["a parameter that has a gradient was frozen before the last micro-batch of its update"])
        self._slots.fill(updates_of(self.optimizer, self._numbers))
        self._first_rates = FirstRates.of(self.optimizer, self._first_rates)
        if self._accumulate > 1:
            self._slots.sums.fill(self._slots.parameters, frozen)
        mark_static(self._slots.tensors())
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn where no step was made
        hooks = self._seen.hooks if self._seen is not None else None
        self._seen = Snapshot(self.model, self.optimizer, self._numbers)
        if hooks not in (None, self._seen.hooks):
            self._slots.hooks[0] = str(int(self._slots.hooks[0]) + 1)

    def _refuse(self, reasons: list[str]) -> None:
        if reasons:
            raise self._refused(reasons)

    def _refused(self, reasons: list[str]) -> TrainStepError:
        return TrainStepError(
            f"{type(self.model).__name__} with {type(self.optimizer).__name__} cannot be trained by one program",
            expected="a model, a loss and an update that torch traces into one graph",
            got="\n    ".join(["", *reasons]),
            remedy="change what is named, or train with the ordinary loop and torch.compile(model)",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
