"""Generate text until a stop token, inside of one recording: the loop and its test run where the model runs.

    python examples/decode.py --prompts 5

``generate`` is an ordinary function: ``torch.while_loop`` over one step of a decoder with caches of keys and values.
Beside it the same step is compiled alone and called by a Python loop, which looks at each token: what one would write
where loops are not captured. Both give the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import fxwrap

VOCABULARY, WIDTH, LENGTH, STOP = 40, 32, 64, 0
State = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Decoder(nn.Module):
    """Causal attention and a feed-forward layer, for one token at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("steps", torch.arange(LENGTH))

    def forward(self, at: Tensor, token: Tensor, text: Tensor, keys: Tensor, values: Tensor) -> State:
        """One step: the next token, written to ``text``, and caches that hold this one's key and value."""
        x = self.tokens(token) + self.positions(at)
        q, k, v = self.qkv(self.norm1(x)).chunk(3)
        here = (self.steps == at).unsqueeze(1)
        keys, values = torch.where(here, k, keys), torch.where(here, v, values)
        scores = (keys @ q / WIDTH**0.5).masked_fill(self.steps > at, float("-inf"))
        x = x + scores.softmax(0) @ values
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        following = self.head(x).argmax()
        return at + 1, following, torch.where(self.steps == at, following, text), keys, values


def start(prompt: Tensor) -> State:
    """The state before the first step."""
    empty = torch.zeros(LENGTH, dtype=torch.int64)
    return torch.tensor(0), prompt.clone(), empty, torch.zeros(LENGTH, WIDTH), torch.zeros(LENGTH, WIDTH)


def generate(model: Decoder, prompt: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens after ``prompt``, up to the stop token or ``limit``; and how many."""

    def goes_on(at: Tensor, token: Tensor, text: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return (token != STOP) & (at < limit)

    at, _, text, _, _ = torch.while_loop(goes_on, model, start(prompt))
    return text, at


def generate_step_by_step(step: Callable[..., State], prompt: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """The same with a loop in Python."""
    state = start(prompt)
    while bool(state[1] != STOP) and bool(state[0] < limit):
        state = step(*state)
    return state[2], state[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=5, help="how many texts to generate")
    parser.add_argument("--limit", type=int, default=LENGTH, help=f"the most tokens of a text, up to {LENGTH}")
    arguments = parser.parse_args()
    if not 0 < arguments.limit <= LENGTH:
        parser.error(f"--limit {arguments.limit}: expected 1 to {LENGTH}, the length of the caches")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model, limit = Decoder().eval(), torch.tensor(arguments.limit)
    compiled = torch.compile(lambda prompt, limit: generate(model, prompt, limit), backend="fxwrap")
    step = torch.compile(model, backend="fxwrap")
    inside, outside = list[float](), list[float]()
    with torch.no_grad():
        for number in range(1, arguments.prompts + 4):
            prompt = torch.tensor(number % VOCABULARY)
            begin = time.perf_counter()
            text, count = compiled(prompt, limit)
            between = time.perf_counter()
            same = torch.equal(text, generate_step_by_step(step, prompt, limit)[0])
            end = time.perf_counter()
            assert same, "the two loops give different tokens"
            if number > 3:  # the first calls compile and record
                tokens = text[: int(count)].tolist()
                print(f"{int(prompt):3} -> {' '.join(map(str, tokens[:12]))}{' ...' if len(tokens) > 12 else ''}")
                inside.append((between - begin) / len(tokens) * 1e6)
                outside.append((end - between) / len(tokens) * 1e6)
    graph = fxwrap.report(compiled).graphs[0]
    print(f"{graph.counters['replays']} replays of {len(graph.partitions)} partition")
    each = statistics.median(inside), statistics.median(outside)
    print(f"microseconds a token: {each[0]:.1f} inside of the recording, {each[1]:.1f} step by step")


if __name__ == "__main__":
    main()
