"""Every fault that can be planted makes an observation come out wrong that comes out right without it."""

import pytest
import torch
from helpers import DELAY, capture, on_device, zeros


def refills_are_read(device):
    source = zeros(4)
    graph, result = capture(lambda: source + 1)
    graph.replay()
    source.fill_(5)
    graph.replay()
    return result.eq(6).all().item()


def the_last_node_runs(device):
    source = zeros(4)
    graph, _ = capture(lambda: (source.add_(1), source.mul_(2)))
    graph.replay()
    return source.eq(2).all().item()


def replays_are_ordered_with_their_stream(device):
    source, side = zeros(4), torch.Stream()
    graph, result = capture(lambda: source + 1)
    torch.accelerator.synchronize()
    device.delay(side, DELAY)
    with side:
        source.fill_(1)
        graph.replay()
    torch.accelerator.synchronize()
    return result.eq(2).all().item()


def replays_draw_new_numbers(device):
    graph, result = capture(lambda: on_device(8))
    graph.replay()
    first = result.clone()
    graph.replay()
    return not torch.equal(result, first)


def a_given_pool_is_used(device):
    handle = device.graph_pool_handle()
    graph, _ = capture(lambda: zeros(4), pool=handle)
    return graph.pool() == handle


def memory_of_a_graph_stays_its_own(device):
    source, stream = zeros(1000), torch.Stream()
    graph, result = capture(lambda: (source + 1) * 2, stream=stream)
    with stream:
        tensor = torch.full((1000,), 7.0, device=source.device)
        graph.replay()
        return tensor.eq(7).all().item() and result.eq(2).all().item()


def refused(function):
    """Whether a capture in which the function is called fails."""
    try:
        capture(function)
    except RuntimeError:
        return True
    return False


def default_stream_is_refused(device):
    graph = torch.accelerator.Graph()
    try:
        graph.capture_begin()
    except RuntimeError:
        return True
    graph.capture_end()
    return False


def a_second_capture_needs_a_reset(device):
    stream = torch.Stream()
    graph, _ = capture(lambda: None, stream=stream)
    with stream:
        try:
            graph.capture_begin()
        except RuntimeError:
            return True
        graph.capture_end()
        return False


def events_order_streams(device):
    side, source = torch.Stream(), zeros(4)
    torch.accelerator.synchronize()
    device.delay(side, DELAY)
    with side:
        source.fill_(1)
    torch.accelerator.current_stream().wait_stream(side)
    return source.clone().eq(1).all().item()


def recorded_streams_keep_memory(device):
    device.empty_cache()
    side, source = torch.Stream(), torch.ones(1000).to(on_device(1).device)
    torch.accelerator.synchronize()
    device.delay(side, DELAY)
    with side:
        copied = source.clone()
    source.record_stream(side)
    del source
    others = [torch.full((1000,), 7.0, device=copied.device) for _ in range(4)]  # One gets the freed memory.
    torch.accelerator.synchronize()
    del others
    return copied.eq(1).all().item()


def captured_memory_is_poisoned(device):
    source, stream = zeros(1000), torch.Stream()
    _, result = capture(lambda: (source + 1) * 2, stream=stream)
    return result.isnan().all().item()


def copies_start_where_their_tensor_does(device):
    source = torch.arange(8.0).to(on_device(1).device)
    return source[4:].clone().cpu().tolist() == [4, 5, 6, 7]


def non_blocking_copies_are_ordered_with_their_stream(device):
    tensor = zeros(4)
    tensor.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    return (tensor + 1).eq(2).all().item()


def decided(begin):
    """How often a body runs that is told to run never, or three times."""
    left = torch.tensor(3 if begin == "loop" else 0, device=on_device(1).device)
    times, device = zeros(1), getattr(torch, left.device.type)

    def work():
        with getattr(device, begin)(left > 0) as decide:
            times.add_(1)
            left.sub_(1)
            if decide is not None:
                decide(left > 0)

    graph, _ = capture(work)
    graph.replay()
    return times.item()


OBSERVATIONS = {
    "replay_ignores_refilled_inputs": refills_are_read,
    "replay_skips_last_node": the_last_node_runs,
    "replay_on_default_stream": replays_are_ordered_with_their_stream,
    "generator_not_advanced": replays_draw_new_numbers,
    "pool_not_shared": a_given_pool_is_used,
    "pool_memory_not_kept": memory_of_a_graph_stays_its_own,
    "capture_allows_item": lambda device: refused(lambda: zeros(1).item()),
    "capture_allows_synchronize": lambda device: refused(torch.accelerator.synchronize),
    "capture_allows_pageable_copy": lambda device: refused(lambda: zeros(4).copy_(torch.ones(4))),
    "capture_on_default_stream_allowed": default_stream_is_refused,
    "recapture_without_reset_allowed": a_second_capture_needs_a_reset,
    "unjoined_fork_allowed": lambda device: refused(lambda: torch.Stream().wait_stream(device.current_stream())),
    "events_do_not_wait": events_order_streams,
    "record_stream_ignored": recorded_streams_keep_memory,
    "no_poison": captured_memory_is_poisoned,
    "storage_offset_dropped": copies_start_where_their_tensor_does,
    "non_blocking_copy_too_late": non_blocking_copies_are_ordered_with_their_stream,
    "branch_always_runs": lambda device: decided("branch") == 0,
    "loop_runs_once": lambda device: decided("loop") == 3,
}


def test_every_fault_is_observed_and_described(device):
    assert set(OBSERVATIONS) == set(device.faults())
    assert all(device.faults().values()) and not device.planted_faults()


@pytest.mark.parametrize("fault", OBSERVATIONS)
def test_a_planted_fault_is_observed(asynchronous, fault):
    observe = OBSERVATIONS[fault]
    assert observe(asynchronous)
    torch.accelerator.synchronize()
    asynchronous.plant_fault(fault)
    assert asynchronous.planted_faults() == [fault]
    assert not observe(asynchronous)
    torch.accelerator.synchronize()
    asynchronous.clear_faults()
    assert observe(asynchronous)


def test_a_fault_that_does_not_exist_is_an_error(device):
    with pytest.raises(ValueError, match="there are: replay_ignores_refilled_inputs"):
        device.plant_fault("no_such_fault")
