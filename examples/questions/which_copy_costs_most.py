"""Which copy costs most?

    python examples/questions/which_copy_costs_most.py

Hardware's graphs freeze addresses: an input that lies elsewhere at each call is copied to where the graph reads it.
The report lists the copies of every replay, the largest first. Here a cache is made anew at each call; one that stays
where it is, is not copied. (The simulated device is the CPU with hardware's rules.)
"""

from __future__ import annotations

import torch

import fxwrap
from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.testing.simulated import simulated


def attend(query: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ((query @ weight) @ cache.T).softmax(-1) @ cache


def main() -> None:
    torch.manual_seed(0)
    weight, cache = torch.randn(64, 64), torch.randn(512, 64)
    for made_anew in (True, False):
        torch._dynamo.reset()
        fast = torch.compile(attend, backend="fxwrap")
        kept = []
        with using_runtime(simulated()), torch.no_grad():
            for _ in range(6):
                here = cache.clone() if made_anew else cache
                kept.append(here)  # or the next one would get its address
                fast(torch.randn(4, 64), here, weight)
        (graph,) = fxwrap.report(fast).to_dict()["graphs"]
        nodes = graph["nodes"]
        print(f"a cache {'made anew' if made_anew else 'that stays'}: every replay copies")
        for copy in graph["memory"]["copies"]:
            print(f"  {copy['bytes']:>7,} bytes of {copy['what']} {nodes[copy['node']]['line']}")


if __name__ == "__main__":
    main()
