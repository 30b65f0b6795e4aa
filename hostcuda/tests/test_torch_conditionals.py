"""torch's own captures of conditional nodes: CUDAGraph.begin_capture_to_if_node, begin_capture_to_while_node, and
torch.cond and torch.while_loop under CUDAGraphCaptureControlFlowOpDispatchMode (torch 2.14)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cuda import HOST_FUNCTION, do
from graphs import capture, first_line, replay_error
from scripts import run

import hostcuda

modes = pytest.importorskip("torch._higher_order_ops.cudagraph_conditional_nodes", reason="of torch 2.14")
ControlFlowOpWarmupDispatchMode = modes.ControlFlowOpWarmupDispatchMode
CUDAGraphCaptureControlFlowOpDispatchMode = modes.CUDAGraphCaptureControlFlowOpDispatchMode


@contextlib.contextmanager
def if_node(predicate: torch.Tensor) -> Iterator[None]:
    graph = torch.cuda.CUDAGraph.get_currently_capturing_graph()
    graph.begin_capture_to_if_node(predicate)
    yield
    graph.end_capture_to_conditional_node()


@contextlib.contextmanager
def while_node(condition: Callable[[], torch.Tensor]) -> Iterator[None]:
    graph = torch.cuda.CUDAGraph.get_currently_capturing_graph()
    graph.begin_capture_to_while_node(condition())
    yield
    graph.set_conditional_handle_for_current_node(condition())
    graph.end_capture_to_conditional_node()


def flag(value: bool = True) -> torch.Tensor:
    return torch.tensor(value, device="cuda")


def number(value: int) -> torch.Tensor:
    return torch.tensor(value, device="cuda")


def bodies_run(graph: torch.cuda.CUDAGraph) -> int:
    before = hostcuda.counter("conditional_bodies")
    graph.replay()
    torch.cuda.synchronize()
    return hostcuda.counter("conditional_bodies") - before


def test_an_if_node_follows_its_predicate() -> None:
    predicate, values = flag(), torch.zeros(100, device="cuda")

    def work() -> None:
        values.add_(1)
        with if_node(predicate):
            values.mul_(10)
        values.add_(100)

    before, graph = hostcuda.skipped(), capture(work)
    for expected, ran in ((110, True), (101, False), (110, True)):
        predicate.fill_(ran)
        values.zero_()
        assert bodies_run(graph) == ran
        assert values.tolist() == [expected] * 100
    assert hostcuda.skipped() == before


def test_two_if_nodes_are_a_cond() -> None:
    predicate, values, result = flag(), torch.ones(10, device="cuda"), torch.zeros(10, device="cuda")

    def work() -> None:
        with if_node(predicate):
            result.copy_(values + 1)
        with if_node(~predicate):
            result.copy_(values - 1)

    graph = capture(work)
    for value in (True, False):
        predicate.fill_(value)
        assert bodies_run(graph) == 1
        assert result.tolist() == [2 if value else 0] * 10


@pytest.mark.parametrize("limit", [0, 1, 7])
def test_a_while_node_until_a_counter(limit: int) -> None:
    count, most = number(0), number(limit)

    def work() -> None:
        count.zero_()
        with while_node(lambda: count < most):
            count.add_(1)

    graph = capture(work)
    assert (bodies_run(graph), count.item()) == (limit, limit)
    most.fill_(3)
    assert (bodies_run(graph), count.item()) == (3, 3)


def test_nested() -> None:
    """Counts the odd ones among the first numbers."""
    count, odd, most = number(0), number(0), number(5)

    def work() -> None:
        count.zero_()
        odd.zero_()
        with while_node(lambda: count < most):
            count.add_(1)
            with if_node(count % 2 == 1):
                odd.add_(1)

    graph = capture(work)
    assert (bodies_run(graph), count.item(), odd.item()) == (5 + 3, 5, 3)
    most.fill_(2)
    assert (bodies_run(graph), count.item(), odd.item()) == (2 + 1, 2, 1)


def test_memory_of_bodies_is_the_graphs() -> None:
    """What a body allocates is the graph's pool's, and nobody else gets it while there is a graph."""
    size, predicate, made = 64 << 20, flag(), []

    def work() -> None:
        with if_node(predicate):
            made.append(torch.full((size,), 3, dtype=torch.uint8, device="cuda"))

    graph = capture(work)
    pool, address = graph.pool(), made[0].data_ptr()
    graph.replay()
    assert made[0][-1].item() == 3
    made.clear()
    torch.cuda.empty_cache()
    others = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    graph.replay()  # into memory that is still there, and still its own
    assert all(other.data_ptr() != address and other[-1].item() == 0 for other in others)
    graph.reset()
    release(pool, nodes=1)


def release(pool: tuple[int, int], nodes: int) -> None:
    """What torch 2.14.1 does not do: each conditional node takes the pool twice, and a reset gives it back once."""
    for _ in range(2 * nodes):
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)


def test_the_pool_of_a_graph_with_conditional_nodes_outlives_it() -> None:
    """torch 2.14.1's own fault (CUDAGraph::begin_capture_to_conditional_node): beginAllocateToPool for the body, and
    again after it, each count as a user of the pool. The device only shows what becomes of the memory."""
    predicate, size = flag(), 64 << 20

    def work(nodes: int) -> None:
        torch.empty(size, dtype=torch.uint8, device="cuda")
        for _ in range(nodes):
            with if_node(predicate):
                predicate.logical_not()

    for nodes in (0, 1, 3):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = capture(lambda nodes=nodes: work(nodes))
        pool = graph.pool()
        graph.reset()
        del graph
        torch.cuda.empty_cache()
        assert (torch.cuda.memory_reserved() - before >= size) == (nodes > 0)
        release(pool, nodes)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before


# -- torch.cond and torch.while_loop --


def branches(predicate: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cond(predicate, lambda a: a.sin() + 1, lambda a: a.cos() * 2, [values])


def halves(values: torch.Tensor, count: torch.Tensor) -> Any:
    return torch.while_loop(lambda v, n: n > 0, lambda v, n: (v / 2, n - 1), (values, count))


def nested(values: torch.Tensor, count: torch.Tensor) -> Any:
    def body(v: torch.Tensor, n: torch.Tensor) -> Any:
        return torch.cond(n % 2 == 0, lambda a: a * 2, lambda a: a + 1, [v]), n - 1

    return torch.while_loop(lambda v, n: n > 0, body, (values, count))


def captured(work: Callable[..., Any], *args: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """By the modes that torch has for it: each branch is warmed up, then captured."""
    work = torch.compile(work, backend="eager", fullgraph=True)
    with ControlFlowOpWarmupDispatchMode():
        work(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), CUDAGraphCaptureControlFlowOpDispatchMode():
        result = work(*args)
    return graph, result


def test_cond() -> None:
    predicate, values = flag(), torch.arange(4.0, device="cuda")
    graph, result = captured(branches, predicate, values)
    for value in (True, False, True):
        predicate.fill_(value)
        assert bodies_run(graph) == 1
        torch.testing.assert_close(result, branches(predicate, values))


def test_while_loop() -> None:
    values, count = torch.arange(4.0, device="cuda"), number(3)
    graph, result = captured(halves, values, count)
    for times in (3, 0, 6):
        count.fill_(times)
        assert bodies_run(graph) == times
        torch.testing.assert_close(result[0], values / 2**times)
        assert result[1].item() == 0


def test_cond_in_a_while_loop() -> None:
    values, count = torch.ones(3, device="cuda"), number(4)
    graph, result = captured(nested, values, count)
    assert bodies_run(graph) == 4 + 4
    assert result[0].tolist() == [7.0] * 3  # ((1 * 2 + 1) * 2) + 1


# -- what torch, and the device, refuse --


class Body:
    """An IF node whose body is what work captures: the error of each step, or "" if there is none."""

    def __init__(self, work: Callable[[], Any]) -> None:
        predicate, self.graph, self.stream = flag(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.graph.capture_begin()
            self.graph.begin_capture_to_if_node(predicate)
            self.work = first_line(work)
            self.end = first_line(self.graph.end_capture_to_conditional_node)
            self.back = torch.cuda.current_stream() == self.stream
            torch.cuda.set_stream(self.stream)
            self.capture_end = first_line(self.graph.capture_end)
        assert hostcuda.counter("active_captures") == 0


def test_a_wait_in_a_body_costs_the_graph() -> None:
    """torch 2.14.1 leaves the body's stream the current one; who goes back to the graph's stream can end the capture,
    and gets no executable graph. Where the graph dies, torch makes its stream the current one."""
    values = torch.ones(3, device="cuda")
    body = Body(values.sum().item)
    assert "not permitted when stream is capturing" in body.work
    assert "previous error during capture" in body.end
    assert not body.back
    assert "invalid argument" in body.capture_end
    stream = body.stream
    del body
    gc.collect()
    assert torch.cuda.current_stream() == stream
    torch.cuda.set_stream(torch.cuda.default_stream())


def test_random_numbers_in_a_body_are_refused_by_torch() -> None:
    """When the body ends; the graph's capture is none the worse for it."""
    body = Body(lambda: torch.rand(3, device="cuda"))
    assert body.work == ""
    assert "RNG within data-dependent conditional nodes" in body.end
    assert body.back
    assert body.capture_end == ""


def test_a_host_function_in_a_body_cannot_be_instantiated() -> None:
    """PLANTED: by CUDA's runtime, on the stream that captures the body; torch knows nothing of it."""
    nothing = HOST_FUNCTION(lambda _: None)

    def work() -> None:
        do("cudaLaunchHostFunc", ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), nothing, None)

    body = Body(work)
    assert (body.work, body.end) == ("", "")
    assert "invalid argument" in body.capture_end


@pytest.mark.parametrize(
    ("predicate", "refused", "fault"),
    [
        (lambda: torch.ones((), device="cuda"), "expected scalar type Bool", ""),
        (lambda: torch.ones(3, dtype=torch.bool, device="cuda"), "", ""),  # its first element counts
        (lambda: torch.tensor(True), "", "an illegal memory access"),  # PLANTED: the kernel gets the host's address
    ],
    ids=["float", "three", "cpu"],
)
def test_a_predicate_that_is_none(predicate: Callable[[], torch.Tensor], refused: str, fault: str) -> None:
    """torch looks at its type, not at its size or device (CUDAGraph.cu, set_conditional_handle)."""
    made, lines = predicate(), []

    def work() -> None:
        graph = torch.cuda.CUDAGraph.get_currently_capturing_graph()
        lines.append(first_line(lambda: graph.begin_capture_to_if_node(made)))
        if not refused:
            graph.end_capture_to_conditional_node()

    if refused:  # its handle has no node then, and the graph is lost
        assert "invalid argument" in first_line(lambda: capture(work))
    else:
        line = replay_error(capture(work))
        hostcuda.clear_sticky()
        assert fault in line if fault else line == ""
    assert refused in lines[0]


def test_outside_of_a_capture_there_is_no_node() -> None:
    graph, predicate = torch.cuda.CUDAGraph(), flag()
    assert "capture_begin() must be called before" in first_line(lambda: graph.begin_capture_to_if_node(predicate))


def test_a_graph_with_conditional_nodes_is_no_part_of_another() -> None:
    predicate = flag()

    def work() -> None:
        with if_node(predicate):
            predicate.logical_not()

    inner = capture(work)
    assert "not permitted when stream is capturing" in first_line(lambda: capture(inner.replay))


PROGRAM = """
    import torch
    from graphs import capture
    from test_torch_conditionals import if_node, number, while_node
    count, sums, most, keep = number(0), number(0), number(4), []
    def work():
        count.zero_()
        sums.zero_()
        with while_node(lambda: count < most):
            count.add_(1)
            with if_node(count > 2):
                keep.append(count * 10)
                sums.add_(keep[-1])
    graph = capture(work)
    torch.cuda.synchronize()
    for limit in (4, 2, 5):
        most.fill_(limit)
        graph.replay()
    print(count.item(), sums.item(), hostcuda.counter("conditional_bodies"))
"""
SETTINGS = [{}, {"HOSTCUDA_LAZY": "1"}, {"HOSTCUDA_ORDER": "lifo"}, {"HOSTCUDA_POISON": "1"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: "".join(one) or "plain")
def test_with(settings: dict[str, str]) -> None:
    assert run(PROGRAM, **settings) == ["5 120 16"]


@pytest.mark.parametrize("setting", ["HOSTCUDA_COMPUTE", "HOSTCUDA_OPERATORS"])
def test_where_nothing_is_computed(setting: str) -> None:
    assert run(PROGRAM, **{setting: "0"})[-1].split()[-1] == "6"
