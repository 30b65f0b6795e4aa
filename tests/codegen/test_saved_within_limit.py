"""What a forward saves for its backward, so that both together stay within ``memory_limit``.

::

    without a limit     forward   |====== saved ======|   backward   |== saved, less and less ==| gradients |
    within one          forward   |= saved =|             backward   |= saved =| repeated | gradients |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled, freezes
from torch import nn
from torch._functorch import config as functorch_config

import fxwrap
from fxwrap.codegen import inductor
from fxwrap.errors import MemoryLimitError
from fxwrap.torch_private.functions import allocations

pytestmark = pytest.mark.compiler

DEPTH, WIDTH, ROWS = 6, 16, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(DEPTH))).to(device)


def training(
    compiled: Callable[..., Compiled], device: torch.device, limit: int = 0, on_cuda: bool = False
) -> tuple[Any, Compiled]:
    """A call of a network with its backward, which returns all gradients; and what was compiled."""
    if device.type == "cuda" and not on_cuda:
        pytest.skip("compiled up to five times, it takes minutes there: one test does")
    model = network(device)
    f = compiled(lambda x: model(x).square().mean(), **({"options": {"memory_limit": limit}} if limit else {}))
    rows = ROWS if device.type != "cuda" else 128 * ROWS  # more than cuBLAS's 32 MiB
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)

    def step() -> list[torch.Tensor]:
        return list(torch.autograd.grad(f(x), list(model.parameters())))

    return step, f


def taken(step: Any) -> int:
    """The most bytes that a step allocates on the CPU at one time."""
    changes = allocations(step)
    assert changes is not None
    return max(itertools.accumulate(changes))


def planned(f: Compiled) -> int:
    """The most bytes that forward or backward takes by its plan; what is saved counts in both."""
    recorders = [program.recorder for program in f.programs]
    assert len(recorders) == 2
    return max(r.budget.taken(r.prepared.plan, r.call_compiled_for()) for r in recorders)


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_forward_and_backward_together_stay_within_a_limit(
    compiled: Callable[..., Compiled], device: torch.device, share: float
) -> None:
    step, free = training(compiled, device, on_cuda=share == 0.5)
    expected = step()
    whole = planned(free)
    limit = int(whole * share)
    torch._dynamo.reset()
    step, f = training(compiled, device, limit, on_cuda=True)
    for _ in range(6):
        gradients = step()
        are_equal = [torch.equal(a, b) for a, b in zip(gradients, expected, strict=True)]
        del gradients  # it is alive in no later call
        assert all(are_equal)
    assert planned(f) <= limit < whole
    if not freezes(device):  # where addresses are frozen an arena is there between calls
        assert taken(step) <= limit
    assert sum(program.counters.replays for program in f.programs) >= 4


def test_what_is_within_the_limit_is_compiled_once(
    compiled: Callable[..., Compiled], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilations, compile_fx = [], inductor.compile_fx

    def counted(*args: Any, **kwargs: Any) -> Any:
        compilations.append(functorch_config.activation_memory_budget)
        return compile_fx(*args, **kwargs)

    monkeypatch.setattr(inductor, "compile_fx", counted)
    step, f = training(compiled, device, 1 << 30)
    step()
    assert compilations == [1.0] and functorch_config.activation_memory_budget == 1.0
    limit = planned(f)
    torch._dynamo.reset()
    step, f = training(compiled, device, limit)
    step()
    assert compilations == [1.0, 1.0]  # what is taken without a limit is enough of one
    limit = limit * 3 // 4
    torch._dynamo.reset()
    compilations.clear()
    step, f = training(compiled, device, limit)
    step()
    assert compilations[:2] == [1.0, 0.0] and len(compilations) == 5
    assert functorch_config.activation_memory_budget == 1.0
    assert len(f.programs) == 2  # what was tried and not taken is in no report


def test_the_lowest_limit_fits(compiled: Callable[..., Compiled], device: torch.device) -> None:
    """What no share of saving makes small enough raises at the first call, with a limit that fits."""
    step, _ = training(compiled, device, 1000)
    with pytest.raises(MemoryLimitError) as caught:
        step()
    torch._dynamo.reset()
    step, f = training(compiled, device, least := caught.value.least)
    for _ in range(3):
        step()
    assert planned(f) <= least


def test_another_limit_counts_what_is_saved(compiled: Callable[..., Compiled], device: torch.device) -> None:
    """It compiles nothing: the same is saved. A forward whose backward would be above the limit does not run."""
    step, f = training(compiled, device)
    step()
    forward = next(program for program in f.programs if program.plan.phase == "forward")
    calls = forward.counters.eager.total()
    fxwrap.limit_memory(f.call, 1000)
    with pytest.raises(MemoryLimitError) as caught:
        step()
    assert forward.counters.eager.total() == calls
    fxwrap.limit_memory(f.call, least := caught.value.least)
    for _ in range(3):
        step()
    assert planned(f) <= least
