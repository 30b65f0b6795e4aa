"""What the pipeline takes of a GPT-2 training step, by stage, and how that grows with the number of layers.

    python benchmarks/planning_time.py                    # 3, 6, 12 and 24 layers, on the CPU
    python benchmarks/planning_time.py --frozen           # where graphs freeze addresses (the simulated device)
    python benchmarks/planning_time.py --layers 12 24

Seconds, up to the replay of the first shape, and for a second one. Goals: plan and verification of 12 layers at most
0.3 s, of 24 at most 0.7 s; a second shape of 12 at most 0.3 s.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.stages import observed_by
from fxwrap.testing.simulated import simulated

# What is planned and proved of memory, and proved of the schedule.
PLANNED = ("cost model", "memory")


def step(layers: int) -> tuple[Any, Any]:
    """A compiled model, and a function that trains it by one step on so many tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(n_layer=layers, n_embd=64, n_head=2, vocab_size=128, n_positions=64, **dropout, **ends)
    model = GPT2LMHeadModel(config)
    # What is found in a cache is not decided again.
    f = torch.compile(model, backend="fxwrap", dynamic=True, options={"fx_graph_cache": False})

    def train(tokens: int) -> None:
        ids = torch.randint(0, 128, (2, tokens))
        f(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)

    return model, train


def measure(layers: int) -> tuple[dict[str, float], float, float]:
    """Seconds by stage up to the first replay, in all, and for a second shape."""
    torch._dynamo.reset()
    spent = Counter[str]()

    def note(name: str, seconds: float) -> None:
        spent[name] += seconds

    _, train = step(layers)
    with observed_by(note):
        for _ in range(3):
            train(32)
        first = dict(spent)
        for _ in range(3):
            train(48)
    again = sum(spent.values()) - sum(first.values())
    return first, sum(first[name] for name in PLANNED), again


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    with using_runtime(simulated()):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 6, 12, 24])
    parser.add_argument("--frozen", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    table = Table("stage", *(f"{layers} layers" for layers in arguments.layers), box=None)
    with frozen() if arguments.frozen else contextlib.nullcontext():
        found = [measure(layers) for layers in arguments.layers]
    for name in found[0][0]:
        table.add_row(name, *(f"{first.get(name, 0):.3f}" for first, _, _ in found))
    table.add_row("plan and verification", *(f"{planned:.3f}" for _, planned, _ in found))
    table.add_row("a second shape", *(f"{again:.3f}" for _, _, again in found))
    growth = ["", *(f"x {now[1] / before[1]:.1f}" for before, now in itertools.pairwise(found))]
    table.add_row("growth of plan and verification", *growth)
    Console().print(table)


if __name__ == "__main__":
    main()
