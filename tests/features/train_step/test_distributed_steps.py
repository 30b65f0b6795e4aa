"""Steps as they are written, in several processes: as one process with the whole batch.

``steps_worker`` says what each scenario does, and makes the comparisons, in all processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_written_steps import mlp, simple
from torch import nn
from two_processes import needs_gloo, run_both

import fxwrap
from fxwrap import TrainStepError

WORKER = Path(__file__).with_name("steps_worker.py")


@needs_gloo
@pytest.mark.compiler
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("scenario", ["replicated", "tensor_parallel", "sharded"])
def test_losses_are_those_of_one_process(scenario: str, world: int, tmp_path: Path) -> None:
    run_both(WORKER, scenario, tmp_path, world)


@needs_gloo
@pytest.mark.compiler
@pytest.mark.parametrize("scenario", ["micro_batches", "its_own_collectives", "within_a_limit", "checked"])
def test_in_two_processes(scenario: str, tmp_path: Path) -> None:
    run_both(WORKER, scenario, tmp_path)


def test_what_is_no_group_is_refused() -> None:
    model = mlp()
    written = simple(model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(TrainStepError, match=r"not initialised\n .*init_process_group first"):
        fxwrap.train_step(written, group="gloo")  # type: ignore[call-overload]


def test_modules_that_keep_their_parameters_elsewhere_are_not_sharded() -> None:
    mesh = type("Mesh", (), {"ndim": 1})()
    with pytest.raises(TrainStepError, match="got: LSTM, which keeps a list of them"):
        fxwrap.shard_parameters(nn.Sequential(nn.LSTM(2, 2)), mesh)
