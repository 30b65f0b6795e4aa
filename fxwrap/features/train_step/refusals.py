"""What a training step cannot be made of, found before anything is compiled: every reason at once."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed import fsdp
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from .optimizers import functional_form

_WRAPPERS = {
    DistributedDataParallel: "give the module inside of it, and group=: the step averages gradients",
    DataParallel: "give the module inside of it",
    fsdp.FullyShardedDataParallel: "train it with the ordinary loop",
    fsdp.FSDPModule: "train it with the ordinary loop",
}
_MODULE_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
# Modules of torch whose functions and classes take outputs and a target.
_COMPARISONS = "torch.nn.functional", "torch.nn.modules.loss"
_OPTIMIZER_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
PARAMETER_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"


def refusals(model: torch.nn.Module, loss: Callable[..., Any], optimizer: Optimizer) -> list[str]:
    """Why no step can be made of these; empty if nothing is known against it."""
    return [*_of_model(model), *_of_parameters(model, optimizer), *_of_optimizer(optimizer), *_of_loss(loss)]


def hooks_of_modules(model: torch.nn.Module) -> Iterator[Mapping[Any, Any]]:
    """The tables of hooks of a model's modules, by which forward and backward call them."""
    for module in model.modules():
        yield from (getattr(module, name) for name in _MODULE_HOOKS)
    yield from hooks_of_all_modules()


def hooks_of_all_modules() -> Iterator[Mapping[Any, Any]]:
    """The tables of hooks that are registered for every module."""
    yield from (getattr(torch.nn.modules.module, f"_global{name}") for name in _MODULE_HOOKS)


def hooks_of_steps(optimizer: Optimizer) -> Iterator[Mapping[Any, Any]]:
    """The tables of hooks that ``optimizer.step`` calls, those of all optimizers included."""
    yield from (getattr(optimizer, name) for name in _OPTIMIZER_HOOKS)
    of_all = sys.modules[Optimizer.__module__]
    yield from (getattr(of_all, f"_global_optimizer_{kind}_hooks") for kind in ("pre", "post"))


def _of_model(model: torch.nn.Module) -> Iterator[str]:
    if any(getattr(torch.nn.modules.module, f"_global{name}") for name in _MODULE_HOOKS if "backward" in name):
        yield "all modules have backward hooks (torch.nn.modules.module): remove them, or use the ordinary loop"
    for name, module in model.named_modules():
        where = f"{type(module).__name__} ({name or 'the model'})"
        for wrapper, instead in _WRAPPERS.items():
            if isinstance(module, wrapper):
                yield f"{where} communicates by itself: {instead}"
        if getattr(module, "sparse", False) and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            yield f"{where} has sparse gradients: make it with sparse=False"
        if module._backward_hooks or module._backward_pre_hooks:
            yield f"{where} has backward hooks: remove them, or use the ordinary loop"


def _of_parameters(model: torch.nn.Module, optimizer: Optimizer) -> Iterator[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        name = names.get(parameter, "a parameter that is not the model's")
        if any(getattr(parameter, hooks, None) for hooks in PARAMETER_HOOKS):
            yield f"{name} has hooks, which a program cannot call: remove them, or use the ordinary loop"
        if type(parameter) not in (torch.nn.Parameter, torch.Tensor):
            yield f"{name} is a {type(parameter).__name__}: only plain parameters are trained in one program"


def _of_optimizer(optimizer: Optimizer) -> Iterator[str]:
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        yield f"{name} evaluates the loss several times in a step (a closure): use the ordinary loop"
    elif isinstance(optimizer, torch.optim.SparseAdam):
        yield f"{name} is for sparse gradients: use Adam"
    elif functional_form(optimizer) is None:
        yield f"{name} has no functional form in its module, as torch.optim's optimizers have: use the ordinary loop"
    if any(hooks_of_steps(optimizer)):
        yield f"{name} has step hooks: remove them, and do their work between steps"
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            yield f"{name} is differentiable=True: a step keeps no graph of its update"
        first_differs = isinstance(optimizer, torch.optim.SGD) and group["momentum"] and group["dampening"]
        if first_differs and not all(
            optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in group["params"]
        ):
            yield f"{name} with dampening makes its first update without it: do that one with the ordinary loop"


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
                yield f"the loss uses a GradScaler ({name}), which skips updates by what it reads: use bfloat16"
