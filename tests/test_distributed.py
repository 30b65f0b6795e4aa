"""Two processes, as ``torch.distributed`` has them: what they compute is what they compute with Inductor's wrapper.

``distributed_worker`` says what each scenario does, and makes the comparisons, in both processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from two_processes import needs_gloo, run_both

WORKER = Path(__file__).with_name("distributed_worker.py")

pytestmark = needs_gloo


def test_collectives_in_a_compiled_region(tmp_path: Path) -> None:
    """Functional, coalesced, in place, overlapping with work: bit for bit, over warm-up, recording and replays."""
    run_both(WORKER, "collectives", tmp_path)


@pytest.mark.parametrize("scenario", ["ddp", "fsdp", "tensor_parallel"])
def test_training(scenario: str, tmp_path: Path) -> None:
    """Ten steps, each bit for bit Inductor's and close to eager; with replays and without a fallback."""
    run_both(WORKER, scenario, tmp_path)
