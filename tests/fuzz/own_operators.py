"""Operators that fuzzed programs call, such as users register: with effects, memory and errors of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Surroundings:
    """What operators find outside of their arguments.

    Attributes:
        raising: whether ``raises`` does.
        kept: copies of what ``keeps`` has been given: Inductor's buffers are written again, too.
    """

    raising: bool = False
    kept: list[Tensor] = field(default_factory=list)


AROUND = Surroundings()


class OnPurposeError(ValueError):
    """What ``raises`` raises."""


@torch.library.custom_op("fxwrap_fuzz::raises", mutates_args=())
def _raises(x: Tensor) -> Tensor:
    if AROUND.raising:
        raise OnPurposeError
    return x.clone()


@torch.library.custom_op("fxwrap_fuzz::keeps", mutates_args=())
def _keeps(x: Tensor) -> Tensor:
    with torch.inference_mode(False):  # the call that records runs outside of the caller's mode
        AROUND.kept.append(x.clone())
    return x * 2


@torch.library.custom_op("fxwrap_fuzz::scale_", mutates_args=("x",))
def _scale_(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("fxwrap_fuzz::both_", mutates_args=("x",))
def _both_(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x - 2 * y


@torch.library.custom_op("fxwrap_fuzz::loss", mutates_args=())
def _loss(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.square().sum(0), 2 * x


def _keep_gradient(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


for _operator in (_raises, _keeps):
    _operator.register_fake(torch.empty_like)
_loss.register_fake(lambda x: (x.new_empty(x.size(1)), torch.empty_like(x)))
_loss.register_autograd(lambda ctx, loss, _: ctx.saved_tensors[0] * loss, setup_context=_keep_gradient)
_scale_.register_fake(lambda x: None)
_both_.register_fake(lambda x, y: torch.empty_like(x))

# Custom_op refuses such an operator, and torch has no schema for it: it says that its result is new.
torch.library.define("fxwrap_fuzz::same", "(Tensor x) -> Tensor")
torch.library.impl("fxwrap_fuzz::same", "CompositeExplicitAutograd", lambda x: x)
torch.library.register_fake("fxwrap_fuzz::same", torch.empty_like)


@torch.library.custom_op("fxwrap_fuzz::takes_memory", mutates_args=())
def _takes_memory(x: Tensor) -> Tensor:
    """Eight times the memory of its result, which no plan knows."""
    parts = [x + n for n in range(8)]
    return sum(parts[1:], parts[0]) / 8 - 3.5


@torch.library.custom_op("fxwrap_fuzz::tells", mutates_args=())
def _tells(x: Tensor) -> None:
    with torch.inference_mode(False):
        AROUND.kept.append(x.clone())


def keep_in_order(operator: Any) -> None:
    """Have torch keep an operator's calls, in their order."""
    try:
        from torch._library.effects import EffectType
    except ImportError:
        from torch._higher_order_ops.effects import _EffectType as EffectType
    register = getattr(torch.library, "_register_effectful_op", None)
    if register is None:
        from torch._higher_order_ops.effects import _register_effectful_op as register
    register(operator, EffectType.ORDERED)


_takes_memory.register_fake(torch.empty_like)
_takes_memory.register_autograd(lambda ctx, gradient: gradient, setup_context=lambda ctx, inputs, output: None)
_tells.register_fake(lambda x: None)
keep_in_order(_tells._opoverload)

# What these do on the host happens at every call, and is no part of a device graph.
HOST_WORK = ("fxwrap_fuzz::raises", "fxwrap_fuzz::keeps", "fxwrap_fuzz::tells")
