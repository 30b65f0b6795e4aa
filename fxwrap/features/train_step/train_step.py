"""``fxwrap.train_step``: forward, losses, gradients and the optimizers' updates as one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, overload

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...errors import TrainStepError
from ...options import refuse_unknown
from .loss_step import TrainStep
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

    which means the following, and is a program from its first call on::

        optimizer.zero_grad()
        value = loss(model, x, y)
        value.backward()
        optimizer.step()

    Parameters, buffers and ``optimizer.state`` stay the objects that they are and are written in place. Between
    steps they can be read, saved, loaded, evaluated and changed; so can learning rates and other settings of the
    optimizer, parameter groups, ``requires_grad``, hooks and ``model.train()``. ``p.grad`` is None after a call (with
    ``accumulate``, and where a written step reads it: it holds what it holds in the ordinary loop).

    Args:
        model: a step as it is written (a function, or a method); or the module that ``loss`` gets as its first
            argument. Without any of them this is a decorator: ``@fxwrap.train_step(memory_limit="6GiB")``.
        loss: ``loss(model, *batch)`` returns the loss, a tensor of one element with a gradient, or a tuple with the
            loss in front; all are returned detached.
        optimizer: any whose update computes with tensors. Parameters that it does not have get no gradients.
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
        return _written(model, modules, optimizers, group, dynamic, options)
    if modules or optimizers:
        raise TrainStepError(
            "modules and optimizers of train_step",
            expected="a step as it is written: train_step(step, modules=[...], optimizers=[...])",
            got="a model, a loss and an optimizer",
            remedy="leave them out",
        )
    return TrainStep(model, loss, optimizer, clip_norm, accumulate, group, dynamic, options)  # type: ignore[arg-type]


def _written(
    step: Callable[..., Any], modules: Sequence[torch.nn.Module], optimizers: Sequence[Optimizer], *how: Any
) -> WrittenStep:
    if not callable(step):
        raise TrainStepError(
            "step of train_step",
            expected="a function step(*batch), or a model, a loss and an optimizer",
            got=type(step).__name__,
        )
    given: dict[str, torch.nn.Module | Optimizer] = {}
    for name, kind, values in (("modules", torch.nn.Module, modules), ("optimizers", Optimizer, optimizers)):
        for number, one in enumerate(values):
            if not isinstance(one, kind):
                raise TrainStepError(
                    f"{name} of train_step",
                    expected=f"a list of {kind.__module__}.{kind.__name__}",
                    got=type(one).__name__,
                )
            given[f"{name}[{number}]"] = one
    return WrittenStep(step, step, given, *how)
