"""Conditional nodes, and captures into graphs that are there.

Source: CUDA Programming Guide, "CUDA Graphs", "Conditional Graph Nodes"; CUDA Runtime API, cudaGraphAddNode,
cudaConditionalNodeParams, cudaGraphConditionalHandleCreate, cudaStreamBeginCaptureToGraph.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
from conditionals import (
    CONDITIONAL,
    EMPTY,
    GRAPH,
    IF,
    SWITCH,
    WHILE,
    Params,
    add,
    at,
    branch,
    bytes_of,
    captured_graph,
    capturing,
    conditional,
    graph,
    instantiate,
    into,
    make_handle,
    set_handle,
    write,
)
from cuda import (
    GLOBAL,
    HOST_FUNCTION,
    RELAXED,
    answer,
    begin,
    begin_to,
    byte,
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
from scripts import run

import hostcuda


def bodies_run(made: Any, on: Any) -> int:
    """Launches it once: how many bodies have run."""
    before = hostcuda.counter("conditional_bodies")
    assert launch(made, on) == "Success"
    do("cudaStreamSynchronize", on)
    return hostcuda.counter("conditional_bodies") - before


def test_if() -> None:
    one, value, place = stream(), bytes_of([1]), memory()
    with captured_graph(one) as made:
        (body,) = branch(one, IF, value=value)
        with into(body) as inner:
            fill(place, 5, inner)
        copy(at(place, 1), place, one)
    run_it = executable(made)
    assert bodies_run(run_it, one) == 1
    assert (byte(place), byte(at(place, 1))) == (5, 5)
    write(value, [0])
    fill(place, 7, one)
    assert bodies_run(run_it, one) == 0
    assert (byte(place), byte(at(place, 1))) == (7, 7)
    write(value, [1])
    assert bodies_run(run_it, one) == 1
    assert byte(at(place, 1)) == 5


@pytest.mark.parametrize("value", [0, 1])
def test_if_with_else(value: int) -> None:
    one, place, given = stream(), memory(), bytes_of([value])
    with captured_graph(one) as made:
        for number, body in enumerate(branch(one, IF, 2, given)):
            with into(body) as inner:
                fill(place, 10 + number, inner)
    assert bodies_run(executable(made), one) == 1
    assert byte(place) == (10 if value else 11)


@pytest.mark.parametrize("value", [0, 1, 2, 3, 1000])
def test_switch(value: int) -> None:
    """A value without a body runs none."""
    one, place = stream(), bytes_of([9])
    with captured_graph(one) as made:
        for number, body in enumerate(branch(one, SWITCH, 3, default=value)):
            with into(body) as inner:
                fill(place, number, inner)
    assert bodies_run(executable(made), one) == (value < 3)
    assert byte(place) == (value if value < 3 else 9)


def loop(on: Any, values: Any, count: Any = None) -> Any:
    """A graph that loops while the first of the values is not 0, and moves them one to the front each time."""
    kept = memory()
    with captured_graph(on) as made:
        (body,) = branch(on, WHILE, value=values)
        with into(body) as inner:
            copy(kept, at(values, 1), inner, 8)
            copy(values, kept, inner, 8)
            set_handle(body.handle, values, inner)
    return made


@pytest.mark.parametrize("times", [0, 1, 5])
def test_while(times: int) -> None:
    one = stream()
    values = bytes_of([1] * times + [0] * 9)
    run_it = executable(loop(one, values))
    assert bodies_run(run_it, one) == times
    write(values, [1, 1])
    assert bodies_run(run_it, one) == 2


def test_the_default_value_is_that_of_each_launch() -> None:
    """Without the flag what is given is no default; what a launch has set is forgotten in the next."""
    one, zero = stream(), bytes_of([0])
    with captured_graph(one) as made:
        (body,) = branch(one, WHILE, default=1)
        with into(body) as inner:
            set_handle(body.handle, zero, inner)
    run_it = executable(made)
    assert [bodies_run(run_it, one) for _ in range(3)] == [1, 1, 1]


def test_nested() -> None:
    """An IF in a WHILE: the inner handle is the body's, and the outer one is set from the inner body."""
    one, kept, zero = stream(), memory(), bytes_of([0])
    values = bytes_of([1, 0, 1, 0, 1, 1, 0, 0, 0, 0])  # whether the inner body runs; the first one ends the loop
    with captured_graph(one) as made:
        (outer,) = branch(one, WHILE, default=1)
        with into(outer) as middle:
            copy(kept, at(values, 1), middle, 8)
            copy(values, kept, middle, 8)
            (inner_body,) = branch(middle, IF, value=values)
            with into(inner_body) as inner:
                set_handle(outer.handle, zero, inner)
    run_it = executable(made)
    assert bodies_run(run_it, one) == 3  # 0; 1, and its body
    assert bodies_run(run_it, one) == 3
    assert bodies_run(run_it, one) == 2


def test_a_handle_may_be_used_in_a_body() -> None:
    """API: with a node "in this graph or one of its children"."""
    one, place = stream(), bytes_of([0])
    with captured_graph(one) as made:
        outer = make_handle(capturing(one)[0], 1)
        (body,) = branch(one, IF, default=1)
        _, (inner_body,) = conditional(body, outer)
        with into(inner_body) as inner:
            fill(place, 4, inner)
    assert bodies_run(executable(made), one) == 2
    assert byte(place) == 4


def test_streams_fork_and_join_in_a_body() -> None:
    one, two, fork, join, place = stream(), stream(), event(), event(), memory()
    with captured_graph(one) as made:
        (body,) = branch(one, IF, default=1)
        with into(body) as inner:
            record(fork, inner)
            wait(two, fork)
            fill(place, 3, two)
            record(join, two)
            wait(inner, join)
            copy(at(place, 1), place, inner)
    assert bodies_run(executable(made), one) == 1
    assert byte(at(place, 1)) == 3


def test_a_graph_in_a_body() -> None:
    """Launched while the body is captured, and added as a node: both are there as they were."""
    one, place, small = stream(), memory(), graph()
    with into(small) as inner:
        fill(place, 6, inner)
    launched = executable(small)
    with captured_graph(one) as made:
        (body,) = branch(one, IF, default=1)
        with into(body) as inner:
            assert launch(launched, inner) == "Success"
            copy(at(place, 1), place, inner)
        params = Params(type=GRAPH, handle=small.value)
        assert add(body, params) == "Success"
    do("cudaGraphDestroy", small)
    assert bodies_run(executable(made), one) == 1
    assert byte(at(place, 1)) == 6


# -- captures into a graph --


def test_a_capture_into_a_graph_adds_to_it() -> None:
    one, place, into_this = stream(), memory(), graph()
    for value in (1, 2):
        nodes = nodes_of(into_this)
        assert begin_to(one, into_this, nodes) == "Success"
        fill(place, value, one)
        got, made = end(one)
        assert (got, made.value) == ("Success", into_this.value)
    assert [dependencies(node) for node in nodes_of(into_this)] == [[], nodes_of(into_this)[:1]]
    run_it = executable(into_this)
    do("cudaGraphDestroy", into_this)
    launch(run_it, one)
    assert byte(place, one) == 2


def nodes_of(of: Any) -> list[int]:
    count = ctypes.c_size_t()
    do("cudaGraphGetNodes", of, None, ctypes.byref(count))
    handles = (ctypes.c_void_p * count.value)()
    do("cudaGraphGetNodes", of, handles, ctypes.byref(count))
    return list(handles)


def dependencies(of: int) -> list[int]:
    count, on = ctypes.c_size_t(8), (ctypes.c_void_p * 8)()
    do("cudaGraphNodeGetDependencies", ctypes.c_void_p(of), on, None, ctypes.byref(count))
    return list(on)[: count.value]


def test_a_capture_in_a_capture_is_one_of_its_own() -> None:
    """Each is ended by itself, and an unsafe call invalidates both."""
    one, inner = stream(), stream()
    begin(one)
    (body,) = branch(one, IF, default=1)
    assert begin_to(inner, body, mode=GLOBAL) == "Success"
    assert hostcuda.counter("active_captures") == 2
    assert malloc() == "StreamCaptureUnsupported"
    assert answer("cudaStreamEndCapture", inner, None) == "StreamCaptureInvalidated"
    assert status(one) == "invalidated"
    assert end(one)[0] == "StreamCaptureInvalidated"


def test_its_mode_and_thread() -> None:
    one, two, target = stream(), stream(), graph()
    assert begin_to(one, target, mode=GLOBAL) == "Success"
    assert begin_to(one, target) == "IllegalState"
    assert in_thread(lambda: end(one)[0]) == "StreamCaptureWrongThread"
    assert end(one)[0] == "Success"
    assert begin_to(two, target, mode=RELAXED) == "Success"
    assert malloc() == "Success"
    assert in_thread(lambda: end(two)[0]) == "Success"
    assert begin_to(None, target) == "StreamCaptureUnsupported"


# -- what graphs say, and hold --


def test_bodies_are_graphs(tmp_path: Path) -> None:
    one, place = stream(), memory()
    with captured_graph(one) as made:
        fill(place, 1, one)
        before = capturing(one)[1]
        (body,) = branch(one, IF, default=1)
        assert nodes_of(body) == []
        with into(body) as inner:
            fill(place, 2, inner)
    kind, (first, node) = ctypes.c_int(), nodes_of(made)
    do("cudaGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    assert (kind.value, dependencies(node), before) == (CONDITIONAL, [first], [first])
    assert len(nodes_of(body)) == 1
    do("cudaGraphDebugDotPrint", made, str(tmp_path / "graph.dot").encode(), 0)
    text = (tmp_path / "graph.dot").read_text()
    assert text.count("cudaMemsetAsync") == 2
    assert "subgraph cluster" in text


def test_the_executable_graph_is_a_snapshot_of_bodies_too() -> None:
    one, place = stream(), memory()
    with captured_graph(one) as made:
        (body,) = branch(one, IF, default=1)
        with into(body) as inner:
            fill(place, 2, inner)
    run_it = executable(made)
    with into(body) as inner:
        fill(place, 3, inner)
    assert bodies_run(run_it, one) == 1
    assert byte(place) == 2
    do("cudaGraphDestroy", made)
    assert bodies_run(run_it, one) == 1


def test_user_objects_of_bodies_live_with_the_executable_graph() -> None:
    one, gone = stream(), []
    destroy = HOST_FUNCTION(lambda _: gone.append(True))
    thing = ctypes.c_void_p()
    do("cudaUserObjectCreate", ctypes.byref(thing), None, destroy, 1, 1)
    with captured_graph(one) as made:
        (body,) = branch(one, IF, default=1)
        do("cudaGraphRetainUserObject", body, thing, 1, 1)  # moved to it
    run_it = executable(made)
    do("cudaGraphDestroy", made)
    assert bodies_run(run_it, one) == 1
    assert gone == []
    do("cudaGraphExecDestroy", run_it)
    assert gone == [True]


def test_an_empty_node() -> None:
    target, node = graph(), ctypes.c_void_p()
    assert add(target, Params(type=EMPTY), node=node) == "Success"
    assert add(target, Params(type=EMPTY), [node.value]) == "Success"
    assert [dependencies(one) for one in nodes_of(target)] == [[], [node.value]]
    assert instantiate(target)[0] == "Success"


# -- settings --

SETTINGS = [{}, {"HOSTCUDA_LAZY": "1"}, {"HOSTCUDA_ORDER": "lifo"}, {"HOSTCUDA_POISON": "1"}]
PROGRAM = """
    from conditionals import *
    from test_conditional_nodes import bodies_run, loop
    one, values, place = stream(), bytes_of([1, 1, 1, 0]), bytes_of([0, 0])
    print(bodies_run(executable(loop(one, values)), one))
    write(values, [1])
    with captured_graph(one) as made:
        fill(place, 1, one)
        then, = branch(one, IF, value=values)
        with into(then) as inner:
            fill(place, 2, inner)
            copy(at(place, 1), place, inner)
        fill(place, 3, one)
        for body in branch(one, SWITCH, 2, default=1):
            with into(body) as inner:
                fill(at(place, 2), 4, inner)
    ready = executable(made)
    do("cudaGraphDestroy", made)
    print(launch(ready, one), launch(ready, one))
    do("cudaGraphExecDestroy", ready)
    print(byte(place, one), byte(at(place, 1)), byte(at(place, 2)), hostcuda.counter("conditional_bodies"))
"""


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: "".join(one) or "plain")
def test_with(settings: dict[str, str]) -> None:
    assert run(PROGRAM, **settings) == ["3", "Success Success", "3 2 4 7"]


def test_where_nothing_is_computed_the_first_body_runs_once() -> None:
    """Handles have no value there, and no loop may go on for ever."""
    assert run(PROGRAM, HOSTCUDA_COMPUTE="0") == ["1", "Success Success", "0 0 0 5"]


def test_a_value_that_is_set_without_a_wait() -> None:
    """PLANTED: the node does not depend on what writes the predicate. Each order that is allowed may show it."""
    script = """
        from conditionals import *
        for waits in (False, True):
            one, two, values, fork, join = stream(), stream(), bytes_of([1]), event(), event()
            with captured_graph(one) as made:
                record(fork, one)
                wait(two, fork)
                fill(values, 0, two)
                record(join, two)
                if waits:
                    wait(one, join)
                body, = branch(one, IF, value=values)
                wait(one, join)
            launch(executable(made), one)
            do("cudaDeviceSynchronize")
            print(waits, hostcuda.counter("conditional_bodies"))
    """
    assert run(script) == ["False 0", "True 0"]
    assert run(script, HOSTCUDA_ORDER="lifo") == ["False 1", "True 1"]
