"""What one of two processes does in ``test_distributed``: ``distributed_worker.py <scenario> <rank> <store>``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from conftest import Compiled, assert_same, inductor, on_simulated
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from two_processes import WORLD, take_part

from fxwrap.backend import fxwrap as backend
from fxwrap.graphs.compilation import Compilation
from fxwrap.graphs.program import WARM_UPS

# -- training -----------------------------------------------------------------------------------------------

STEPS = 10
# Compiles a module in place, or its call: nothing (eager), Inductor, fxwrap.
Backend = Callable[..., Any] | str | None
# Makes a model and what to call in its place, given the backend.
Setup = Callable[[Backend], tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]]


class Block(torch.nn.Module):
    """A transformer block."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.merge = torch.nn.Linear(width, width)
        self.mlp = MLP(width, 2 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class MLP(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def ddp(how: Backend) -> Any:
    """The first bucket is full at 1 MiB: so there are two of them, and Dynamo cuts the graph between them."""
    model = DistributedDataParallel(torch.nn.Sequential(MLP(32, 5000), MLP(32, 5000)), bucket_cap_mb=1)
    return model, torch.compile(model, backend=how) if how else model


def fsdp(how: Backend) -> Any:
    """Parameters are gathered before a block runs, and freed after it: their memory comes and goes."""
    # The input of both blocks needs a gradient, so that they share their code.
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), Block(), Block())
    for block in model[1:]:
        if how:
            block.compile(backend=how)
        fully_shard(block)
    fully_shard(model)
    return model, model


def tensor_parallel(how: Backend) -> Any:
    """Each process has a part of every matrix: the collectives are in the compiled graphs."""
    model = torch.nn.Sequential(MLP(32, 64), MLP(32, 64))
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, torch.compile(model, backend=how) if how else model


def train(setup: Setup, how: Backend, seed: int) -> list[list[torch.Tensor]]:
    """The parameters after every step, this process's part of them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, call = setup(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(seed)
    history = []
    for _ in range(STEPS):
        x, target = torch.randn(2, 4, 6, 32, generator=data)
        torch.nn.functional.mse_loss(call(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        history.append([value.detach().clone() for value in local])
    return history


def training(setup: Setup, seed: int) -> None:
    """After every step: close to eager, and bit for bit what Inductor's own wrapper computes."""
    compilation = Compilation()
    eager = train(setup, None, seed)
    theirs = train(setup, "inductor", seed)
    ours = train(setup, functools.partial(backend, compilation=compilation), seed)
    assert not torch.equal(eager[0][0], eager[-1][0]), "nothing was learnt"
    for mine, other, reference in zip(ours, theirs, eager, strict=True):
        assert_same(mine, other)
        torch.testing.assert_close(mine, reference)
    assert_replayed(compilation)
    assert {program.plan.phase for program in compilation.programs} == {"forward", "backward"}
    if setup is ddp:
        assert len(compilation.programs) == 4, "DDP's buckets cut the graph in two"


def assert_replayed(compilation: Compilation) -> None:
    assert not compilation.fallbacks, compilation.fallbacks[0]
    for program in compilation.programs:
        assert program.counters.replays > 0
        assert set(program.counters.eager) <= set(WARM_UPS), program.counters.eager


# -- collectives in a compiled region -----------------------------------------------------------------------


def functional(x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    y = funcol.all_reduce(x.sin(), "sum", group) + funcol.broadcast(x + 1, 1, group)
    y = funcol.all_gather_tensor(y.cos(), 0, group) @ x
    y = funcol.reduce_scatter_tensor(y * 2, "sum", 0, group)
    return funcol.all_to_all_single(y + x, None, None, group) * x


def uneven(x: torch.Tensor) -> torch.Tensor:
    """Process ``r`` sends one row and three, or two and two."""
    sent = [[1, 3], [2, 2]]
    rank = dist.get_rank()
    return funcol.all_to_all_single(x.sin(), [row[rank] for row in sent], sent[rank], dist.group.WORLD) * 2


def coalesced(x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    a, b = funcol.all_gather_into_tensor_coalesced([x.sin(), x.cos()], group)
    c, d = funcol.all_reduce_coalesced([x + 1, x * 2], "sum", group)
    e, f = funcol.reduce_scatter_tensor_coalesced([a * b, a + b], "sum", [0, 0], group)
    return c * e + d * f


def in_place(x: torch.Tensor) -> torch.Tensor:
    """What Dynamo traces of torch.distributed's own functions; ``x`` is updated."""
    y = x * 2
    dist.all_reduce(y)
    gathered = x.new_empty(2 * x.size(0), x.size(1))
    dist.all_gather_into_tensor(gathered, y.sin())
    scattered = torch.empty_like(x)
    dist.reduce_scatter_tensor(scattered, gathered * 3)
    exchanged = torch.empty_like(x)
    dist.all_to_all_single(exchanged, scattered + y)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return exchanged @ x


def overlapping(x: torch.Tensor) -> torch.Tensor:
    """Collectives that are waited for long after they began, with work in between and each other."""
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name  # type: ignore[union-attr]
    gathered = ops.all_gather_into_tensor(x.sin(), WORLD, name)
    reduced = ops.wait_tensor(ops.all_reduce(x.cos(), "sum", name))
    scattered = ops.reduce_scatter_tensor(torch.cat([reduced @ x, x]), "sum", WORLD, name)
    z = (reduced @ reduced).relu()
    y = ops.wait_tensor(gathered) @ z
    return y[: x.size(0)] + y[x.size(0) :] + ops.wait_tensor(scattered)


REGIONS = [functional, uneven, coalesced, in_place, overlapping]


def collectives(rank: int) -> None:
    """Four calls of each region: warm-up, recording, replays; as the CPU does it, and as hardware would."""
    for region in REGIONS:
        torch._dynamo.reset()
        theirs, ours, simulated = inductor(region), Compiled(region), Compiled(region)
        for call in range(4):
            torch.manual_seed(WORLD * call + rank)
            x = torch.randn(4, 4)
            expected = theirs(other := x.clone()), other
            # So that an error says whose numbers are wrong.
            torch.testing.assert_close(expected, (region(eager := x.clone()), eager), rtol=1e-4, atol=1e-4)
            assert_same((ours(mine := x.clone()), mine), expected)
            with on_simulated():
                assert_same((simulated(mine := x.clone()), mine), expected)
        for compiled in (ours, simulated):
            assert_replayed(compiled.compilation)
            assert compiled.program.counters.replays == 2, compiled.program.counters.to_dict()


# -- the process --------------------------------------------------------------------------------------------

SCENARIOS: dict[str, Callable[[int], None]] = {
    "collectives": collectives,
    "ddp": lambda rank: training(ddp, seed=rank),
    "fsdp": lambda rank: training(fsdp, seed=rank),
    "tensor_parallel": lambda rank: training(tensor_parallel, seed=0),  # every process has the whole batch
}

if __name__ == "__main__":
    take_part(SCENARIOS)
