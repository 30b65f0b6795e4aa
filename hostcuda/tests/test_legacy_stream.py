"""The legacy default stream beside captures: it would wait for every blocking stream, and those that capture are none
to wait for. Source: CUDA Programming Guide, "Prohibited and Unhandled Operations"; cudaStreamIsCapturing."""

from __future__ import annotations

import ctypes

import pytest
from cuda import (
    ACTIVE,
    BLOCKING,
    DEFAULT_KIND,
    INVALIDATED,
    LEGACY,
    NON_BLOCKING,
    NONE,
    RELAXED,
    answer,
    begin,
    byte,
    end,
    event,
    fill,
    memory,
    pinned,
    record,
    status,
    stream,
    wait,
)

IMPLICIT = "StreamCaptureImplicit"


@pytest.mark.parametrize("use", ["work", "record", "wait", "copy", "synchronize"])
def test_using_it_while_a_blocking_stream_captures(use: str) -> None:
    """PLANTED for each use: the other stream was not made with cudaStreamNonBlocking."""
    place, host, mark = memory(), pinned(), event()
    uses = {
        "work": lambda: fill(place, 1, LEGACY),
        "record": lambda: record(mark, LEGACY),
        "wait": lambda: wait(LEGACY, mark),
        "copy": lambda: answer("cudaMemcpy", place, host, ctypes.c_size_t(4), DEFAULT_KIND),
        "synchronize": lambda: answer("cudaStreamSynchronize", LEGACY),
    }
    one = stream(BLOCKING)
    begin(one, RELAXED)  # in this mode no call is refused because it is unsafe
    assert uses[use]() == IMPLICIT
    assert status(one) == INVALIDATED
    assert end(one)[0] == "StreamCaptureInvalidated"
    assert uses[use]() == "Success"


def test_a_stream_that_does_not_block_lets_it_work() -> None:
    place, one = memory(), stream(NON_BLOCKING)
    begin(one, RELAXED)
    assert fill(place, 4, LEGACY) == "Success"
    assert answer("cudaStreamSynchronize", LEGACY) == "Success"
    assert byte(place) == 4
    assert end(one)[0] == "Success"


def test_asking_whether_it_captures_invalidates_nothing() -> None:
    one = stream(BLOCKING)
    begin(one)
    assert status(LEGACY) == IMPLICIT
    assert status(one) == ACTIVE
    assert end(one)[0] == "Success"
    assert status(LEGACY) == NONE


def test_it_never_joins_a_capture() -> None:
    one, mark = stream(NON_BLOCKING), event()
    begin(one)
    record(mark, one)
    assert wait(LEGACY, mark) == IMPLICIT
    assert end(one)[0] == "StreamCaptureInvalidated"
