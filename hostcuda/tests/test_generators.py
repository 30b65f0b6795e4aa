"""Random numbers in graphs: replays advance the generator, as eager calls do (torch's own philox state)."""

from __future__ import annotations

import torch
from graphs import capture, first_line, needs_later_rules


def drawn(graph: torch.cuda.CUDAGraph, result: torch.Tensor) -> torch.Tensor:
    graph.replay()
    return result.cpu().clone()


def test_replays_draw_what_eager_calls_would() -> None:
    result = torch.empty(1000, device="cuda")
    graph = capture(lambda: result.uniform_())
    torch.cuda.manual_seed(3)
    eager = [result.uniform_().cpu().clone() for _ in range(3)]
    torch.cuda.manual_seed(3)
    assert all(torch.equal(drawn(graph, result), one) for one in eager)
    torch.cuda.manual_seed(3)
    mixed = [drawn(graph, result), result.uniform_().cpu().clone(), drawn(graph, result)]
    assert all(torch.equal(one, other) for one, other in zip(mixed, eager, strict=True))


def test_a_capture_draws_nothing() -> None:
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    graph = capture(lambda: torch.rand(1000, device="cuda"))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    graph.replay()
    assert not torch.equal(torch.cuda.get_rng_state(), before)


def test_states_are_kept_and_set() -> None:
    result = torch.empty(100, device="cuda")
    graph = capture(lambda: result.normal_())
    state = torch.cuda.get_rng_state()
    first, second = drawn(graph, result), drawn(graph, result)
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(drawn(graph, result), first)


@needs_later_rules
def test_a_generator_of_ones_own() -> None:
    own = torch.Generator("cuda").manual_seed(5)
    result = torch.empty(100, device="cuda")
    torch.cuda.manual_seed(9)
    graph = capture(lambda: result.uniform_(generator=own))
    first = drawn(graph, result)
    assert not torch.equal(drawn(graph, result), first)
    own.manual_seed(5)
    assert torch.equal(drawn(graph, result), first)


def test_two_draws_of_a_graph_differ() -> None:
    one, two = torch.empty(100, device="cuda"), torch.empty(100, device="cuda")
    graph = capture(lambda: (one.uniform_(), two.uniform_()))
    graph.replay()
    assert not torch.equal(one, two)


@needs_later_rules
def test_a_failed_capture_leaves_the_generator_as_it_was() -> None:
    torch.cuda.manual_seed(3)
    expected = torch.rand(10, device="cuda")
    torch.cuda.manual_seed(3)
    assert first_line(lambda: capture(lambda: torch.rand(10, device="cuda").sum().item()))
    assert torch.equal(torch.rand(10, device="cuda"), expected)
