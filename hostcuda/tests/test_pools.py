"""Memory pools of torch's allocator on the device: private pools of graphs, sharing, and when memory goes back."""

from __future__ import annotations

import gc

import pytest
import torch
from graphs import capture, needs_later_rules
from scripts import run, start

import hostcuda

SIZE = 32 << 20  # more than a segment that is shared


def big(value: int = 1) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8, device="cuda")


def emptied() -> int:
    """What the device holds when nothing is cached."""
    gc.collect()
    torch.cuda.empty_cache()
    return hostcuda.counter("used_bytes")


@needs_later_rules  # with 2.11 failed captures before hold what is freed
def test_a_graphs_memory_is_its_own_and_goes_with_it() -> None:
    before = emptied()
    made: list[torch.Tensor] = []
    graph = capture(lambda: made.append(big()))
    inside = [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] != (0, 0)]
    assert sum(segment["total_size"] for segment in inside) >= SIZE
    address = made[0].data_ptr()
    made.clear()
    assert emptied() >= before + SIZE  # no tensor is left, and the graph writes there
    other = big()
    assert other.data_ptr() != address
    del graph, other
    assert emptied() == before


def test_graphs_that_share_a_pool_share_memory() -> None:
    before = emptied()
    pool = torch.cuda.graph_pool_handle()
    seen: list[int] = []
    graphs = [capture(lambda: seen.append(big().data_ptr()), pool=pool) for _ in range(3)]
    assert seen[0] == seen[1] == seen[2]
    assert emptied() < before + 2 * SIZE
    separate = [capture(lambda: seen.append(big().data_ptr())) for _ in range(2)]
    assert len(set(seen)) == 3
    assert emptied() >= before + 3 * SIZE
    graphs.pop()
    assert emptied() >= before + 3 * SIZE  # two others use the pool
    del graphs, separate
    assert emptied() == before


@pytest.mark.parametrize("kept", [True, False])
def test_an_output_holds_its_memory_and_the_next_graph_leaves_it_alone(kept: bool) -> None:
    """PLANTED: the first graph's output is dropped before the second graph of its pool is captured."""
    pool = torch.cuda.graph_pool_handle()
    made: list[torch.Tensor] = []
    first = capture(lambda: made.append(big(1)), pool=pool)
    address = made[0].data_ptr()
    if not kept:
        made.clear()
    second = capture(lambda: made.append(big(2)), pool=pool)
    assert (made[-1].data_ptr() == address) == (not kept)
    output = made[0]
    second.replay()
    first.replay()
    assert output[0].item() == 1
    second.replay()
    assert output[0].item() == (1 if kept else 2)


def test_an_input_that_was_freed() -> None:
    """PLANTED: a graph reads a tensor that is gone, and whose memory went back to the device."""
    ended = start("""
        import torch
        from graphs import replay_error
        source, result = torch.ones(32 << 20, device="cuda"), torch.zeros(32 << 20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.add(source, 1, out=result)
        graph.replay()
        torch.cuda.synchronize()
        print(result[0].item(), flush=True)
        del source
        torch.cuda.empty_cache()
        print(replay_error(graph))
    """)
    assert ended.stdout.splitlines() == ["2.0", "CUDA error: an illegal memory access was encountered"], ended.stderr
    assert "is not allocated" in ended.stderr


def test_an_input_that_was_freed_and_given_to_another() -> None:
    """PLANTED: the memory stays in the allocator's cache: what the graph reads is the new owner's."""
    source = torch.ones(1000, device="cuda")
    result = torch.zeros(1000, device="cuda")
    graph = capture(lambda: torch.add(source, 1, out=result))
    address = source.data_ptr()
    source = None
    other = torch.full((1000,), 5.0, device="cuda")
    assert other.data_ptr() == address
    graph.replay()
    assert result[0].item() == 6


def test_poison_shows_a_read_of_memory_that_nobody_wrote() -> None:
    """PLANTED: the first element is never written."""
    script = """
        import torch
        values = torch.empty(32 << 20, device="cuda")
        values[1:].fill_(1)
        print(values.sum().item() == values.sum().item(), values[1].item())
        made = []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made.append(torch.ones(32 << 20, device="cuda"))
        print(made[0][0].item(), end=" ")  # PLANTED: a graph's output is read before its first replay
        graph.replay()
        print(made[0][0].item())
    """
    assert run(script, HOSTCUDA_POISON="1") == ["False 1.0", "nan 1.0"]


def test_a_stream_that_uses_a_tensor_of_another_one() -> None:
    """PLANTED: without record_stream, memory is given away while the other stream has not read it yet."""
    script = """
        import torch
        for recorded in (False, True):
            other = torch.cuda.Stream()
            source = torch.full((1000,), 1.0, device="cuda")
            address = source.data_ptr()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                result = source * 2
            if recorded:
                source.record_stream(other)
            del source
            new = torch.full((1000,), 7.0, device="cuda")
            torch.cuda.current_stream().synchronize()
            other.synchronize()
            print(recorded, new.data_ptr() == address, result[0].item())
            del new, result
    """
    assert run(script, HOSTCUDA_LAZY="1") == ["False True 14.0", "True False 2.0"]


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_memory_is_allocated_in_captures_of_every_mode(mode: str) -> None:
    """torch calls cudaMalloc in relaxed mode: c10/cuda/CUDACachingAllocator.cpp, cudaMallocMaybeCapturing."""
    emptied()
    mallocs = hostcuda.counter("mallocs")
    graph = capture(big, mode=mode)
    assert hostcuda.counter("mallocs") > mallocs
    graph.replay()
