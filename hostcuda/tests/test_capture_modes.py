"""What a capture's mode, and a thread's, prohibit. Source: cudaThreadExchangeStreamCaptureMode."""

from __future__ import annotations

import ctypes

import pytest
from cuda import (
    ACTIVE,
    DEFAULT_KIND,
    GLOBAL,
    INVALIDATED,
    LEGACY,
    NONE,
    RELAXED,
    THREAD_LOCAL,
    another_thread_captures,
    answer,
    begin,
    end,
    event,
    exchange_mode,
    fill,
    free_memory,
    in_thread,
    malloc,
    memory,
    pinned,
    record,
    status,
    stream,
)

REFUSED = "StreamCaptureUnsupported"


def in_mode(mode: int) -> str:
    """Mallocs in this thread, in a mode."""
    before = exchange_mode(mode)
    try:
        return malloc()
    finally:
        assert exchange_mode(before) == mode


@pytest.mark.parametrize(
    ("capture", "thread", "own", "other"),
    [
        # a capture that this thread has begun counts unless it or the thread is relaxed;
        # another thread's counts if both it and the thread are global
        (GLOBAL, GLOBAL, REFUSED, REFUSED),
        (GLOBAL, THREAD_LOCAL, REFUSED, "Success"),
        (GLOBAL, RELAXED, "Success", "Success"),
        (THREAD_LOCAL, GLOBAL, REFUSED, "Success"),
        (THREAD_LOCAL, THREAD_LOCAL, REFUSED, "Success"),
        (THREAD_LOCAL, RELAXED, "Success", "Success"),
        (RELAXED, GLOBAL, "Success", "Success"),
        (RELAXED, THREAD_LOCAL, "Success", "Success"),
        (RELAXED, RELAXED, "Success", "Success"),
    ],
)
def test_an_unsafe_call(capture: int, thread: int, own: str, other: str) -> None:
    one = stream()
    for where, expected in ((in_mode, own), (lambda mode: in_thread(lambda: in_mode(mode)), other)):
        assert begin(one, capture) == "Success"
        assert where(thread) == expected
        assert status(one) == (ACTIVE if expected == "Success" else INVALIDATED)
        got, graph = end(one)
        assert (got, bool(graph)) == (
            ("Success", True) if expected == "Success" else ("StreamCaptureInvalidated", False)
        )


def test_a_refused_call_does_nothing_and_the_next_is_good() -> None:
    one = stream()
    begin(one)
    free = free_memory()
    assert malloc() == REFUSED
    assert free_memory() == free
    end(one)
    assert malloc() == "Success"


def test_an_unsafe_call_invalidates_each_capture_that_prohibits_it() -> None:
    mine, relaxed = stream(), stream()
    begin(mine)
    begin(relaxed, RELAXED)
    with another_thread_captures(THREAD_LOCAL) as theirs:
        assert malloc() == REFUSED
        assert (status(mine), status(relaxed), status(theirs)) == (INVALIDATED, ACTIVE, ACTIVE)
    assert end(mine)[0] == "StreamCaptureInvalidated"
    assert end(relaxed)[0] == "Success"


def test_streams_may_be_used_and_captured_beside_a_capture() -> None:
    one, two = stream(), stream()
    place = memory()
    with another_thread_captures(GLOBAL) as theirs:
        assert fill(place, 7, one) == "Success"  # asynchronous work is safe in every mode
        assert begin(two) == "Success"
        assert end(two)[0] == "Success"
        assert status(theirs) == ACTIVE


@pytest.mark.parametrize(
    "call",
    ["cudaHostAlloc", "cudaFree", "cudaFreeHost", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"],
)
def test_which_calls_are_unsafe(call: str) -> None:
    one, idle, mark, place, host = stream(), stream(), event(), memory(), pinned()
    assert record(mark, idle) == "Success"
    made = ctypes.c_void_p()
    arguments = {
        "cudaHostAlloc": (ctypes.byref(made), ctypes.c_size_t(512), 0),
        "cudaFree": (place,),
        "cudaFreeHost": (host,),
        "cudaStreamSynchronize": (idle,),
        "cudaEventSynchronize": (mark,),
        "cudaMemcpy": (place, host, ctypes.c_size_t(4), DEFAULT_KIND),
    }[call]
    assert begin(one) == "Success"
    assert answer(call, *arguments) == REFUSED
    assert end(one)[0] == "StreamCaptureInvalidated"
    assert answer(call, *arguments) == "Success"


def test_the_legacy_stream_captures_nothing() -> None:
    assert begin(LEGACY) == REFUSED
    assert status(LEGACY) == NONE


def test_a_stream_captures_one_graph_at_a_time() -> None:
    one = stream()
    assert begin(one) == "Success"
    assert begin(one) == "IllegalState"
    assert end(one)[0] == "Success"
    assert end(one)[0] == "IllegalState"
