"""New weights for a compiled model, a hundred times: which ways need a recording.

::

    p.copy_(new), load_state_dict(new)               the address stays       nothing is recorded
    load_state_dict(new, assign=True), p.data = new  all addresses move      a recording at each of the first moves;
                                                                             then one that expects them to move
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor

WAYS: dict[str, tuple[bool, Callable[[torch.nn.Module, dict[str, torch.Tensor]], object]]] = {
    "copied": (True, lambda model, new: [p.copy_(new[n]) for n, p in model.named_parameters()]),
    "load_state_dict": (True, lambda model, new: model.load_state_dict(new)),
    "assign": (False, lambda model, new: model.load_state_dict(new, assign=True)),
    "data": (False, lambda model, new: [setattr(p, "data", new[n]) for n, p in model.named_parameters()]),
}


@pytest.mark.parametrize("way", WAYS)
def test_new_weights(device: torch.device, way: str) -> None:
    stays, change = WAYS[way]
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)).to(device).eval()
    ours, expected = Compiled(model), inductor(model)
    theirs: Any = expected._orig_mod  # type: ignore[attr-defined]  # a copy
    generator = torch.Generator().manual_seed(0)
    kept: list[Any] = []

    def call() -> None:
        x = torch.randn(4, 8, generator=generator).to(device)
        assert_same(ours(x), expected(x))

    with torch.no_grad():
        for _ in range(3):
            call()
        before = sum(ours.program.counters.recordings.values())
        assert before == 1
        made = list[int]()
        for _ in range(100):
            new = {n: torch.randn(p.shape, generator=generator).to(device) for n, p in model.named_parameters()}
            kept.append(new)  # so that no new weight gets the address of an old one
            change(model, new)
            WAYS["copied"][1](theirs, new)
            earlier = sum(ours.program.counters.recordings.values())
            call()
            call()
            made.append(sum(ours.program.counters.recordings.values()) - earlier)
    assert max(made) <= 1, "at most one for a change"
    # Copies of inputs that move need room: whether the arena has it depends on what has run in this process before.
    grown = ours.program.counters.recordings["the arena moved"]
    assert grown <= 1 and sum(made) - grown <= (0 if stays else 4), f"no storm: {ours.program.counters.to_dict()}"
    assert len(ours.compilation.programs) == 1, "nothing is compiled anew"
    assert ours.program.counters.replays > 180


@torch.no_grad()
def test_a_weight_that_the_program_gives_a_storage(compiled: Any, device: torch.device) -> None:
    """
    ::

        program:  buf0 = w * mask     set_(w, buf0)     ends, and its memory is the next program's
        caller:                                         reads w

    Inductor's own wrapper runs it: there buf0 is an allocation of its own, and w keeps it.
    """

    class Masked(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data *= (self.weight > 0).to(x)
            return super().forward(x)

    model = Masked(16, 16).to(device)
    expected, x = model.weight * (model.weight > 0), torch.randn(4, 16, device=device)
    f, other = compiled(model), compiled(lambda x: (x @ x.t()).sin().sum(0))
    with pytest.warns(UserWarning, match="the storage of a tensor is replaced"):
        f(x)
    for _ in range(5):
        torch.testing.assert_close(f(x), torch.nn.functional.linear(x, expected, model.bias))
        other(torch.randn(16, 16, device=device))
        assert torch.equal(model.weight, expected)
    assert f.programs == [] and f.compilation.fallbacks
