"""The checks for a GPU, without one: on hostsim, in processes of their own, and each notices what it is there for."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import processes
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
NO_GPU = 77
on_hostsim = pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="hostsim needs torch.accelerator.Graph, of torch 2.13 or later"
)


def gpu_checks(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    script = str(ROOT / "benchmarks" / "gpu.py")
    return processes.run(script, *arguments, PYTHONPATH=paths, OMP_NUM_THREADS="1", **environment)


def verdicts(output: str) -> dict[str, str]:
    """By check, what stands before its name."""
    return {name: verdict for verdict, name in re.findall(r"^(ok|FAIL|skip) +(.*?) \([\d.]+ s\):", output, re.M)}


def test_without_a_gpu_one_line_says_so() -> None:
    done = gpu_checks(CUDA_VISIBLE_DEVICES="", ZE_AFFINITY_MASK="")
    assert re.fullmatch(r"no GPU: torch .* finds neither CUDA nor XPU here .*\n", done.stdout), done
    assert done.returncode == NO_GPU


@pytest.fixture(scope="module")
def sample() -> subprocess.CompletedProcess[str]:
    return gpu_checks("--device", "hostsim", "--only", "launches counted", "templates", "memory short")


@on_hostsim
def test_a_sample_passes_on_hostsim(sample: subprocess.CompletedProcess[str]) -> None:
    done, found = sample, verdicts(sample.stdout)
    assert (found["launches counted"], found["matmul templates"]) == ("ok", "skip"), done
    assert "skipped: its kernels are Triton's" in done.stdout
    assert done.stdout.endswith("failed: none\n") and done.returncode == 0
    # As the device counts them: ten calls, and five steps forward and backward, a graph each.
    launches = re.search(r"(\d+) launches", done.stdout)
    assert launches is not None and int(launches[1]) == 10 + 2 * 5


@on_hostsim
def test_a_planted_fault_is_a_failure(tmp_path: Path) -> None:
    file, fault = tmp_path / "results", "replay_ignores_refilled_inputs"
    done = gpu_checks("--device", "hostsim", "--only", "launches", "--plant", fault, "--results", str(file))
    assert verdicts(done.stdout) == {"launches counted": "FAIL"}, done
    machine, found = map(json.loads, file.read_text().splitlines())
    assert machine["torch"] == torch.__version__ and "WRONG" in found["text"]
    assert (found["check"], found["verdict"]) == ("launches counted", "failed")
    assert "WRONG" in done.stdout
    assert done.stdout.endswith("failed: launches counted\n") and done.returncode == 1


@on_hostsim
def test_a_check_that_does_not_end_is_a_failure_and_the_next_one_runs() -> None:
    done = gpu_checks("--device", "hostsim", "--only", "launches", "templates", "--limit", "0.01")
    assert verdicts(done.stdout) == {"launches counted": "FAIL", "matmul templates": "skip"}, done
    assert "no end after" in done.stdout and done.returncode == 1


@on_hostsim
def test_an_error_of_a_check_is_told_in_short_and_in_full() -> None:
    done = gpu_checks("--device", "hostsim", "--only", "launches", "--plant", "no_such_fault")
    assert verdicts(done.stdout) == {"launches counted": "FAIL"}
    assert "no_such_fault" in done.stdout and "Traceback" in done.stderr and done.returncode == 1


@on_hostsim
def test_memory_can_be_short_on_hostsim(sample: subprocess.CompletedProcess[str]) -> None:
    found = [verdict for name, verdict in verdicts(sample.stdout).items() if "memory short" in name]
    assert found == ["ok", "ok"], sample
    assert "what eager work takes and a quarter: {'warm-up': 1, 'out of memory':" in sample.stdout
