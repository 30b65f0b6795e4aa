"""What a call costs around its kernels: a 12-block residual MLP of width 32 on batches of 4, on one thread.

Prints microseconds a call for fxwrap and for Inductor's Python wrapper, timed in turn in one process, and the
median of the ratios. The aim is a ratio of at most 0.75.

    python benchmarks/mlp_overhead.py
"""

from __future__ import annotations

import argparse

import torch
from timing import compare


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=60)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(args.width) for _ in range(args.blocks))).eval()
    x = torch.randn(args.batch, args.width)
    with torch.no_grad():
        # Compiled code hangs on code objects: with one each, neither backend waits behind the other's guards.
        ours = torch.compile(lambda x: model(x), backend="fxwrap")
        theirs = torch.compile(lambda x: model(x), backend="inductor")
        for _ in range(3):
            a, b = ours(x), theirs(x)
        assert torch.equal(a, b), "fxwrap and Inductor disagree"
        del a, b
        result = compare(lambda: ours(x), lambda: theirs(x), args.pairs)
        eager = compare(lambda: model(x), lambda: theirs(x), 10)
    print(f"eager            {eager.first:8.1f} us a call")
    print(f"inductor         {result.second:8.1f} us a call")
    print(f"fxwrap           {result.first:8.1f} us a call")
    print(f"fxwrap / inductor   {result.ratio:5.3f}  (median of {args.pairs} pairs)")


if __name__ == "__main__":
    main()
