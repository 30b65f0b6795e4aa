"""``examples/train.py``: what its checkpoints hold, and what it says to arguments that are wrong."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

ROOT = Path(__file__).parents[3]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return processes.run(str(ROOT / "examples" / "train.py"), *arguments, cwd=folder)


def losses(printed: str) -> list[str]:
    return re.findall(r"^step \d+: loss [\d.]+, held out [\d.]+", printed, re.MULTILINE)


def peak(printed: str) -> int:
    (found,) = re.findall(r"a step takes ([\d,]+) bytes", printed)
    return int(found.replace(",", ""))


def differences(left: Path, right: Path) -> list[str]:
    """The entries of two checkpoints that are not equal, bit for bit."""

    def entries(path: Path) -> dict[str, Any]:
        return {keystr(key): value for key, value in tree_flatten_with_path(torch.load(path))[0]}

    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    ours, theirs = entries(left), entries(right)
    assert ours.keys() == theirs.keys()
    return [key for key, value in ours.items() if not equal(value, theirs[key])]


@pytest.mark.compiler
def test_a_resumed_run_ends_as_one_without_a_break_also_within_less_memory(tmp_path: Path) -> None:
    whole = run(tmp_path, "--steps", "6", "--every", "3", "--layers", "1")
    assert whole.returncode == 0, whole.stderr
    limit = peak(whole.stdout) * 3 // 4
    resume = ("--resume", "checkpoints/step-3.pt", "--checkpoints", "resumed", "--memory-limit", str(limit))
    resumed = run(tmp_path, "--steps", "6", "--every", "3", "--layers", "1", *resume)
    assert resumed.returncode == 0, resumed.stderr

    assert losses(resumed.stdout) == losses(whole.stdout)[1:]
    assert differences(tmp_path / "checkpoints" / "step-6.pt", tmp_path / "resumed" / "step-6.pt") == []
    assert differences(tmp_path / "checkpoints" / "step-3.pt", tmp_path / "resumed" / "step-6.pt")
    assert peak(resumed.stdout) <= limit


@pytest.mark.compiler
def test_a_limit_that_is_too_small_is_said_plainly(tmp_path: Path) -> None:
    done = run(tmp_path, "--steps", "1", "--layers", "1", "--memory-limit", "1kB")
    assert done.returncode == 2
    assert re.search(r"a program does not fit into memory_limit\n  expected: at least \d+ bytes", done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", "0"], "--steps, --every and --layers must be at least 1"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--resume", "nothing.pt"], "--resume: there is no file nothing.pt"),
        (["--device", "abacus"], "--device abacus: Expected one of cpu, cuda"),
        (["--memory-limit", "lots"], "expected: bytes, or a size such as '6GiB'"),
    ],
)
def test_wrong_arguments(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
