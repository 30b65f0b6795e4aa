"""cuBLAS by torch's own handle pool: workspaces for each handle and stream, and a first handle inside of a capture.

Source: ATen/cuda/CUDABlas.cpp and CublasHandlePool.cpp.
"""

from __future__ import annotations

import gc

import pytest
import torch
from graphs import capture, in_thread, workspaces_stay
from scripts import run

MEBIBYTE = 1 << 20


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


def clear() -> None:
    torch._C._cuda_clearCublasWorkspaces()


stays = pytest.mark.skipif(not workspaces_stay(), reason="torch 2.15 frees a workspace with the product")


def test_a_product_has_a_workspace() -> None:
    matrix = torch.ones(4, 4, device="cuda")
    clear()
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.mm(matrix, matrix)
    assert torch.cuda.max_memory_allocated() - before >= 32 * MEBIBYTE
    clear()


@stays
def test_a_workspace_for_each_handle_and_stream() -> None:
    matrix = torch.ones(4, 4, device="cuda")
    other = torch.cuda.Stream()
    clear()
    before = allocated()

    def kept() -> int:
        return (allocated() - before) // MEBIBYTE

    torch.mm(matrix, matrix)
    one = kept()
    assert one == 32  # what torch takes on compute capability 9.0, parseChosenWorkspaceSize
    torch.mm(matrix, matrix)
    assert kept() == one
    with torch.cuda.stream(other):
        torch.mm(matrix, matrix)
        torch.mm(matrix, matrix)
    assert kept() == 2 * one
    in_thread(lambda: torch.mm(matrix, matrix) is None)  # a thread has a handle of its own
    assert kept() == 3 * one
    clear()
    assert allocated() == before


@stays
def test_a_workspace_that_a_capture_makes_lies_in_its_pool() -> None:
    matrix = torch.ones(4, 4, device="cuda")
    clear()
    graph = capture(lambda: torch.mm(matrix, matrix))
    pool = graph.pool()
    large = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == tuple(pool)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    assert sum(large) >= 32 * MEBIBYTE
    clear()


def test_a_first_handle_inside_of_a_capture_is_refused() -> None:
    """PLANTED: the thread has made no product yet. cublasCreate allocates, which a capture prohibits unless relaxed.

    A thread hands its handle on when it ends, soon after join() has returned: the next one needs none of its own.
    """
    script = """
        import time, torch
        from graphs import capture, first_line, in_thread
        matrix = torch.ones(4, 4, device="cuda")
        def product():
            return torch.mm(matrix, matrix)
        def unprepared(mode="global"):
            return first_line(lambda: capture(product, mode=mode))
        print(unprepared())
        print(in_thread(lambda: unprepared("relaxed")) or "relaxed: captured")
        for attempt in range(100):
            if not in_thread(unprepared):
                break
            time.sleep(0.05)
        print("handed on:", attempt < 99)
        product()
        print(unprepared() or "prepared: captured")
    """
    refused, *others = run(script)
    assert "CUBLAS_STATUS_NOT_INITIALIZED" in refused
    assert others == ["relaxed: captured", "handed on: True", "prepared: captured"]


def test_products_are_right_now_and_at_replays() -> None:
    left, right = torch.randn(8, 5), torch.randn(5, 7)
    a, b = left.cuda(), right.cuda()
    torch.testing.assert_close((a @ b).cpu(), left @ right)
    result = torch.empty(8, 7, device="cuda")
    graph = capture(lambda: torch.mm(a, b, out=result))
    a.mul_(2)
    graph.replay()
    torch.testing.assert_close(result.cpu(), 2 * left @ right)
    clear()
