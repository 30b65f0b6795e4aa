"""Branches and loops as nodes of a device graph that freezes addresses: it decides at each replay what runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import HOSTCUDA, Compiled, assert_same, freezes, inductor
from torch import Tensor
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import fxwrap
from fxwrap.graphs.devices.runtime import conditional_nodes_of
from fxwrap.plan import Verdict

pytestmark = pytest.mark.usefixtures("only_with_nodes")


@pytest.fixture
def only_with_nodes(device: torch.device) -> None:
    if not freezes(device):
        pytest.skip("its graph repeats calls: test_control_flow.py")
    if conditional_nodes_of(device) is None:
        pytest.skip("its graphs have no conditional nodes")


def count(device: torch.device, number: int = 0) -> Tensor:
    """A number that the device counts."""
    return torch.full((), number, dtype=torch.int64, device=device)


def replays_of_one_partition(f: Compiled) -> int:
    (graph,) = fxwrap.report(f).graphs
    assert [partition.verdict for partition in graph.partitions] == [Verdict.CAPTURED], graph.partitions
    (replays,) = f.replays()
    return replays


def assert_replays_right(f: Any, function: Any, calls: Sequence[Callable[[], Sequence[Any]]], least: int) -> None:
    """Call both with equal inputs, several times; what is written to inputs is compared, too."""
    theirs = inductor(function)
    for _ in range(3):
        for make in calls:
            torch.manual_seed(0)
            mine = make()
            torch.manual_seed(0)
            others = make()
            assert_same(f(*mine), theirs(*others))
            assert_same(mine, others)
    assert replays_of_one_partition(f) >= least


@torch.no_grad()
def test_a_branch_is_two_if_nodes(compiled: Any, device: torch.device) -> None:
    """::

    launch k0 | switch    | launch k1            [ launch k0   IF p: launch a   IF not p: launch b   launch k1 ]
    captured  | on the host | captured     ->      one graph; both branches write to one place
    """

    def function(x: Tensor, p: Tensor) -> Tensor:
        return torch.cond(p, lambda x: (x @ x).relu(), lambda x: (x @ x + 1).sin(), (x * 2,)) + 1

    f = compiled(function)
    calls = [lambda p=p: (torch.randn(4, 4, device=device), torch.tensor(p, device=device)) for p in (True, False)]
    assert_replays_right(f, function, calls, least=4)


@torch.no_grad()
def test_a_loop_is_a_while_node(compiled: Any, device: torch.device) -> None:
    """::

    launch k0 | while_loop  | launch k1          [ launch k0   copy   cond   WHILE: body, copy, cond   launch k1 ]
    captured  | on the host | captured     ->      one graph; what is carried stays in one place
    """

    def function(x: Tensor, n: Tensor) -> Tensor:
        def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, torch.tanh(x @ x) + x

        _, y = while_loop(lambda i, x: i < n, body, (count(device), x))
        return y * 2

    f = compiled(function)
    calls = [lambda n=n: (torch.randn(4, 4, device=device), count(device, n)) for n in (0, 1, 7, 2)]
    assert_replays_right(f, function, calls, least=8)


@torch.no_grad()
def test_results_of_a_loop_are_handed_out_without_their_tuple(compiled: Any, device: torch.device) -> None:
    """A replay makes a tensor over each result, and calls nothing in Python for the tuple, which nobody reads."""
    f, theirs = compiled(swapped(device)), inductor(swapped(device))
    for n in (3, 0, 2, 1):
        x = torch.randn(4, 4, device=device)
        assert_same(f(x, count(device, n)), theirs(x, count(device, n)))
    (graph,) = fxwrap.report(f).graphs
    made = [line for line in graph.unit.splitlines() if line.endswith("# Python")]
    assert graph.unit and not any("each(" in line or "copies_out(" in line for line in made), graph.unit


def swapped(device: torch.device) -> Callable[..., Any]:
    """What is carried changes places: each iteration reads all of it before it writes."""

    def function(x: Tensor, n: Tensor) -> Any:
        return while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, b.clone(), a + 1), (count(device), x, x * 2))

    return function


def writes_what_decides(device: torch.device) -> Callable[..., Any]:
    """The first branch changes what the second one's predicate would be read from."""

    def function(x: Tensor, n: Tensor) -> Any:
        def first(x: Tensor, n: Tensor) -> Tensor:
            n.add_(2)
            return x + 1

        return torch.cond(n > 1, first, lambda x, n: x - 1, (x, n)), n + 0

    return function


def in_each_other(device: torch.device) -> Callable[..., Any]:
    """A branch in a loop in a branch."""

    def function(x: Tensor, n: Tensor) -> Any:
        def looped(x: Tensor) -> Tensor:
            def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                return i + 1, torch.cond(i % 2 == 0, lambda x: x.sin() + x, lambda x: x * 0.5, (x,))

            return while_loop(lambda i, x: i < n, body, (count(device), x))[1]

        return torch.cond(n > 1, looped, lambda x: x.cos(), (x,))

    return function


def until_small(device: torch.device) -> Callable[..., Any]:
    """The values decide, and the condition computes with them."""

    def function(x: Tensor, n: Tensor) -> Any:
        return while_loop(lambda i, x: x.abs().max() > 0.1, lambda i, x: (i + 1, x * 0.5), (n + 0, x))

    return function


def as_it_came(device: torch.device) -> Callable[..., Any]:
    """A branch returns its operand, another one a view's clone: results are copied to one place."""

    def function(x: Tensor, n: Tensor) -> Any:
        return torch.cond(n > 1, lambda x: (x.clone(), x.sum()), lambda x: (x.t().contiguous(), x.max()), (x,))

    return function


@torch.no_grad()
@pytest.mark.parametrize("make", [swapped, writes_what_decides, in_each_other, until_small, as_it_came])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_programs(
    compiled: Any, device: torch.device, make: Callable[..., Callable[..., Any]], dynamic: bool
) -> None:
    """Each is one graph, and computes what Inductor's wrapper does."""
    function = make(device)
    f = compiled(function, dynamic=dynamic)
    calls = [lambda n=n: (torch.randn(4, 4, device=device), count(device, n)) for n in (0, 1, 5, 2)]
    assert_replays_right(f, function, calls, least=8)


def drawn(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def as_number(x: Tensor) -> Tensor:
    return x * x.max().item()


@torch.no_grad()
@pytest.mark.parametrize(("branch", "reason"), [(drawn, "draws random numbers"), (as_number, "reads a number")])
def test_what_no_body_can_hold_is_decided_on_the_host(
    compiled: Any, device: torch.device, branch: Callable[[Tensor], Tensor], reason: str
) -> None:
    """A graph would draw as much for a branch that does not run; a number is read on the host. The report says so."""

    def function(x: Tensor, p: Tensor) -> Tensor:
        return torch.cond(p, branch, lambda x: x - 1, (x * 2,)) + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        f, theirs = compiled(function, options={"capture": "always"}), inductor(function)
        for call in range(6):
            x, p = torch.randn(8, device=device), torch.tensor(call % 2 == 0, device=device)
            torch.manual_seed(call)
            mine = f(x, p)
            torch.manual_seed(call)
            assert_same(mine, theirs(x, p))
    reasons = [partition.reason for graph in fxwrap.report(f).graphs for partition in graph.partitions]
    assert any(reason in text for text in reasons), reasons


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 6])
def test_a_loop_that_counts_on_the_host_is_captured_with_all_its_iterations(
    compiled: Any, device: torch.device, length: int
) -> None:
    """::

    i = zeros on the CPU | scan: i < 6, i.item(), work    ->    i = zeros | [ work on 0 ... work on 5 ]
    eager                | on the host                          eager     | one graph, no node that decides
    """
    if device.type == "cpu":
        pytest.skip("its device is the host: nothing tells its counter from its data")

    def function(xs: Tensor, h: Tensor, w: Tensor) -> Any:
        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(h @ w + x)
            return h, torch.cond(h.sum() > 0, lambda h: h * 2, lambda h: h - 1, (h,))

        return scan(cell, h, xs, dim=0)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        f, theirs = compiled(function), inductor(function)
        for _ in range(6):
            given = [torch.randn(*size, device=device) for size in ((length, 4, 8), (4, 8), (8, 8))]
            assert_same(f(*given), theirs(*given))
    (graph,) = fxwrap.report(f).graphs
    assert [partition.verdict for partition in graph.partitions] == [Verdict.EAGER, Verdict.CAPTURED]
    assert "cpp_fused" in graph.partitions[0].reason and f.replays()[0] >= 3


@torch.no_grad()
def test_a_capture_that_fails_in_a_body_leaves_everything_usable(
    compiled: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host decides from then on, on the caller's stream, and other programs are captured.

    A body that fails to end raises once. What is raised where nobody can catch it is kept by whoever reports it, and
    with it the graph, which makes another stream the current one when it is freed.
    """
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    @torch.library.custom_op("fxwrap_tests::waits_in_a_body", mutates_args=())
    def waits(x: Tensor) -> Tensor:
        return x + int(bool((x * 0 == 0).all()))  # reads a value on the host, and does not say so

    @waits.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def function(x: Tensor, p: Tensor) -> Tensor:
        return torch.cond(p, lambda x: waits(x) * 2, lambda x: x - 1, (x,)) + 1

    def other(x: Tensor) -> Tensor:
        return (x + 1).sin()

    module = torch.get_device_module(device) if device.type != "cpu" else None
    before = module.current_stream() if module is not None else None
    f, theirs = compiled(function), inductor(function)
    for call in range(6):
        x, p = torch.randn(8, device=device), torch.tensor(call % 2 == 0, device=device)
        assert_same(f(x, p), theirs(x, p))
    assert module is None or module.current_stream() == before
    (graph,) = fxwrap.report(f).graphs
    assert any("a capture failed at it" in partition.reason for partition in graph.partitions)
    assert not unraisable
    g = compiled(other, options={"capture": "always"})
    for _ in range(4):
        x = torch.randn(8, device=device)
        assert_same(g(x), inductor(other)(x))
    assert replays_of_one_partition(g)


@torch.no_grad()
def test_what_has_never_run_is_captured(compiled: Any, device: torch.device) -> None:
    """The first calls take the other branch, so that neither its kernel nor the library of its product has run."""

    def function(x: Tensor, p: Tensor) -> Tensor:
        return torch.cond(p, lambda x: torch.linalg.vector_norm(x @ x, dim=1).exp(), lambda x: x[0] - 1, (x,)) + 1

    f, theirs = compiled(function), inductor(function)
    for call in range(6):
        x, p = torch.randn(8, 8, device=device), torch.tensor(call >= 4, device=device)
        assert_same(f(x, p), theirs(x, p))
    assert replays_of_one_partition(f) >= 3


@torch.no_grad()
def test_memory_of_branches_is_that_of_the_larger_one(compiled: Any, device: torch.device) -> None:
    """By torch's allocator: a second branch that needs megabytes for itself, as the first one does, takes no more."""
    if device.type != "cuda":
        pytest.skip("what torch's CUDA allocator counts")

    def one(x: Tensor) -> Tensor:
        return (x.softmax(0).t().softmax(0) + x).softmax(0)

    def other(x: Tensor) -> Tensor:
        return (x.softmax(1).t().softmax(1) - x).softmax(1)

    def little(x: Tensor) -> Tensor:
        return x + 1

    def kept(second: Callable[[Tensor], Tensor]) -> int:
        def function(x: Tensor, p: Tensor) -> Tensor:
            return torch.cond(p, one, second, (x,)) + 0

        f = compiled(function, options={"capture": "always"})
        x, p = torch.randn(512, 512, device=device), torch.tensor(True, device=device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for _ in range(4):
            f(x, p)
        assert replays_of_one_partition(f)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        after = torch.cuda.memory_reserved()
        fxwrap.release(f)
        return after - before

    kept(little)  # what libraries keep from their first call on
    assert kept(other) <= kept(little) + (1 << 20)


@pytest.mark.skipif(not HOSTCUDA, reason="what torch does not give back is counted on hostcuda")
@torch.no_grad()
def test_the_pool_of_a_released_program_returns_to_the_device(compiled: Any, device: torch.device) -> None:
    """torch 2.14 counts two users of the pool for each conditional node, and gives none of them back."""
    if device.type != "cuda":
        pytest.skip("what torch's CUDA allocator counts")

    def function(x: Tensor, p: Tensor) -> Tensor:
        y = torch.cond(p, lambda x: torch.cumsum(x, 0), lambda x: torch.cumsum(x + 1, 0), (x,))
        return torch.cond(p, lambda x: torch.cumsum(x, 1), lambda x: torch.cumsum(x + 1, 1), (y,))

    x, p = torch.randn(256, 256, device=device), torch.tensor(True, device=device)
    sizes = []
    for _ in range(3):
        f = compiled(function, options={"capture": "always"})
        for _ in range(4):
            f(x, p)
        assert replays_of_one_partition(f)
        fxwrap.release(f)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved())
    assert sizes[0] == sizes[1] == sizes[2]
