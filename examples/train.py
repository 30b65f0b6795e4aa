"""Train a small decoder on the characters of this repository's own documents; each step is one program.

    python examples/train.py --memory-limit 64MiB
    python examples/train.py --resume checkpoints/step-200.pt     # goes on as if it had not stopped, bit for bit

An ordinary training script but for ``fxwrap.train_step``, which stands for zero_grad, forward, loss, backward,
clip_grad_norm_ and optimizer.step. ``docs/training.md`` explains it.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxwrap

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, WARM_UP = 128, 48, 4, 64, 8, 20


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """Scores the next character, after each character."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.characters(characters) + self.positions.weight[: characters.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def read_documents() -> Tensor:
    pages = sorted(Path(__file__).resolve().parents[1].glob("docs/*.md"))
    return torch.tensor(list("".join(page.read_text() for page in pages).encode("ascii", "ignore")))


def random_batch(text: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
    windows = text[starts + torch.arange(LENGTH + 1)].to(device)
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Tensor) -> float:
    model.eval()
    windows = held_out.unfold(0, LENGTH + 1, LENGTH)
    loss = loss_of(model, windows[:, :-1], windows[:, 1:]).item()
    model.train()
    return loss


@torch.no_grad()
def generate(model: nn.Module, prompt: str, count: int, device: torch.device) -> str:
    model.eval()
    characters = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(count):
        scores = model(characters[:, -LENGTH:])[:, -1]
        characters = torch.cat([characters, torch.multinomial((2 * scores).softmax(-1), 1)], dim=1)
    return bytes(characters[0].tolist()).decode()


def learning_rate(step: int, steps: int) -> float:
    """The share of the largest rate: it rises to 1, then falls as a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 + 0.5 * math.cos(math.pi * (step - WARM_UP) / max(steps - WARM_UP, 1))


def random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def set_random_state(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


def train(args: argparse.Namespace) -> None:
    # Otherwise threads add up an embedding's gradient in any order. cuBLAS then wants the variable.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    device, text = args.device, read_documents()
    training, held_out = text[: -len(text) // 20], text[-len(text) // 20 :].to(device)

    model = Decoder(args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args.steps))
    step = fxwrap.train_step(model, loss_of, optimizer, clip_norm=1.0, memory_limit=args.memory_limit)

    done = 0
    if args.resume:
        saved = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        set_random_state(device, saved["random"])
        done = saved["step"]
        if done >= args.steps:
            raise SystemExit(f"{args.resume} is of step {done}: --steps must be more")

    times: list[float] = []
    for number in range(done + 1, args.steps + 1):
        x, y = random_batch(training, device)
        begin = time.perf_counter()
        loss = step(x, y).item()
        times.append((time.perf_counter() - begin) * 1e3)
        scheduler.step()
        if number == done + 1:
            print(f"step {number} took {times.pop() / 1e3:.0f} seconds: it was compiled")
        if number % args.every == 0 or number == args.steps:
            speed = f", {statistics.median(times):.2f} ms a step" if times else ""
            print(f"step {number}: loss {loss:.6f}, held out {evaluate(model, held_out):.6f}{speed}")
            times.clear()
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "random": random_state(device),
                "step": number,
            }
            torch.save(checkpoint, args.checkpoints / f"step-{number}.pt")
    print(repr(generate(model, "A program ", 80, device)))

    stats = fxwrap.stats(step)
    print(f"fxwrap: {stats['replays']} replays, eager runs {stats['eager']}, fallbacks {stats['fallbacks']}")
    for graph in fxwrap.report(step).graphs:
        if graph.memory:
            print(f"fxwrap: a step takes {graph.memory.peak:,} bytes beside parameters, state and batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="all steps, with those before --resume")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations and checkpoints")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--memory-limit", help="the most that a step may take beside its inputs, such as 64MiB")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="the folder for checkpoints")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, xpu, ...")
    args = parser.parse_args()
    if min(args.steps, args.every, args.layers) < 1:
        parser.error("--steps, --every and --layers must be at least 1")
    if args.resume and not args.resume.is_file():
        parser.error(f"--resume: there is no file {args.resume}")
    try:
        args.device = torch.empty(0, device=args.device).device
    except (RuntimeError, AssertionError) as error:  # no such type; not in this torch; no such device
        parser.error(f"--device {args.device}: {error}")
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    try:
        train(args)
    except fxwrap.FxwrapError as error:  # the limit is no size; a step takes more
        parser.error(str(error))


if __name__ == "__main__":
    main()
