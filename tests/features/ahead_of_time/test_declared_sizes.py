"""Sizes that an exported program declares, where Inductor's code is for some of them only."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fxwrap
from fxwrap.errors import InputError


def _convolution(least: int, most: int, example: int) -> Any:
    rows = torch.export.Dim("rows", min=least, max=most)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
    return torch.export.export(model, (torch.randn(example, 3, 8, 8),), dynamic_shapes=({0: rows},))


@pytest.mark.parametrize("example, accepts", [(4, "< 16"), (32, ">= 16")])
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "in memory"])
def test_a_range_that_inductor_narrows_is_told_at_once(
    tmp_path: Path, saved: bool, example: int, accepts: str
) -> None:
    """torch chooses a convolution's library by the batch, from 16 on: one program is for one side of that."""
    method = _convolution(2, 64, example)
    with pytest.warns(UserWarning, match="fewer sizes than were exported") as told:
        program: Any = _loaded(tmp_path, method) if saved else fxwrap.aot_compile({"run": method})
    (warning,) = told
    assert warning.filename == __file__
    text = str(warning.message)
    assert "method 'run'" in text and "2 <= s" in text and "<= 64" in text and "size 0 of 'input_1'" in text
    assert accepts in text and "export one method for each side" in text
    refused = torch.randn(36 - example, 3, 8, 8)
    with pytest.raises(InputError, match=accepts):
        program.run(refused)


def _loaded(tmp_path: Path, method: Any) -> Any:
    fxwrap.save(tmp_path / "model.fxw", {"run": method})
    return fxwrap.load(tmp_path / "model.fxw", trust=True)


def test_one_method_for_each_side_accepts_the_whole_range() -> None:
    small, large = _convolution(2, 15, 4), _convolution(16, 64, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        program = fxwrap.aot_compile({"small": small, "large": large})
    for rows in (2, 15, 16, 64):
        x = torch.randn(rows, 3, 8, 8)
        method, exported = (program.small, small) if rows < 16 else (program.large, large)
        torch.testing.assert_close(method(x), exported.module()(x))
