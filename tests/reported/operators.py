"""Custom operators of the reports' programs."""

from __future__ import annotations

import torch

_UNSAFE = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("fxwrap_reported::not_captured", mutates_args=(), tags=_UNSAFE)
def not_captured(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@not_captured.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxwrap_reported::mean_of", mutates_args=(), tags=_UNSAFE)
def mean_of(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (x + y + z) / 3


@mean_of.register_fake
def _(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxwrap_reported::step_and_two", mutates_args=("x",))
def step_and_two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add one in place; return two tensors."""
    x.add_(1)
    return x + 1, x + 2


@step_and_two.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("fxwrap_reported::rows_for_first", mutates_args=(), tags=_UNSAFE)
def rows_for_first(x: torch.Tensor) -> int:
    """A number that is known when it has been computed."""
    return int((x[:, 0] > 0).sum())


@rows_for_first.register_fake
def _(x: torch.Tensor) -> int:
    return torch.library.get_ctx().new_dynamic_size(min=0, max=x.shape[0])  # type: ignore[return-value]
