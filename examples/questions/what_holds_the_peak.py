"""What holds the peak of memory?

    python examples/questions/what_holds_the_peak.py

The report has every storage with its live range, and the step at which most is alive. The picture of it is
``explanation.memory_picture("memory.svg")``; a page to click through is ``explanation.to_html("report.html")``.
"""

from __future__ import annotations

import torch

import fxwrap


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)  # length by length: this is what grows
        return self.out(scores @ v)


def main() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        explanation = fxwrap.explain(Attention(), torch.randn(4, 256, 64), calls=4)
    (graph,) = explanation.to_dict()["graphs"]
    memory, storages = graph["memory"], {one["name"]: one for one in graph["memory"]["storages"]}
    peak = memory["peak"]
    print(f"{peak['bytes']:,} bytes are alive at {peak['node']} ({peak['user_line'].rpartition('/')[2]}):")
    for name in peak["storages"]:
        one = storages[name]
        print(f"  {one['bytes'] / peak['bytes']:4.0%} {name}, {one['use']}: {one['user_line'].rpartition('/')[2]}")
    measured = max(call["allocated_bytes"]["cpu"] for call in explanation.to_dict()["calls"])
    (predicted,) = memory["predicted"]
    print(f"predicted {predicted['total']:,}, a call was measured to take {measured:,}")


if __name__ == "__main__":
    main()
