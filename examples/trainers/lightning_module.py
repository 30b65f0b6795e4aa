"""A GAN in Lightning, whose training step is one program; beside the same module without fxwrap.

    pip install '.[trainers]'
    python examples/trainers/lightning_module.py

With manual optimization the update is code of the module's own, so that it can be one program. Data, logs,
validation, checkpoints, callbacks and schedules of learning rates stay Lightning's. The generator learns to draw
points of a ring.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fxwrap

NOISE, WIDTH = 4, 32


class Gan(lightning.LightningModule):
    """A generator and a critic, which learn in turns.

    Args:
        one_program: whether the update is one program.
    """

    def __init__(self, one_program: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one_program = one_program
        self.generator = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
        self.critic = nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = self.generator, self.critic
        return [torch.optim.Adam(part.parameters(), lr=3e-3, betas=(0.5, 0.99)) for part in parts]

    def on_train_start(self) -> None:
        # Now the optimizers are there, which are Lightning's to keep.
        self.step = self.update
        if self.one_program:
            self.step = fxwrap.train_step(self.update, optimizers=self.trainer.optimizers)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        critic_loss, generator_loss = self.step(*batch)
        # Lightning counts updates by its own optimizers. No gradients are left: these steps change nothing.
        for optimizer in self.optimizers():
            optimizer.step()
        self.log_dict({"critic": critic_loss, "generator": generator_loss})

    def update(self, real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The whole update, with torch's optimizers, not Lightning's. It clears the gradients that it has used."""
        of_generator, of_critic = self.optimizers(use_pl_optimizer=False)
        fake = self.generator(noise)
        critic_loss = functional.softplus(-self.critic(real)).mean()
        critic_loss = critic_loss + functional.softplus(self.critic(fake.detach())).mean()
        self.manual_backward(critic_loss)
        self.clip_gradients(of_critic, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        of_critic.step()
        of_critic.zero_grad()
        generator_loss = functional.softplus(-self.critic(fake)).mean()
        self.manual_backward(generator_loss)
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
        return critic_loss, generator_loss


class Notes(lightning.Callback):
    """Notes what updates log, and how long they take."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.times.append((time.perf_counter() - self.begin) * 1e3)
        self.logged.append({name: float(value) for name, value in trainer.logged_metrics.items()})


def points(count: int) -> TensorDataset:
    """Points of a ring, each with the noise that the generator gets."""
    angles = torch.rand(count) * 2 * torch.pi
    return TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1), torch.randn(count, NOISE))


def trained(one_program: bool, steps: int, resume: str | None = None, **settings: Any) -> tuple[Gan, Notes]:
    """A GAN after ``steps`` updates, each a step of two optimizers."""
    torch.manual_seed(0)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    settings = {**quiet, "accelerator": "cpu", "enable_checkpointing": False, **settings}
    gan, notes = Gan(one_program), Notes()
    trainer = lightning.Trainer(max_steps=2 * steps, callbacks=[notes, *settings.pop("callbacks", [])], **settings)
    trainer.fit(gan, DataLoader(points(512), batch_size=64), ckpt_path=resume)
    return gan, notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    both = []
    for one_program in (False, True):
        gan, notes = trained(one_program, steps)
        both.append(notes.logged)
        last = ", ".join(f"{name} {value:.4f}" for name, value in notes.logged[-1].items())
        speed = f"{statistics.median(notes.times):.2f} ms an update"
        print(f"{'one program' if one_program else 'as written'}: {gan.global_step} steps, {last}, {speed}")
    apart = max(abs(a[name] - b[name]) for a, b in zip(*both, strict=True) for name in a)
    print(f"losses differ by {apart:.0e}")
    print(f"fxwrap: {fxwrap.stats(gan.step)['replays']} replays, traces {dict(gan.step.traced)}")


if __name__ == "__main__":
    main()
