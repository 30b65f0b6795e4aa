"""Constructs: whatever Inductor can wrap becomes a host graph, and computes the bits of Inductor's own wrapper."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from conftest import (
    Compiled,
    assert_same,
    freezes,
    inductor,
    inductor_takes_chosen_sizes,
    on_cpu,
    on_simulated,
    tensors_in,
)
from torch._inductor import config
from torch._inductor.codegen.wrapper import WrapperLine
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_map_only

import fxwrap
from fxwrap.codegen.store.stored_program import functions
from fxwrap.graphs.devices.runtime import conditional_nodes_of, freezes_addresses
from fxwrap.host_graph.control_flow import switch, while_loop
from fxwrap.host_graph.graph_json import graph_to_data
from fxwrap.host_graph.listing import list_graph
from fxwrap.host_graph.nodes import Kind, kind_of, launch
from fxwrap.host_graph.sizes import evaluate_sizes, number_at
from fxwrap.host_graph.user_code import user_line
from fxwrap.passes.analysis.aliasing import analyse_storages
from fxwrap.passes.analysis.dependencies import build_dependency_graph
from fxwrap.passes.verify import verify_schedule
from fxwrap.plan import Verdict

CALLS = 4  # warm-up, recording, two replays
Make = Callable[[], tuple[Any, ...]]


def square() -> tuple[torch.Tensor]:
    return (torch.randn(4, 4),)


def squares() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 4), torch.randn(4, 4)


def rows() -> tuple[torch.Tensor]:
    """As many rows as it happens."""
    return (torch.randn(int(torch.randint(3, 6, ())), 4),)


def run(function: Callable[..., Any], inputs: tuple[Any, ...], gradients: bool) -> list[Any]:
    """Results, gradients, and the inputs afterwards."""
    leaves = [
        leaf for leaf in inputs if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() | leaf.is_complex()
    ]
    for leaf in leaves if gradients else ():
        leaf.requires_grad_()
    result = function(*inputs)
    if gradients:
        sum(t.abs().sum() for t in tensors_in(result) if t.requires_grad).backward()
    return [result, [leaf.grad for leaf in leaves], inputs]


def twice(make: Make) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Inputs, and others just like them."""
    state = torch.get_rng_state()
    first = make()
    torch.set_rng_state(state)
    return first, make()


def compare(
    function: Callable[..., Any],
    make: Make = square,
    gradients: bool = False,
    replays: int = 2,
    **compile_options: Any,
) -> Compiled:
    """Compare with Inductor's own wrapper, call by call."""
    ours = Compiled(function, compile_options=compile_options)
    theirs = inductor(function, **compile_options)
    for _ in range(CALLS):
        mine, others = twice(make)
        expected = run(theirs, others, gradients)  # first, so that a failure of Inductor's own is seen as that
        assert_same(run(ours, mine, gradients), expected)
    assert not ours.compilation.fallbacks, ours.compilation.fallbacks[0]
    assert ours.programs and all(count >= replays for count in ours.replays())
    return ours


# -- operators -----------------------------------------------------------------------------------------


def scatter(x: torch.Tensor) -> torch.Tensor:
    index = torch.tensor([[0, 1, 0, 1]])
    return torch.zeros(4, 4).scatter_reduce(0, index, x[:1], "prod").scatter_add(0, index, x[1:2])


def index_put(x: torch.Tensor) -> torch.Tensor:
    index = torch.tensor([0, 0, 1])
    return x.sin().index_put((index,), x[:3], accumulate=True)


def several_outputs(x: torch.Tensor) -> list[torch.Tensor]:
    values, indices = torch.topk(x, 2)
    q, r = torch.linalg.qr(x)
    return [values.sum() + indices.sum() + (q @ r).sum(), *torch.var_mean(x, 1), *torch.frexp(x), *x.mode()]


def list_output(x: torch.Tensor) -> list[torch.Tensor]:
    return [part.sin() for part in torch.ops.aten.unbind(torch.sort(x)[0])]


def attention(x: torch.Tensor) -> torch.Tensor:
    y = x.view(1, 2, 2, 4)
    return torch.nn.functional.scaled_dot_product_attention(y, y + 1, y * 2)


def fft(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.ifft(torch.fft.fft(x * 2)).real


def linalg(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.cholesky(x @ x.t() + 8 * torch.eye(4)) + torch.linalg.inv(x + 9 * torch.eye(4))


def half(x: torch.Tensor) -> torch.Tensor:
    return (x.bfloat16() @ x.bfloat16()).float().softmax(0)


def convolution(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(x.view(1, 1, 4, 4), x[:3, :3].reshape(1, 1, 3, 3), padding=1).relu()


def embedding(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding_bag(torch.tensor([[0, 1], [2, 3]]), x).sort()[0]


def zero_elements(x: torch.Tensor) -> list[torch.Tensor]:
    none = x[:0]
    return [torch.cat([none @ x, x.cumsum(0)]), none @ x, none.sum(), none.sort(0)[0], none.softmax(0)]


def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.sin()
    return y[1:], y.t(), y.view(torch.int32), y.view(2, 8)[:, ::2], y.sum(0).expand(4, 4), x.t()


def copies_that_need_not_wait(x: torch.Tensor) -> torch.Tensor:
    return x.sin().to("cpu", non_blocking=True) + torch.empty(4, 4).copy_(x, non_blocking=True)


@pytest.mark.parametrize(
    "function",
    [
        scatter, index_put, several_outputs, list_output, attention, fft, linalg, half, convolution, embedding,
        zero_elements, views, copies_that_need_not_wait,
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_operators(function: Callable[..., Any]) -> None:
    compare(function)


def test_operators_backward() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.embedding(torch.tensor([0, 1, 1]), x)
        return rows.cumsum(0)[1:] @ x.sort(1)[0]

    compare(function, gradients=True)


def test_empty_inputs() -> None:
    compare(lambda e, x: (e @ x, e * 2, e.sum(), x.cumsum(0)[e.shape[0] :]), lambda: (torch.randn(0, 4), *square()))


@pytest.mark.gpu
def test_pinned_memory() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ones(4, 4, pin_memory=True).to(x.device, non_blocking=True) + x

    def make() -> tuple[torch.Tensor]:
        return (torch.randn(4, 4, device=torch.accelerator.current_accelerator()),)

    try:
        inductor(function)(*make())
    except torch._inductor.exc.InductorError as error:
        pytest.skip(f"Inductor itself refuses: {error}")
    compare(function, make)


# -- dtypes --------------------------------------------------------------------------------------------


def test_complex_numbers() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        back = torch.view_as_complex(torch.view_as_real(b) * 2)
        return a * a + 1, torch.view_as_real(a).sum(), (b @ b).abs(), back, a.conj() * a, a.conj(), b.real + b.imag

    compare(function, lambda: (torch.randn(4, 4, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.complex128)))


def test_complex_gradients() -> None:
    compare(lambda a: (a @ a.conj()).abs().sum(), lambda: (torch.randn(4, 4, dtype=torch.complex64),), gradients=True)


def test_narrow_and_unsigned_numbers() -> None:
    def function(x: torch.Tensor, u8: torch.Tensor, u16: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        f8 = x.to(torch.float8_e4m3fn)
        u32 = u16.to(torch.uint32)
        numbers = [f8, f8.float() + 1, x.to(torch.float8_e5m2).view(torch.uint8), x.half() @ x.half()]
        nibbles = [u8 & 15, u8 >> 4, u8.view(torch.int8) + 1]
        return [
            *numbers,
            *nibbles,
            u16.int() + 1,
            u32.long() * 2,
            u32,
            mask & (x > 0),
            mask.sum(),
            x.view(torch.int32),
        ]

    def make() -> tuple[torch.Tensor, ...]:
        u8 = torch.randint(0, 255, (4, 4), dtype=torch.uint8)
        return torch.randn(4, 4), u8, u8.to(torch.uint16), torch.rand(4, 4) > 0.5

    compare(function, make)


# -- control flow --------------------------------------------------------------------------------------


def test_cond_with_closures_and_gradients() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: v.sin() @ w, lambda v: v.cos() + w, (x,))

    compare(function, squares, gradients=True)


def test_cond_in_a_cond() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def yes(v: torch.Tensor) -> torch.Tensor:
            return torch.cond(v[0, 0] > 0, lambda u: u + 1, lambda u: u.sin(), (v,))

        return torch.cond(x.sum() > 0, yes, lambda v: v.cos() @ v, (x,)), x.sin()

    compare(function)


def test_cond_with_dynamic_shapes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda v: v.sin() + v.shape[0], lambda v: v.cos() * 2, (x,))

    compare(function, rows, replays=0, dynamic=True)


def test_cond_whose_branches_have_results_of_different_sizes() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compare(lambda x: torch.cond(x.sum() > 0, lambda v: v[:2].sin(), lambda v: v[:3].cos(), (x,)))


def count_down(i: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    """A loop over outer tensors, with a branch in its body."""

    def body(i: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i - 1, torch.cond(x.sum() > 0, lambda v: v.sin() - 1, lambda v: v.cos() @ w, (x,))

    return torch._higher_order_ops.while_loop(lambda i, x: (i > 0) & (x.sum() < 100), body, (i, x))


def test_while_loop_with_a_cond_in_it() -> None:
    compare(count_down, lambda: (torch.tensor(3), *squares()))


def test_while_loop_that_does_nothing_returns_copies() -> None:
    f = Compiled(count_down)
    for _ in range(CALLS):
        i, x, w = torch.tensor(0), *squares()
        number, result = f(i, x, w)
        assert torch.equal(result, x) and result.data_ptr() != x.data_ptr() and number.item() == 0
    assert f.replays() == [2] and not f.compilation.fallbacks


def test_while_loop_with_dynamic_shapes() -> None:
    def function(i: torch.Tensor, x: torch.Tensor) -> Any:
        body = lambda i, x: (i - 1, x.sin() + x.shape[0])
        return torch._higher_order_ops.while_loop(lambda i, x: i > 0, body, (i, x))

    compare(function, lambda: (torch.tensor(3), *rows()), replays=0, dynamic=True)


def test_scan_with_gradients(unbacked: None) -> None:
    from torch._higher_order_ops.scan import scan

    def function(start: torch.Tensor, xs: torch.Tensor) -> Any:
        return scan(lambda carry, x: (carry + x, (carry * x).sin()), start, xs)[1]

    compare(function, lambda: (torch.randn(4), torch.randn(5, 4)), gradients=True)


@pytest.mark.parametrize("gradients", [False, True])
def test_scan_with_several_results(unbacked: None, gradients: bool) -> None:
    """Inductor writes stacked results in place, and its loop has no outputs for them.

    ::

        loop.outputs = [carry]                   of what the loop returns, carry is number 2
        getitem(loop, 2)                         not loop.outputs[2]
    """
    from torch._higher_order_ops.scan import scan

    def function(start: torch.Tensor, xs: torch.Tensor) -> Any:
        return scan(lambda carry, x: (carry * 0.5 + x, (carry.sin(), x.cos())), start, xs)

    compare(function, lambda: (torch.randn(3), torch.randn(6, 3)), gradients=gradients)


def test_the_carry_of_a_scan_has_its_own_size(unbacked: None) -> None:
    """What is allocated for a result is sized by its operand's fake value: it must be the carry's, not another's."""
    from torch._higher_order_ops.scan import scan

    def function(start: torch.Tensor, xs: torch.Tensor) -> Any:
        carry, stacked = scan(lambda carry, x: (carry * 0.5 + x.sum(), carry.sin()), start, xs)
        return torch.sort(carry, 1)[0], stacked

    ours = compare(function, lambda: (torch.randn(8, 8), torch.randn(8, 3)))
    assert "aten.sort.values_stable" in list_graph(ours.program.plan.graph)


def test_associative_scan() -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    compare(lambda xs: associative_scan(lambda a, b: a * b, xs, dim=0, combine_mode="generic"))


@torch.compiler.nested_compile_region
def region(v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(torch.nn.functional.dropout(v @ w, 0.5), 2)
    return values.sin(), indices


def test_nested_regions_are_part_of_the_graph() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, i = region(x, w)
        second, j = region(x.sin() + first.sum(), w)
        return first + second, i, j

    ours = compare_random(function, squares, gradients=True)
    (forward, backward) = (program.plan.graph for program in ours.programs)
    for gm in (forward, backward):
        assert not [child for child in gm.children() if isinstance(child, GraphModule)]
        assert any(node.target is launch for node in gm.graph.nodes)


def test_a_nested_region_with_a_branch_and_dynamic_shapes() -> None:
    @torch.compiler.nested_compile_region
    def branching(v: torch.Tensor) -> torch.Tensor:
        wide = v.reshape(-1, 2) @ torch.ones(2, v.size(0) * 2)
        return torch.cond(v.sum() > 0, lambda a: a.sin(), lambda a: a + 1, (wide,))

    compare(lambda x: branching(x) + branching(x.cos()), rows, replays=0, dynamic=True)


def loop_then_branch(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What is computed before, between and after is captured; branches and loops are, where graphs can decide."""
    body = lambda i, y: (i + 1, (y @ w).sin())
    _, y = torch._higher_order_ops.while_loop(lambda i, y: i < 3, body, (torch.zeros((), dtype=torch.int64), x + 1))
    z = torch.cond(y.sum() > 0, lambda v: v + w, lambda v: v - w, (y * 2,))
    return z.relu(), y


def test_control_flow_between_captured_partitions(device: torch.device) -> None:
    f, theirs = Compiled(loop_then_branch), inductor(loop_then_branch)
    for _ in range(CALLS):
        x, w = torch.randn(2, 4, 4, device=device)
        assert_same(f(x, w), theirs(x, w))
    assert f.replays() == [2] and not f.compilation.fallbacks
    partitions = f.program.plan.partitions
    if not freezes_addresses(device):
        assert [partition.verdict for partition in partitions] == [Verdict.CAPTURED]
        return
    reasons = "; ".join(partition.reason for partition in partitions)
    if conditional_nodes_of(device) is not None:
        assert "while_loop:" not in reasons and "switch:" not in reasons
        return
    assert "while_loop: control flow is decided on the host" in reasons
    assert "switch: control flow is decided on the host" in reasons and "test_constructs.py" in reasons


def branching_graph(writes: bool, returns_input: bool) -> GraphModule:
    """``y = switch(p, (a, b), branch); sin(a); add_(b)`` with a branch that may write ``a`` and return it."""

    def fake(node: Any) -> Any:
        node.meta["val"] = torch.empty(4)
        return node

    branch = Graph()
    a, b = fake(branch.placeholder("a")), fake(branch.placeholder("b"))
    changed = fake(branch.call_function(torch.ops.aten.add_.Tensor, (a, b))) if writes else a
    fresh = fake(branch.call_function(torch.ops.aten.sin.default, (b,)))
    branch.output([changed if returns_input else fresh, fresh])
    modules = torch.nn.Module()
    modules.branch = GraphModule({}, branch)
    graph = Graph()
    p, a, b = (fake(graph.placeholder(name)) for name in "pab")
    handle = graph.create_node("get_attr", "branch")
    y = graph.call_function(switch, (p, (a, b), handle, handle))
    y.meta["val"] = [torch.empty(4), torch.empty(4)]
    fake(graph.call_function(torch.ops.aten.sin.default, (a,), name="reader"))
    fake(graph.call_function(torch.ops.aten.add_.Tensor, (b, 1), name="writer"))
    graph.output([y])
    return GraphModule(modules, graph)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("returns_input", [False, True])
def test_what_a_branch_does_to_its_operands_is_known(writes: bool, returns_input: bool) -> None:
    gm = branching_graph(writes, returns_input)
    facts = analyse_storages(gm)
    node = {n.name: n for n in gm.graph.nodes}
    y = node["switch"]
    assert facts.writes(y) == (facts.of(node["a"]) if writes else frozenset())
    assert facts.reads(y) >= facts.of(node["a"]) | facts.of(node["b"])
    assert bool(facts.of(y) & facts.of(node["a"])) == returns_input and not facts.of(y) & facts.of(node["b"])
    edges = build_dependency_graph(gm, facts)
    assert edges.has_edge(y, node["reader"]) == writes and edges.has_edge(y, node["writer"])
    work = [n for n in gm.graph.nodes if kind_of(n) is Kind.EXTERN]
    verify_schedule(gm, work)
    early_reader = sorted(work, key=lambda n: n.name != "reader")
    with pytest.raises(fxwrap.PlanError) if writes else contextlib.nullcontext():
        verify_schedule(gm, early_reader)


def test_loops_and_branches_run_on_fake_tensors() -> None:
    """So that any pass can propagate values through a host graph."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, p = torch.empty(4), torch.empty((), dtype=torch.bool)
        (y,) = switch(p, (x,), lambda v: [v.sin()], lambda v: [v.cos()])
        (z,) = while_loop(lambda v: [v.sum() > 0], lambda v: [v.view(2, 2).sum(0).repeat(2)], (x,))
        (stacked,) = while_loop(lambda v: [v.sum() > 0], lambda v: [v.sin()], (x,), (), True)
    assert y.shape == z.shape == (4,) and stacked.shape == (1, 4)


# -- flex attention ------------------------------------------------------------------------------------


def test_flex_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        biased = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1)
        return biased, flex_attention(q, k, v, block_mask=mask)

    # Gradients: torch has none for flex attention on a CPU.
    compare(function, lambda: tuple(torch.randn(3, 1, 2, 128, 16)))


# -- effects and objects -------------------------------------------------------------------------------


def register_effect(operator: Any) -> None:
    """Have torch keep an operator's calls in order."""
    try:
        from torch._library.effects import EffectType
    except ImportError:
        from torch._higher_order_ops.effects import _EffectType as EffectType
    register = getattr(torch.library, "_register_effectful_op", None)
    if register is None:
        from torch._higher_order_ops.effects import _register_effectful_op as register
    register(operator, EffectType.ORDERED)


LOG: list[str] = []


def note(name: str, **kwargs: Any) -> Any:
    """An operator that copies its input, and whose calls are seen in LOG."""

    def function(x: torch.Tensor) -> torch.Tensor:
        LOG.append(f"{name} {x.sum().item():.4f}")
        return x.clone()

    operator = torch.library.custom_op(f"fxwrap_constructs::{name}", function, mutates_args=(), **kwargs)
    operator.register_fake(torch.empty_like)
    register_effect(operator._opoverload)
    return operator


captured_note, eager_note = note("captured"), note("eager", tags=(torch.Tag.cudagraph_unsafe,))


def test_effects_keep_their_order(device: torch.device) -> None:
    """Nothing but the effects joins these calls, and they have different verdicts."""

    def function(x: torch.Tensor) -> torch.Tensor:
        a = captured_note(x)
        b = eager_note(x * 2)
        c = captured_note(x * 3)
        return a + b + c + eager_note(x * 4)

    f = Compiled(function)
    for _ in range(CALLS):
        x = torch.randn(4, device=device)
        LOG.clear()
        torch.testing.assert_close(f(x), x * 10)
        expected = zip(["captured", "eager", "captured", "eager"], [x, x * 2, x * 3, x * 4], strict=True)
        assert [f"{name} {value.sum().item():.4f}" for name, value in expected] == LOG
    # An accelerator finds out when it captures that they read numbers, and the program is cut again around them.
    assert f.replays() == [1 if freezes(device) else 2] and not f.compilation.fallbacks


def test_print_prints_at_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    if not hasattr(torch._higher_order_ops, "print"):
        pytest.skip("this torch has no print for compiled code")

    def function(x: torch.Tensor) -> torch.Tensor:
        torch._higher_order_ops.print("{} rows of {n}", x.shape[0], n=x.shape[1])
        return x + 1

    f = Compiled(function, compile_options={"dynamic": True})
    for count in (3, 3, 3, 4):
        assert f(torch.zeros(count, 5)).sum() == count * 5
        assert capsys.readouterr().out == f"{count} rows of 5\n"
    assert f.replays() == [1] and not f.compilation.fallbacks


@pytest.fixture
def torchbind() -> Iterator[Any]:
    from torch.testing._internal.torchbind_impls import init_torchbind_implementations, load_torchbind_test_lib

    try:
        load_torchbind_test_lib()
    except OSError:
        pytest.skip("this torch comes without its library of torchbind classes")
    init_torchbind_implementations()
    yield torch.classes._TorchScriptTesting._Foo


def test_torchbind_objects(torchbind: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = torchbind(10, 20)

        def forward(self, foo: Any, x: torch.Tensor) -> torch.Tensor:
            takes_foo = torch.ops._TorchScriptTesting.takes_foo
            return takes_foo(foo, x.sin()) + takes_foo(self.own, x) + foo.add_tensor(x)

    model = Model()
    ours, theirs = Compiled(model), torch.compile(model, backend="inductor")
    foo = torchbind(1, 2)
    for _ in range(CALLS):
        x = torch.randn(3, 4)
        assert_same(ours(foo, x), theirs(foo, x))
    assert ours.replays() == [2] and not ours.compilation.fallbacks


def test_opaque_objects() -> None:
    opaque = pytest.importorskip("torch._library.opaque_object", reason="this torch has no opaque objects")
    base = getattr(opaque, "OpaqueBase", None) or opaque.CustomClassBase

    Counter = type("Counter", (base,), {"count": 0, "__module__": __name__, "__qualname__": "Counter"})
    register = getattr(opaque, "register_custom_class", None)
    if register is not None:
        register(Counter, typ="symbolic")
    else:
        opaque.register_opaque_type(Counter, typ="reference")

    def multiply(counter: Any, x: torch.Tensor) -> torch.Tensor:
        counter.count += 1
        return x * counter.count

    multiply.__annotations__["counter"] = Counter
    operator = torch.library.custom_op("fxwrap_constructs::multiply", multiply, mutates_args=())
    operator.register_fake(lambda counter, x: torch.empty_like(x))
    f = Compiled(lambda counter, x: operator(counter, x.sin()) + 1)
    counter = Counter()
    for call in range(1, CALLS + 1):
        x = torch.randn(4)
        torch.testing.assert_close(f(counter, x), x.sin() * call + 1)
    assert f.replays() == [2] and not f.compilation.fallbacks


# -- constants -----------------------------------------------------------------------------------------

OUTER = torch.arange(16.0).view(4, 4)


def test_constants_and_lifted_tensors() -> None:
    compare(lambda x: x @ OUTER + torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.tensor(3), gradients=True)


def test_frozen_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)).eval()
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        ours = compare(model)
    inputs = [node for node in ours.program.plan.graph.graph.nodes if node.op == "placeholder"]
    constants = [node for node in ours.program.plan.graph.graph.nodes if node.op == "get_attr"]
    assert len(inputs) == 1 and len(constants) > 1


# -- random numbers ------------------------------------------------------------------------------------


def compare_random(
    function: Callable[..., Any], make: Make = square, gradients: bool = False, **compile_options: Any
) -> Compiled:
    """Two draws from each seed: the same as Inductor's, and not the same as one another."""
    ours = Compiled(function, compile_options=compile_options)
    theirs = inductor(function, **compile_options)
    for seed in range(CALLS):
        draws = []
        for f, inputs in zip((ours, theirs), twice(make), strict=True):
            torch.manual_seed(seed)
            draws.append([run(f, inputs, gradients) for _ in range(2)])
        assert_same(*draws)
        assert not all(map(torch.equal, tensors_in(draws[0][0][0]), tensors_in(draws[0][1][0])))
    assert not ours.compilation.fallbacks, ours.compilation.fallbacks[0]
    assert ours.programs and all(count >= CALLS for count in ours.replays())
    return ours


@pytest.mark.parametrize("fallback_random", [False, True])
def test_random_numbers(fallback_random: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        drawn = torch.rand_like(x) + x, torch.randn(4), torch.randint(0, 100, (4,))
        return (*drawn, torch.bernoulli(x.sigmoid()), torch.randperm(5), torch.multinomial(x.sigmoid(), 2))

    compare_random(function, options={"fallback_random": fallback_random})


@pytest.mark.parametrize("fallback_random", [False, True])
def test_dropout_in_training(fallback_random: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x @ x, 0.5)

    compare_random(function, gradients=True, options={"fallback_random": fallback_random})


# -- custom operators ----------------------------------------------------------------------------------


@torch.library.custom_op("fxwrap_constructs::split", mutates_args=())
def split(x: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return [part.clone() for part in torch.split(x, sizes)]


@split.register_fake
def _(x: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return [x.new_empty(size, *x.shape[1:]) for size in sizes]


@torch.library.custom_op("fxwrap_constructs::sin_cos", mutates_args=())
def sin_cos(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin() * factor, x.cos() * factor


@sin_cos.register_fake
def _(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("fxwrap_constructs::scale_all_", mutates_args=("x", "others"))
def scale_all_(x: torch.Tensor, others: list[torch.Tensor], factor: int) -> None:
    for tensor in (x, *others):
        tensor.mul_(factor)


@torch.library.custom_op("fxwrap_constructs::add_and_sum_", mutates_args=("x",))
def add_and_sum_(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.add_(n).sum(0)


@add_and_sum_.register_fake
def _(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.new_empty(x.shape[1:])


@torch.library.custom_op("fxwrap_constructs::tell", mutates_args=())
def tell(x: torch.Tensor) -> None:
    LOG.append(f"{x.sum().item():.4f}")


@tell.register_fake
def _(x: torch.Tensor) -> None:
    return None


register_effect(tell._opoverload)  # without results and effects it would be dead code


def test_custom_operators_with_lists_and_tuples() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        top, rest = split(x + 1, [1, 3])
        return top.sum() + rest, *sin_cos(x, 0.5)

    compare(function)


def test_custom_operators_that_mutate() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = x + 1, x * 2, x * 3
        scale_all_(a, [b, c, y], 2)
        total = add_and_sum_(y, x.shape[0] * 2)
        return a + b + c, b, total

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        (x,) = rows()
        return x, x * 2

    compare(function, make, replays=0, dynamic=True)
    compare(function, squares)


def test_custom_operators_that_return_nothing() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        tell(x + 1)
        tell(x * 2)
        return x.sin()

    f = Compiled(function)
    for _ in range(CALLS):
        x = torch.randn(4)
        LOG.clear()
        torch.testing.assert_close(f(x), x.sin())
        assert [f"{value.sum().item():.4f}" for value in (x + 1, x * 2)] == LOG
    assert f.replays() == [2] and not f.compilation.fallbacks


@torch.library.custom_op("fxwrap_constructs::assert_finite", mutates_args=())
def assert_finite(x: torch.Tensor) -> torch.Tensor:
    assert bool(x.isfinite().all()), "not finite"
    return x.clone()


assert_finite.register_fake(torch.empty_like)


def test_a_custom_operator_whose_name_is_that_of_a_check() -> None:
    """``assert_size_stride`` and its like return nothing; this one does, and its result is used."""
    compare(lambda x: assert_finite(x * 2) + 1)


def test_custom_operators_with_out() -> None:
    with torch.library._scoped_library("fxwrap_constructs_out", "DEF") as library:
        library.define("sin(Tensor x, *, Tensor(a!) out) -> ()", tags=(torch.Tag.pt2_compliant_tag,))

        def sin(x: torch.Tensor, *, out: torch.Tensor) -> None:
            out.copy_(x.sin())

        for key in ("CPU", "Meta"):
            library.impl("sin", sin, key)

        def function(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            torch.ops.fxwrap_constructs_out.sin(x + 1, out=out)
            return out * 2

        compare(function)


def test_custom_operators_with_a_gradient() -> None:
    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.factor = inputs[1]

    def backward(ctx: Any, sin: torch.Tensor, cos: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return (sin * x.cos() - cos * x.sin()) * ctx.factor, None

    sin_cos.register_autograd(backward, setup_context=keep)
    compare(lambda x: sin_cos(x * 2, 3.0)[0] + sin_cos(x, 2.0)[1], gradients=True)


# -- data-dependent sizes, and expressions of sizes --------------------------------------------


@pytest.fixture
def unbacked() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def with_a_count(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    count = n.max().item()
    torch._check(count >= 1)
    torch._check(count <= 6)
    torch._check(12 % count == 0)
    parts = x.view(-1)[:12].view(count, 12 // count).sum(0)
    return x[:count].sum(0) * count, torch.full((count + 1,), 2.0), torch.zeros(count, x.shape[0]) + count, parts


def test_numbers_out_of_tensors(unbacked: None) -> None:
    compare(with_a_count, lambda: (torch.randn(6, 4), torch.randint(1, 5, (3,))))


def test_sizes_out_of_tensors(unbacked: None) -> None:
    def function(x: torch.Tensor, repeats: torch.Tensor) -> tuple[Any, ...]:
        rows = torch.nonzero(x[:, 0] > 0)[:, 0]
        chosen = x.sin()[rows]
        unique, inverse, counts = torch.unique(repeats, return_inverse=True, return_counts=True)
        repeated = torch.repeat_interleave(x, repeats, dim=0) * 2
        return chosen @ chosen.t(), rows.shape[0], x[x > 0].cos(), unique * 2, inverse, counts.float(), repeated

    compare(function, lambda: (torch.randn(6, 4), torch.randint(1, 4, (6,))))


def test_expressions_of_sizes() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = x.size(0)
        full = torch.full((n + 1, n * 2), 1.5).sum(0)
        product = x.reshape(-1, 2) @ torch.ones(2, n * 2) + x.view(2, n * 2).sum()
        return full + product.sum(0), x[: n // 2].cumsum(0), torch.arange(n * 3)[::2]

    compare(function, rows, replays=0, dynamic=True)


_EXPRESSIONS: dict[str, Sequence[Callable[[Any], Any]]] = {
    "rounding": [
        lambda n: round(n / 2 + 1),
        lambda n: round(n * 0.3) + 1,
        lambda n: int(10 * round(n / 7, 1)),
        lambda n: math.ceil(n / 3),
        lambda n: math.floor(n * 0.7),
        lambda n: math.trunc(n * 0.7),
        lambda n: int(n * 1.5),
        lambda n: int(n * 1.5 // 2),
        lambda n: math.floor(-n / 3) + 9,
    ],
    "integers": [
        lambda n: abs(n - 20),
        lambda n: int(abs(n / 2 - 20)),
        lambda n: -(-n // 3),
        lambda n: max(min(n * 2, 9), 7),
        lambda n: n % 5 + 2,
        lambda n: n**2,
        lambda n: 2 ** (n % 4 + 1),
        lambda n: (n << 1) + (n >> 1),
        lambda n: (n & 7) + (n | 1) + (n ^ 3),
        lambda n: torch.sym_sum([n, n, 3]),
    ],
    "choices": [
        lambda n: torch.sym_ite(n > 14, n, 2 * n),
        lambda n: torch.sym_ite(n > 14, n, n * 0 + 3),
        lambda n: torch.sym_ite(n > 14, 3, 2),
    ],
    "functions": [
        lambda n: int(n**1.5),
        lambda n: int(math.sqrt(n)),
        lambda n: int(math.log2(n)) + 1,
        *(lambda n, function=function: int(5 * function(n)) + 6 for function in (math.cos, math.tanh, math.atan)),
    ],
}


@pytest.mark.parametrize("kind", _EXPRESSIONS)
def test_python_arithmetic_on_sizes(kind: str) -> None:
    """In sizes, and as numbers. What is known of a size is symbolic, and holds at every call."""
    if kind == "choices" and not inductor_takes_chosen_sizes():
        pytest.skip("Inductor itself cannot compile it")
    expressions = _EXPRESSIONS[kind]

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        numbers = [expression(x.size(0)) for expression in expressions]
        return [torch.ones(number) * 2 for number in numbers] + [x * number for number in numbers]

    def make() -> tuple[torch.Tensor]:
        return (torch.randn(int(torch.randint(12, 20, ())), 4),)

    f = compare(function, make, replays=0, dynamic=True)
    graph = f.program.plan.graph
    assert json.dumps(graph_to_data(graph, functions()))
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    rows, columns = (node for node in inputs if isinstance(node.meta["val"], torch.SymInt))
    for size in (12, 13, 17, 31):
        known = evaluate_sizes(graph, {**dict.fromkeys(inputs), rows: size, columns: 4})
        symbols = {rows.meta["val"].node.expr: sympy.Integer(size), columns.meta["val"].node.expr: sympy.Integer(4)}
        assert len(known) > len(expressions)
        for node, number in known.items():
            value = node.meta["val"]
            assert isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)), node
            assert not isinstance(value, torch.SymInt) or number_at(value, symbols) == number, node


def test_expressions_of_sizes_backward() -> None:
    """A backward program takes expressions as inputs."""

    def function(x: torch.Tensor) -> torch.Tensor:
        n = x.size(0)
        padded = torch.nn.functional.pad(x, (0, n // 2)).sort(1)[0]
        return torch.cat([padded, padded.flip(0)]).view(-1, 2) @ torch.ones(2, n + 1)

    compare(function, rows, gradients=True, replays=0, dynamic=True)


# -- layouts -------------------------------------------------------------------------------------------


def offset_and_aligned_to_nothing() -> torch.Tensor:
    return torch.randn(48)[17:33].view(4, 4)


def test_layouts_of_inputs() -> None:
    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        offset, expanded, transposed, overlapping, scalar = inputs
        sums = [offset @ expanded, transposed + offset, scalar * offset, expanded.sum(0)]
        return [*sums, overlapping.sin() @ overlapping, overlapping.t(), offset.t(), torch.mm(offset, transposed)]

    def make() -> tuple[torch.Tensor, ...]:
        overlapping = torch.randn(20).as_strided((4, 4), (2, 1), 1)
        transposed = torch.randn(4, 4).t()
        return (
            offset_and_aligned_to_nothing(),
            torch.randn(1, 4).expand(4, 4),
            transposed,
            overlapping,
            torch.tensor(2.0),
        )

    compare(function, make)


def test_conjugated_and_negated_inputs() -> None:
    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, 4, dtype=torch.complex64).conj(), torch._neg_view(torch.randn(4, 4))

    compare(lambda c, n: ((c * 2).real, c.imag @ n, n + 1, c.conj(), n @ n), make)


def test_channels_last() -> None:
    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(5, 3, 3, 3)

    compare(convolve, make, gradients=True)


def overlapping_views() -> tuple[torch.Tensor, ...]:
    base = torch.randn(8, 4)
    return base[:4], base[2:6]


def one_tensor_twice() -> tuple[torch.Tensor, ...]:
    return square() * 2


@pytest.mark.parametrize("make", [overlapping_views, one_tensor_twice])
def test_inputs_that_share_memory(make: Make) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y.sin() @ x

    # Torch's cache takes programs for views of another base to be the same.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        compare(function, make)


# -- checks --------------------------------------------------------------------------------------------


def raised_by(function: Callable[..., Any], *inputs: Any) -> type[BaseException] | None:
    try:
        function(*inputs)
    except (AssertionError, RuntimeError, ZeroDivisionError) as error:
        return type(error)
    return None


def test_nan_asserts_are_made_at_every_call() -> None:
    """On inputs and results, as by Inductor's wrapper: also while recording, and on replays."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.log() @ x

    options = {"nan_asserts": True}
    for bad in range(CALLS):
        torch._dynamo.reset()
        f, theirs = Compiled(function, compile_options={"options": options}), inductor(function, options=options)
        for call in range(CALLS):
            x = torch.rand(4, 4) + 1
            if call == bad:
                x[0, 0] = float("nan") if bad % 2 else -1.0
            errors = [raised_by(g, x.clone()) for g in (f, theirs)]
            assert errors == [AssertionError if call == bad else None] * 2
        assert not f.compilation.fallbacks
        assert_same(f(x := torch.rand(4, 4) + 1), theirs(x))


def test_asserts_on_numbers_out_of_tensors_are_made_at_replays(unbacked: None) -> None:
    f, theirs = Compiled(with_a_count), inductor(with_a_count)
    for count in (2, 3, 4, 5, 2, 0, 7, 3):
        inputs = torch.randn(6, 4), torch.tensor([1, 0, count]) if count else torch.tensor([0, 0, 0])
        errors = [raised_by(g, *inputs) for g in (f, theirs)]
        assert (errors[0] is None) == (errors[1] is None) == (count in (2, 3, 4)), count
    assert f.program.counters.replays >= 2 and not f.compilation.fallbacks


@torch.library.custom_op("fxwrap_constructs::misaligned", mutates_args=())
def misaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:1], x])[1:]


misaligned.register_fake(torch.empty_like)


def test_asserts_on_alignment() -> None:
    errors = []
    for f in (Compiled(lambda x: misaligned(x.sin()) + 1), inductor(lambda x: misaligned(x.sin()) + 1)):
        for _ in range(3):
            with pytest.raises(AssertionError, match="align") as caught:
                f(torch.randn(5))
            errors.append(str(caught.value))
    assert len(set(errors)) == 1


def test_division_by_zero_is_raised_at_replays() -> None:
    header = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "inductor" / "cpp_prefix.h"
    if "integer_div_error" not in header.read_text():
        pytest.skip("a division by zero ends the process in kernels of this torch")
    f, theirs = Compiled(lambda x, n: x // n), inductor(lambda x, n: x // n)
    for zeros in (0, 0, 0, 1, 0):
        errors = []
        for g in (f, theirs):
            n = torch.tensor([1 - zeros, 2, 3])
            errors.append(raised_by(g, torch.arange(3), n))
        assert errors == [RuntimeError if zeros else None] * 2
    assert f.program.counters.replays >= 2


def test_a_convolution_that_is_not_laid_out_as_predicted() -> None:
    """Without the assert the kernel after it would read wrong numbers."""

    def other_layout(*args: Any) -> torch.Tensor:
        result = torch.ops.aten._convolution.default(*args, False, False, False, False)
        return result.contiguous()  # Inductor predicts channels last

    x, w = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    messages = set()
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings(action="ignore"):
        library.impl("convolution", other_layout, "CPU")
        for f in (Compiled(convolve), inductor(convolve)):
            for _ in range(3):
                with pytest.raises(AssertionError, match="stride") as caught:
                    f(x, w)
                messages.add(str(caught.value))
    assert len(messages) == 1


def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(x, w).relu()


# -- what cannot be emitted ----------------------------------------------------------------------------


class UnknownLine(WrapperLine):
    """A line with a loop in it, made for the operator of another line."""

    def __init__(self, node: Any) -> None:
        self.node = node

    def codegen(self, code: Any) -> None:
        code.writeline("while True: pass")


class WithUnknownLines(fxwrap.FxwrapCodegen):
    """Two lines that nobody knows, and one that is a plain string, among the others."""

    def run_wrapper_ir_passes(self, is_inference: bool) -> None:
        super().run_wrapper_ir_passes(is_inference)
        nodes = {
            str(getattr(line.node, "op_overload", "")): line.node for line in self.lines if hasattr(line, "node")
        }
        cumsum, sort = (nodes[f"aten.{name}"] for name in ("cumsum.default", "sort.stable"))
        self.lines[-2:-2] = [UnknownLine(cumsum), UnknownLine(sort), "import nothing"]


def cumsum_and_sort(x: torch.Tensor) -> torch.Tensor:
    y = x.cumsum(0)
    return torch.sort(y)[0] @ x


def test_strict_names_every_line_that_cannot_be_emitted() -> None:
    f = Compiled(cumsum_and_sort, compile_options={"options": {"codegen": WithUnknownLines, "strict": True}})
    with pytest.raises(Exception, match="3 wrapper line") as caught:
        f(*square())
    _, unknown_cumsum, unknown_sort, text = str(caught.value).split("cannot emit the wrapper line ")
    for part in ("'while True: pass' (UnknownLine)", "aten.cumsum.default", "test_constructs.py", "y = x.cumsum(0)"):
        assert part in unknown_cumsum
    for part in (
        "'while True: pass' (UnknownLine)",
        "aten.sort.stable",
        "test_constructs.py",
        "return torch.sort(y)",
    ):
        assert part in unknown_sort
    assert "'import nothing'" in text and "operator" not in text.split("what to do")[0]
    assert "strict=True" in text and "torch.compiler.disable" in text


def test_without_strict_one_warning_names_them_all_and_the_graph_runs() -> None:
    f = Compiled(cumsum_and_sort, compile_options={"options": {"codegen": WithUnknownLines}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(CALLS):
            (x,) = square()
            torch.testing.assert_close(f(x), cumsum_and_sort(x))
    (message,) = [str(warning.message) for warning in caught if "fxwrap" in str(warning.message)]
    (counted,) = f.compilation.fallbacks
    for text in (message, counted):
        assert text.count("cannot emit the wrapper line") == 3 and "aten.sort.stable" in text
    assert not f.programs


# -- provenance ----------------------------------------------------------------------------------------


def three_steps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = torch.relu(y) + 1
    return z.cumsum(0)


def test_nodes_know_the_code_and_the_nodes_they_come_from() -> None:
    f = Compiled(three_steps)
    f(*squares())
    graph = f.program.plan.graph.graph
    found = {}
    for node in graph.nodes:
        if kind_of(node) in (Kind.LAUNCH, Kind.EXTERN):
            found[tuple(sorted(node.meta["origins"]))] = user_line(node)
    by_code = {line.split(": ", 1)[1]: origins for origins, line in found.items()}
    assert "mm" in by_code["y = x @ w"]
    assert by_code["z = torch.relu(y) + 1"] == ("add", "relu")
    assert "cumsum" in by_code["return z.cumsum(0)"]
    assert all("test_constructs.py" in line for line in found.values())


def test_explanations_name_the_users_code() -> None:
    options = {"eager_ops": ["while_loop", "switch"]}
    explanation = fxwrap.explain(loop_then_branch, *squares(), fxwrap_options=options)
    assert "test_constructs.py" in str(explanation) and "while_loop" in str(explanation)
    assert "torch.cond(y.sum() > 0" in " ".join(str(explanation).split())  # however the lines are broken
    (graph,) = explanation.graphs
    listing = list_graph(graph.graph)
    assert "while_loop_body_graph_0 = graph\n    " in listing
    # Kernels of branches and bodies are shown, too.
    assert all(f"launch {kernel.name}(" in listing for kernel in graph.kernels) and len(graph.kernels) >= 5


class Box(torch.Tensor):
    """A subclass around one tensor. AOTAutograd takes it apart and makes it again."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Box:
        how = {"strides": inner.stride(), "dtype": inner.dtype, "requires_grad": inner.requires_grad}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **how)  # type: ignore[attr-defined, no-any-return]

    @torch.compiler.disable  # torch 2.11's Dynamo fails on it
    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Box:
        return Box(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Box, lambda box: box.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Box, func(*args, **kwargs))


@pytest.mark.parametrize("training", [False, True])
def test_a_subclass_around_one_tensor_in_a_graph_with_one_output(compiled: Any, training: bool) -> None:
    """Inductor's wrapper returns a list, even of one output, and whoever unwraps the subclass takes its first."""
    f: Any = compiled(lambda x: x * 2)
    for _ in range(4):
        x = Box(torch.arange(12.0).reshape(3, 4)).requires_grad_(training)
        y = f(x)
        assert torch.equal(y.inner, torch.arange(12.0).reshape(3, 4) * 2)
        if training:
            y.sum().backward()
            assert torch.equal(x.grad.inner, torch.full((3, 4), 2.0))


@torch.no_grad()
def test_jagged_tensors(compiled: Any) -> None:
    """The size of the jagged dimension is a number of its own kind, and an input of the graph."""
    n = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)
    linear = torch.nn.Linear(4, 4)
    for g in (lambda n: n.sin() * 2 + 1, lambda n: n.values().sum(), linear):
        f: Compiled = compiled(g, options={"strict": True})
        for _ in range(4):
            got, expected = f(n), g(n)
            if got.is_nested:
                got, expected = got.values(), expected.values()
            torch.testing.assert_close(got, expected)
        assert f.program.counters.replays


@pytest.mark.parametrize("where", [on_cpu, on_simulated])
def test_training_on_jagged_tensors(compiled: Any, where: Any) -> None:
    """The ragged size is an output of forward, and an input of backward.

    It is another one for each tensor, and says whose structure a tensor has: recordings hand it through, and are not
    told apart by it.
    """
    with where():
        f: Compiled = compiled(lambda n: n.sin() * 2, options={"strict": True})
        for _ in range(6):
            rows = [torch.randn(3, 4), torch.randn(5, 4)]
            n = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
            out = f(n)
            assert out.size(1) == n.size(1)
            (out + n).values().sum().backward()
            torch.testing.assert_close(n.grad.values(), 1 + 2 * torch.cat(rows).cos())
    for program in f.programs:
        assert program.counters.replays >= 3, program.name


def test_a_size_that_two_inputs_are(compiled: Any) -> None:
    """Once sizes are dynamic, the ragged size is an input twice: of the tensor, and of its padding."""
    f: Compiled = compiled(lambda n: torch.nested.to_padded_tensor(n.sin(), 0.0))
    for lengths in ((3, 5, 2), (4, 1, 1, 6), (2, 2), (3, 5, 2)):
        rows = [torch.randn(length, 4) for length in lengths]
        n = torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)
        out = f(n)
        torch.testing.assert_close(out[1, : lengths[1]], rows[1].sin())
        assert not out[1, lengths[1] :].any()
        out.sum().backward()
        torch.testing.assert_close(n.grad.values(), torch.cat(rows).cos())
    assert not f.compilation.fallbacks


@pytest.mark.parametrize("name", ["cpp_wrapper", "fx_wrapper"])
def test_whatever_wrapper_the_process_has_chosen_for_inductor(compiled: Any, name: str) -> None:
    """As TORCHINDUCTOR_CPP_WRAPPER=1 does."""
    with config.patch(name, True):
        f: Compiled = compiled(lambda x: (x.sin() @ x).cos(), options={"strict": True})
        for _ in range(4):
            x = torch.randn(4, 4)
            torch.testing.assert_close(f(x), (x.sin() @ x).cos())
        assert f.program.counters.replays and getattr(config, name)
