"""What the first call takes in a new process, with empty caches and with full ones, against Inductor.

    python benchmarks/warm_start.py                              # all models, inference and training
    python benchmarks/warm_start.py --models gpt2-6 mlp --modes inference
    python benchmarks/warm_start.py --rounds 9 --cold-rounds 0   # warm starts only
    python benchmarks/warm_start.py --profile mlp training       # where the time of a warm start goes, by function

Seconds from ``import torch`` to the end of the first call (training: of the first forward and backward); making the
model does not count. Each measurement is a process of its own, fxwrap's and Inductor's in turn. Each side has a cache
of its own, so that each compiles its kernels itself. A ratio is the median of those of neighbouring processes, by
wall time and by processor time (compilers included). Hits are those of FxGraphCache and AOTAutogradCache, as torch
counts them. Goals by wall time: warm at most 1.15, cold at most 1.05; the exit code is 1 if one is missed.
"""

from __future__ import annotations

import os
import time

import torch

BEGIN, BEGIN_CPU = time.perf_counter(), os.times()

import argparse  # noqa: E402
import cProfile  # noqa: E402
import json  # noqa: E402
import pstats  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

GOALS = {"warm": 1.15, "cold": 1.05}
SIDES = ("fxwrap", "inductor")
HITS = (("inductor", "fxgraph_cache_hit"), ("aot_autograd", "autograd_cache_hit"))
# The module, its inputs, and how it is compiled.
Model = tuple[Any, dict[str, Any], dict[str, Any]]


def gpt2(layers: int) -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    config = GPT2Config(n_layer=layers, n_embd=64, n_head=2, vocab_size=128, n_positions=64, **dropout, **ends)
    ids = torch.randint(0, 128, (2, 32))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, {}


def resnet18() -> Model:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    model = ResNetForImageClassification(ResNetConfig(layer_type="basic", num_labels=10, **sizes))
    return model, {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([1, 2])}, {}


def mlp() -> Model:
    layers = [part for _ in range(6) for part in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    return torch.nn.Sequential(*layers), {"input": torch.randn(24, 64)}, {"dynamic": True}


MODELS: dict[str, Callable[[], Model]] = {
    "gpt2-6": lambda: gpt2(6),
    "gpt2-12": lambda: gpt2(12),
    "resnet18": resnet18,
    "mlp": mlp,
}


def first_call(name: str, mode: str, side: str) -> None:
    """Prints, as JSON: seconds, seconds of processors, hits."""

    def now() -> tuple[float, float]:
        return time.perf_counter() - BEGIN, sum(os.times()[:4]) - sum(BEGIN_CPU[:4])

    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = now()
    model, inputs, options = MODELS[name]()
    model.train(mode == "training")
    making = [after - b for after, b in zip(now(), before, strict=True)]
    profile = cProfile.Profile()
    if os.environ.get("WARM_START_PROFILE"):
        profile.enable()
    f = torch.compile(model, backend=side, **options)
    with torch.set_grad_enabled(mode == "training"):
        out = f(**inputs)
        if mode == "training":
            (out.loss if hasattr(out, "loss") else out.sum()).backward()
    spent = [after - made for after, made in zip(now(), making, strict=True)]
    if os.environ.get("WARM_START_PROFILE"):
        profile.disable()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(120)
    from torch._dynamo.utils import counters

    print(json.dumps([*spent, [counters[kind][key] for kind, key in HITS]]))


def in_process(name: str, mode: str, side: str, cache: str, profiled: bool = False) -> Any:
    """What ``first_call`` prints in a new process."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # An installed package is compiled to bytecode, as torch is here; a checkout shall be no slower.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if profiled:
        environment["WARM_START_PROFILE"] = "1"
    command = [sys.executable, __file__, "--first-call", name, mode, side]
    errors = None if profiled else subprocess.PIPE
    done = subprocess.run(command, check=False, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode:
        raise SystemExit(f"{name}, {mode}, {side}: the process ended with {done.returncode}\n{done.stderr or ''}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, mode: str, rounds: int, cold_rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Measurements by temperature: of each pair of processes, by side."""
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(max(1, cold_rounds)):
            sides = SIDES if turn % 2 else SIDES[::-1]
            pair = {side: in_process(name, mode, side, f"{folder}/{side}{turn}") for side in sides}
            found["cold"] += [pair] if turn < cold_rounds else []
        for _ in range(rounds):
            found["warm"].append({side: in_process(name, mode, side, f"{folder}/{side}0") for side in SIDES})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=("inference", "training"), default=["inference", "training"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold-rounds", type=int, default=1)
    parser.add_argument("--profile", nargs=2, metavar=("MODEL", "MODE"))
    parser.add_argument("--first-call", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first_call:
        first_call(*arguments.first_call)
        return
    if arguments.profile:
        with tempfile.TemporaryDirectory() as folder:
            for side in SIDES:
                in_process(*arguments.profile, side, f"{folder}/{side}")
                in_process(*arguments.profile, side, f"{folder}/{side}", profiled=True)
        return
    from rich.console import Console
    from rich.table import Table

    columns = (
        "model",
        "mode",
        "caches",
        "fxwrap s",
        "Inductor s",
        "ratio",
        "by CPU time",
        "hits",
        "Inductor's",
        "goal",
    )
    table, missed = Table(*columns, box=None), False
    with tempfile.TemporaryDirectory() as folder:  # modules are compiled, and files are in memory
        for side in SIDES:
            in_process("mlp", "inference", side, folder)
    for name in arguments.models:
        for mode in arguments.modes:
            for caches, pairs in measure(name, mode, arguments.rounds, arguments.cold_rounds).items():
                if not pairs:
                    continue
                seconds = [statistics.median(pair[side][0] for pair in pairs) for side in SIDES]
                ratio, by_cpu = (
                    statistics.median(pair["fxwrap"][i] / pair["inductor"][i] for pair in pairs) for i in (0, 1)
                )
                hits = ["+".join(map(str, pairs[-1][side][2])) for side in SIDES]
                reached = ratio <= GOALS[caches]
                missed |= not reached
                goal = f"{GOALS[caches]:.2f} {'reached' if reached else 'MISSED'}"
                row = (f"{seconds[0]:.2f}", f"{seconds[1]:.2f}", f"{ratio:.2f}", f"{by_cpu:.2f}", *hits, goal)
                print(name, mode, caches, *row, file=sys.stderr, flush=True)
                table.add_row(name, mode, caches, *row)
    Console(width=max(120, Console().width)).print(table)
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
