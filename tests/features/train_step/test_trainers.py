"""``examples/trainers``: steps that are one program in transformers' ``Trainer`` and in Lightning, beside their own.

``make test-trainers`` installs what they need.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fxwrap

TRAINERS = Path(__file__).resolve().parents[3] / "examples" / "trainers"
pytestmark = pytest.mark.compiler


@pytest.fixture
def transformers_trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    return _example("transformers_trainer", monkeypatch)


@pytest.fixture
def lightning_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("lightning")
    return _example("lightning_module", monkeypatch)


def _example(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TRAINERS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def test_a_trainer_accumulates_clips_saves_and_goes_on(transformers_trainer: Any, tmp_path: Path) -> None:
    """Eight batches an epoch, two for an update; the last one has fewer rows."""
    example = transformers_trainer
    settings = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 5,
    }
    theirs, _ = example.trained(example.Trainer, str(tmp_path / "theirs"), **settings)
    ours, _ = example.trained(example.OneProgramTrainer, str(tmp_path / "ours"), **settings)
    checkpoint = str(tmp_path / "ours" / "checkpoint-5")
    resumed, _ = example.trained(example.OneProgramTrainer, str(tmp_path / "ours"), resume=checkpoint, **settings)
    back, _ = example.trained(example.Trainer, str(tmp_path / "theirs"), resume=checkpoint, **settings)

    for name in ("loss", "grad_norm", "learning_rate"):
        expected = example.logged(theirs, name)
        assert len(expected) == 8
        for trainer in (ours, resumed, back):
            assert example.logged(trainer, name) == pytest.approx(expected, abs=1e-4, rel=1e-3), name
    assert min(example.logged(theirs, "grad_norm")) > 0.5 and expected[0] != expected[-1]
    assert example.logged(ours)[-1] < 0.9 * example.logged(ours)[0]
    assert fxwrap.stats(ours.program)["replays"] >= 6
    for one, other in zip(ours.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
        assert one.grad is None


def test_a_trainer_says_what_it_does_not_do(transformers_trainer: Any, tmp_path: Path) -> None:
    example = transformers_trainer
    trainer, _ = example.trained(example.OneProgramTrainer, str(tmp_path), max_steps=1)
    trainer.program = None
    with pytest.raises(ValueError, match="one program trains one model in one process"):
        trainer.training_step(torch.nn.DataParallel(trainer.model), {})
    trainer.accelerator.scaler = SimpleNamespace()
    with pytest.raises(ValueError, match="without fp16"):
        trainer.training_step(trainer.model, {})


def test_lightning_counts_logs_saves_and_goes_on(lightning_module: Any, tmp_path: Path) -> None:
    """Eight batches an epoch, and two optimizers: 16 steps until a checkpoint."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(tmp_path, "{step}", every_n_epochs=1, save_top_k=-1)
    theirs, expected = lightning_module.trained(False, 12)
    ours, notes = lightning_module.trained(True, 12, enable_checkpointing=True, callbacks=[saving])
    # Lightning gives a run that goes on other batches than the one without a break.
    checkpoint = str(tmp_path / "step=16.ckpt")
    (resumed, rest), (_, expected_rest) = (
        lightning_module.trained(one_program, 12, resume=checkpoint) for one_program in (True, False)
    )

    assert ours.global_step == resumed.global_step == theirs.global_step == 24
    assert len(notes.logged) == 12 and len(rest.logged) == 4
    for ran, other in ((notes, expected), (rest, expected_rest)):
        for one, its in zip(ran.logged, other.logged, strict=True):
            assert one == pytest.approx(its, abs=1e-4)
    assert fxwrap.stats(ours.step)["replays"] >= 9
    assert dict(ours.step.traced) == {"first trace": 1}
