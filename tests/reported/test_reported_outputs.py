"""Reports on outputs and gradients that are read, or fed back, after another call."""

from __future__ import annotations

from typing import Any

import operators
import torch
import torch.nn.functional as F
from reports import Way, parameters_of, reported
from torch.utils.checkpoint import checkpoint

OVERWRITTEN = "raises RuntimeError: Error: accessing tensor output of CUDAGraphs that has been overwritten"
GRADIENT = "raises RuntimeError: Error: accessing gradient tensor output of CUDAGraphs that has been overwritten"


@reported(
    170604,
    symptom="a result is read after the next call of the same function; marking the beginning of a step is no help",
    seen=OVERWRITTEN,
    trees="raises, as reported",
    fxwrap="both results keep their values, and calls are replayed",
)
@torch.no_grad()
def test_the_first_result_is_read_after_the_second_call(way: Way) -> None:
    f, theirs = way.both(lambda x: x @ x)
    for _ in range(5):
        x, y = way.randn(2, 10, 10)
        torch.compiler.cudagraph_mark_step_begin()
        first = f(x)
        torch.compiler.cudagraph_mark_step_begin()
        second = f(y)
        way.same((first, second), (theirs(x), theirs(y)))
    way.replays(6)


@reported(
    152887,
    symptom='blocks that are compiled one by one fail at "x = f(x)"',
    seen=OVERWRITTEN,
    trees="raises, as reported",
    fxwrap="each block's result is the next one's input; calls are replayed",
)
@torch.no_grad()
def test_a_loop_of_blocks(way: Way) -> None:
    blocks = [torch.nn.Linear(8, 8).to(way.device) for _ in range(3)]
    pairs = [way.both(block) for block in blocks]
    for _ in range(10):
        x = y = way.randn(4, 8)
        for f, theirs in pairs:
            x, y = f(x), theirs(y)
        way.same(x, y)
    way.replays(9)


@reported(
    160281,
    symptom='two functions, "g(f(x))": the second finds its input overwritten',
    seen=OVERWRITTEN,
    trees="raises, as reported",
    fxwrap="the composition is right from the first call on, and is replayed",
)
@torch.no_grad()
def test_one_function_of_anothers_result(way: Way) -> None:
    (f, their_f), (g, their_g) = way.both(lambda x: x + 1), way.both(lambda x: x * 3)
    for _ in range(10):
        x = way.randn(2)
        way.same(g(f(x)), their_g(their_f(x)))
    way.replays(6)


@reported(
    122192,
    symptom="whether a result of one function can be given to another depends on how often the first was called",
    seen=OVERWRITTEN,
    trees="raises after one and after two calls of the first function, not after three and four",
    fxwrap="right after one, two, three and four calls",
)
@torch.no_grad()
def test_any_number_of_calls_before_the_handover(way: Way) -> None:
    for calls in (1, 2, 3, 4):
        torch._dynamo.reset()
        (f, their_f), (g, their_g) = way.both(torch.cos), way.both(torch.sin)
        for _ in range(calls):
            x = way.randn(5)
            y, z = f(x), their_f(x)
        way.same(g(y), their_g(z))
    way.replays(1)


@reported(
    176294,
    symptom="a step's state is fed back, `state = step(state)`, through one partition or several: reading it raises "
    "(from the pull request that mends it)",
    seen=OVERWRITTEN,
    trees="raises, as reported",
    fxwrap="twelve steps are right; an operator that is not captured lies between two partitions",
)
@torch.no_grad()
def test_a_state_that_is_fed_back(way: Way) -> None:
    def step(position: torch.Tensor, speed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        force = operators.not_captured(position) - position
        speed = speed * 0.9 + force * 0.1
        return position + speed, speed

    f, theirs = way.both(step)
    mine = others = (way.randn(16), way.randn(16))
    for _ in range(12):
        mine, others = f(*mine), theirs(*others)
    way.same(mine, others)
    way.replays(8)


@reported(
    175557,
    symptom="a cache that grows by one row at each step crashes decoding",
    seen=OVERWRITTEN,
    trees="raises, as reported",
    fxwrap="four sequences of twelve steps are right; sizes that have been recorded are replayed",
)
@torch.no_grad()
def test_a_cache_that_grows(way: Way) -> None:
    projection = torch.nn.Linear(8, 8).to(way.device)

    def decode(x: torch.Tensor, cache: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        row = projection(x)
        cache = row if cache is None else torch.cat([cache, row], 1)
        return cache.mean(1), cache

    f, theirs = way.both(decode)
    for _ in range(4):
        mine = others = None
        for _ in range(12):
            x = way.randn(1, 1, 8)
            torch.compiler.cudagraph_mark_step_begin()
            (got, mine), (expected, others) = f(x, mine), theirs(x, others)
            way.same((got, mine), (expected, others))
    way.replays(8)


@reported(
    154824,
    symptom="an input that came from another graph is an output, too: it is released in the replay, which fails",
    seen="right",
    trees="right, and captured: not seen",
    fxwrap="the input comes back as it was given, beside a result made of it",
)
@torch.no_grad()
def test_an_input_is_an_output_too(way: Way) -> None:
    (f, their_f), (g, their_g) = way.both(lambda x: x.sin()), way.both(lambda x: (x, x.cos() + 1, x[1:]))
    for _ in range(10):
        torch.compiler.cudagraph_mark_step_begin()
        x = way.randn(4, 4)
        y, z = f(x), their_f(x)
        result = g(y)
        assert result[0] is y
        way.same(result, their_g(z))
    way.replays(9)


@reported(
    138949,
    symptom="a policy that needs gradients gets its own detached output as input: calls become slower",
    seen="right, 1 captures, 0 launches",
    trees="right; no call leaves the warm-up, so that no graph is launched",
    fxwrap="every call after the first ones is a replay, and there are few recordings",
)
def test_a_detached_output_is_the_next_input(way: Way) -> None:
    policy = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16)).to(way.device)
    f, theirs = way.both(policy, fullgraph=True)
    mine = others = way.randn(1, 16)
    for _ in range(40):
        mine, others = f(mine).detach(), theirs(others).detach()
    way.same(mine, others)
    way.replays(30)
    way.recordings(4)


# -- training ------------------------------------------------------------------------------------------------------


@reported(
    169545,
    symptom="accumulated gradients are overwritten, though the output is cloned and steps are marked",
    seen=GRADIENT,
    trees="raises, as reported",
    fxwrap="gradients of five micro-batches add up to Inductor's",
)
def test_gradients_are_accumulated(way: Way) -> None:
    f, theirs = way.both(_mlp(way), fullgraph=True)
    _accumulate(way, f, theirs, rounds=3)
    way.replays(12)


@reported(
    96693,
    symptom="accumulated gradients are those of one micro-batch only, and nothing is said (a comment in the thread)",
    seen=GRADIENT,
    trees="raises: a gradient is overwritten; none was lost silently",
    fxwrap="bias gradients are sums over all micro-batches",
)
def test_no_micro_batch_is_lost(way: Way) -> None:
    model = _mlp(way)
    f, theirs = way.both(model)
    for _ in range(3):
        _accumulate(way, f, theirs, rounds=1)
        # The last bias adds to each of 8 results of each of 5 micro-batches, each with the gradient 1.
        way.same(model[-1].bias.grad, torch.full((4,), 40.0, device=way.device))
    way.replays(10)


@reported(
    105169,
    symptom="two results and two gradients of one function with a size among its outputs: the process crashes",
    seen=OVERWRITTEN,
    trees="raises: an output is overwritten",
    fxwrap="both results and both gradients are right",
)
def test_two_results_and_their_gradients(way: Way) -> None:
    def double(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        x = torch.cat([x, x])
        return torch.addmm(x, x, x).relu(), x.size(0)

    f, theirs = way.both(double)
    for _ in range(4):
        x, y = (way.randn(2, 4, requires_grad=True) for _ in range(2))
        kept = []
        for one in (x, y):
            mine, others = f(one), theirs(one)
            assert mine[1] == others[1] == 4
            kept.append((mine[0], others[0], *(torch.autograd.grad(r[0].sum(), one)[0] for r in (mine, others))))
        for result, expected, gradient, expected_gradient in kept:
            way.same((result, gradient), (expected, expected_gradient))
    way.replays(8)


@reported(
    97253,
    symptom="the gradient of a small function is zero",
    seen="right",
    trees="right, and captured: not seen",
    fxwrap="the gradient is Inductor's at every call",
)
def test_a_gradient_is_not_zero(way: Way) -> None:
    f, theirs = way.both(lambda x: torch.sin(x) + torch.cos(x), fullgraph=True)
    for _ in range(5):
        x = torch.nn.Parameter(way.randn(3, 3))
        mine, others = (torch.autograd.grad(g(x).sum(), x)[0] for g in (f, theirs))
        way.same(mine, others)
        assert mine.abs().sum() > 0
    way.replays(4)


@reported(
    106321,
    symptom="gradients of an unrolled recurrence are wrong by `gradcheck`",
    seen="right",
    trees="right, and captured: not seen",
    fxwrap="`gradcheck` passes",
)
def test_gradcheck(way: Way) -> None:
    def recurrence(xs: torch.Tensor, state: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        states = []
        for x in xs:
            state = x + state * w
            states.append(state)
        return torch.cat(states)

    f = way.compile(recurrence)
    sizes = ((3, 2, 4), (2, 4), (4,))
    args = tuple(way.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes)
    assert torch.autograd.gradcheck(f, args)
    way.replays(20)


@reported(
    148439,
    symptom="a router of experts in a training step finds outputs overwritten while it is recorded",
    seen="right",
    trees="right, and captured: not seen",
    fxwrap="three layers, forward and backward, are right",
)
def test_a_router_is_called_for_every_layer(way: Way) -> None:
    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores, experts = torch.topk(logits, 2, dim=1)
        weights = torch.softmax(scores, -1)
        chosen = torch.zeros_like(logits).scatter(1, experts, weights)
        tokens = torch.histc(experts.float(), bins=4, min=0, max=4)
        return chosen, chosen > 0, tokens

    f, theirs = way.both(route)
    layers = [torch.nn.Linear(8, 4).to(way.device) for _ in range(3)]
    for _ in range(5):
        x = way.randn(6, 8)
        sides = []
        for g in (f, theirs):
            routed = [g(layer(x)) for layer in layers]
            loss = sum((chosen * chosen).sum() for chosen, _, _ in routed)
            parameters = [p for layer in layers for p in layer.parameters()]
            sides.append((routed, torch.autograd.grad(loss, parameters)))
        way.same(*sides)
    way.replays(15)


@reported(
    154306,
    symptom="a compiled block in a checkpointed section: an input is freed in the recording, and not in the replay",
    seen="raises RuntimeError: TODO: graph recording observed an input tensor deallocate",
    trees="raises, as reported",
    fxwrap="gradients through recomputed sections are right, and calls are replayed",
)
def test_a_compiled_block_in_a_recomputed_section(way: Way) -> None:
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)).to(way.device)
    pair = way.both(block)
    for _ in range(6):
        x = way.randn(4, 8)
        sides = []
        for f in pair:

            def section(y: torch.Tensor, f: Any = f) -> torch.Tensor:
                return f(y.sin()).cos()

            start = x.clone().requires_grad_()
            y = checkpoint(section, checkpoint(section, start, use_reentrant=False), use_reentrant=False)
            sides.append((y, torch.autograd.grad(y.square().sum(), start)))
        way.same(*sides)
    way.replays(12)


@reported(
    148829,
    symptom="layers that are compiled one by one and checkpointed fail in the forward of the first step",
    seen=OVERWRITTEN,
    trees="raises: an output is overwritten",
    fxwrap="ten layers are right from the first step on",
)
def test_ten_checkpointed_layers(way: Way) -> None:
    pairs = [way.both(torch.nn.Linear(10, 10).to(way.device)) for _ in range(10)]
    for _ in range(10):
        x = way.randn(10, 10)
        sides = []
        for side in (0, 1):
            y = start = x.clone().requires_grad_()
            for pair in pairs:
                y = checkpoint(pair[side], y, use_reentrant=True)
            y.sum().backward()
            sides.append((y, start.grad))
        way.same(*sides)
    way.replays(20)


@reported(
    135892,
    symptom="a model that was first called in inference mode breaks when it is trained",
    seen="right",
    trees="right, and captured: not seen",
    fxwrap="inference mode, training and inference mode again are right",
)
def test_inference_mode_before_training(way: Way) -> None:
    model = _mlp(way)
    f, theirs = way.both(model)
    for _ in range(3):
        for _ in range(3):
            x = way.randn(8, 4)
            with torch.inference_mode():
                way.same(f(x), theirs(x))
        x = way.randn(8, 4)
        mine, others = (torch.autograd.grad(F.mse_loss(g(x), x), parameters_of(g)) for g in (f, theirs))
        way.same(mine, others)
    way.replays(6)


def _mlp(way: Way) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).to(way.device)


def _accumulate(way: Way, f: Any, theirs: Any, rounds: int) -> None:
    """Five micro-batches before each comparison."""
    for _ in range(rounds):
        for g in (f, theirs):
            for parameter in parameters_of(g):
                parameter.grad = None
        for _ in range(5):
            x = way.randn(8, 4)
            for g in (f, theirs):
                torch.compiler.cudagraph_mark_step_begin()
                g(x).clone().sum().backward()
        way.same([p.grad for p in parameters_of(f)], [p.grad for p in parameters_of(theirs)])
