"""The rules of captures, pools and generators, as torch's own code has them on this device, compared with
docs/hardware_rules.md. The table's other columns are those of tests/examples/test_hardware_rules.py."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graphs import capture, first_line, in_thread, needs_later_rules, workspaces_stay
from scripts import run

TABLE = Path(__file__).parents[2] / "docs" / "hardware_rules.md"


def said(rule: str) -> str:
    """The first word of the rule's cell in the column of this device, which is the last."""
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith(f"| `{rule}` |")]
    assert len(rows) == 1, f"{rule} in {TABLE.name}: {len(rows)} rows"
    word = re.match(r"[a-z]+", rows[0].split("|")[-2].strip())
    assert word
    return word[0]


def ones() -> torch.Tensor:
    return torch.ones(1000, device="cuda")


def captured_work_waits() -> bool:
    result = torch.zeros(3, device="cuda")
    capture(lambda: result.add_(1))
    return result[0].item() == 0


def capture_refuses_waits() -> bool:
    values = ones()
    waits: list[Callable[[], object]] = [
        lambda: values.sum().item(),
        lambda: values.nonzero(),
        lambda: bool(values[0] > 0),
        torch.cuda.synchronize,
        lambda: torch.cuda.current_stream().synchronize(),
    ]
    lost = []
    for wait in waits:
        errors = []
        lost.append(first_line(lambda wait=wait, errors=errors: capture(lambda: errors.append(first_line(wait)))))
        assert "not permitted when stream is capturing" in errors[0]
    return all("previous error during capture" in line for line in lost)


def one_capture_at_a_time() -> bool:
    values = ones()

    def other() -> str:
        return first_line(lambda: capture(lambda: values + torch.rand(1000, device="cuda"), mode="relaxed"))

    second: list[str] = []
    stream = torch.cuda.Stream()  # the other thread has the usual one
    capture(lambda: second.append(in_thread(other)) or torch.rand(1000, device="cuda"), mode="relaxed", on=stream)
    return second != [""]


def no_replay_in_a_capture() -> bool:
    result = torch.zeros(3, device="cuda")
    inner = capture(lambda: result.add_(1))
    if first_line(lambda: capture(inner.replay)):
        return True
    outer = capture(inner.replay)
    outer.replay()
    outer.replay()
    assert result[0].item() == 2  # it is a part of the outer one
    return False


def pool_dies_with_its_last_graph() -> bool:
    values, pool = ones(), torch.cuda.graph_pool_handle()
    capture(lambda: values * 2, pool=pool).reset()
    return "INTERNAL ASSERT FAILED" in first_line(lambda: capture(lambda: values * 2, pool=pool))


def failed(pool: tuple[int, int]) -> torch.cuda.CUDAGraph:
    """A graph whose capture has failed, and which is still there."""
    graph, values = torch.cuda.CUDAGraph(), ones()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=pool)
        assert first_line(lambda: values.sum().item())
        assert first_line(graph.capture_end)
    return graph


def failed_capture_holds_its_pool() -> bool:
    pool, values = torch.cuda.graph_pool_handle(), ones()
    good = capture(lambda: values * 2, pool=pool)
    graph = failed(pool)
    holds = "already recording" in first_line(lambda: capture(lambda: values * 2, pool=pool))
    assert good and graph
    return holds or first_line(torch.cuda.empty_cache) != ""


def failed_capture_spoils_its_pool() -> bool:
    pool, values = torch.cuda.graph_pool_handle(), ones()
    good = capture(lambda: values * 2, pool=pool)
    failed(pool).reset()
    line = first_line(lambda: capture(lambda: values * 2, pool=pool))
    assert good
    return line != ""


def failed_capture_holds_generators() -> bool:
    graph = failed(torch.cuda.graph_pool_handle())
    line = first_line(lambda: torch.rand(3, device="cuda"))
    assert graph
    return line != ""


def workspace_belongs_to_thread_and_stream() -> bool:
    matrix = torch.ones(4, 4, device="cuda")

    def taken() -> int:
        before = torch.cuda.memory_allocated()
        torch.mm(matrix, matrix)
        return torch.cuda.memory_allocated() - before

    torch._C._cuda_clearCublasWorkspaces()
    taken()
    with torch.cuda.stream(torch.cuda.Stream()):
        other_stream = taken()
    torch._C._cuda_clearCublasWorkspaces()
    taken()
    return other_stream > 0 and in_thread(taken) > 0


def libraries_begin_outside_of_captures() -> bool:
    script = """
        import torch
        from graphs import capture, first_line
        matrix = torch.ones(4, 4, device="cuda")
        print(first_line(lambda: capture(lambda: torch.mm(matrix, matrix))))
    """
    return "CUBLAS_STATUS_NOT_INITIALIZED" in run(script)[0]


CACHE = """
    import torch
    from graphs import first_line, in_thread
    def big(mebibytes):
        return torch.empty(mebibytes << 20, dtype=torch.uint8, device="cuda")
    def cached(mode, allocate):
        torch.cuda.empty_cache()
        big(100)  # cached, and of no use to anybody who asks for more
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode=mode)
            line = first_line(allocate)
            end = first_line(graph.capture_end)
        graph.reset()
        what = "out of memory" if "out of memory" in line else "refused" if "not permitted" in line else line
        print(mode, what or "fits", "and lost" if "previous error" in end else end)
    torch.ones(3, device="cuda")
    for mode in ("global", "relaxed"):
        cached(mode, lambda: big(120))
        cached(mode, lambda: in_thread(lambda: big(120) is None))
"""


def cache_stays_while_capturing() -> bool:
    """That of whoever captures. Others' memory that is short is won by emptying the cache, as at any time: a wait for
    the device, which a capture that is not relaxed prohibits, and which it does not survive."""
    mine_global, theirs_global, mine_relaxed, theirs_relaxed = run(CACHE, HOSTCUDA_MEMORY="150M")
    assert theirs_global == "global refused and lost"
    assert theirs_relaxed == "relaxed fits "
    return (mine_global, mine_relaxed) == ("global out of memory ", "relaxed out of memory ")


RULES = [
    captured_work_waits,
    capture_refuses_waits,
    one_capture_at_a_time,
    no_replay_in_a_capture,
    pool_dies_with_its_last_graph,
    failed_capture_holds_its_pool,
    failed_capture_spoils_its_pool,
    failed_capture_holds_generators,
    workspace_belongs_to_thread_and_stream,
    libraries_begin_outside_of_captures,
    cache_stays_while_capturing,
]


@needs_later_rules
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule(rule: Callable[[], bool]) -> None:
    """Whether torch's own code has it here; what the table says of it."""
    if rule is workspace_belongs_to_thread_and_stream and not workspaces_stay():
        pytest.skip("torch 2.15 frees a workspace with the product")
    holds = rule()
    gc.collect()
    torch.cuda.empty_cache()
    assert said(rule.__name__) == ("yes" if holds else "no")


def test_a_dead_pool_is_new_when_both_caches_were_emptied() -> None:
    """The allocator of the device's memory and that of pinned memory each keep what a pool has left."""
    values = ones()
    for host, device, expected in ((False, True, False), (True, True, True)):
        pool = torch.cuda.graph_pool_handle()
        capture(lambda: values * 2, pool=pool).reset()
        if device:
            torch.cuda.empty_cache()
        if host:
            torch._C._host_emptyCache()
        assert (first_line(lambda pool=pool: capture(lambda: values * 2, pool=pool)) == "") == expected


@needs_later_rules
def test_a_graph_that_is_part_of_another_draws_the_same_numbers_each_time() -> None:
    """torch sets a graph's seed and offset when it is replayed: here that is once, in the outer capture."""
    result = torch.zeros(100, device="cuda")
    inner = capture(lambda: result.uniform_())
    outer = capture(inner.replay)
    outer.replay()
    first = result.clone()
    outer.replay()
    assert torch.equal(result, first)
    inner.replay()
    assert not torch.equal(result, first)


@needs_later_rules
def test_a_graph_that_is_part_of_another_and_is_gone() -> None:
    """PLANTED: the outer graph goes on writing where the inner one's seed lay, which somebody else owns by now."""
    result = torch.zeros(100, device="cuda")
    outer = capture(capture(lambda: result.uniform_()).replay)
    owners = [torch.zeros(2, device="cuda") for _ in range(100)]
    outer.replay()
    assert any(owner.count_nonzero() for owner in owners)


def test_a_copy_of_pageable_memory_is_refused_by_torch_and_costs_no_capture() -> None:
    values, errors = ones(), []
    capture(lambda: errors.append(first_line(values.cpu)))
    assert "unless the CPU tensor is pinned" in errors[0]
