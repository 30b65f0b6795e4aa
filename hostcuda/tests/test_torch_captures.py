"""What a program of torch's may and may not do while it captures: a list as in hostsim's test_capture_errors.py.

Torch's own code says what becomes of each, by what the device answers to its calls.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graphs import capture, first_line, in_thread, needs_later_rules

import hostcuda

WAITS = "operation not permitted when stream is capturing"
LOST = "operation failed due to a previous error during capture"
CAPTURED_EVENT = "operation not permitted on an event last recorded in a capturing stream"
PAGEABLE = "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned"
GOOD = ""


class Attempt:
    """A stream that captures, and what there was before."""

    def __init__(self) -> None:
        self.source = torch.ones(1000, device="cuda")
        self.pinned = torch.ones(1000).pin_memory()
        self.stream, self.before = torch.cuda.Stream(), torch.cuda.Event()
        self.before.record()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()

    def end(self) -> str:
        torch.cuda.set_stream(self.stream)
        line = first_line(self.graph.capture_end)
        torch.cuda.set_stream(torch.cuda.default_stream())
        return line


def works_on(stream: torch.cuda.Stream, source: torch.Tensor) -> None:
    with torch.cuda.stream(stream):
        source.add_(1)


def forks(here: Attempt, work: bool) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(here.stream)
    if work:
        works_on(side, here.source)


default = torch.cuda.default_stream

# the error of the call, that of the end, and whether both are so in relaxed captures (there: no error at all)
WAYS: dict[str, tuple[Callable[[Attempt], object], str, str, bool]] = {
    "waits for the device": (lambda here: torch.cuda.synchronize(), WAITS, LOST, True),
    "waits for its stream": (lambda here: here.stream.synchronize(), WAITS, LOST, True),
    "queries its stream": (lambda here: here.stream.query(), WAITS, LOST, True),
    "waits for another stream": (lambda here: default().synchronize(), WAITS, LOST, False),
    "queries another stream": (lambda here: default().query(), WAITS, LOST, False),
    "waits for its own event": (lambda here: here.stream.record_event().synchronize(), CAPTURED_EVENT, LOST, True),
    "queries its own event": (lambda here: here.stream.record_event().query(), CAPTURED_EVENT, LOST, True),
    "waits for an event from before": (lambda here: here.before.synchronize(), WAITS, LOST, False),
    "queries an event from before": (lambda here: here.before.query(), WAITS, LOST, False),
    "has its stream wait for work outside": (
        lambda here: here.stream.wait_event(here.before),
        "dependency created on uncaptured work in another stream",
        LOST,
        True,
    ),
    "reads a value": (lambda here: here.source.sum().item(), WAITS, LOST, True),
    "asks for a size that depends on values": (lambda here: here.source.nonzero(), WAITS, LOST, True),
    "copies from pinned memory and waits": (lambda here: here.source.copy_(here.pinned), WAITS, LOST, True),
    "copies from pinned memory": (lambda here: here.source.copy_(here.pinned, non_blocking=True), GOOD, GOOD, True),
    # torch asks before it calls CUDA: the capture itself does not know
    "copies to pageable memory": (lambda here: here.source.cpu(), PAGEABLE, GOOD, True),
    "copies from pageable memory": (lambda here: here.source.copy_(torch.ones(1000)), PAGEABLE, GOOD, True),
    "pins memory": (lambda here: torch.ones(1000).pin_memory(), GOOD, GOOD, True),
    # torch's streams do not block: this work is no part of the graph, and nobody says so
    "works on the default stream": (lambda here: works_on(default(), here.source), GOOD, GOOD, True),
    "works on a stream that did not fork": (
        lambda here: works_on(torch.cuda.Stream(), here.source),
        GOOD,
        GOOD,
        True,
    ),
    "forks to the default stream": (
        lambda here: default().wait_stream(here.stream),
        "operation would make the legacy stream depend on a capturing blocking stream",
        LOST,
        True,
    ),
    "does not join a fork": (lambda here: forks(here, work=True), GOOD, "capturing stream has unjoined work", True),
    "does not join a fork without work": (lambda here: forks(here, work=False), GOOD, GOOD, True),
    "seeds the generator": (
        lambda here: torch.cuda.manual_seed(torch.cuda.initial_seed() + 1),
        "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is the same",
        GOOD,
        True,
    ),
    "reads the generator's state": (lambda here: torch.cuda.get_rng_state(), GOOD, GOOD, True),
    "another thread waits for the device": (lambda here: in_thread(torch.cuda.synchronize), WAITS, LOST, True),
}


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("way", WAYS)
def test_a_capture_that(way: str, mode: str) -> None:
    work, error, at_the_end, always = WAYS[way]
    if mode == "relaxed" and not always:
        error = at_the_end = GOOD
    here = Attempt()
    torch.cuda.set_stream(here.stream)
    here.graph.capture_begin(capture_error_mode=mode)
    here.source + 1
    got = first_line(lambda: work(here))
    end = here.end()
    for line, expected in ((got, error), (end, at_the_end)):
        text = line.removeprefix("CUDA error: ")
        assert text.startswith(expected) if expected else text == "", (got, end)
    assert hostcuda.counter("active_captures") == 0
    assert (torch.ones(3, device="cuda") + 1).sum().item() == 6  # whatever became of it, the device is usable


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_another_thread_reads_a_value(mode: str) -> None:
    here, other = Attempt(), torch.ones(1000, device="cuda")
    torch.cuda.set_stream(here.stream)
    here.graph.capture_begin(capture_error_mode=mode)
    got = first_line(lambda: in_thread(lambda: other.sum().item()))
    assert (WAITS in got) == (mode == "global")
    assert (LOST in here.end()) == (mode == "global")


def test_ending_on_another_stream_is_refused_and_the_capture_goes_on() -> None:
    here = Attempt()
    torch.cuda.set_stream(here.stream)
    here.graph.capture_begin()
    result = here.source + 1
    torch.cuda.set_stream(default())
    assert "same stream it began on" in first_line(here.graph.capture_end)
    assert here.end() == ""
    here.graph.replay()
    assert result[0].item() == 2


@needs_later_rules
@pytest.mark.parametrize("dead", [False, True])
def test_emptying_the_cache(dead: bool) -> None:
    """What is cached stays. PLANTED: a pool whose last graph is gone is freed all the same, which no capture survives
    that is not relaxed (CUDACachingAllocator.cpp, release_cached_blocks)."""
    gc.collect()
    torch.cuda.empty_cache()
    size = 100 << 20
    torch.empty(size, dtype=torch.uint8, device="cuda")  # cached from here on
    if dead:
        capture(lambda: torch.empty(size, dtype=torch.uint8, device="cuda")).reset()
    here = Attempt()
    torch.cuda.set_stream(here.stream)
    here.graph.capture_begin()
    reserved = torch.cuda.memory_reserved()
    line = first_line(torch.cuda.empty_cache)
    assert torch.cuda.memory_reserved() == reserved
    assert (WAITS in line, LOST in here.end()) == (dead, dead)
    here.graph.reset()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < size


def test_the_table_says_the_same() -> None:
    """The second table of docs/hardware_rules.md has these rows, and in the second column what becomes of each."""
    text = (Path(__file__).parents[2] / "docs" / "hardware_rules.md").read_text()
    rows = text.split("## What a thread does while it captures\n")[1].split("|---|---|---|---|\n")[1].splitlines()
    said = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in rows}
    done = {}
    for way, (_, error, at_the_end, always) in WAYS.items():
        words = ", ".join(word for word, line in (("refused", error), ("lost", at_the_end)) if line)
        done[way] = (words or "allowed") + ("" if always else "; not if relaxed")
    assert said == done
