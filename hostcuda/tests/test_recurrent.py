"""A GRU's cell is a fused kernel of CUDA's: it is computed as the CPU computes it in parts."""

from __future__ import annotations

import pytest
from scripts import run


def test_results_are_contiguous() -> None:
    lines = run(
        """
        import torch
        cell, state = torch.nn.GRUCell(4, 8).cuda(), torch.randn(8, 3).cuda().t().requires_grad_()
        result = cell(torch.randn(3, 4).cuda(), state)
        result.sum().backward()
        print(result.stride())
        """
    )
    assert lines == ["(8, 1)"]


@pytest.mark.parametrize("bias", [True, False])
def test_a_grus_cell(bias: bool) -> None:
    lines = run(
        f"""
        import copy, torch
        cell = torch.nn.GRUCell(4, 8, bias={bias})
        values, states, results = torch.randn(2, 4), torch.randn(2, 8), []
        for device, one in (("cpu", cell), ("cuda", copy.deepcopy(cell).cuda())):
            state = states.to(device, copy=True).requires_grad_()
            result = one(values.to(device), state)
            result.square().sum().backward()
            results.append([result, state.grad, *(p.grad for p in one.parameters())])
        torch.testing.assert_close([one.cpu() for one in results[1]], results[0])
        print(len(results[0]), any("gru" in name for name in hostcuda.skipped()))
        """
    )
    assert lines == [f"{6 if bias else 4} False"]
