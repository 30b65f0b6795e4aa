"""Reports on threads."""

from __future__ import annotations

import functools

import torch
from reports import Way, reported
from threads import in_threads


@reported(
    123177,
    symptom="a compiled function is called in several threads: an assertion fails in each",
    seen="right, 17 captures",
    trees="right: not seen; each thread records for itself",
    fxwrap="eight threads, twelve calls in each, are right, and calls are replayed",
)
def test_calls_in_several_threads(way: Way) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + torch.cos(y)

    f, theirs = way.both(program)
    inputs = [[(way.randn(2, 3), way.randn(2, 3)) for _ in range(12)] for _ in range(8)]
    with torch.no_grad():
        expected = [[theirs(*pair) for pair in own] for own in inputs]
        f(*inputs[0][0])  # Dynamo compiles once

    def calls(thread: int) -> None:
        for pair, result in zip(inputs[thread], expected[thread], strict=True):
            way.same(f(*pair), result)

    in_threads([functools.partial(calls, thread) for thread in range(8)])
    way.replays(40)
