"""Two processes, as ``torch.distributed`` has them: what they compute is what they compute with Inductor's wrapper.

``distributed_worker`` says what each scenario does, and makes the comparisons, in both processes.
"""

from __future__ import annotations

import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import processes
import pytest
import torch.distributed as dist

WORKER = Path(__file__).with_name("distributed_worker.py")
TIMEOUT_S = 600
# A process that lost its partner says so; but nobody needs to wait until the collective gives up.
GRACE_S = 5

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch was built without gloo"
)


def run_both(scenario: str, folder: Path) -> None:
    """Run a scenario in two processes; they meet in a file."""
    logs = [folder / f"rank{rank}.txt" for rank in (0, 1)]
    running: list[BaseProcess] = []
    try:
        for rank, log in enumerate(logs):
            arguments = (str(WORKER), scenario, str(rank), str(folder / "store"))
            running.append(processes.start(arguments, log, log, OMP_NUM_THREADS="1"))
        deadline = time.monotonic() + TIMEOUT_S
        while any(process.exitcode is None for process in running) and time.monotonic() < deadline:
            if any(process.exitcode for process in running):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(0.05)
        codes = [process.exitcode for process in running]
    finally:
        for process in running:
            process.kill()
            process.join()
    if codes != [0, 0]:
        said = "\n".join(
            f"-- rank {rank}, {'killed' if code is None else f'exit code {code}'}:\n{log.read_text(errors='replace')}"
            for rank, (code, log) in enumerate(zip(codes, logs, strict=True))
        )
        pytest.fail(f"{scenario} failed\n{said}", pytrace=False)


def test_collectives_in_a_compiled_region(tmp_path: Path) -> None:
    """Functional, coalesced, in place, overlapping with work: bit for bit, over warm-up, recording and replays."""
    run_both("collectives", tmp_path)


@pytest.mark.parametrize("scenario", ["ddp", "fsdp", "tensor_parallel"])
def test_training(scenario: str, tmp_path: Path) -> None:
    """Ten steps, each bit for bit Inductor's and close to eager; with replays and without a fallback."""
    run_both(scenario, tmp_path)
