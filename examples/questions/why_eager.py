"""Why does a part of my model run eagerly, and what would have to change?

    python examples/questions/why_eager.py

A router asks on the host how many tokens an expert gets. The report names the operator, its reason, the line, and
what to do instead.
"""

from __future__ import annotations

import torch

import fxwrap


def route(tokens: torch.Tensor, gate: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
    scores = (tokens @ gate).sigmoid()
    chosen = torch.nonzero(scores > 0.5)[:, 0]  # how many, only data tells
    return (tokens[chosen] @ expert).relu().sum(0)


def main() -> None:
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        explanation = fxwrap.explain(route, torch.randn(32, 16), torch.randn(16, 1), torch.randn(16, 16))
    for graph in explanation.to_dict()["graphs"]:
        for node in graph["nodes"].values():
            if node["verdict"] == "eager" and node["operator"] and not node["inherited"]:
                print(f"{node['operator']} runs eagerly: {node['reason']}")
                print(f"  line:    {node['user_line'].rpartition('/')[2]}")
                print(f"  instead: {node['to_capture_it']}")


if __name__ == "__main__":
    main()
