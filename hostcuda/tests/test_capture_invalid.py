"""A capture that was invalidated: what every later call answers, and how it ends.

Source: CUDA Programming Guide, "Cross-stream Dependencies and Events" and "Invalidation"; cudaStreamEndCapture.
"""

from __future__ import annotations

import ctypes

import pytest
from cuda import (
    ACTIVE,
    GLOBAL,
    INVALIDATED,
    LEGACY,
    NONE,
    RELAXED,
    THREAD_LOCAL,
    another_thread_captures,
    answer,
    begin,
    byte,
    captured,
    copy,
    do,
    end,
    event,
    executable,
    fill,
    in_thread,
    launch,
    malloc,
    memory,
    record,
    status,
    stream,
    wait,
)

import hostcuda


def lost() -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """A stream whose capture has been invalidated, and an event that was recorded in it before."""
    one, mark = stream(), event()
    assert begin(one) == "Success"
    assert record(mark, one) == "Success"
    assert malloc() == "StreamCaptureUnsupported"
    assert status(one) == INVALIDATED
    return one, mark


def test_every_later_call_on_its_streams_and_events_is_an_error() -> None:
    one, mark = lost()
    other, place = stream(), ctypes.c_void_p(8)
    answers = {
        "memset": fill(place, 1, one),
        "copy": copy(place, place, one),
        "record": record(event(), one),
        "wait": wait(one, event()),
        "join": wait(other, mark),
        "launch": answer("cudaLaunchHostFunc", one, None, None),
    }
    assert set(answers.values()) == {"StreamCaptureInvalidated"}, answers
    assert status(other) == NONE
    got, graph = end(one)
    assert got == "StreamCaptureInvalidated"
    assert not graph
    assert status(one) == NONE


def test_the_stream_is_good_again_afterwards() -> None:
    one, _ = lost()
    end(one)
    place = memory()
    assert fill(place, 5, one) == "Success"
    assert byte(place, one) == 5
    graph = captured(one, lambda: fill(place, 6, one))
    assert launch(graph, one) == "Success"
    assert byte(place, one) == 6


def test_joined_streams_are_lost_with_it_and_let_go_of_at_its_end() -> None:
    one, two, fork, place = stream(), stream(), event(), memory()
    begin(one)
    record(fork, one)
    wait(two, fork)
    malloc()
    assert (status(one), status(two)) == (INVALIDATED, INVALIDATED)
    assert fill(place, 1, two) == "StreamCaptureInvalidated"
    assert end(one)[0] == "StreamCaptureInvalidated"
    assert (status(one), status(two)) == (NONE, NONE)
    assert fill(place, 1, two) == "Success"


def test_an_error_that_invalidates_nothing() -> None:
    one, two, fork, join, place = stream(), stream(), event(), event(), memory()
    begin(one)
    assert begin(one) == "IllegalState"
    record(fork, one)
    wait(two, fork)
    assert in_thread(lambda: end(one)[0]) == "StreamCaptureWrongThread"
    assert status(one) == ACTIVE
    assert fill(place, 9, two) == "Success"
    record(join, two)
    wait(one, join)
    got, graph = end(one)
    assert got == "Success"
    launch(executable(graph), one)
    assert byte(place, one) == 9


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_ending_in_another_thread(mode: int) -> None:
    one = stream()
    begin(one, mode)
    there = in_thread(lambda: end(one)[0])
    if mode == RELAXED:
        assert there == "Success"
    else:
        assert there == "StreamCaptureWrongThread"
        assert end(one)[0] == "Success"


def test_ending_on_another_stream_of_the_capture() -> None:
    one, two, fork = stream(), stream(), event()
    begin(one)
    record(fork, one)
    wait(two, fork)
    assert end(two)[0] == "StreamCaptureUnmatched"
    assert status(one) == INVALIDATED
    assert end(one)[0] == "StreamCaptureInvalidated"


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_waiting_for_the_device_while_anybody_captures(mode: int) -> None:
    """It would wait for the capturing stream, whatever the mode (Programming Guide, "Prohibited Operations")."""
    one = stream()
    begin(one, mode)
    assert answer("cudaDeviceSynchronize") == "StreamCaptureUnsupported"
    assert end(one)[0] == "StreamCaptureInvalidated"
    with another_thread_captures(mode, ends="StreamCaptureInvalidated"):
        assert answer("cudaDeviceSynchronize") == "StreamCaptureUnsupported"
    do("cudaDeviceSynchronize")


@pytest.mark.parametrize("call", ["cudaStreamSynchronize", "cudaStreamQuery"])
def test_waiting_for_the_stream_that_captures(call: str) -> None:
    one = stream()
    begin(one, RELAXED)
    assert answer(call, one) == "StreamCaptureUnsupported"
    assert end(one)[0] == "StreamCaptureInvalidated"


def test_a_destroyed_stream_takes_its_capture_along() -> None:
    one, two, fork = stream(), stream(), event()
    begin(one)
    record(fork, one)
    wait(two, fork)
    do("cudaStreamDestroy", two)
    assert end(one)[0] == "StreamCaptureInvalidated"


def test_the_legacy_stream_is_not_concerned() -> None:
    place = memory()
    one, _ = lost()
    assert fill(place, 1, LEGACY) == "Success"  # one is not a blocking stream
    end(one)


def test_counts_and_refusals_name_what_happened() -> None:
    before = hostcuda.counter("captures_failed"), hostcuda.counter("captures"), sum(hostcuda.refusals().values())
    one, _ = lost()
    end(one)
    assert hostcuda.counter("captures_failed") == before[0] + 1
    assert hostcuda.counter("captures") == before[1] + 1
    assert sum(hostcuda.refusals().values()) == before[2] + 2
    assert hostcuda.refusals()["cudaMalloc -> cudaErrorStreamCaptureUnsupported"] >= 1
