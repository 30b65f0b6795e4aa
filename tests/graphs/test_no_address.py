"""Tensors without memory of their own, and memory that repeats: no graph with fixed addresses holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor


@torch.library.custom_op("fxwrap_no_address::spread", mutates_args=())
def spread(x: torch.Tensor) -> torch.Tensor:
    """One row, for every row."""
    return (x.sum(0, keepdim=True) + 1).expand(x.shape)


@spread.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(1, x.size(1)).expand(x.shape)


def test_sparse_gradients(compiled: Any, device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        pytest.skip(f"{device} has no sparse tensors")
    tables = [torch.nn.Embedding(10, 4, sparse=True).to(device) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    f: Compiled = compiled(lambda index: tables[0](index).square().sum())
    for _ in range(5):
        index = torch.randint(0, 10, (6,), device=device)
        for table in tables:
            table.zero_grad(set_to_none=True)
        f(index).backward()
        tables[1](index).square().sum().backward()
        mine, theirs = (table.weight.grad for table in tables)
        assert mine is not None and theirs is not None and mine.is_sparse
        torch.testing.assert_close(mine.to_dense(), theirs.to_dense())
    for program in f.programs:
        assert program.counters.replays, program.counters.to_dict()


def test_a_sparse_tensor_holds_what_it_was_made_of(compiled: Any, device: torch.device) -> None:
    """Its schema does not say so: a gradient's values would be in memory that is used again."""
    if device.type not in ("cpu", "cuda"):
        pytest.skip(f"{device} has no sparse tensors")
    tables = [torch.nn.Embedding(10, 4, sparse=True).to(device) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    weight = torch.randn(6, 1, device=device)
    f: Compiled = compiled(lambda index: (tables[0](index) * weight).sum())
    kept = []
    for _ in range(6):
        index = torch.randint(0, 10, (6,), device=device)
        for table in tables:
            table.zero_grad(set_to_none=True)
        f(index).backward()
        (tables[1](index) * weight).sum().backward()
        kept.append(tuple(table.weight.grad for table in tables))
        for mine, theirs in kept:
            torch.testing.assert_close(mine.to_dense(), theirs.to_dense())


def test_a_meta_tensor_among_the_inputs(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(lambda x, shape: (x.sin() + 1, shape * 2))
    for _ in range(5):
        x = torch.randn(4, device=device)
        y, twice = f(x, torch.empty(3, device="meta"))
        torch.testing.assert_close(y, x.sin() + 1)
        assert twice.device.type == "meta" and twice.shape == (3,)
    assert f.program.counters.replays >= 2


@pytest.mark.parametrize("captured", [True, False])
def test_a_result_that_repeats_its_memory(compiled: Any, device: torch.device, captured: bool) -> None:
    """Nothing can be copied to every repetition: a copy has one row, too."""
    options = {} if captured else {"eager_ops": "fxwrap_no_address::spread"}

    def g(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return spread(x.sin()), spread(x).cos() + x

    f: Compiled = compiled(g, options=options)
    theirs = inductor(g)
    kept = []
    for _ in range(6):
        x = torch.randn(4, 5, device=device)
        results, expected = f(x), theirs(x)
        assert_same(results, expected)
        kept.append((results, [value.clone() for value in expected]))
        for mine, values in kept:
            for a, b in zip(mine, values, strict=True):
                torch.testing.assert_close(a, b)
    assert f.program.counters.replays >= 3
