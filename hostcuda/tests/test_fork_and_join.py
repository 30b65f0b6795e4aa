"""Streams that join a capture by events, and what separates captures from other work.

Source: CUDA Programming Guide, "Cross-stream Dependencies and Events", "Prohibited and Unhandled Operations";
cudaErrorStreamCaptureUnjoined, ...Isolation, ...Merge and cudaErrorCapturedEvent in driver_types.h.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from cuda import (
    ACTIVE,
    EXTERNAL,
    INVALIDATED,
    NONE,
    answer,
    begin,
    byte,
    captured,
    copy,
    do,
    end,
    event,
    fill,
    launch,
    memory,
    record,
    status,
    stream,
    wait,
)


def at(pointer: ctypes.c_void_p, offset: int) -> ctypes.c_void_p:
    return ctypes.c_void_p((pointer.value or 0) + offset)


def nodes(graph: Any) -> dict[int, list[int]]:
    """For each node of a graph, those that it depends on; numbered as they were captured."""
    count = ctypes.c_size_t()
    do("cudaGraphGetNodes", graph, None, ctypes.byref(count))
    handles = (ctypes.c_void_p * count.value)()
    do("cudaGraphGetNodes", graph, handles, ctypes.byref(count))
    number = {handle: i for i, handle in enumerate(handles)}
    found = {}
    for handle, i in number.items():
        many = ctypes.c_size_t()
        do("cudaGraphNodeGetDependencies", ctypes.c_void_p(handle), None, None, ctypes.byref(many))
        on = (ctypes.c_void_p * many.value)()
        do("cudaGraphNodeGetDependencies", ctypes.c_void_p(handle), on, None, ctypes.byref(many))
        found[i] = sorted(number[one] for one in on)
    return found


def test_a_fork_and_a_join() -> None:
    one, two, fork, join, place = stream(), stream(), event(), event(), memory()
    begin(one)
    fill(place, 1, one)
    record(fork, one)
    assert status(two) == NONE
    wait(two, fork)
    assert status(two) == ACTIVE
    copy(at(place, 1), place, two)
    copy(at(place, 2), place, one)
    record(join, two)
    wait(one, join)
    copy(at(place, 3), at(place, 1), one, 2)
    got, graph = end(one)
    assert got == "Success"
    assert nodes(graph) == {0: [], 1: [0], 2: [0], 3: [1, 2]}
    assert (status(one), status(two)) == (NONE, NONE)
    assert fill(place, 2, two) == "Success"  # work of its own again
    assert byte(place, two) == 2


def test_captured_work_runs_at_launches_only() -> None:
    one, place = stream(), memory()
    fill(place, 1, one)
    graph = captured(one, lambda: fill(place, 2, one))
    assert byte(place, one) == 1
    launch(graph, one)
    assert byte(place, one) == 2
    fill(place, 3, one)
    launch(graph, one)
    assert byte(place, one) == 2


def test_unjoined_work() -> None:
    """PLANTED: the join is missing."""
    one, two, fork, place = stream(), stream(), event(), memory()
    begin(one)
    fill(place, 1, one)
    record(fork, one)
    wait(two, fork)
    fill(place, 2, two)
    got, graph = end(one)
    assert got == "StreamCaptureUnjoined"
    assert not graph
    assert (status(one), status(two)) == (NONE, NONE)


def test_work_after_the_join_is_unjoined_too() -> None:
    one, two, fork, join, place = stream(), stream(), event(), event(), memory()
    begin(one)
    record(fork, one)
    wait(two, fork)
    fill(place, 2, two)
    record(join, two)
    fill(place, 3, two)
    wait(one, join)
    assert end(one)[0] == "StreamCaptureUnjoined"


def test_a_capture_waits_for_no_work_outside_of_it() -> None:
    one, two, before, place = stream(), stream(), event(), memory()
    fill(place, 1, two)
    record(before, two)
    begin(one)
    assert wait(one, before) == "StreamCaptureIsolation"
    assert status(one) == INVALIDATED
    assert end(one)[0] == "StreamCaptureInvalidated"


def test_external_events_cross_the_boundary() -> None:
    one, two, before, after, place = stream(), stream(), event(), event(), memory()
    fill(place, 1, two)
    record(before, two)

    def work() -> None:
        assert wait(one, before, EXTERNAL) == "Success"
        copy(at(place, 1), place, one)
        assert record(after, one, EXTERNAL) == "Success"

    graph = captured(one, work)
    launch(graph, one)
    assert byte(at(place, 1), one) == 1
    assert answer("cudaEventQuery", after) == "Success"  # no captured event: the graph records it


def test_an_event_that_was_never_recorded_holds_nobody() -> None:
    one, mark = stream(), event()
    begin(one)
    assert wait(one, mark) == "Success"
    assert end(one)[0] == "Success"


@pytest.mark.parametrize("call", ["cudaEventQuery", "cudaEventSynchronize"])
def test_a_captured_event_is_not_asked(call: str) -> None:
    one, mark = stream(), event()
    begin(one)
    record(mark, one)
    assert answer(call, mark) == "CapturedEvent"
    assert status(one) == INVALIDATED
    end(one)
    assert answer(call, mark) == "CapturedEvent"  # it is still the one of that capture
    assert record(mark, one) == "Success"
    assert answer("cudaEventSynchronize", mark) == "Success"


def test_a_captured_event_after_its_capture() -> None:
    one, two, mark = stream(), stream(), event()
    begin(one)
    record(mark, one)
    assert end(one)[0] == "Success"
    assert wait(two, mark) == "CapturedEvent"
    begin(two)
    assert wait(two, mark) == "CapturedEvent"
    assert end(two)[0] == "StreamCaptureInvalidated"
    elapsed = ctypes.c_float()
    assert answer("cudaEventElapsedTime", ctypes.byref(elapsed), mark, mark) == "CapturedEvent"


def test_two_captures_do_not_merge() -> None:
    one, two, mark, place = stream(), stream(), event(), memory()
    begin(one)
    begin(two)
    fill(place, 1, one)
    record(mark, one)
    assert wait(two, mark) == "StreamCaptureMerge"
    assert end(one)[0] == "StreamCaptureInvalidated"
    assert end(two)[0] == "StreamCaptureInvalidated"


def test_an_event_keeps_what_it_was_recorded_at() -> None:
    """cudaEventRecord: later work on the stream does not modify the event, a later record overwrites it."""
    one, two, mark, join, place = stream(), stream(), event(), event(), memory()
    begin(one)
    fill(place, 1, one)
    record(mark, one)
    fill(place, 2, one)
    wait(two, mark)
    fill(at(place, 1), 3, two)
    record(join, two)
    wait(one, join)
    got, graph = end(one)
    assert got == "Success"
    assert nodes(graph) == {0: [], 1: [0], 2: [0]}
