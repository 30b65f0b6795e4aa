"""Processes of ``torch.distributed``, two or more: a test runs them, a worker is one of them.

A worker is a script, ``worker.py <scenario> <rank> <store> <world>``, that calls ``take_part``. It makes the
comparisons.
"""

from __future__ import annotations

import datetime
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist

WORLD = 2
# Of one collective, so that a process that is alone says so before the test gives up.
COLLECTIVE = datetime.timedelta(seconds=120)
TIMEOUT_S = 600
# A process that lost its partner says so; but nobody needs to wait until the collective gives up.
GRACE_S = 5

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch was built without gloo"
)


def run_both(worker: Path, scenario: str, folder: Path, world: int = WORLD) -> None:
    """Run a scenario in so many processes; they meet in a file."""
    logs = [folder / f"rank{rank}.txt" for rank in range(world)]
    running: list[BaseProcess] = []
    try:
        for rank, log in enumerate(logs):
            arguments = (str(worker), scenario, str(rank), str(folder / "store"), str(world))
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
    if codes != [0] * world:
        said = "\n".join(
            f"-- rank {rank}, {'killed' if code is None else f'exit code {code}'}:\n{log.read_text(errors='replace')}"
            for rank, (code, log) in enumerate(zip(codes, logs, strict=True))
        )
        pytest.fail(f"{scenario} failed\n{said}", pytrace=False)


def take_part(scenarios: Mapping[str, Callable[[int], None]]) -> None:
    """Be one of the processes, as the command line says. A scenario is called with the process's rank."""
    scenario, rank, store, world = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=COLLECTIVE
    )
    scenarios[scenario](rank)
    # Nobody leaves while the other may still ask for something.
    dist.barrier()
    dist.destroy_process_group()
