"""Reports on programs that are cut at operators that cannot be captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lazy_group
import operators
import pytest
import torch
import torch.distributed as dist
from reports import Way, reported
from torch._higher_order_ops.while_loop import while_loop
from two_processes import needs_gloo


@reported(
    193953,
    symptom="an operator returns a list, and other partitions use its tensors: a check of the pool fails",
    seen="raises RuntimeError: Detected 1 tensor(s) in the cudagraph pool not tracked as outputs",
    trees="raises, as reported",
    fxwrap="right, and replayed around the operator that is not captured",
)
@torch.no_grad()
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@torch._inductor.config.patch(fallback_by_default=True)
def test_a_list_across_partitions(way: Way) -> None:
    def both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = torch._foreach_abs([a, b])
        return torch.unique(first).sum(), second + 1

    f, theirs = way.both(both, fullgraph=True)
    for _ in range(6):
        a, b = way.randn(2, 4)
        way.same(f(a, b), theirs(a, b))
    way.replays(4)


@reported(
    163129,
    symptom="a custom operator changes an input that later partitions do not have: an unbound local variable",
    seen="right",
    trees="right, and captured: not seen",
    fxwrap="the input is changed once a call, and the result is right",
)
@torch.no_grad()
def test_a_custom_operator_changes_an_input(way: Way) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        one, two = operators.step_and_two(x)
        mean = operators.mean_of(one, two, one + 1)
        total = mean + one + two
        total += 1
        return mean + total

    f, theirs = way.both(program)
    x = way.randn(2, 4, 8)
    twin = x.clone()
    for _ in range(8):
        way.same((f(x), x), (theirs(twin), twin))
    for _ in range(4):
        x = way.randn(2, 4, 8)
        twin = x.clone()
        way.same((f(x), x), (theirs(twin), twin))
    way.replays(6)


@reported(
    169232,
    symptom="cut at several operators, a partition lacks one of its inputs: a name is not defined",
    seen="right",
    trees="right, and captured: not seen",
    fxwrap="every partition has what it needs, forward and backward",
)
def test_cut_at_several_operators(way: Way) -> None:
    def program(x: torch.Tensor, index: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        a = torch.softmax(x, -1)
        b = a.index_put((index,), a.sum(), accumulate=True)
        c = torch.cumsum(b, 0) / (a.sum(-1, keepdim=True).clamp(min=0.5).expand_as(b) + 1)
        d = c.masked_fill(mask, 0).nan_to_num()
        e = torch.nn.functional.embedding(index, d)
        return (e @ a.t()).sum() + (d * b).sum()

    with _cut_at("aten::cumsum", "aten::index_put", "aten::index_put_") as cut:
        f, theirs = way.both(program, cut)
        for _ in range(6):
            x, index = way.randn(6, 4, requires_grad=True), torch.randint(0, 6, (5,), device=way.device)
            mask = way.randn(6, 4) > 0
            sides = []
            for g in (f, theirs):
                result = g(x, index, mask)
                sides.append((result, torch.autograd.grad(result, x)))
            way.same(*sides)
    way.replays(8)


@contextlib.contextmanager
def _cut_at(*names: str) -> Iterator[dict[str, Any]]:
    """Operators that must not be captured: for graph trees a setting of Inductor's, for fxwrap an option."""
    with torch._inductor.config.patch(custom_should_partition_ops=[*names, *(f"{name}.default" for name in names)]):
        yield {"eager_ops": names}


@reported(
    160263,
    symptom="a view of a view of a complex result crosses a cut: a local variable is referenced before assignment",
    seen="raises RuntimeError: These storage data ptrs are not allocated in pool",
    trees="raises, with another message: a check of the pool fails",
    fxwrap="right, with a scalar of the CPU among the operands",
)
@torch.no_grad()
def test_views_of_a_complex_result_cross_a_cut(way: Way) -> None:
    def program(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        z = torch.addcmul(x, y, scale, value=1)
        z = torch.view_as_real(z).flatten().view(-1, 2)
        return torch.view_as_complex(operators.not_captured(z) + z)

    f, theirs = way.both(program)
    for _ in range(6):
        x, y = (way.randn(4, dtype=torch.complex64) for _ in range(2))
        scale = torch.tensor(2.0 + 1j)  # on the CPU, whatever the device is
        way.same(f(x, y, scale), theirs(x, y, scale))
    way.replays(3)


@reported(
    169050,
    symptom="training with graph partition: a local variable of a partition has no value",
    seen="right",
    trees="right, and captured: not seen",
    fxwrap="four layers with a cut in each are right, forward and backward",
)
def test_training_with_cuts(way: Way) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cumsum(self.up(self.norm(x)), 0)
            return x + self.down(torch.nn.functional.gelu(y)) * y.mean()

    model = torch.nn.Sequential(*(Layer() for _ in range(4))).to(way.device)
    with _cut_at("aten::cumsum") as cut:
        f, theirs = way.both(model, cut)
        for _ in range(5):
            x = way.randn(4, 8, requires_grad=True)
            sides = []
            for g in (f, theirs):
                y = g(x)
                sides.append((y, torch.autograd.grad(y.square().sum(), x)))
            way.same(*sides)
    way.replays(6)


@reported(
    172728,
    symptom="a number that an operator computes gets into a captured partition, in sizes and offsets",
    seen="right",
    trees="right, and captured: not seen",
    fxwrap="right for every number, 0 and all rows among them; calls are replayed",
)
@torch.no_grad()
def test_a_computed_number_decides_sizes(way: Way) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.relu(x @ w)
        n = operators.rows_for_first(x)
        return torch.cat([h[:n] @ v, h[n:] @ (v + 1)]), h @ v

    f, theirs = way.both(program)
    w, v = way.randn(6, 8), way.randn(8, 6)
    for n in (3, 5, 0, 8, 3, 1, 8):
        x = way.randn(8, 6)
        x[:, 0] = torch.where(torch.arange(8, device=way.device) < n, 1.0, -1.0)
        way.same(f(x, w, v), theirs(x, w, v))
    way.replays(4)


@reported(
    93666,
    symptom="one operator that cannot be captured switches graphs off for the whole program",
    seen="right",
    trees="right, and captured around the operator: not seen",
    fxwrap="what is before and behind the operator is captured",
)
@torch.no_grad()
def test_one_operator_that_cannot_be_captured(way: Way) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = operators.not_captured(torch.relu(x @ w))
        return (y @ w).softmax(-1)

    f, theirs = way.both(program)
    w = way.randn(8, 8)
    for _ in range(6):
        x = way.randn(4, 8)
        way.same(f(x, w), theirs(x, w))
    way.verdicts("captured", "eager", "captured")
    way.replays(4)


@reported(
    176310,
    symptom="the state that a loop carries crosses a cut as a list of tensors: a check of the pool fails (from the "
    "pull request that mends it)",
    seen="raises RuntimeError: These storage data ptrs are not allocated in pool",
    trees="raises, as reported",
    fxwrap="right for 0, 1 and several rounds",
)
@torch.no_grad()
def test_the_state_of_a_loop_crosses_a_cut(way: Way) -> None:
    def program(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        start = (torch.zeros((), dtype=torch.int64, device=x.device), x, x.sin())

        def body(i: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return i + 1, x + y * 0.5, y.cos()

        _, x, y = while_loop(lambda i, x, y: i < n, body, start)
        return x * 2 + y, y

    f, theirs = way.both(program)
    for n in (2, 0, 1, 5, 2, 3):
        x, count = way.randn(8), torch.tensor(n, device=way.device)
        way.same(f(x, count), theirs(x, count))
    way.replays(3)


@contextlib.contextmanager
def _alone(device: torch.device) -> Iterator[str]:
    """The name of a process group with this process only."""
    backends = {"cuda": "nccl", "cpu": "gloo"}
    if (backend := backends.get(device.type)) is None:
        pytest.skip(f"no process group works on {device.type}")
    with lazy_group.default_group(backend):
        yield dist.group.WORLD.group_name  # type: ignore[union-attr]


@needs_gloo
@reported(
    192000,
    symptom="a collective is waited for behind a graph break: CUDA answers that an argument is invalid",
    seen="raises AcceleratorError: CUDA error: capturing stream has unjoined work",
    trees="raises, with another message: the capture has unjoined work",
    fxwrap="right; both programs run eagerly, and the report says that a communication is in flight",
)
@torch.no_grad()
def test_a_collective_is_waited_for_behind_a_graph_break(way: Way) -> None:
    ops = torch.ops._c10d_functional
    with _alone(way.device) as group:

        def program(x: torch.Tensor) -> torch.Tensor:
            pending = ops.all_reduce.default(x * 2, "sum", group)
            torch._dynamo.graph_break()
            return ops.wait_tensor.default(pending) + 1

        f, theirs = way.both(program)
        for _ in range(6):
            x = way.randn(16)
            way.same(f(x), theirs(x))
        way.runs_eagerly("is in flight when a call begins or ends")
