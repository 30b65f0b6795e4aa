"""What a training step cannot be made of, found before anything is compiled: every reason at once."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed import fsdp
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

_WRAPPERS = {
    DistributedDataParallel: "give the module inside of it, and group=: the step averages gradients",
    DataParallel: "give the module inside of it",
    fsdp.FullyShardedDataParallel: "give the module inside of it, split by fxwrap.shard_parameters",
    fsdp.FSDPModule: "split the module by fxwrap.shard_parameters instead",
}
_MODULE_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
# Modules of torch whose functions and classes take outputs and a target.
_COMPARISONS = "torch.nn.functional", "torch.nn.modules.loss"
_OPTIMIZER_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
PARAMETER_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"


def refusals(loss: Callable[..., Any], optimizer: Optimizer) -> list[str]:
    """Why no step can be made of these; empty if nothing is known against it."""
    return [*_of_optimizer(optimizer), *_of_loss(loss)]


def hooks_of_all_modules() -> Iterator[Mapping[Any, Any]]:
    """The tables of hooks that are registered for every module."""
    yield from (getattr(torch.nn.modules.module, f"_global{name}") for name in _MODULE_HOOKS)


def hooks_of_steps(optimizer: Optimizer) -> Iterator[Mapping[Any, Any]]:
    """The tables of hooks that ``optimizer.step`` calls, those of all optimizers included."""
    yield from (getattr(optimizer, name) for name in _OPTIMIZER_HOOKS)
    of_all = sys.modules[Optimizer.__module__]
    yield from (getattr(of_all, f"_global_optimizer_{kind}_hooks") for kind in ("pre", "post"))


def of_modules(modules: Iterable[torch.nn.Module]) -> list[str]:
    """Why no program can have some modules: each reason once."""
    return list(dict.fromkeys(f"{type(module).__name__} {reason}" for module in modules for reason in _of(module)))


def _of(module: torch.nn.Module) -> Iterator[str]:
    for wrapper, instead in _WRAPPERS.items():
        if isinstance(module, wrapper):
            yield f"communicates by itself: {instead}"
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
        yield "has sparse gradients: make it with sparse=False"


def _of_optimizer(optimizer: Optimizer) -> Iterator[str]:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        yield f"{name} evaluates the loss several times in a step (a closure): use the ordinary loop"


def _of_loss(loss: Callable[..., Any]) -> Iterator[str]:
    called = loss
    while isinstance(called, functools.partial):
        called = called.func
    kind = called if inspect.isroutine(called) else type(called)
    if str(kind.__module__).startswith(_COMPARISONS):
        yield (
            f"the loss is {kind.__name__}, which compares outputs with a target, and would get the model: give "
            "lambda model, x, y: loss(model(x), y)"
        )
    if inspect.isfunction(loss):
        variables = inspect.getclosurevars(loss)
        for name, value in {**variables.globals, **variables.nonlocals}.items():
            if isinstance(value, torch.amp.GradScaler):
                yield f"the loss uses a GradScaler ({name}), which no update unscales: use train_step(step)"
