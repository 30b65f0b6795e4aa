"""Reports on inputs, states and parameters that are changed in place."""

from __future__ import annotations

from typing import Any

import torch
from reports import Way, parameters_of, reported


@reported(
    192748,
    symptom="a state that the compiled function has made is passed back, and changed in place: the process crashes",
    seen="crashes, -11",
    trees="the process crashes (SIGSEGV)",
    fxwrap="the state and the outputs are right at every step",
)
@torch.no_grad()
def test_a_state_that_was_made_inside(way: Way) -> None:
    layer = torch.nn.Linear(16, 16).to(way.device)

    def step(x: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if state is None:
            state = torch.zeros_like(x)
        state.copy_(state + layer(x))
        return x + state, state

    f, theirs = way.both(step)
    x = way.randn(1, 16)
    (_, state), (_, others) = f(x), theirs(x)
    for _ in range(8):
        x = way.randn(1, 16)
        (got, state), (expected, others) = f(x, state), theirs(x, others)
        way.same((got, state), (expected, others))
    way.replays(4)


@reported(
    120733,
    symptom="a function that changes its input in place is not captured",
    seen="right, 1 captures, 0 launches",
    trees="right; no graph is launched",
    fxwrap="captured; the caller sees the change, wherever the tensor lies",
)
@torch.no_grad()
def test_an_input_is_changed_in_place(way: Way) -> None:
    def rotate(q: torch.Tensor, k: torch.Tensor, angle: torch.Tensor) -> None:
        for x in (q, k):
            even, odd = x[..., ::2].clone(), x[..., 1::2].clone()
            x[..., ::2] = even * angle.cos() - odd * angle.sin()
            x[..., 1::2] = even * angle.sin() + odd * angle.cos()

    f, theirs = way.both(rotate)
    for _ in range(6):
        q, k, angle = way.randn(4, 8), way.randn(2, 8), way.randn(1)
        twins = q.clone(), k.clone()
        f(q, k, angle)
        theirs(*twins, angle)
        way.same((q, k), twins)
    way.replays(4)


@reported(
    183313,
    symptom="a weight is masked through `.data` in the forward pass: tensors in the pool are not tracked as outputs",
    seen="right, 0 captures",
    trees="right: not seen; nothing is captured",
    fxwrap="right; the graph runs through Inductor's own wrapper, and the report says why",
)
@torch.no_grad()
def test_a_weight_is_masked_through_data(way: Way) -> None:
    class Masked(torch.nn.Conv2d):
        def __init__(self) -> None:
            super().__init__(2, 3, 3)
            self.mask: Any
            self.register_buffer("mask", torch.ones(3, 2, 3, 3).triu())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data *= self.mask
            return super().forward(x)

    model = Masked().to(way.device)
    f, theirs = way.both(torch.nn.Sequential(model, torch.nn.ReLU()))
    for _ in range(8):
        x = way.randn(1, 2, 6, 6)
        way.same(f(x), theirs(x))
        way.same(parameters_of(f), parameters_of(theirs))
        assert torch.equal(model.weight, model.weight.triu())
    way.falls_back("the storage of a tensor is replaced")
