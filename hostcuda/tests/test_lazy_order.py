"""HOSTCUDA_LAZY=1: work waits until somebody has to wait for it, and then only what that needs runs.

A missing wait gives wrong numbers, and always the same ones. Each script prints what it finds without the wait
(PLANTED), and with it.
"""

from __future__ import annotations

import pytest
from scripts import run

LAZY = {"HOSTCUDA_LAZY": "1"}


def test_between_streams() -> None:
    script = """
        for waits in (False, True):
            one, two, mark, place, result = stream(), stream(), event(), memory(), memory()
            do("cudaDeviceSynchronize")
            fill(place, 1, one)
            if waits:
                record(mark, one)
                wait(two, mark)
            copy(result, place, two)
            print(waits, byte(result, two))
    """
    assert run(script, **LAZY) == run(script, **LAZY) == ["False 0", "True 1"]
    assert run(script) == ["False 1", "True 1"]  # eager order shows nothing


@pytest.mark.parametrize("how", ["cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"])
def test_before_the_host_reads(how: str) -> None:
    script = f"""
        one, mark, place, unrelated = stream(), event(), memory(), stream()
        fill(place, 1, one)
        record(mark, one)
        do("cudaStreamSynchronize", unrelated)
        print(byte(place))
        do("{how}", *{{"cudaStreamSynchronize": [one], "cudaEventSynchronize": [mark]}}.get("{how}", []))
        print(byte(place))
    """
    assert run(script, **LAZY) == ["0", "1"]


def test_an_event_waits_for_what_was_issued_before_it_only() -> None:
    script = """
        one, mark, place = stream(), event(), memory()
        fill(place, 1, one)
        record(mark, one)
        fill(place, 2, one)
        do("cudaEventSynchronize", mark)
        print(byte(place), byte(place, one))
    """
    assert run(script, **LAZY) == ["1 2"]


def test_copies_from_the_host() -> None:
    """From pageable memory: staged at once. From pinned memory: read when it runs (PLANTED: it was changed before).

    Source: CUDA Runtime API, "API synchronization behavior", Memcpy.
    """
    script = """
        pageable = ctypes.create_string_buffer(bytes([1]), 64)
        for name, host in (("pageable", ctypes.c_void_p(ctypes.addressof(pageable))), ("pinned", pinned())):
            for waits in (False, True):
                one, place = stream(), memory()
                ctypes.memset(host, 1, 1)
                copy(place, host, one)
                if waits:
                    do("cudaStreamSynchronize", one)
                ctypes.memset(host, 2, 1)
                print(name, waits, byte(place, one))
    """
    assert run(script, **LAZY) == ["pageable False 1", "pageable True 1", "pinned False 2", "pinned True 1"]


def test_copies_to_the_host() -> None:
    """To pageable memory: done when the call returns. To pinned memory: when somebody has waited."""
    script = """
        pageable = ctypes.create_string_buffer(64)
        for name, host in (("pageable", ctypes.c_void_p(ctypes.addressof(pageable))), ("pinned", pinned())):
            ctypes.memset(host, 0, 1)
            one, place = stream(), memory()
            fill(place, 1, one)
            copy(host, place, one)
            print(name, byte(host), byte(host, one))
    """
    assert run(script, **LAZY) == ["pageable 1 1", "pinned 0 1"]


def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it() -> None:
    """Source: CUDA Runtime API, "Stream synchronization behavior". PLANTED: a stream that does not block."""
    script = """
        for flags in (BLOCKING, NON_BLOCKING):
            one, mark, place, result = stream(flags), event(), memory(), memory()
            fill(place, 1, one)
            copy(result, place, LEGACY)
            record(mark, LEGACY)
            do("cudaEventSynchronize", mark)  # waits for no more than what the copy waited for
            before = byte(result)
            fill(place, 2, LEGACY)
            copy(result, place, one)
            print(before, byte(result, one))
    """
    assert run(script, **LAZY) == ["1 2", "0 1"]


def test_a_synchronous_copy_waits_for_blocking_streams_only() -> None:
    script = """
        host = pinned()
        for flags in (BLOCKING, NON_BLOCKING):
            one, place = stream(flags), memory()
            fill(place, 1, one)
            do("cudaMemcpy", host, place, ctypes.c_size_t(1), DEFAULT_KIND)
            print(byte(host))
    """
    assert run(script, **LAZY) == ["1", "0"]


def test_graphs_are_work_as_all_other() -> None:
    script = """
        for waits in (False, True):
            one, two, mark, place, result = stream(), stream(), event(), memory(), memory()
            graph = captured(one, lambda: fill(place, 1, one))
            launch(graph, one)
            if waits:
                record(mark, one)
                wait(two, mark)
            copy(result, place, two)
            print(byte(result, two))
        # an executable graph that is destroyed after its launch runs all the same
        fill(place, 0, one)
        launch(graph, one)
        do("cudaGraphExecDestroy", graph)
        print(byte(place, one))
    """
    assert run(script, **LAZY) == ["0", "1", "1"]


def test_nothing_is_ready_at_the_first_query() -> None:
    script = """
        one, mark, place = stream(), event(), memory()
        fill(place, 1, one)
        record(mark, one)
        fill(place, 2, one)
        print(answer("cudaEventQuery", mark), answer("cudaStreamQuery", one))
        print(answer("cudaEventQuery", mark), byte(place))
        print(answer("cudaStreamQuery", one), byte(place))
    """
    assert run(script, **LAZY) == ["NotReady NotReady", "Success 1", "Success 2"]


def test_freeing_waits_for_the_device() -> None:
    script = """
        one, place, host = stream(), memory(), pinned()
        fill(place, 3, one)
        copy(host, place, one)
        do("cudaFree", place)
        print(byte(host))
        two, late = stream(), memory()
        fill(late, 4, two)
        do("cudaStreamDestroy", two)  # returns at once; its work still runs
        do("cudaDeviceSynchronize")
        print(byte(late))
    """
    assert run(script, **LAZY) == ["3", "4"]


def test_host_functions_run_in_their_place() -> None:
    script = """
        one, two, mark, seen = stream(), stream(), event(), []
        note = [HOST_FUNCTION(lambda _, i=i: seen.append(i)) for i in range(3)]
        do("cudaLaunchHostFunc", one, note[0], None)
        record(mark, one)
        do("cudaLaunchHostFunc", one, note[1], None)
        wait(two, mark)
        do("cudaLaunchHostFunc", two, note[2], None)
        do("cudaStreamSynchronize", two)
        print(seen)
        do("cudaStreamSynchronize", one)
        print(seen)
    """
    assert run(script, **LAZY) == ["[0, 2]", "[0, 2, 1]"]
    assert run(script) == ["[0, 1, 2]", "[0, 1, 2]"]


def test_a_fault_is_reported_by_whoever_waits() -> None:
    script = """
        one, place = stream(), memory()
        do("cudaFree", place)
        print(fill(place, 1, one), answer("cudaStreamSynchronize", one), answer("cudaStreamSynchronize", one))
    """
    assert run(script, **LAZY) == ["Success IllegalAddress IllegalAddress"]
