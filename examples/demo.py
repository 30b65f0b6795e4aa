"""Train a small GPT-style decoder and generate from it: eager, with Inductor, and with fxwrap, side by side.

    python examples/demo.py            # or: make demo

Plain ``torch.nn``; the only line that differs between these is ``torch.compile``. A fourth copy trains with
``fxwrap.train_step``: each step is one program. Runs on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

import fxwrap

TEXT = """
A host graph is what runs around the kernels: memory is allocated, kernels are launched, libraries are called.
A partition is a run of it that can be captured; a plan says where each buffer lies; a recording is replayed.
What cannot be captured runs as it is, and the reason is shown. An output is never overwritten while it is held.
"""


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Token and position embeddings, blocks, and a head that scores the next token."""

    def __init__(self, vocabulary: int, length: int, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


@dataclass
class Contender:
    """One way to run the same model, and what was measured of it.

    ``train`` makes a training step of a batch and returns the loss. ``call`` scores tokens; None: it only trains.
    """

    name: str
    train: Callable[[torch.Tensor], torch.Tensor]
    call: Callable[[torch.Tensor], torch.Tensor] | None
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    step_us: list[float] = field(default_factory=list)
    token_us: list[float] = field(default_factory=list)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def contenders(model: Decoder) -> list[Contender]:
    """Four copies of one model. Compiled code hangs on code objects, so each gets a function of its own: with a
    shared one, whichever compiles last would wait behind the other's guards."""
    plain, inductor, ours, whole = (copy.deepcopy(model) for _ in range(4))
    calls: list[tuple[str, Decoder, Callable[[torch.Tensor], torch.Tensor]]] = [
        ("eager", plain, plain),
        ("inductor", inductor, torch.compile(lambda ids: inductor(ids), backend="inductor")),
        ("fxwrap", ours, torch.compile(lambda ids: ours(ids), backend="fxwrap")),
    ]
    step = fxwrap.train_step(whole, loss_of, optimizer_of(whole))
    ordinary = [Contender(name, ordinary_step(call, optimizer_of(own)), call) for name, own, call in calls]
    return [*ordinary, Contender("fxwrap.train_step", step, None)]


def optimizer_of(model: Decoder) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def ordinary_step(
    call: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor], torch.Tensor]:
    def train(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(call, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[Any, float]:
    synchronize(device)
    begin = time.perf_counter()
    result = work()
    synchronize(device)
    return result, (time.perf_counter() - begin) * 1e6


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


@torch.no_grad()
def next_token(side: Contender, window: torch.Tensor) -> int:
    assert side.call is not None
    return int(side.call(window)[0, -1].argmax())


def in_turn(sides: list[Contender], turn: int) -> list[Contender]:
    first = turn % len(sides)
    return sides[first:] + sides[:first]


def run(console: Console, sides: list[Contender], data: torch.Tensor, length: int, steps: int, tokens: int) -> None:
    device = data.device
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        starts = torch.randint(len(data) - length - 1, (8,), generator=generator)
        batch = torch.stack([data[s : s + length + 1] for s in starts])
        # All take each step before any takes the next, so that a busy machine slows all alike.
        for side in in_turn(sides, step):
            with console.status(f"training step {step + 1} of {steps}: {side.name}"):
                loss, elapsed = timed(device, functools.partial(side.train, batch))
            side.losses.append(loss.item())
            side.step_us.append(elapsed)
        if step < 3 or (step + 1) % 20 == 0:
            console.print(
                f"  step {step + 1:3d}   loss {sides[-1].losses[-1]:.4f}" + ("   (compiles)" if step == 0 else "")
            )
    generating = [side for side in sides if side.call is not None]
    for side in generating:
        side.tokens = data[:length].tolist()
    for position in range(tokens):
        for side in in_turn(generating, position):
            window = torch.tensor([side.tokens[-length:]], device=device)
            with console.status(f"token {position + 1} of {tokens}: {side.name}"):
                token, elapsed = timed(device, functools.partial(next_token, side, window))
            side.tokens.append(token)
            side.token_us.append(elapsed)
        if position == 0:
            console.print("  first token   (compiles)")


def decisions(fn: Callable[..., Any] | None) -> dict[str, str]:
    """What fxwrap decided about a compiled function, and how its calls went, by row of the table."""
    graphs, counters = fxwrap.report(fn).graphs, fxwrap.stats(fn)
    plans = [graph.memory for graph in graphs if graph.memory is not None]
    captured = sum(p.verdict.value == "captured" for graph in graphs for p in graph.partitions)
    rows = {
        "programs": str(len(graphs)),
        "partitions": f"{captured} captured, {sum(len(graph.partitions) for graph in graphs) - captured} eager",
    }
    if any(plan.arenas for plan in plans):
        rows["arena bytes"] = " + ".join(f"{plan.size:,}" for plan in plans)
    else:  # as on the CPU
        rows["bytes kept between calls"] = f"{max(plan.kept for plan in plans):,}"
        rows["bytes at the peak of a call"] = " + ".join(f"{plan.peak:,}" for plan in plans)
    return rows | {
        "lower bound": " + ".join(f"{plan.lower_bound:,}" for plan in plans),
        "without reuse": " + ".join(f"{plan.plain:,}" for plan in plans),
        "replays": str(counters["replays"]),
        "recordings": str(sum(counters["recordings"].values())),
        "eager runs": ", ".join(f"{n} ({why})" for why, n in counters["eager"].items()) or "0",
    }


def report(console: Console, sides: list[Contender], alphabet: list[str], length: int) -> None:
    _, inductor, ours, _ = sides

    def same(side: Contender, what: str) -> str:
        mine, reference = getattr(side, what), getattr(inductor, what)
        if side is inductor or not mine:
            return "-"
        if mine == reference:
            return "bit for bit"
        if what == "losses" and torch.allclose(torch.tensor(mine), torch.tensor(reference), rtol=1e-3):
            return f"within {max(abs(a - b) for a, b in zip(mine, reference, strict=True)):.0e}"
        return "DIFFERENT"

    def median(values: list[float]) -> str:
        return f"{statistics.median(values[len(values) // 3 :]):,.0f}" if values else "-"

    table = Table("", *(side.name for side in sides), title="a small GPT-style decoder")
    table.add_row("last loss", *(f"{side.losses[-1]:.6f}" for side in sides))
    table.add_row("losses like Inductor's", *(same(side, "losses") for side in sides))
    table.add_row("tokens like Inductor's", *(same(side, "tokens") for side in sides))
    table.add_row("microseconds a training step", *(median(side.step_us) for side in sides))
    table.add_row("microseconds a token", *(median(side.token_us) for side in sides))
    decided = [decisions(fn) for fn in (ours.call, sides[-1].train)]
    for row in decided[0]:
        table.add_row(row, "", "", *(column[row] for column in decided))
    console.print(table)
    text = "".join(alphabet[token] for token in ours.tokens[length:])
    console.print("generated:", repr(text), markup=False, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument("--tokens", type=int, default=40, help="tokens to generate")
    parser.add_argument("--device", help="cpu, cuda, xpu; the accelerator if there is one")
    args = parser.parse_args()
    if args.steps < 6 or args.tokens < 6:
        parser.error("--steps and --tokens must be at least 6: the first calls compile and record")

    warnings.filterwarnings("ignore", category=FutureWarning)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(args.device or accelerator or "cpu")
    if device.type == "cpu":
        # Several threads add up an embedding's gradient in any order, with Inductor's wrapper as with fxwrap's.
        torch.set_num_threads(1)
    console = Console(width=118)
    console.print(
        f"torch {torch.__version__} on {device}; four copies of one model, the same batches", highlight=False
    )
    torch.manual_seed(0)
    alphabet = sorted(set(TEXT))
    data = torch.tensor([alphabet.index(character) for character in TEXT], device=device)
    length = 32
    model = Decoder(len(alphabet), length).to(device)
    sides = contenders(model)
    begin = time.perf_counter()
    run(console, sides, data, length, args.steps, args.tokens)
    report(console, sides, alphabet, length)
    console.print(f"{time.perf_counter() - begin:.0f} seconds, most of them compiling", highlight=False)


if __name__ == "__main__":
    main()
