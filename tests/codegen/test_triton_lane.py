"""Triton kernels, without a GPU: emitted for CPU tensors, lowered, launched in Triton's interpreter, replayed."""

from __future__ import annotations

import random
import re
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from conftest import Compiled, assert_same
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._inductor import config, ir, scheduler
from torch._inductor.runtime import triton_helpers
from torch._inductor.virtualized import V
from torch.fx import GraphModule
from torch.library import wrap_triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_lane import Launch, triton_on_cpu

from fxwrap.codegen.emit import triton_kernels
from fxwrap.codegen.emit.emission import FxwrapCodegen
from fxwrap.codegen.emit.triton_kernels import TritonLauncher, argument_names, declared_writes, written_arguments
from fxwrap.graphs.devices.runtime import using_runtime
from fxwrap.host_graph.listing import list_graph
from fxwrap.host_graph.nodes import Kernel, Kind, kernel_of, kind_of, launch
from fxwrap.testing.simulated import Rules, simulated


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    with triton_on_cpu() as seen:
        yield seen


@pytest.fixture(params=["cpu", "simulated"])
def runtime(request: pytest.FixtureRequest) -> Iterator[None]:
    """The CPU, and the CPU with graphs that keep their addresses, as hardware does."""
    if request.param == "simulated":
        # An interpreted kernel reads on the host what a compiled one would not, and every run of it is counted.
        with using_runtime(simulated(Rules(captured_work_waits=False, capture_refuses_waits=False))):
            yield
    else:
        yield


class Watching(FxwrapCodegen):
    """Keeps the text of host graphs as they are before lowering."""

    portable: list[str]

    def compile_graph(self, gm: GraphModule) -> Any:
        self.portable.append(drawing(gm))
        return super().compile_graph(gm)


@pytest.fixture
def watching() -> type[Watching]:
    return type("WatchingThis", (Watching,), {"portable": []})


def drawing(gm: GraphModule) -> str:
    # Positions in torch's table of kernels depend on what ran before.
    return re.sub(r"(kernel_idx|constant_args_idx)=\d+", r"\1=N", list_graph(gm))


def kernels(program: Any) -> list[Kernel]:
    return [kernel for node in program.plan.graph.graph.nodes if (kernel := kernel_of(node)) is not None]


# -- what users compile -------------------------------------------------------------------------------------


def pointwise(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2 + y


def reduction(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum(1)


def softmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x + y, 1)


def in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return x * 2


def scatter(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(x.size(0) - 1, -1, -1)
    return x.index_put((rows,), y, accumulate=True) + 1


def rearranged(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Requirements sizes that Inductor computes beforehand (``ps0``) and a grid of two dimensions."""
    return torch.cat([x, y], 1).t().contiguous() * 2


def layer_norm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[1:], y[0])


def looped_reduction(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of more numbers than a block holds."""
    return torch.outer(x.reshape(-1), y.reshape(-1)).sin().sum()


def argmax(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    largest = (x * y).max(1)
    return largest.values + largest.indices


def cumulative(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(x * y, 1)


def half_precision(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.bfloat16() * y.bfloat16()


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A library's kernel between two of Triton's."""
    return torch.relu(torch.sin(x) @ y.t()) + 1


@triton.jit
def add_kernel(in_ptr0, in_ptr1, out_ptr, n_elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    x = tl.load(in_ptr0 + offsets, mask=mask)
    y = tl.load(in_ptr1 + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


@triton.jit
def scale_kernel(in_ptr, BLOCK: tl.constexpr, n_elements, scale):  # type: ignore[no-untyped-def]
    """Its only pointer is named like an input of Inductor's kernels, and written."""
    offsets = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    tl.store(in_ptr + offsets, tl.load(in_ptr + offsets, mask=mask) * scale, mask=mask)


@triton.jit
def count_kernel(out_ptr, n_elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every instance adds one, so that a wrong grid shows."""
    offsets = tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + offsets, offsets * 0 + 1.0, mask=offsets < n_elements)


@triton.jit
def double_kernel(source, target, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Takes descriptors, which hardware copies whole tiles by."""
    row = tl.program_id(0) * ROWS
    target.store([row, 0], source.load([row, 0]) * 2)


tuned_kernel = triton.autotune(configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=[])(
    add_kernel
)


def users_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), BLOCK=16)
    return out + 1


def users_views(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.numel() - 3)
    add_kernel[(triton.cdiv(out.numel(), 16),)](x.view(-1)[3:], y.view(-1)[3:], out, out.numel(), BLOCK=16)
    return out + 1


def users_scale(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x + y
    scale_kernel[(triton.cdiv(z.numel(), 16),)](z, 16, z.numel(), 2.5)
    return z * 2


def users_count(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    count_kernel[(3,)](out, x.numel(), BLOCK=64)
    return out + x + y


def users_autotuned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    tuned_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())
    return out + 1


def users_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One kernel, compiled once, launched on two sizes."""
    rows, total = torch.empty_like(y[0]), torch.empty_like(x)
    add_kernel[(1,)](x[0], y[0], rows, rows.numel(), BLOCK=16)
    add_kernel[(triton.cdiv(x.numel(), 16),)](x, y, total, x.numel(), BLOCK=16)
    return rows * total


def users_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Writes what the caller passed."""
    scale_kernel[(triton.cdiv(x.numel(), 16),)](x, 16, x.numel(), 2.5)
    return x + y


def users_options(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), BLOCK=16, num_warps=2, num_stages=5)
    return out


def users_descriptors(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    source = F.pad(x + y, (0, 1))  # rows of 32 bytes: they have to be multiples of 16
    target = torch.empty_like(source)
    descriptors = [TensorDescriptor.from_tensor(tensor, [4, 8]) for tensor in (source, target)]
    double_kernel[(triton.cdiv(x.size(0), 4),)](*descriptors, ROWS=4)
    return target[:, :7] + 1


@torch.library.triton_op("fxwrap_triton_lane::add", mutates_args=())
def users_operator(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An operator whose forward and backward are kernels of the user's."""
    out = torch.empty_like(x)
    wrap_triton(add_kernel)[(triton.cdiv(x.numel(), 16),)](x, y, out, x.numel(), BLOCK=16)
    return out


@torch.library.triton_op("fxwrap_triton_lane::scale", mutates_args=())
def users_scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    out = x.clone()
    wrap_triton(scale_kernel)[(triton.cdiv(x.numel(), 16),)](out, 16, x.numel(), scale)
    return out


# The gradient of x is made three times too large, so that it shows which backward ran.
users_operator.register_autograd(lambda context, grad: (users_scaled(grad.contiguous(), 3.0), grad))


def users_autograd(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return users_operator(x.sin(), y) * 2


def users_autograd_expected(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    tripled = x.sin() * 3
    return (tripled - (tripled - x.sin()).detach() + y) * 2


EXPECTED: dict[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = {
    **{f: f for f in (pointwise, reduction, looped_reduction, softmax, layer_norm, argmax, cumulative)},
    **{f: f for f in (half_precision, matmul, in_place, scatter, rearranged)},
    users_add: lambda x, y: x + y + 1,
    users_views: lambda x, y: (x + y + 1).view(-1)[3:],
    users_scale: lambda x, y: (x + y) * 5,
    users_count: lambda x, y: x + y + 3,
    users_autotuned: lambda x, y: x + y + 1,
    users_twice: lambda x, y: (x + y)[0] * (x + y),
    users_in_place: lambda x, y: x.mul_(2.5) + y,
    users_options: lambda x, y: x + y,
    users_descriptors: lambda x, y: (x + y) * 2 + 1,
    users_autograd: users_autograd_expected,
}
FUNCTIONS = pytest.mark.parametrize("fn", EXPECTED, ids=lambda fn: fn.__name__)


# -- the same results, replayed -----------------------------------------------------------------------------


@FUNCTIONS
def test_results_and_replays(fn: Any, compiled: Any, launches: list[Launch], runtime: None) -> None:
    f: Compiled = compiled(fn)
    for _ in range(4):
        args = torch.randn(2, 5, 7).unbind()
        mine = [arg.clone() for arg in args]
        torch.testing.assert_close(f(*mine), EXPECTED[fn](*args))
        torch.testing.assert_close(mine, list(args))  # inputs, where they are written
    assert launches and not f.compilation.fallbacks
    counters = f.program.counters
    assert (counters.eager, counters.recordings, counters.replays) == ({"warm-up": 1}, {"first": 1}, 2)


DIFFERENTIABLE = [
    pointwise, reduction, looped_reduction, softmax, layer_norm, argmax, cumulative, half_precision, matmul,
    rearranged, users_autograd,
]  # fmt: skip


@pytest.mark.parametrize("fn", DIFFERENTIABLE, ids=lambda fn: fn.__name__)
def test_gradients(fn: Any, compiled: Any, launches: list[Launch], runtime: None) -> None:
    """Bit for bit those of Inductor's wrapper, which launches the same kernels, and those of eager mode."""

    def results(f: Callable[..., torch.Tensor], weight: torch.Tensor | None) -> Any:
        out = f(*args)
        weight = torch.randn_like(out) if weight is None else weight
        return out, weight, torch.autograd.grad((out * weight).sum(), args)

    f: Compiled = compiled(fn)
    inductors = torch.compile(fn)
    tolerance = (
        {"rtol": 0.02, "atol": 0.02} if fn is half_precision else {}
    )  # not all is rounded that is in eager mode
    for _ in range(8):
        before = f.replays()
        args = [torch.randn(5, 7, requires_grad=True) for _ in range(2)]
        *expected, weight, theirs = results(EXPECTED[fn], None)
        assert_same(results(f, weight), results(inductors, weight))
        out, _, gradients = results(f, weight)
        torch.testing.assert_close([out, gradients], [*expected, theirs], **tolerance)
        del out
    assert not f.compilation.fallbacks
    # Gradients of one round are held in the next: recordings have to learn first to go round them.
    assert f.replays() == [count + 2 for count in before]


def sums_both_ways(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * y).sum(1), (x * 3).sum(0), (x + y).sum(0).bfloat16()


def test_rows_and_columns_in_one_kernel(
    compiled: Any, launches: list[Launch], runtime: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are added up in parts, which lie in a workspace until sums of a library put them together."""
    # GPUs do so in the backward of every large normalisation.
    if not hasattr(scheduler, "_is_gpu_triton_backend"):
        pytest.skip("this torch asks each node whether it is on a GPU")
    monkeypatch.setattr(scheduler, "_is_gpu_triton_backend", lambda *nodes: True)
    f: Compiled = compiled(sums_both_ways)
    settings = {"triton.mix_order_reduction": True, "triton.mix_order_reduction_non_strict_mode": True}
    with config.patch(settings):
        for _ in range(4):
            x, y = torch.randn(2, 64, 8)
            torch.testing.assert_close(f(x, y), sums_both_ways(x, y))
    assert not f.compilation.fallbacks and f.replays() == [2]
    assert "workspace_0" in list_graph(f.program.plan.graph)


@pytest.mark.parametrize(
    "fn", [pointwise, softmax, rearranged, users_add, users_autotuned], ids=lambda fn: fn.__name__
)
def test_dynamic_shapes(fn: Any, compiled: Any, launches: list[Launch]) -> None:
    f: Compiled = compiled(fn, dynamic=True)
    for _ in range(3):
        for rows, columns in ((5, 7), (9, 3)):
            args = torch.randn(2, rows, columns).unbind()
            torch.testing.assert_close(f(*args), EXPECTED[fn](*args))
    assert f.program.counters.replays == 2
    assert not f.compilation.fallbacks


@pytest.mark.parametrize("fn", [softmax, matmul, users_autograd], ids=lambda fn: fn.__name__)
def test_gradients_with_dynamic_shapes(fn: Any, compiled: Any, launches: list[Launch]) -> None:
    f: Compiled = compiled(fn, dynamic=True)
    for _ in range(3):
        for rows, columns in ((5, 7), (9, 3)):
            args = [torch.randn(rows, columns, requires_grad=True) for _ in range(2)]
            out, expected = f(*args), EXPECTED[fn](*args)
            weight = torch.randn_like(out)
            torch.testing.assert_close(
                torch.autograd.grad((out * weight).sum(), args), torch.autograd.grad((expected * weight).sum(), args)
            )
            del out
    assert [bool(count) for count in f.replays()] == [True, True]
    assert not f.compilation.fallbacks


def test_a_descriptor_is_a_view_made_anew_for_every_input(
    compiled: Any, launches: list[Launch], runtime: None
) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        descriptors = [TensorDescriptor.from_tensor(tensor, [4, 8]) for tensor in (x, out)]
        double_kernel[(2,)](*descriptors, ROWS=4)
        return out

    f: Compiled = compiled(fn)
    for _ in range(5):
        x = torch.randn(6, 8)
        mine = x.clone()
        torch.testing.assert_close(f(mine), x * 2)
        torch.testing.assert_close(mine, x)
    graph = f.program.plan.graph.graph
    (launched,) = graph.find_nodes(op="call_function", target=launch)
    _, *descriptors, _x, _y, _z = launched.args
    assert [kind_of(node) for node in descriptors] == [Kind.VIEW] * 2
    assert [node.args[1] for node in descriptors] == [[4, 8]] * 2
    (kernel,) = kernels(f.program)
    assert kernel.writes == (1,) and f.program.counters.replays == 3


# -- the same launches as Inductor's own wrapper makes ------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@FUNCTIONS
def test_launches_are_those_of_inductors_wrapper(
    fn: Any, dynamic: bool, compiled: Any, launches: list[Launch]
) -> None:
    args = torch.randn(2, 5, 7).unbind()
    compiled(fn, dynamic=dynamic)(*[arg.clone() for arg in args])
    mine = list(launches)
    launches.clear()
    torch._dynamo.reset()
    with config.patch(allow_buffer_reuse=False):
        torch.compile(fn, dynamic=dynamic)(*[arg.clone() for arg in args])
    assert mine == launches != []


# -- tuning ----------------------------------------------------------------------------------------------------


CONFIGURATIONS = [
    triton.Config({"BLOCK": 16}, num_warps=2, num_stages=1),
    triton.Config({"BLOCK": 32}, num_warps=8, num_stages=4),
    triton.Config({"BLOCK": 8}, num_warps=1, num_stages=2),
]
tuned_with_options = triton.autotune(configs=CONFIGURATIONS, key=[])(add_kernel)


def users_choice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    tuned_with_options[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel())
    return out


@pytest.mark.parametrize("best", CONFIGURATIONS, ids=lambda best: f"{best.num_warps}-warps")
def test_the_chosen_configuration_reaches_every_launch(best: Any, compiled: Any, runtime: None) -> None:
    def cost(launch: Launch) -> float:
        return abs(launch.options["num_warps"] - best.num_warps)

    with triton_on_cpu(cost) as launches, config.patch(autotune_local_cache=False):
        f: Compiled = compiled(users_choice)
        for _ in range(4):
            x, y = torch.randn(2, 5, 7)
            torch.testing.assert_close(f(x, y), x + y)
        assert f.program.counters.replays == 2
        assert len(launches) == 4
        for launched in launches:
            assert launched.arguments["BLOCK"] == best.kwargs["BLOCK"]
            assert launched.grid == (triton.cdiv(35, best.kwargs["BLOCK"]), 1, 1)
            assert launched.options["num_warps"] == best.num_warps
            assert launched.options["num_stages"] == best.num_stages


@pytest.mark.parametrize("fn", [users_choice, rearranged, looped_reduction], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("seed", [1, 2])
def test_tuning_chooses_what_inductors_wrapper_chooses(fn: Any, seed: int, compiled: Any, runtime: None) -> None:
    """Once, at the first call: a launch that is captured is tuned already."""
    measured: list[Launch] = []

    def cost(launch: Launch) -> float:
        measured.append(launch)
        return random.Random(f"{seed} {launch.grid} {launch.arguments} {launch.options}").random()

    args = torch.randn(2, 5, 7).unbind()
    tuning = {"max_autotune_pointwise": True, "max_autotune": True, "autotune_local_cache": False}
    with triton_on_cpu(cost) as launches, config.patch(tuning):
        f: Compiled = compiled(fn)
        f(*args)
        mine, my_candidates = list(launches), list(measured)
        for _ in range(3):
            f(*args)
        assert measured == my_candidates and launches == mine * 4
        assert f.program.counters.replays == 2
    launches.clear()
    measured.clear()
    torch._dynamo.reset()
    with triton_on_cpu(cost) as launches, config.patch(tuning):
        torch.compile(fn)(*args)
        assert launches == mine and measured == my_candidates and len(measured) > 1


def test_random_numbers_are_those_of_inductors_wrapper(compiled: Any, launches: list[Launch], runtime: None) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.dropout(x, 0.5), torch.rand_like(x) + x

    x = torch.randn(5, 7)
    results = []
    for f in (compiled(fn), torch.compile(fn)):
        torch._dynamo.reset()
        torch.manual_seed(1)
        results.append([f(x) for _ in range(4)])
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not torch.equal(results[0][2][1], results[0][3][1])


def test_a_cpu_scalar_is_passed_by_value_and_never_frozen(
    compiled: Any, launches: list[Launch], runtime: None
) -> None:
    f: Compiled = compiled(lambda x, s, k: (x * s + 1) / k)
    for step in range(4):
        x, s, k = torch.randn(5, 7), torch.randn(()), torch.tensor(step + 1)
        torch.testing.assert_close(f(x, s, k), (x * s + 1) / k)
        args = list(launches[-1].arguments.values())
        assert [type(arg) for arg in args[:3]] == [tuple, float, int]


# -- before and after lowering ------------------------------------------------------------------------------


def test_golden_drawing_of_lowering(compiled: Any, launches: list[Launch], watching: type[Watching]) -> None:
    f: Compiled = compiled(users_add, options={"codegen": watching})
    f(*torch.randn(2, 5, 7).unbind())
    (before,) = watching.portable
    after = drawing(f.program.plan.graph)
    assert (
        f"{before}\n\nbecomes\n\n{after}\n"
        == """\
x: float32[5, 7] on cpu (arg0_1)
y: float32[5, 7] on cpu (arg1_1)
buf0 = allocate (5, 7), strides (7, 1), float32, cpu
triton_kernel_wrapper_mutation(kernel_idx=N, constant_args_idx=N, grid=[(3, 1, 1)], tma_descriptor_metadata={}, \
kwargs={'in_ptr0': x, 'in_ptr1': y, 'out_ptr': buf0, 'n_elements': 35, 'BLOCK': 16})
buf2 = allocate (5, 7), strides (7, 1), float32, cpu
triton_kernel_wrapper_mutation(kernel_idx=N, constant_args_idx=N, grid=[(1, 1, 1)], tma_descriptor_metadata={}, \
kwargs={'in_ptr0': buf0, 'out_ptr0': buf2, 'xnumel': 35, 'XBLOCK': 64})
return buf2

becomes

x: float32[5, 7] on cpu (arg0_1)
y: float32[5, 7] on cpu (arg1_1)
buf0 = allocate (5, 7), strides (7, 1), float32, cpu
launch add_kernel_0(x, y, buf0, 35, 3, 1, 1)
buf2 = allocate (5, 7), strides (7, 1), float32, cpu
launch triton_poi_fused_add_0(buf0, buf2, 35)
return buf2
"""
    )


@FUNCTIONS
def test_portable_before_and_launches_after(
    fn: Any, compiled: Any, launches: list[Launch], watching: type[Watching]
) -> None:
    f: Compiled = compiled(fn, options={"codegen": watching})
    f(*torch.randn(2, 5, 7).unbind())
    (before,) = watching.portable
    targets = [node.target for node in f.program.plan.graph.graph.nodes]
    assert triton_kernel_wrapper_mutation not in targets
    portable = before.count("triton_kernel_wrapper_mutation(")
    # A float argument has no portable form; that kernel is launched directly.
    assert before.count("launch ") == (fn in (users_scale, users_in_place))
    assert targets.count(launch) == portable + before.count("launch ") > 0


@pytest.mark.parametrize("fn", [rearranged, users_add, users_autotuned], ids=lambda fn: fn.__name__)
def test_lowering_leaves_no_arithmetic_that_nobody_uses(fn: Any, compiled: Any, launches: list[Launch]) -> None:
    """A grid of symbolic size is computed for the portable call only."""
    f: Compiled = compiled(fn, dynamic=True)
    f(*torch.randn(2, 5, 7).unbind())
    unused = [node for node in f.program.plan.graph.graph.nodes if not node.users and node.op == "call_function"]
    names = {getattr(node.target, "__name__", "") for node in unused}
    assert {name for name in names if not name.startswith("assert_")} == {"launch"}


def test_lowering_reaches_subgraphs(compiled: Any, launches: list[Launch], watching: type[Watching]) -> None:
    def fn(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return torch.cond(p, lambda x: torch.relu(x) + 1, lambda x: torch.sin(x) * 2, (x,))

    f: Compiled = compiled(fn)
    for choice in (True, False, True, False):
        x, p = torch.randn(5, 7), torch.tensor(choice)
        torch.testing.assert_close(f(x, p), fn(x, p))
    assert len(launches) == 4
    branches = [module for module in f.program.plan.graph.modules() if isinstance(module, GraphModule)][1:]
    assert len(branches) == 2
    for branch in branches:
        targets = [node.target for node in branch.graph.nodes]
        assert launch in targets and triton_kernel_wrapper_mutation not in targets


def test_a_subclass_may_change_portable_calls(compiled: Any, launches: list[Launch]) -> None:
    class Swapping(FxwrapCodegen):
        """Makes another graph module, without what nobody uses, in which y - x is computed for x - y."""

        def compile_graph(self, gm: GraphModule) -> Any:
            for call in gm.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_mutation):
                arguments = call.kwargs["kwargs"]
                swapped = {"in_ptr0": arguments["in_ptr1"], "in_ptr1": arguments["in_ptr0"]}
                call.kwargs = {**call.kwargs, "kwargs": {**arguments, **swapped}}
            # Torch does not know that the call has an effect.
            gm.graph.eliminate_dead_code(
                lambda node: node.is_impure() or node.target is triton_kernel_wrapper_mutation
            )
            return super().compile_graph(GraphModule(gm, gm.graph))

    f: Compiled = compiled(lambda x, y: x - y, options={"codegen": Swapping}, dynamic=True)
    for _ in range(3):
        x, y = torch.randn(2, 5, 7).unbind()
        torch.testing.assert_close(f(x, y), y - x)
    assert not f.compilation.fallbacks


# -- which arguments a kernel writes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (pointwise, [["out_ptr0"]]),
        (in_place, [["in_ptr0", "out_ptr0", "out_ptr2"]]),  # the input, which is passed twice, and the result
        (users_add, [["out_ptr"], ["out_ptr0"]]),
        (users_scale, [["out_ptr0"], ["in_ptr"], ["out_ptr0"]]),
        (users_autotuned, [["out_ptr"], ["out_ptr0"]]),
        (users_descriptors, [["out_ptr0"], ["target"], ["out_ptr0"]]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_writes_of_real_kernels(fn: Any, expected: list[list[str]], compiled: Any, launches: list[Launch]) -> None:
    f: Compiled = compiled(fn)
    f(*torch.randn(2, 5, 7).unbind())
    found = []
    for kernel in kernels(f.program):
        tuner = kernel.call.tuner  # type: ignore[attr-defined]
        declared = {parameter.name for parameter in tuner.fn.params if parameter.is_constexpr}
        names = [name for name in tuner.fn.arg_names if name not in declared]
        found.append([names[position] for position in kernel.writes])
    assert found == expected


def made_up(mutated: tuple[str, ...] = (), custom: bool = False, extra: int = 0) -> Any:
    return types.SimpleNamespace(
        mutated_arg_names=list(mutated),
        custom_kernel=custom,
        inductor_meta={"extra_launcher_args": [f"_grid_{i}" for i in range(extra)]},
    )


POINTER, SIZE, CONSTANT = "*fp32", "i32", "constexpr"


@pytest.mark.parametrize(
    ("tuner", "signature", "known", "expected"),
    [
        # Inductor's own kernels: inputs are read, the rest is written.
        (made_up(), {"in_ptr0": POINTER, "out_ptr0": POINTER, "xnumel": SIZE, "XBLOCK": CONSTANT}, set(), (1,)),
        (made_up(), {"in_out_ptr0": POINTER, "in_ptr0": POINTER, "xnumel": SIZE}, set(), (0,)),
        (made_up(("in_ptr1",)), {"in_ptr0": POINTER, "in_ptr1": POINTER, "out_ptr0": POINTER}, set(), (1, 2)),
        (made_up(), {"in_ptr0": POINTER, "out_ptr0": POINTER, "ks0": SIZE, "ws_ptr": "*u8"}, set(), (1, 3)),
        # A CPU scalar is passed by value.
        (made_up(), {"in_ptr0": POINTER, "in_ptr1": "fp32", "out_ptr0": POINTER}, set(), (2,)),
        # A size of one is a constant, and is passed all the same.
        (made_up(), {"in_ptr0": POINTER, "out_ptr0": POINTER, "ks0": CONSTANT, "ws_ptr": POINTER}, set(), (1, 3)),
        # Templates: named inputs, of which some are written.
        (made_up(extra=3), {"arg_A": POINTER, "arg_B": POINTER, "out_ptr0": POINTER}, set(), (2,)),
        (made_up(extra=3), {"arg_Q": POINTER, "arg_DQ": POINTER, "in_ptr2": POINTER}, {"arg_DQ", "in_ptr2"}, (1, 2)),
        # What the user wrote: any name may be written.
        (made_up(custom=True), {"in_ptr": POINTER, "n": SIZE}, {"in_ptr"}, (0,)),
        (made_up(custom=True), {"x": POINTER, "y": POINTER, "n": SIZE}, {"y"}, (1,)),
        (made_up(custom=True), {"in_ptr": POINTER, "y": POINTER, "n": SIZE}, None, (0, 1)),
        (made_up(custom=True), {"d": "tensordesc<fp32[8, 8]>", "y": POINTER}, None, (0, 1)),
        (made_up(custom=True), {"d": "tensordesc<fp32[8, 8]>", "y": POINTER}, {"y"}, (1,)),
        (made_up(("x",), custom=True), {"x": POINTER, "y": POINTER}, {"y"}, (0, 1)),
    ],
)
def test_written_arguments(tuner: Any, signature: dict[str, str], known: Any, expected: tuple[int, ...]) -> None:
    meta = {"signature": signature}
    count = len(signature) - ("XBLOCK" in signature) + len(tuner.inductor_meta["extra_launcher_args"])
    names = argument_names(tuner, meta, None, count)
    assert len(names) == count
    assert written_arguments(tuner, meta, names, known) == expected


def test_a_kernel_of_which_nothing_is_known_writes_everything() -> None:
    """For example one that is not Triton's (a CuteDSL template): it has a ``run`` and no more."""
    tuner = types.SimpleNamespace()
    names = argument_names(tuner, None, None, 3)
    assert written_arguments(tuner, None, names, set()) == (0, 1, 2)


def test_inputs_that_a_template_writes_are_known() -> None:
    """Flex attention's backward adds to gradients that it takes as inputs."""
    layout = ir.FixedLayout(torch.device("cpu"), torch.float32, [4], [1])
    gradient, query = (ir.InputBuffer(name=name, layout=layout) for name in ("buf3", "arg0_1"))
    template = types.SimpleNamespace(mutated_inputs=[gradient], inputs=[query, gradient])
    line = types.SimpleNamespace(raw_keys=None, call_args=["arg0_1", "buf3", "buf4", 5])
    graph = types.SimpleNamespace(operations=[template, types.SimpleNamespace()], scheduler=None)
    with V.set_graph_handler(graph):
        assert declared_writes(line, ["arg_Q", "arg_DQ", "out_ptr0", "ks0"]) == {"arg_DQ"}


def test_names_of_a_user_kernels_arguments_are_the_ones_that_are_passed() -> None:
    """The kernel's declared constants are in its signature, wherever the user put them, and not in the call."""
    meta = {"signature": {"x": POINTER, "BLOCK": CONSTANT, "y": POINTER, "n": SIZE}, "constants": {"BLOCK": 16}}
    keys = ["x", "y", "n", "", "", ""]
    names = argument_names(made_up(custom=True, extra=3), meta, keys, 6)
    assert names == tuple(keys)
    assert written_arguments(made_up(custom=True, extra=3), meta, names, {"y"}) == (1,)


# -- launching ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_launcher_uses_its_devices_current_stream(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inductor's wrapper: under a guard for the device, on the stream that is current there."""
    events: list[Any] = []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            events.append(("enter", self.index))

        def __exit__(self, *exception: Any) -> None:
            events.append(("leave", self.index))

    module = types.SimpleNamespace(device=Guard, device_count=lambda: count)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(triton_kernels, "_raw_stream_getter", lambda device: lambda index: 100 + index)
    tuner = types.SimpleNamespace(run=lambda *args, stream: events.append((args, stream)))
    TritonLauncher(tuner, torch.device("cuda", 1))("a", 5)
    run = [(("a", 5), 101)]
    assert events == (run if count == 1 else [("enter", 1), *run, ("leave", 1)])


def test_the_lane_leaves_nothing_behind(compiled: Any) -> None:
    def state() -> dict[str, Any]:
        owners = [
            tl,
            tl.core,
            tl.standard,
            tl.math,
            tl.tensor,
            triton_helpers,
            triton.backends,
            JITFunction,
            ASTSource,
        ]
        return {
            f"{compilation.__name__}.{key}": value
            for compilation in owners
            for key, value in vars(compilation).items()
        }

    before = state()
    with triton_on_cpu():
        compiled(softmax)(*torch.randn(2, 5, 7).unbind())
    after = state()
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []
    assert config.cpu_backend == "cpp"


def test_two_threads_tune_one_kernel_one_after_the_other() -> None:
    """Inductor's tuner is not safe for two: the second would run a kernel that the first has not loaded yet."""

    class Tuner:
        def __init__(self) -> None:
            self.inside, self.most, self.calls = 0, 0, 0

        def run(self, *_: Any, stream: int) -> None:
            self.inside += 1
            self.most, self.calls = max(self.most, self.inside), self.calls + 1
            time.sleep(0.02)
            self.inside -= 1

    tuner = Tuner()
    launcher = TritonLauncher(tuner, torch.device("cpu"))
    threads = [threading.Thread(target=launcher) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tuner.most, tuner.calls) == (1, 4)
