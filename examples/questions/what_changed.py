"""What did my change change?

    python examples/questions/what_changed.py

Two reports are compared: of two versions of the code, two shapes, two versions of torch. A report goes to a file with
``explanation.save("before.json")``, and ``python -m fxwrap diff before.json after.json`` prints the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fxwrap


def before(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(x @ w)
    return hidden / hidden.norm(dim=-1, keepdim=True) @ w


def after(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(x @ w)
    return F.normalize(hidden, dim=-1).cumsum(0) @ w


def main() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 32), torch.randn(32, 32)
    with torch.no_grad():
        was, now = fxwrap.explain(before, x, w), fxwrap.explain(after, x, w)
    print(was.diff(now))


if __name__ == "__main__":
    main()
