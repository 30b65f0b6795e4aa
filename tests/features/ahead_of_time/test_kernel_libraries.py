"""Programs that are loaded and dropped: one library for each kernel's content, closed after its last user."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from native_calls import native
from torch import nn

import fxwrap
from fxwrap.features.ahead_of_time.codegen import kernel_libraries

MAPS = Path("/proc/self/maps")
pytestmark = pytest.mark.skipif(not MAPS.exists(), reason="nothing tells what is mapped")
X = torch.linspace(-1, 1, 24).reshape(3, 8)


@pytest.fixture(autouse=True)
def none_before() -> Iterator[None]:
    gc.collect()
    kernel_libraries.close_unused()
    yield


def saved(path: Path, width: int) -> tuple[Path, torch.Tensor]:
    """A file with two kernels that no other width has, and the program's result."""
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width + 1), nn.Tanh()).eval()
    with torch.no_grad():
        return fxwrap.save(path / f"{width}.fxw", {"f": (model, (X,))}), model(X)


def mappings() -> tuple[int, int]:
    """How many parts of files and of memory are mapped; and how many of them are of kernels."""
    gc.collect()
    lines = MAPS.read_text().splitlines()
    return len(lines), sum("/fxwrap-" in line and "kernel.so" in line for line in lines)


def call(program: Any, expected: torch.Tensor, times: int = 4) -> None:
    for _ in range(times):
        torch.testing.assert_close(program.f(X), expected)


def test_one_file_again_and_again(tmp_path: Path) -> None:
    path, expected = saved(tmp_path, 9)
    counts = []
    for _ in range(8):
        program = fxwrap.load(path, trust=True)
        call(program, expected)
        del program
        counts.append(mappings())
    (_, kernels), *_ = counts
    assert kernels > 0 and {count for _, count in counts} == {kernels}
    assert counts[-1][0] <= counts[1][0] + 8  # threads and allocators map some


def test_two_programs_of_one_file_share_its_libraries(tmp_path: Path) -> None:
    path, expected = saved(tmp_path, 9)
    first = fxwrap.load(path, trust=True)
    _, before = mappings()
    second = fxwrap.load(path, trust=True)
    assert mappings()[1] == before > 0
    del first
    other, its_own = saved(tmp_path, 10)
    third = fxwrap.load(other, trust=True)  # closes what nothing uses any more
    call(second, expected)
    call(third, its_own)


def test_files_that_come_and_go(tmp_path: Path) -> None:
    """A library goes when the next file is loaded."""
    files, counts = [saved(tmp_path, width) for width in range(11, 16)], list[int]()
    for turn in range(15):
        path, expected = files[turn % len(files)]
        program = fxwrap.load(path, trust=True)
        call(program, expected)
        del program
        counts.append(mappings()[1])
    turns = len(files)
    assert counts[turns : 2 * turns] == counts[-turns:] and max(counts) < 2 * max(counts[0], counts[-1])
    fxwrap.release()
    assert mappings()[1] < counts[-1]


@native
def test_a_unit_keeps_the_libraries_that_it_calls_into(tmp_path: Path) -> None:
    path, expected = saved(tmp_path, 16)
    program = fxwrap.load(path, trust=True)
    call(program, expected)
    (recording,) = program.f.program.specializations.recordings()
    unit = recording.unit
    assert unit is not None
    del program, recording
    _, before = mappings()
    kernel_libraries.close_unused()
    assert mappings()[1] == before > 0
    del unit
    gc.collect()
    kernel_libraries.close_unused()
    assert mappings()[1] < before
