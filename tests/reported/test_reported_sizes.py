"""Reports on sizes that vary."""

from __future__ import annotations

import torch
from reports import Way, parameters_of, reported

LENGTHS = (9, 30, 14, 22, 5, 27, 18, 11, 25, 7, 16, 20)


@reported(
    188150,
    symptom="every batch of a training loop is padded to another length: each is recorded, and steps become slower",
    seen="right, 25 captures",
    trees="right; forward and backward are recorded for every length",
    fxwrap="with `max_recordings=4` each program keeps four recordings; other lengths run eagerly",
)
def test_every_batch_has_another_length(way: Way) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).to(way.device)
    f, theirs = way.both(model, {"max_recordings": 4}, dynamic=True)
    for _ in range(4):
        for length in (*LENGTHS, 9, 9):
            x = way.randn(2, length, 4)
            sides = [torch.autograd.grad(g(x).square().mean(), parameters_of(g)) for g in (f, theirs)]
            way.same(*sides)
    way.replays(8)
    way.kept(4)


@reported(
    196385,
    symptom="with `cudagraph_skip_dynamic_graphs`, an operator with a dynamic input and a result of fixed size is "
    "recorded for every size",
    seen="right, 6 captures",
    trees="right; each of five sizes is recorded, as reported",
    fxwrap="a size is recorded once, and there are `max_recordings` of them; the part of fixed size is not shared "
    "by sizes",
)
@torch.no_grad()
@torch._inductor.config.patch({"triton.cudagraph_skip_dynamic_graphs": True})
def test_a_median_of_any_number_of_rows(way: Way) -> None:
    def program(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.median(rows) * (weight @ weight).relu()

    f, theirs = way.both(program, {"max_recordings": 3}, fullgraph=True)
    weight = way.randn(8, 8)
    for _ in range(4):
        for size in (10, 13, 16, 19, 22):
            rows = way.randn(size, 8)
            torch._dynamo.mark_dynamic(rows, 0)
            way.same(f(rows, weight), theirs(rows, weight))
    way.replays(3)
    way.kept(3)


@reported(
    196519,
    symptom="with `cudagraph_skip_dynamic_graphs`, what has a fixed size behind an operator with a dynamic input is "
    "not captured",
    seen="right, 0 captures",
    trees="right; nothing is captured, as reported",
    fxwrap="all of it is captured and replayed, once for each size; the part of fixed size is not shared by sizes",
)
@torch.no_grad()
@torch._inductor.config.patch({"triton.cudagraph_skip_dynamic_graphs": True})
def test_products_behind_a_product_of_any_size(way: Way) -> None:
    def program(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return x.t() @ x @ a @ b @ c

    f, theirs = way.both(program)
    a, b, c = way.randn(3, 8, 8)
    for _ in range(4):
        for size in (32, 48, 20):
            x = way.randn(size, 8)
            torch._dynamo.mark_dynamic(x, 0)
            way.same(f(x, a, b, c), theirs(x, a, b, c))
    way.verdicts("captured")
    way.replays(3)


@reported(
    128424,
    symptom="memory grows with every size that is called a second time, and those calls take very long",
    seen="right, 13 captures",
    trees="right; every size is recorded, and allocated memory did not grow: not seen",
    fxwrap="the recordings of twelve sizes lie in the memory that the largest needs",
)
@torch.no_grad()
def test_memory_does_not_grow_with_sizes(way: Way) -> None:
    def program(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.embedding(ids, table)
        return (x @ x.transpose(1, 2)).softmax(-1) @ x

    f, theirs = way.both(program, dynamic=True)
    table = way.randn(64, 256)
    taken = []
    for _ in range(4):
        for length in sorted(LENGTHS, reverse=True):
            ids = torch.randint(0, 64, (8, length), device=way.device)
            for _ in range(2):
                way.same(f(ids, table), theirs(ids, table))
            taken.append(way.memory())
    way.replays(36)
    assert max(taken[len(LENGTHS) :]) - taken[0] < 1 << 20, taken
