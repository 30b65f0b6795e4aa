"""Why is my model recorded again?

    python examples/questions/why_recorded_again.py

The report has the history of recordings: when, why, at which sizes, and what it cost. Here a batch comes in four
sizes; ``fxwrap.record(fast, *examples)`` would record them ahead of time.
"""

from __future__ import annotations

import torch

import fxwrap


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    fast = torch.compile(model, backend="fxwrap", dynamic=True)
    with torch.no_grad():
        for rows in (2, 3, 5, 7) * 5:
            fast(torch.randn(rows, 32))
    (graph,) = fxwrap.report(fast).to_dict()["graphs"]
    made = graph["recordings"]
    print(f"{len(made)} recordings for {graph['counters']['replays']} replays:")
    for one in made:
        sizes = ", ".join(f"{name}={size}" for name, size in one["sizes"].items())
        print(f"  {one['why']} ({sizes}): took {one['us'] / 1e3:.1f} ms")


if __name__ == "__main__":
    main()
