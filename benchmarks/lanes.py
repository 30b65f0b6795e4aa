"""Work at the same time: microseconds a call with several threads, in one lane and in several, and by Inductor.

    python benchmarks/lanes.py                        # two threads; --threads 4; --models recommender gru

The sides run in turn in one process (``timing.compare``). Calls are bound (``fxwrap.bind``): what Dynamo's guards
take does not count. Results are compared bit for bit with those of one lane; the exit code is 1 if any differs. A
training step is written as ``NAME step``.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from typing import Any

import speed_models
import torch
from timing import compare
from torch import Tensor

import fxwrap

# Mixtures of experts, whose sizes data decide, run eagerly in between: no lanes.
NAMES = "recommender", "gru", "mlp", "decoder", "llama", "recommender step", "gru step", "mlp step"


def called(name: str, backend: str, lanes: int) -> Callable[[], Any]:
    """A call without arguments, of a model or a training step made anew."""
    torch.manual_seed(0)
    model, args = getattr(speed_models, name.split(maxsplit=1)[0])()[:2]
    model, options = copy.deepcopy(model), {"lanes": lanes}
    if name.endswith("step"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if backend == "fxwrap":
            step = fxwrap.train_step(model, loss_of, optimizer, options=options)
            return lambda: step(*args)
        forward, update = torch.compile(loss_of, dynamic=False), torch.compile(optimizer.step)

        def ordinary() -> Tensor:
            loss = forward(model, *args)
            loss.backward()
            update()
            optimizer.zero_grad()
            return loss

        return ordinary
    compiled = torch.compile(
        model.eval(), backend=backend, dynamic=False, options=options if backend == "fxwrap" else None
    )
    with torch.no_grad():
        for _ in range(3):
            compiled(*args)
        call = fxwrap.bind(compiled, *args, strict=False)

    def run() -> Any:
        with torch.no_grad():
            return call(*args)

    return run


def loss_of(model: Callable[..., Any], *args: Any) -> Tensor:
    result = model(*args)
    return (result[0] if isinstance(result, tuple) else result).float().square().mean()


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, (tuple, list)):
        return all(map(equal, first, second))
    return not isinstance(first, Tensor) or torch.equal(first, second)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="*", default=NAMES)
    parser.add_argument("--pairs", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    wrong = 0
    print("| | one lane | lanes | lanes by one | Inductor | lanes by Inductor |\n|---|---|---|---|---|---|")
    for name in given.models:
        one, several = called(name, "fxwrap", 1), called(name, "fxwrap", given.threads)
        same = all(equal(one(), several()) for _ in range(20))
        wrong += not same
        inductor = called(name, "inductor", 1)
        for _ in range(5):
            inductor()
        beside = compare(several, one, given.pairs, 20)
        other = compare(several, inductor, given.pairs, 20)
        row = (
            f"{beside.second:.0f} | {beside.first:.0f} | {beside.ratio:.2f} | {other.second:.0f} | {other.ratio:.2f}"
        )
        print(f"| {name}{'' if same else ' (DIFFERS)'} | {row} |", flush=True)
        torch._dynamo.reset()
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
