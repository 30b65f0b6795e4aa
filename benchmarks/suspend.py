"""The price of fxwrap.suspend and fxwrap.resume: bytes given back, and the time of both and of the call after them.

PYTHONPATH=. python benchmarks/suspend.py            # on CUDA
PYTHONPATH=. python -m hostcuda benchmarks/suspend.py  # CUDA on host memory: bytes are right, times are the host's

Bytes are the device's own count (``mem_get_info``). "held" is what the recordings keep between calls.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import fxwrap

DEVICE = torch.device("cuda", 0)
OPTIONS = {"suspendable": True, "capture": "always"}


def mlp(width: int) -> Callable[[], Any]:
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).to(DEVICE).eval()
    compiled, x = torch.compile(model, backend="fxwrap", options=OPTIONS), torch.randn(64, width, device=DEVICE)

    def call() -> Any:
        with torch.no_grad():
            compiled(x)

    return call


def transformer(width: int) -> Callable[[], Any]:
    layer = torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(DEVICE).eval()
    compiled = torch.compile(model, backend="fxwrap", options=OPTIONS)
    x = torch.randn(4, 32, width, device=DEVICE)

    def call() -> Any:
        with torch.no_grad():
            compiled(x)

    return call


def training(width: int) -> Callable[[], Any]:
    first, last = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
    model = torch.nn.Sequential(first, torch.nn.GELU(), torch.nn.LayerNorm(width), last).to(DEVICE)
    compiled, x = torch.compile(model, backend="fxwrap", options=OPTIONS), torch.randn(64, width, device=DEVICE)

    def call() -> Any:
        model.zero_grad(set_to_none=True)
        compiled(x).square().mean().backward()
        model.zero_grad(set_to_none=True)  # gradients are live outputs

    return call


MODELS = {"mlp": mlp, "transformer": transformer, "training": training}


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info(DEVICE)[0])


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(name: str, width: int, rounds: int) -> str:
    """A line about one model."""
    call = MODELS[name](width)
    for _ in range(4):
        call()
    gc.collect()
    torch.cuda.empty_cache()
    before = free_bytes()
    times: dict[str, list[float]] = {"suspend": [], "resume": [], "call": []}
    given = fxwrap.suspend()
    counted = free_bytes() - before
    for _ in range(rounds):
        times["resume"].append(seconds(fxwrap.resume))
        times["call"].append(seconds(call))
        times["suspend"].append(seconds(fxwrap.suspend))
    fxwrap.release()
    gc.collect()
    torch.cuda.empty_cache()
    fxwrap.release()
    held = free_bytes() - before
    median = {what: statistics.median(several) * 1e6 for what, several in times.items()}
    return (
        f"{name:12} held {held / 2**20:7.1f} MiB  given back {counted / 2**20:7.1f} ({counted / max(held, 1):.1%}, "
        f"suspend() says {given / 2**20:.1f})  suspend {median['suspend']:6.0f} us  "
        f"resume {median['resume']:6.0f} us  call {median['call']:6.0f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=50)
    arguments = parser.parse_args()
    for name in arguments.models:
        print(measure(name, arguments.width, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
