"""What is refused of conditional nodes: each test plants a violation.

Source: CUDA Programming Guide, "Conditional Graph Nodes", "Conditional Handles", "Conditional Node Body Graph
Requirements"; CUDA Runtime API, cudaGraphNodeTypeConditional. README.md says what is decided here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
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
    branch,
    bytes_of,
    captured_graph,
    conditional,
    graph,
    instantiate,
    into,
    make_handle,
    set_handle,
    why_not,
)
from cuda import (
    EXTERNAL,
    HOST_FUNCTION,
    RELAXED,
    answer,
    begin,
    begin_to,
    copy,
    do,
    end,
    event,
    executable,
    fill,
    launch,
    memory,
    pinned,
    record,
    status,
    stream,
    wait,
)
from scripts import run

import hostcuda


@pytest.fixture
def faults() -> Iterator[None]:
    yield
    hostcuda.clear_sticky()


PLACE = memory()
NOTHING = HOST_FUNCTION(lambda _: None)

# -- handles and nodes --


def test_a_handle_is_made_for_a_graph_and_with_flags_that_there_are() -> None:
    made, target = ctypes.c_ulonglong(), graph()
    call = "cudaGraphConditionalHandleCreate"
    assert answer(call, ctypes.byref(made), None, 0, 0) == "InvalidValue"
    assert answer(call, ctypes.byref(made), target, 0, 2) == "InvalidValue"


def refused(to: Any, handle: int, kind: int = IF, size: int = 1, after: Any = ()) -> bool:
    return add(to, Params(type=CONDITIONAL, handle=handle, kind=kind, size=size), after) == "InvalidValue"


def test_a_handle_belongs_to_its_graph() -> None:
    target, other = graph(), graph()
    handle = make_handle(target)
    assert refused(other, handle)
    assert refused(target, handle + 1000)
    do("cudaGraphDestroy", target)
    assert refused(other, handle)


def test_a_handle_of_a_body_is_not_for_the_graph_around_it() -> None:
    target = graph()
    _, (body,) = conditional(target, make_handle(target))
    inner = make_handle(body)
    assert refused(target, inner)
    conditional(body, inner)


def test_a_handle_has_one_node() -> None:
    target = graph()
    handle = make_handle(target)
    conditional(target, handle)
    assert refused(target, handle)


@pytest.mark.parametrize(("kind", "sizes"), [(IF, (0, 3)), (WHILE, (0, 2)), (SWITCH, (0,)), (7, (1,))])
def test_sizes(kind: int, sizes: tuple[int, ...]) -> None:
    target = graph()
    handle = make_handle(target)
    assert all(refused(target, handle, kind, size) for size in sizes)
    if kind <= SWITCH:
        conditional(target, handle, kind)  # what was refused has not used the handle


def test_a_handle_without_a_node() -> None:
    target = graph()
    handle = make_handle(target)
    assert why_not(target) == "a conditional handle without a node"
    _, (body,) = conditional(target, handle)
    inner = make_handle(body)
    assert why_not(target) == "a conditional handle without a node"
    conditional(body, inner)
    assert instantiate(target)[0] == "Success"


def test_dependencies_are_nodes_of_the_graph() -> None:
    target, other, node = graph(), graph(), ctypes.c_void_p()
    add(target, Params(type=EMPTY), node=node)
    assert add(other, Params(type=EMPTY), [node.value]) == "InvalidValue"
    assert add(target, Params(type=EMPTY), [node.value, node.value]) == "InvalidValue"
    assert refused(other, make_handle(other), after=[node.value])
    assert begin_to(stream(), other, [node.value]) == "InvalidValue"
    assert begin_to(stream(), None) == "InvalidValue"


def test_work_is_not_added_node_by_node() -> None:
    assert add(graph(), Params(type=0)) == "NotSupported"


# -- bodies --


def with_body(work: Callable[[Any], Any], kind: int = IF) -> Any:
    """A graph with one conditional node, in whose body is what work captures."""
    one = stream()
    with captured_graph(one) as made:
        (body,) = branch(one, kind, default=1)
        with into(body) as inner:
            work(inner)
    return made


def small(work: Callable[[Any], Any]) -> Any:
    target = graph()
    with into(target) as inner:
        work(inner)
    return target


def host(on: Any) -> None:
    do("cudaLaunchHostFunc", on, NOTHING, None)


BODIES: dict[str, Callable[[Any], Any]] = {
    "cudaLaunchHostFunc in": host,
    "cudaEventRecord in": lambda on: record(event(), on, EXTERNAL),
    "cudaStreamWaitEvent in": lambda on: wait(on, event(), EXTERNAL),
    "cudaMemcpyAsync of other memory than the device's in": lambda on: copy(
        PLACE, ctypes.create_string_buffer(8), on
    ),
    "cudaMemsetAsync of other memory than the device's in": lambda on: fill(ctypes.create_string_buffer(8), 1, on),
}


@pytest.mark.parametrize("kind", [IF, WHILE, SWITCH])
@pytest.mark.parametrize("what", BODIES)
def test_a_body_has_no(what: str, kind: int) -> None:
    assert why_not(with_body(BODIES[what], kind)) == f"{what} the body of a conditional node"


@pytest.mark.parametrize("what", BODIES)
def test_outside_of_bodies_it_is_allowed(what: str) -> None:
    assert instantiate(small(BODIES[what]))[0] == "Success"


@pytest.mark.parametrize("what", BODIES)
def test_nor_has_a_graph_in_a_body(what: str) -> None:
    inner = executable(small(BODIES[what]))
    nested = executable(small(lambda on: launch(inner, on)))
    for child in (inner, nested):
        assert why_not(with_body(lambda on, child=child: launch(child, on))).startswith(what)

    def added(on: Any) -> None:
        (body,) = branch(on, IF, default=1)
        assert add(body, Params(type=GRAPH, handle=small(BODIES[what]).value)) == "Success"

    assert why_not(small(added)).startswith(what)


def test_nor_has_a_body_in_a_body() -> None:
    def nested(on: Any) -> None:
        (body,) = branch(on, WHILE, default=1)
        with into(body) as inner:
            host(inner)

    assert why_not(with_body(nested)) == "cudaLaunchHostFunc in the body of a conditional node"


def test_memory_of_bodies_is_there_when_they_are_instantiated() -> None:
    place, other = memory(), pinned()
    made = with_body(lambda on: copy(place, other, on))
    run_it = executable(made)
    do("cudaGraphExecDestroy", run_it)
    do("cudaFree", place)
    assert why_not(made).startswith("cudaMemcpyAsync of other memory")


def test_a_body_is_its_nodes() -> None:
    target = graph()
    _, (body,) = conditional(target, make_handle(target))
    assert why_not(body) == "the body of a conditional node by itself"
    assert answer("cudaGraphDestroy", body) == "InvalidValue"
    assert answer("cudaGraphDestroy", target) == "Success"


def test_a_body_waits_for_no_event_of_the_capture_around_it() -> None:
    """Two captures: neither survives (Guide, "Prohibited and Unhandled Operations")."""
    one, mark = stream(), event()
    begin(one)
    record(mark, one)
    (body,) = branch(one, IF, default=1)
    with into(body, ends="StreamCaptureInvalidated") as inner:
        assert wait(inner, mark) == "StreamCaptureMerge"
    assert end(one)[0] == "StreamCaptureInvalidated"


@pytest.mark.parametrize("body", [False, True])
def test_a_capture_into_a_graph_that_has_failed(body: bool) -> None:
    """PLANTED: the join is missing. The graph is there still, and is of no use."""
    one, two, fork, place = stream(), stream(), event(), memory()

    def fails(target: Any) -> None:
        with into(target, ends="StreamCaptureUnjoined") as inner:
            fill(place, 1, inner)
            record(fork, inner)
            wait(two, fork)
            fill(place, 2, two)

    if body:
        with captured_graph(one) as made:
            fails(branch(one, IF, default=1)[0])
    else:
        made = graph()
        fails(made)
    assert status(two) == "none"
    assert why_not(made) == "a capture into the graph has failed"
    do("cudaGraphDestroy", made)


def test_the_stream_of_such_a_capture_is_destroyed() -> None:
    one, target = stream(), graph()
    begin_to(one, target)
    do("cudaStreamDestroy", one)
    assert why_not(target) == "a capture into the graph has failed"


def test_a_capture_into_a_graph_of_its_own_gives_it_to_somebody() -> None:
    one = stream()
    begin(one)
    assert answer("cudaStreamEndCapture", one, None) == "InvalidValue"
    assert end(one)[0] == "Success"


def test_a_graph_stays_while_something_captures_into_it() -> None:
    one, target = stream(), graph()
    _, (body,) = conditional(target, make_handle(target))
    begin_to(one, body, mode=RELAXED)
    assert answer("cudaGraphDestroy", target) == "IllegalState"
    assert end(one)[0] == "Success"
    do("cudaGraphDestroy", target)


# -- graphs with conditional nodes --


def test_one_executable_graph_at_a_time() -> None:
    made = with_body(lambda on: None)
    first = executable(made)
    assert why_not(made) == "a second time, with conditional nodes"
    do("cudaGraphExecDestroy", first)
    assert instantiate(made)[0] == "Success"
    plain = small(lambda on: None)
    assert (instantiate(plain)[0], instantiate(plain)[0]) == ("Success", "Success")


def test_no_child_graph() -> None:
    made, one = with_body(lambda on: None), stream()
    assert add(graph(), Params(type=GRAPH, handle=made.value)) == "InvalidValue"
    run_it = executable(made)
    begin(one)
    assert launch(run_it, one) == "StreamCaptureUnsupported"
    assert end(one)[0] == "StreamCaptureInvalidated"


# -- values --


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize("kind", [IF, WHILE, SWITCH])
def test_a_value_that_nobody_has_set(kind: int, capfd: pytest.CaptureFixture[str]) -> None:
    one = stream()
    with captured_graph(one) as made:
        branch(one, kind)
    assert launch(executable(made), one) == "LaunchFailure"
    assert "is reached before it is set" in capfd.readouterr().err


@pytest.mark.usefixtures("faults")
def test_a_value_of_the_launch_before_is_none_of_this_one(capfd: pytest.CaptureFixture[str]) -> None:
    """PLANTED: the value is set behind its node, for the next launch."""
    one, value = stream(), bytes_of([1])
    with captured_graph(one) as made:
        bodies = branch(one, IF, default=1)
        (body,) = branch(one, IF)
        with into(bodies[0]) as inner:
            fill(value, 1, inner)
        set_handle(body.handle, value, one)
    assert launch(executable(made), one) == "LaunchFailure"
    assert "is reached before it is set" in capfd.readouterr().err


@pytest.mark.usefixtures("faults")
def test_a_handle_is_set_by_its_own_graph(capfd: pytest.CaptureFixture[str]) -> None:
    one, target, value = stream(), graph(), bytes_of([1])
    handle = make_handle(target)
    assert set_handle(handle, value, one) == "LaunchFailure"
    assert "outside of a launch of its graph" in capfd.readouterr().err
    hostcuda.clear_sticky()
    assert launch(executable(small(lambda on: set_handle(handle, value, on))), one) == "LaunchFailure"
    hostcuda.clear_sticky()
    assert set_handle(handle + 1000, value, one) == "LaunchFailure"


@pytest.mark.usefixtures("faults")
def test_a_predicate_that_was_freed() -> None:
    one, value = stream(), bytes_of([1])
    with captured_graph(one) as made:
        branch(one, IF, value=value)
    run_it = executable(made)
    do("cudaFree", value)
    assert launch(run_it, one) == "IllegalAddress"


@pytest.mark.usefixtures("faults")
def test_a_predicate_of_the_hosts() -> None:
    one, value, good = stream(), ctypes.create_string_buffer(b"\1"), pinned()
    with captured_graph(one) as made:
        branch(one, IF, value=ctypes.c_void_p(ctypes.addressof(value)))
    assert launch(executable(made), one) == "IllegalAddress"
    hostcuda.clear_sticky()
    with captured_graph(one) as made:
        branch(one, IF, value=good)
    assert launch(executable(made), one) == "Success"


def test_a_loop_that_does_not_end() -> None:
    script = """
        from conditionals import *
        one = stream()
        with captured_graph(one) as made:
            branch(one, WHILE, default=1)
        print(launch(executable(made), one), hostcuda.counter("conditional_bodies"))
    """
    assert run(script, HOSTCUDA_LOOPS="100") == ["LaunchFailure 100"]
