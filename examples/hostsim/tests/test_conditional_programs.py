"""Branches and loops of compiled programs are nodes of one graph, and compute the bits of Inductor's own wrapper."""

import threading

import pytest
import torch
from helpers import assert_equal, name
from torch._higher_order_ops.while_loop import while_loop

fxwrap = pytest.importorskip("fxwrap")


@pytest.fixture(autouse=True)
def registered(device):
    from hostsim.inductor import register

    torch.compiler.reset()
    with register(), torch.no_grad():
        yield
    torch.compiler.reset()
    fxwrap.release()


def number(value):
    return torch.tensor(value, device=name())


def either(x, n):
    return torch.cond(n > 1, lambda x: (x @ x).relu(), lambda x: (x + 1).sin(), (x * 2,)) + 1


def repeated(x, n):
    body = lambda i, x: (i + 1, torch.tanh(x @ x) + x)  # noqa: E731
    return while_loop(lambda i, x: i < n, body, (torch.zeros_like(n), x))[1] * 2


def swapped(x, n):
    """Each iteration reads all that is carried before it writes any of it."""
    body = lambda i, a, b: (i + 1, b.clone(), a + 1)  # noqa: E731
    return while_loop(lambda i, a, b: i < n, body, (torch.zeros_like(n), x, x * 2))


def in_each_other(x, n):
    """A branch in a loop in a branch."""

    def looped(x):
        def body(i, x):
            return i + 1, torch.cond(i % 2 == 0, lambda x: x.sin() + x, lambda x: x @ x, (x,))

        return while_loop(lambda i, x: i < n, body, (torch.zeros_like(n), x))[1]

    return torch.cond(n > 0, looped, lambda x: x.cos(), (x,))


def loop_in_loop(x, n):
    def inner(i, x):
        return i + 1, while_loop(lambda j, x: j < i, lambda j, x: (j + 1, x.sin() + 1), (torch.zeros_like(n), x))[1]

    return while_loop(lambda i, x: i < n, inner, (torch.zeros_like(n), x))[1]


def writes_what_decides(x, n):
    def first(x, n):
        n.add_(2)
        return x + 1

    return torch.cond(n > 1, first, lambda x, n: x - 1, (x, n)), n + 0


@pytest.mark.parametrize("function", [either, repeated, swapped, in_each_other, loop_in_loop, writes_what_decides])
def test_a_program_is_one_graph(mode, device, function):
    ours, theirs = torch.compile(function, backend="fxwrap"), torch.compile(function, backend="inductor")
    for call, n in enumerate([0, 1, 7, 2] * 2):
        x = torch.randn(4, 4, generator=torch.manual_seed(call))
        mine, others = (x.to(name()), number(n)), (x.to(name()), number(n))
        torch.testing.assert_close(ours(*mine), theirs(*others), rtol=0, atol=0, equal_nan=True)
        assert_equal(mine[1], others[1])
    (graph,) = fxwrap.report(ours).graphs
    assert [partition.verdict.value for partition in graph.partitions] == ["captured"]
    assert graph.counters["replays"] >= 6


def test_bodies_run_as_often_as_the_program_says(device):
    f = torch.compile(repeated, backend="fxwrap")
    x = torch.zeros(4, 4, device=name())
    for n in (2, 2, 2):
        f(x, number(n))
    for n in (0, 1, 7):
        device.reset_graph_counters()
        f(x, number(n))
        counters = device.graph_counters()
        assert (counters["replays"], counters["bodies_run"]) == (1, n)


def test_a_library_may_begin_in_a_branch_that_has_never_run(device):
    """A thread whose first product is in the other branch: a relaxed capture that is thrown away makes its handle."""
    f, results = torch.compile(either, backend="fxwrap"), []
    x = torch.randn(4, 4)

    def call():
        with torch.no_grad():
            results.extend(f(x.to(name()), number(n)).cpu() for n in (0, 0, 0, 3, 0))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    other, product = (x * 2 + 1).sin() + 1, (4 * x @ x).relu() + 1
    for mine, expected in zip(results, (other, other, other, product, other), strict=True):
        torch.testing.assert_close(mine, expected)
    (graph,) = fxwrap.report(f).graphs
    assert [partition.verdict.value for partition in graph.partitions] == ["captured"]
    assert not any("failed" in event for event in graph.counters["events"])


def test_a_branch_that_draws_numbers_is_no_node(device):
    def draws(x, n):
        return torch.cond(n > 1, lambda x: x + torch.rand_like(x), lambda x: x - 1, (x.sin(),)) + 2

    f = torch.compile(draws, backend="fxwrap", options={"capture": "always"})
    x, drawn = torch.zeros(4, 4, device=name()), []
    for n in (0, 2, 2, 0, 2):
        result = f(x, number(n))
        if n:
            assert (result >= 2).all() and not any(torch.equal(result, other) for other in drawn)
            drawn.append(result.clone())
        else:
            assert_equal(result, torch.ones(4, 4))
    (graph,) = fxwrap.report(f).graphs
    assert [partition.verdict.value for partition in graph.partitions] == ["captured", "eager", "captured"]


def test_a_planted_fault_is_seen_through_programs(device):
    x = torch.randn(4, 4).to(name())
    for fault, function, n in (("branch_always_runs", either, 0), ("loop_runs_once", repeated, 3)):
        f = torch.compile(function, backend="fxwrap")
        expected = [f(x, number(n)) for _ in range(3)][-1]
        device.plant_fault(fault)
        assert not torch.equal(f(x, number(n)), expected)
        device.clear_faults()
        assert torch.equal(f(x, number(n)), expected)
