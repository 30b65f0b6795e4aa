import gc
import threading

import pytest
import torch
from helpers import DELAY, assert_equal, capture, name, on_device, zeros


def test_a_graph_replays_on_refilled_inputs(mode, device):
    source = on_device(4, 8)
    graph, result = capture(lambda: torch.softmax(source @ source.t(), -1))
    for _ in range(3):
        refill = torch.randn(4, 8)
        source.copy_(refill)
        graph.replay()
        assert_equal(result, torch.softmax(refill @ refill.t(), -1), rtol=1e-5, atol=1e-6)


def test_nothing_runs_while_it_is_captured(mode, device):
    source = zeros(4)
    graph, _ = capture(lambda: source.add_(1))
    assert_equal(source, torch.zeros(4))
    for expected in (1.0, 2.0):
        graph.replay()
        assert_equal(source, torch.full((4,), expected))


def test_counters(device):
    source = zeros(4)
    live = device.graph_counters()["live_graphs"]
    graph, _ = capture(lambda: source.add_(1).mul_(2))
    graph.replay(), graph.replay()
    assert device.graph_counters() == {
        "captures": 1, "replays": 2, "nodes_captured": 2, "nodes_replayed": 4, "bodies_run": 0,
        "live_graphs": live + 1,
    }  # fmt: skip
    graph.reset()
    assert device.graph_counters()["live_graphs"] == live
    device.reset_graph_counters()
    assert sum(device.graph_counters().values()) == live


def test_being_captured_belongs_to_the_stream(device):
    stream, other = torch.Stream(), torch.Stream()
    source, seen, graph = zeros(1), [], torch.accelerator.Graph()

    def work(on):
        with on:
            seen.append(device.is_current_stream_capturing())
            source.add_(1)

    with stream, graph:
        assert device.is_current_stream_capturing() and stream.is_capturing() and not other.is_capturing()
        for on in (stream, other):
            thread = threading.Thread(target=work, args=(on,))
            thread.start()
            thread.join()
    assert not stream.is_capturing() and seen == [True, False]
    assert source.item() == 1  # The work on the other stream has run,
    graph.replay()
    torch.accelerator.synchronize()
    assert source.item() == 2  # and that of any thread on the captured one is in the graph.


def test_replays_follow_the_current_stream(asynchronous):
    source = zeros(4)
    graph, result = capture(lambda: source + 1)
    side = torch.Stream()
    torch.accelerator.synchronize()
    asynchronous.delay(side, DELAY)
    with side:
        source.fill_(1)
        graph.replay()
    assert not side.query() and asynchronous.default_stream().query()
    side.synchronize()
    assert_equal(result, torch.full((4,), 2.0))


@pytest.mark.parametrize("by", ["event", "stream"])
def test_fork_and_join(mode, device, by):
    source, forked = on_device(4), torch.Stream()

    def fork_and_join():
        origin = device.current_stream()
        if by == "event":
            origin.record_event().wait(forked)
        else:
            forked.wait_stream(origin)
        with forked:
            left = source * 2
        right = source * 3
        origin.wait_event(forked.record_event()) if by == "event" else origin.wait_stream(forked)
        return left + right

    graph, result = capture(fork_and_join)
    assert not forked.is_capturing()
    refill = torch.randn(4)
    source.copy_(refill)
    graph.replay()
    assert_equal(result, refill * 2 + refill * 3)
    with forked:
        assert_equal(source * 2, refill * 2)


def test_a_fork_of_a_fork_is_joined_through_it(device):
    source, first, second = on_device(4), torch.Stream(), torch.Stream()

    def fork_twice():
        origin = device.current_stream()
        first.wait_stream(origin)
        second.wait_stream(first)
        with second:
            result = source * 2
        first.wait_stream(second)
        origin.wait_stream(first)
        return result + 1

    graph, result = capture(fork_twice)
    graph.replay()
    assert_equal(result, source.cpu() * 2 + 1)


def test_keep_graph_and_instantiate(device):
    source = on_device(4)
    graph, result = capture(lambda: source + 1, keep_graph=True)
    graph.instantiate()
    graph.instantiate()
    graph.replay()
    assert_equal(result, source.cpu() + 1)
    graph, result = capture(lambda: source + 2, keep_graph=True)
    graph.replay()
    assert_equal(result, source.cpu() + 2)


def test_a_graph_that_was_reset_can_be_captured_again(device):
    source, stream = on_device(4), torch.Stream()
    graph, _ = capture(lambda: source + 1, stream=stream)
    graph.reset()
    graph.reset()
    with stream, graph:
        result = source + 2
    graph.replay()
    assert_equal(result, source.cpu() + 2)


def test_a_graph_may_go_while_it_still_has_to_run(asynchronous):
    source = zeros(4)
    graph, _ = capture(lambda: source.add_(1))
    asynchronous.delay(asynchronous.current_stream(), DELAY)
    graph.replay()
    del graph
    gc.collect()
    assert_equal(source, torch.ones(4))


def test_an_abandoned_capture_ends_with_its_graph(device):
    source, stream = on_device(4), torch.Stream()
    with stream:
        graph = torch.accelerator.Graph()
        graph.capture_begin()
        source + 1
        graph.reset()
        assert not stream.is_capturing()
        assert_equal(source + 1, source.cpu() + 1)


def test_graphs_on_the_second_device(mode, device):
    with device.device(1):
        source = on_device(4)
        graph, result = capture(lambda: source + 1)
    graph.replay()
    assert result.device.index == 1
    torch.accelerator.synchronize(1)
    assert_equal(result, source.cpu() + 1)


def test_graphs_are_captured_in_several_threads_at_once(device):
    results, barrier = {}, threading.Barrier(3)

    def work(number):
        source = torch.full((4,), float(number), device=name())
        with torch.Stream():
            graph = torch.accelerator.Graph(capture_error_mode="thread_local")
            barrier.wait()
            graph.capture_begin()
            value = (source + 1) * 2
            barrier.wait()
            graph.capture_end()
            graph.replay()
        results[number] = value

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for number in range(3):
        assert_equal(results[number], torch.full((4,), 2.0 * (number + 1)))


def test_what_fails_in_a_replay_names_its_node(mode, device):
    def fail():
        raise ValueError("no such luck")

    source = zeros(2)
    graph, _ = capture(lambda: (source.add_(1), device.launch(fail)))
    with pytest.raises(RuntimeError, match=r"node 1 \('launch fail'\).*no such luck"):
        graph.replay()
        torch.accelerator.synchronize()
    assert_equal(source, torch.ones(2))


def test_debug_dump(device, tmp_path):
    source, graph = on_device(4), torch.accelerator.Graph()
    graph.enable_debug_mode()
    with torch.Stream(), graph:
        (source + 1).relu_()
    graph.debug_dump(str(tmp_path / "graph.txt"))
    lines = (tmp_path / "graph.txt").read_text().splitlines()
    assert len(lines) == 2 and "aten::add" in lines[0] and "aten::relu_" in lines[1]
    assert f"reads {source.data_ptr():#x}+16" in lines[0]
    with pytest.raises(RuntimeError, match="cannot write"):
        graph.debug_dump(str(tmp_path / "nowhere" / "graph.txt"))
