"""Nodes of a graph that decide at each replay whether their body runs, or how often."""

import re
import signal
import threading

import pytest
import torch
from helpers import DELAY, assert_equal, capture, name, on_device, zeros


def truth(value):
    return torch.tensor(value, device=name())


def count_to(limit, device, times):
    """A loop that counts from nothing: what it counts, and how often it did, of a stream that is captured."""
    counted = torch.zeros((), device=name())
    going = counted < limit
    with device.loop(going) as decide:
        counted += 1
        times += 1
        decide(counted < limit)
    return counted


def test_a_branch_runs_if_its_predicate_is_true_when_it_is_reached(mode, device):
    source, going = zeros(4), truth(True)

    def work():
        source.add_(1)
        with device.branch(going):
            source.mul_(10)
            going.logical_not_()  # nobody reads it any more
        source.add_(2)

    graph, _ = capture(work)
    assert_equal(source, torch.zeros(4))
    expected = 0
    for value in (True, False, False, True):
        going.fill_(value)
        graph.replay()
        expected = (expected + 1) * (10 if value else 1) + 2
        assert_equal(source, torch.full((4,), float(expected)))
    assert going.item() is False


@pytest.mark.parametrize("before", ["work", "nothing"])
def test_a_predicate_may_be_computed_in_the_graph(mode, device, before):
    source = on_device(4)

    def work():
        result = source * 2
        going = source.sum() > 0 if before == "work" else truth_of_source
        with device.branch(going):
            result.neg_()
        return result

    truth_of_source = source.sum() > 0
    graph, result = capture(work)
    for sign in (1, -1):
        refill = torch.rand(4) * sign
        source.copy_(refill)
        truth_of_source.copy_(refill.sum() > 0)
        graph.replay()
        assert_equal(result, refill * (-2 if sign > 0 else 2))


def test_a_loop_runs_as_often_as_it_says(mode, device):
    limit, times = torch.zeros((), device=name()), zeros(1)
    graph, counted = capture(lambda: count_to(limit, device, times))
    total = 0
    for often in (3, 0, 1, 7):
        limit.fill_(often)
        graph.replay()
        total += often
        assert_equal(counted, torch.tensor(float(often)))
        assert_equal(times, torch.tensor([float(total)]))


def test_bodies_in_bodies(mode, device):
    """A loop in a branch in a loop: rows times columns, but for odd rows."""
    rows, columns, times = torch.zeros((), device=name()), torch.zeros((), device=name()), zeros(1)

    def work():
        row = torch.zeros((), device=name())
        with device.loop(row < rows) as decide:
            with device.branch(row % 2 == 0):
                count_to(columns, device, times)
            row += 1
            decide(row < rows)

    graph, _ = capture(work)
    for shape in ((4, 3), (0, 5), (5, 0), (1, 2), (5, 5)):
        rows.fill_(shape[0]), columns.fill_(shape[1]), times.zero_()
        graph.replay()
        assert_equal(times, torch.tensor([float((shape[0] + 1) // 2 * shape[1])]))


def test_streams_fork_and_join_in_a_body(mode, device):
    source, going, forked = on_device(4), truth(True), torch.Stream()

    def work():
        result = source * 2
        origin = device.current_stream()
        for _ in range(2):
            with device.branch(going):
                forked.wait_stream(origin)
                with forked:
                    other = result + 1
                origin.wait_stream(forked)
                result.copy_(other)
            assert not forked.is_capturing() and origin.is_capturing()  # it belongs to a body while that is captured
        return result

    graph, result = capture(work)
    for value in (True, False):
        going.fill_(value)
        graph.replay()
        assert_equal(result, source.cpu() * 2 + (1 + torch.ones(4) if value else 0))


def test_another_stream_of_the_capture_is_not_in_the_body(device):
    source, going, forked = zeros(4), truth(False), torch.Stream()

    def work():
        origin = device.current_stream()
        forked.wait_stream(origin)
        with device.branch(going), forked:
            source.add_(1)
        origin.wait_stream(forked)

    graph, _ = capture(work)
    graph.replay()
    assert_equal(source, torch.ones(4))


def test_work_of_other_threads_is_in_the_body(device):
    source, going = zeros(4), truth(False)

    def work():
        stream = device.current_stream()

        def add():
            with stream:
                source.add_(1)

        with device.branch(going):
            thread = threading.Thread(target=add)
            thread.start()
            thread.join()

    graph, _ = capture(work)
    graph.replay()
    assert_equal(source, torch.zeros(4))
    going.fill_(True)
    graph.replay()
    assert_equal(source, torch.ones(4))


def test_a_body_runs_in_the_order_of_its_stream(asynchronous):
    source, going, side = zeros(4), truth(False), torch.Stream()

    def work():
        with asynchronous.branch(going):
            source.add_(1)

    graph, _ = capture(work)
    torch.accelerator.synchronize()
    asynchronous.delay(side, DELAY)
    with side:
        going.fill_(True)
        graph.replay()
        source.mul_(10)
    side.synchronize()
    assert_equal(source, torch.full((4,), 10.0))


def test_memory_of_a_body_comes_from_the_pool(device):
    source, going = on_device(1000), truth(True)
    pool = device.graph_pool_handle()

    def work():
        result = torch.empty_like(source)
        before = device.pool_stats(pool)
        with device.branch(going):
            result.copy_((source + 1) * 2)
        within = device.pool_stats(pool)
        assert within["allocations"] == before["allocations"] + 2 and within["blocks"] == before["blocks"]
        reserved = within["reserved"]
        result + 1, source + 1  # what was freed in the body is reused
        assert device.pool_stats(pool)["reserved"] == reserved
        return result

    graph, result = capture(work, pool=pool)
    graph.replay()
    assert_equal(result, (source.cpu() + 1) * 2)


@pytest.mark.parametrize("what", ["input", "predicate"])
def test_memory_of_a_body_that_was_given_back_is_missed(device, what):
    kept = {"input": zeros(4), "predicate": truth(False)}
    result = zeros(4)

    def work():
        with device.branch(kept["predicate"]):
            result.add_(kept["input"])

    graph, _ = capture(work)
    graph.replay()
    del kept[what]
    device.empty_cache()
    with pytest.raises(RuntimeError, match="has been given back"):
        graph.replay()


def test_pinned_memory_that_a_body_copies_from_lives_with_the_graph(device):
    going, target = truth(True), zeros(4)

    def work():
        with device.branch(going):
            target.copy_(torch.ones(4).pin_memory(), non_blocking=True)

    graph, _ = capture(work)
    torch.full((4,), 7.0).pin_memory()
    graph.replay()
    assert_equal(target, torch.ones(4))


def test_counters_and_dump(device, tmp_path):
    limit, times = torch.full((), 3.0, device=name()), zeros(1)
    graph = torch.accelerator.Graph()
    graph.enable_debug_mode()
    device.reset_graph_counters()
    with torch.Stream(), graph:
        count_to(limit, device, times)
    graph.debug_dump(str(tmp_path / "graph.txt"))
    lines = (tmp_path / "graph.txt").read_text().splitlines()
    names = [re.match(r"[\d.]+ [\w:]+( condition)?", line)[0] for line in lines]
    in_body = ["2.0 aten::add", "2.1 aten::add", "2.2 aten::lt", "2.3 set condition"]
    assert names == ["0 aten::zero_", "1 aten::lt", "2 while", *in_body]
    assert re.fullmatch(r"2 while reads 0x\w+\+1", lines[2])
    assert f"reads {times.data_ptr():#x}+4" in lines[4] or f"writes {times.data_ptr():#x}+4" in lines[4]
    graph.replay()
    torch.accelerator.synchronize()
    counters = device.graph_counters()
    assert (counters["nodes_captured"], counters["bodies_run"], counters["nodes_replayed"]) == (7, 3, 3 + 3 * 4)


def test_what_fails_in_a_body_names_its_node(mode, device):
    def fail():
        raise ValueError("no such luck")

    source, going = zeros(2), truth(True)

    def work():
        source.add_(1)
        with device.branch(going):
            source.add_(1)
            device.launch(fail)

    graph, _ = capture(work)
    with pytest.raises(RuntimeError, match=r"node 1\.1 \('launch fail'\) of a graph failed in its replay: .*luck"):
        graph.replay()
        torch.accelerator.synchronize()
    assert_equal(source, torch.full((2,), 2.0))


def test_a_planted_fault_reads_what_inputs_of_a_body_held_first(device):
    source, going = zeros(4), truth(True)

    def work():
        result = torch.zeros_like(source)
        with device.branch(going):
            result.add_(source)
        return result

    graph, result = capture(work)
    device.plant_fault("replay_ignores_refilled_inputs")
    graph.replay()
    source.fill_(5)
    graph.replay()
    assert_equal(result, torch.zeros(4))
    device.clear_faults()
    graph.replay()
    assert_equal(result, torch.full((4,), 5.0))


def test_a_loop_that_never_ends_can_be_interrupted(device):
    def interrupt(*_):
        raise KeyboardInterrupt

    limit, times = torch.full((), 3.0, device=name()), zeros(1)
    graph, counted = capture(lambda: count_to(limit, device, times))
    limit.fill_(float("inf"))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            graph.replay()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    limit.fill_(2)
    graph.replay()
    assert_equal(counted, torch.tensor(2.0))


def test_a_body_that_raises_is_ended(device):
    source, going = zeros(4), truth(True)

    def work():
        with pytest.raises(ValueError, match="no such luck"), device.branch(going):
            source.add_(1)
            raise ValueError("no such luck")
        source.add_(10)

    graph, _ = capture(work)
    going.fill_(False)
    graph.replay()
    assert_equal(source, torch.full((4,), 10.0))
