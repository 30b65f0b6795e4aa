"""Events, their time, and what they are before they are recorded. Source: cudaEventRecord, cudaEventElapsedTime."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from cuda import EXTERNAL, HOST_FUNCTION, NO_TIMING, answer, captured, do, event, launch, record, stream, wait
from scripts import run


def elapsed(first: Any, second: Any) -> tuple[str, float]:
    result = ctypes.c_float(-1)
    return answer("cudaEventElapsedTime", ctypes.byref(result), first, second), result.value


def test_an_event_that_was_not_recorded_is_complete() -> None:
    mark = event()
    assert answer("cudaEventQuery", mark) == "Success"
    assert answer("cudaEventSynchronize", mark) == "Success"
    assert wait(stream(), mark) == "Success"


def test_elapsed_time_is_that_of_the_work() -> None:
    one, first, second = stream(), event(), event()
    sleeps = HOST_FUNCTION(lambda _: time.sleep(0.05))
    record(first, one)
    do("cudaLaunchHostFunc", one, sleeps, None)
    record(second, one)
    do("cudaEventSynchronize", second)
    got, milliseconds = elapsed(first, second)
    assert got == "Success"
    assert 49 < milliseconds < 5000
    assert elapsed(second, first)[1] == -milliseconds
    record(first, one)
    assert elapsed(first, second)[1] < 0


def test_events_without_time() -> None:
    one, timed, untimed, never = stream(), event(), event(NO_TIMING), event()
    record(timed, one)
    record(untimed, one)
    do("cudaStreamSynchronize", one)
    assert elapsed(timed, never)[0] == "InvalidResourceHandle"
    assert elapsed(timed, untimed)[0] == "InvalidResourceHandle"
    assert elapsed(untimed, timed)[0] == "InvalidResourceHandle"


def test_a_time_that_is_not_known_yet() -> None:
    """PLANTED: nobody has waited for the second event."""
    script = """
        one, first, second, place, time = stream(), event(), event(), memory(), ctypes.c_float(-1)
        def elapsed():
            return answer("cudaEventElapsedTime", ctypes.byref(time), first, second)
        record(first, one)
        fill(place, 1, one)
        record(second, one)
        print(elapsed())
        do("cudaEventSynchronize", second)
        print(elapsed(), time.value >= 0)
    """
    assert run(script, HOSTCUDA_LAZY="1") == ["NotReady", "Success True"]


def test_a_graph_records_external_events_at_each_launch() -> None:
    one, first, second = stream(), event(), event()
    record(first, one)
    graph = captured(one, lambda: record(second, one, EXTERNAL))
    times = []
    for _ in range(2):
        launch(graph, one)
        do("cudaStreamSynchronize", one)
        time.sleep(0.01)
        times.append(elapsed(first, second))
    assert [got for got, _ in times] == ["Success", "Success"]
    assert times[1][1] > times[0][1] > 0


def test_destroyed_events_are_forgotten() -> None:
    one, two, mark = stream(), stream(), event()
    record(mark, one)
    wait(two, mark)
    do("cudaEventDestroy", mark)
    do("cudaStreamSynchronize", two)
