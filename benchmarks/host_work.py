"""Models with host work in the middle: into how many captured partitions fxwrap and Inductor cut them.

    python benchmarks/host_work.py            # needs examples/hostsim, which it builds

The models run on the simulated accelerator, compiled by fxwrap, replayed, and compared with eager. Inductor's own
scheduler orders and cuts the same graphs, with its check for CUDA lifted; what it would generate is not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "hostsim"))

WIDTH = 16


@torch.library.custom_op("host_work::lookup", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def lookup(keys: Tensor) -> Tensor:
    """Asks a service on the host."""
    return (keys.cpu() * 2).to(keys.device)


@lookup.register_fake
def _(keys: Tensor) -> Tensor:
    return torch.empty_like(keys)


class Layers(nn.Module):
    """A stack of linear layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.randn(8, WIDTH).to(device),)


class Router(Layers):
    """A mixture of experts that reads on the host how many tokens each expert has."""

    def forward(self, x: Tensor) -> Tensor:
        choice = x[:, : len(self.layers)].argmax(1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.layers):
            mine = choice == number
            share = mine.sum().item() / x.size(0)
            result = result + torch.where(mine[:, None], expert(x).relu(), 0.0) * share
        return result


class Detector(Layers):
    """Boxes with a high score, found with nonzero; overlapping ones suppressed, with tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.layers[0](x).relu()
        boxes = self.layers[1](features)[:, :4].abs().cumsum(1)
        scores = self.layers[2](features)[:, 0].sigmoid()
        left = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
        right = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
        overlap = (right - left).clamp(min=0).prod(2)
        better = scores[None] > scores[:, None]
        keep = (scores > 0.3) & ~((overlap > 0.5) & better).any(1)
        return torch.nonzero(keep), self.layers[3](features)


class Sampler(Layers):
    """A few steps of sampling, each of which hands its token's probability to the host."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[float]]:
        seen = []
        for layer in self.layers:
            chances = layer(x).softmax(1)
            token = chances.argmax(1)
            seen.append(chances.amax().item())
            x = x + F.one_hot(token, WIDTH).to(x.dtype)
        return x, seen


class Recommender(Layers):
    """Embedding tables on the host, dense layers on the device."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.tables = [torch.randn(32, WIDTH) for _ in range(count)]

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.randn(8, WIDTH).to(device), torch.randint(0, 32, (8,)))

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        for table, layer in zip(self.tables, self.layers, strict=True):
            x = layer(x).relu() + F.embedding(keys, table).to(x.device)
        return x


class MaskedLoss(Layers):
    """A loss over the marked elements only, for each of several heads."""

    def forward(self, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for layer in self.layers:
            error = (layer(x) - x).square()
            loss = loss + error[x > 0].sum() / error.numel()
        return loss


class HostScalars(Layers):
    """A schedule kept in scalars on the host."""

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        return (*super().inputs(device), torch.tensor(0.5))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        for layer in self.layers:
            step = step * 0.9
            x = layer(x) * step
        return x


class Branches(Layers):
    """A branch on data between layers, and one beside them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layers[0](x)
        y = torch.cond(y.sum() > 0, lambda v: v + 1, lambda v: v - 1, (y,))
        z = torch.cond(x.sum() > 0, lambda v: v * 2, lambda v: v * 3, (x,))
        return self.layers[1](y).relu(), self.layers[2](z).relu()


class Services(Layers):
    """Two towers that each ask a service between their layers."""

    def forward(self, x: Tensor) -> Tensor:
        left = right = x
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            left = lookup(first(left).relu())
            right = lookup(second(right).sigmoid())
        return left + right


class Metrics(Layers):
    """Statistics of every layer, read while the model runs."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[float]]:
        norms = []
        for layer in self.layers:
            x = layer(x).relu()
            norms.append(x.norm().item())
        return x, norms


class Ragged(Layers):
    """Rows repeated as often as the data says, in two places."""

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        return (*super().inputs(device), torch.tensor([1, 2, 0, 3, 1, 1, 2, 0]).to(device))

    def forward(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layers[0](x).repeat_interleave(counts, 0)
        second = self.layers[1](x).relu().repeat_interleave(counts + 1, 0)
        return first.sum(0), second.sum(0) + self.layers[2](x).sum(0)


class StochasticDepth(Layers):
    """Layers that are scaled by draws of the host."""

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        return (*super().inputs(device), torch.rand(len(self.layers)))

    def forward(self, x: Tensor, draws: Tensor) -> Tensor:
        for layer, keep in zip(self.layers, (draws * 0.5 + 0.5).unbind(), strict=True):
            x = x + layer(x).relu() * keep.to(x.device)
        return x


class Guarded(Layers):
    """Every layer checks that its numbers are finite, and goes on without what is not."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[int]]:
        bad = []
        for layer in self.layers:
            y = layer(x)
            bad.append((~y.isfinite()).sum().item())
            x = torch.where(y.isfinite(), y, x).relu()
        return x, bad


MODELS: dict[str, Callable[[], Layers]] = {
    "mixture of experts, .item()": lambda: Router(4),
    "detector, nonzero": lambda: Detector(4),
    "sampler": lambda: Sampler(4),
    "recommender, tables on the host": lambda: Recommender(4),
    "masked losses": lambda: MaskedLoss(3),
    "scalars on the host": lambda: HostScalars(4),
    "branches": lambda: Branches(3),
    "services in two towers": lambda: Services(4),
    "metrics of every layer": lambda: Metrics(5),
    "ragged rows": lambda: Ragged(3),
    "stochastic depth": lambda: StochasticDepth(4),
    "guarded layers": lambda: Guarded(4),
}


class _Counted(Exception):
    """Ends a compilation of Inductor's once its partitions are counted."""


def inductors_partitions(model: nn.Module, inputs: tuple[Any, ...]) -> list[bool]:
    """The partitions that Inductor's graph partition makes, in order: True for one that it would capture."""
    from torch._inductor import config
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    from fxwrap.devices import device_support

    found: list[bool] = []
    cut = Scheduler.graph_partition

    def counting(self: Any) -> Any:
        _, signatures = cut(self)
        found.extend(not signature.skip_cudagraph for signature in signatures)
        raise _Counted

    def on_accelerator(self: Any) -> bool:
        device = self.get_device()
        return device is not None and device.type != "cpu"

    torch.compiler.reset()
    accelerator = next(value.device.type for value in inputs if value.device.type != "cpu")
    with (
        config.patch(dict(device_support(accelerator).config)),
        config.patch({"graph_partition": True, "triton.cudagraphs": True, "fx_graph_cache": False}),
        torch._functorch.config.patch(enable_autograd_cache=False),
        mock.patch.object(BaseSchedulerNode, "is_gpu", on_accelerator),
        mock.patch.object(Scheduler, "graph_partition", counting),
    ):
        try:
            torch.compile(model, backend="inductor", fullgraph=True)(*inputs)
        except Exception:
            if not found:
                raise
    return found


def fxwraps_cut(model: nn.Module, inputs: Callable[[], tuple[Any, ...]], calls: int = 4) -> tuple[Any, int]:
    """The cut that fxwrap makes, and how often it was replayed; every call is compared with eager."""
    import fxwrap

    torch.compiler.reset()
    compiled = torch.compile(model, backend="fxwrap", fullgraph=True, options={"capture": "always"})
    for _ in range(calls):
        args = inputs()
        torch.testing.assert_close(compiled(*args), model(*args))
    (graph,) = fxwrap.report(compiled).graphs
    return graph.program.plan.cut, graph.program.counters.replays


def compare(name: str, device: torch.device) -> dict[str, Any]:
    """One row of the table."""
    torch.manual_seed(0)
    model = MODELS[name]().to(device).eval()
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True),
    ):
        cut, replays = fxwraps_cut(model, lambda: model.inputs(device))
        theirs = inductors_partitions(model, model.inputs(device))
    return {
        "model": name,
        "fewest possible": cut.fewest,
        "fxwrap": cut.captured,
        "Inductor": sum(theirs),
        "fxwrap, all": len(cut.partitions),
        "Inductor, all": len(theirs),
        "replays": replays,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="models whose name has this in it")
    arguments = parser.parse_args(argv)

    import hostsim.inductor
    from rich.console import Console
    from rich.table import Table

    rows = []
    with hostsim.inductor.register():
        for name in MODELS:
            if arguments.only in name:
                rows.append(compare(name, torch.device(hostsim.NAME, 0)))
    table = Table(title=f"captured partitions, torch {torch.__version__}")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=column == "model")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=130).print(table)
    return int(any(row["fxwrap"] > row["Inductor"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
