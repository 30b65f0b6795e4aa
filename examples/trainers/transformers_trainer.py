"""transformers' ``Trainer``, whose training step is one program; beside an ordinary ``Trainer``.

    pip install '.[trainers]'
    python examples/trainers/transformers_trainer.py

``OneProgramTrainer`` is what to copy. Forward, backward, clipping and the optimizer's step are one program. Data,
schedules of learning rates, logs, evaluation, checkpoints and callbacks stay Trainer's own. The model here is a small
Llama with random weights, which learns to count in steps of 1 to 5.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import fxwrap


class OneProgramTrainer(Trainer):
    """A Trainer whose ``training_step`` makes the whole update.

    The update clears the gradients that it has used. Trainer's loop then finds none: its own ``clip_grad_norm_`` and
    ``optimizer.step()`` change nothing, and its scheduler goes on as usual.
    """

    program: Any = None

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if self.program is None:
            if model is not self.model or self.accelerator.num_processes > 1 or self.accelerator.scaler is not None:
                raise ValueError("one program trains one model in one process, without fp16: use bf16, or Trainer")
            self.program = self.as_one_program()
        # What Trainer changes between calls is an argument: there is a program for each value.
        last, batches = self.accelerator.sync_gradients, self.current_gradient_accumulation_steps
        inputs = dict(self._prepare_inputs(inputs))
        loss, self.norm = self.program(inputs, num_items_in_batch, last, batches)
        return loss

    def as_one_program(self) -> Any:
        add_gradients = super().training_step

        def update(inputs: dict[str, Any], items: Tensor | int | None, last: bool, batches: int) -> Any:
            loss = add_gradients(self.model, inputs, items)
            if not last:  # of the batches whose gradients are accumulated
                return loss, None
            limit = self.args.max_grad_norm or float("inf")
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss, norm

        return fxwrap.train_step(update)

    # What Trainer would do with gradients between ``training_step`` and its logs.
    def _clip_grad_norm(self, model: torch.nn.Module) -> Tensor:
        return self.norm

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return self.norm


class Counting(Dataset):  # type: ignore[type-arg]
    """Rows of 16 numbers below 32, each some more than the one before."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        numbers = (torch.arange(16) * (row % 5 + 1) + row) % 32
        return {"input_ids": numbers, "labels": numbers}


class Clock(TrainerCallback):
    """Notes how long updates take."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append((time.perf_counter() - self.begin) * 1e3)


def trained(kind: type[Trainer], folder: str, resume: str | None = None, **settings: Any) -> tuple[Trainer, Clock]:
    """A small model, trained by a Trainer of some kind."""
    defaults = {
        "per_device_train_batch_size": 10,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    clock, arguments = Clock(), TrainingArguments(output_dir=folder, **{**defaults, **settings})
    trainer = kind(LlamaForCausalLM(config), arguments, train_dataset=Counting(), callbacks=[clock])
    trainer.train(resume_from_checkpoint=resume)
    return trainer, clock


def logged(trainer: Trainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    losses = []
    for kind in (Trainer, OneProgramTrainer):
        with tempfile.TemporaryDirectory() as folder:
            trainer, clock = trained(kind, folder, max_steps=steps)
        losses.append(logged(trainer))
        speed = statistics.median(clock.times)
        print(f"{kind.__name__}: loss {losses[-1][0]:.4f} ... {losses[-1][-1]:.4f}, {speed:.2f} ms an update")
    print(f"losses differ by {max(abs(a - b) for a, b in zip(*losses, strict=True)):.0e}")
    print(f"fxwrap: {fxwrap.stats(trainer.program)['replays']} replays, traces {dict(trainer.program.traced)}")


if __name__ == "__main__":
    main()
