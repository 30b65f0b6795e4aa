"""A small decoder with a key-value cache: saved as one file with two methods, loaded, and asked for tokens.

python examples/save_and_load.py                       # saves decoder.fxw in the working folder, loads it, generates
python -m fxwrap inspect decoder.fxw
python -m fxwrap save examples.save_and_load:methods -o decoder.fxw

Needs pip install 'fxwrap[save]', and the commands typer as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxwrap

TOKENS, WIDTH, HEADS, LAYERS, LONGEST = 256, 128, 4, 3, 128


class Layer(nn.Module):
    """Attention over what was seen so far, which it keeps in two buffers, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, HEADS, LONGEST, WIDTH // HEADS))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).view(1, -1, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        self.keys[:, :, at], self.values[:, :, at] = key, value
        seen = torch.arange(LONGEST, device=x.device) <= at[:, None]
        found = nn.functional.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen)
        x = x + self.out(found.transpose(1, 2).reshape(1, -1, WIDTH))
        return x + self.feed(self.norms[1](x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor, at: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(at)
        for layer in self.layers:
            x = layer(x, at)
        return self.head(x[:, -1])


def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder().eval()


def methods() -> dict[str, Any]:
    """``prefill`` takes a prompt of any length, ``decode`` one token; both work on one cache."""
    decoder, length = model(), torch.export.Dim("length", min=2, max=LONGEST)
    prompt = torch.zeros(1, 8, dtype=torch.long), torch.arange(8)
    shapes = {"tokens": {1: length}, "at": {0: length}}
    return {
        "prefill": torch.export.export(decoder, prompt, dynamic_shapes=shapes),
        "decode": (decoder, (torch.zeros(1, 1, dtype=torch.long), torch.tensor([8]))),
    }


def generate(prefill: Callable[..., Tensor], decode: Callable[..., Tensor], prompt: Tensor, count: int) -> list[int]:
    logits, found = prefill(prompt, torch.arange(prompt.size(1))), list[int]()
    for step in range(count):
        token = logits.argmax(-1)
        found.append(int(token))
        logits = decode(token[None], torch.tensor([prompt.size(1) + step]))
    return found


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("decoder.fxw")
    fxwrap.save(path, methods(), progress=lambda what: print(f"  {what}"))
    program = fxwrap.load(path, trust=True)
    print(*program.methods.values(), sep="\n")
    prompt, eager = torch.arange(10)[None], model()
    with torch.no_grad():
        for name, functions in (("eager", (eager, eager)), ("saved", (program.prefill, program.decode))):
            generate(*functions, prompt, 40)
            begin = time.perf_counter()
            tokens = generate(*functions, prompt, 40)
            print(f"{name}: {40 / (time.perf_counter() - begin):,.0f} tokens a second: {tokens[:8]} ...")


if __name__ == "__main__":
    main()
