"""``group=``: processes that train together, as with DistributedDataParallel.

``group_worker`` says what each scenario does, and makes the comparisons, in both processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from loops import Net, squares
from torch import optim
from two_processes import needs_gloo, run_both

import fxwrap
from fxwrap import TrainStepError

WORKER = Path(__file__).with_name("group_worker.py")


@needs_gloo
@pytest.mark.parametrize("scenario", ["plain", "clipped", "accumulated", "buckets", "normalized"])
def test_training_is_that_of_ddp(scenario: str, tmp_path: Path) -> None:
    """Losses of ten steps; parameters that are equal in both processes; one replay for each update."""
    run_both(WORKER, scenario, tmp_path)


@needs_gloo
@pytest.mark.parametrize("scenario", ["begins_alike", "same_data", "refused"])
def test_processes_agree(scenario: str, tmp_path: Path) -> None:
    """On what they begin with, and on the bits of one process that is alone."""
    run_both(WORKER, scenario, tmp_path)


def test_nothing_is_initialised() -> None:
    model = Net()
    with pytest.raises(TrainStepError, match=r"not initialised\n .*init_process_group first"):
        fxwrap.train_step(model, squares, optim.SGD(model.parameters(), 0.1), group="gloo")  # type: ignore[arg-type]
