import threading
import time

import pytest
import torch
from helpers import DELAY, assert_equal, on_device


def test_streams_are_distinct_and_current_ones_are_restored(device):
    first, second = torch.Stream(), device.Stream()
    assert first != second and first != device.default_stream()
    with first:
        assert device.current_stream() == first
        with device.stream(second):
            assert torch.accelerator.current_stream() == second
        with device.stream(None):
            assert device.current_stream() == first
    assert device.current_stream() == device.default_stream()
    other = device.Stream(device=1)
    with device.stream(other):
        assert device.current_device() == 1 and device.current_stream(1) == other
    assert device.current_device() == 0
    device.set_stream(first)
    assert device.current_stream() == first


def test_a_stream_runs_in_order_and_without_the_host(asynchronous):
    tensor = torch.zeros(4, device=on_device(1).device)
    stream = asynchronous.current_stream()
    stream.synchronize()
    asynchronous.delay(stream, DELAY)
    tensor.add_(3)
    tensor.mul_(3)
    assert not stream.query()
    stream.synchronize()
    assert stream.query()
    assert_equal(tensor, torch.full((4,), 9.0))


def test_missing_synchronisation_yields_wrong_data(asynchronous):
    side, source = torch.Stream(), torch.zeros(4, device=on_device(1).device)
    torch.accelerator.synchronize()
    asynchronous.delay(side, DELAY)
    with side:
        source.fill_(1)
    too_early = source.clone()
    asynchronous.current_stream().wait_stream(side)
    in_time = source.clone()
    assert_equal(too_early, torch.zeros(4))
    assert_equal(in_time, torch.ones(4))


def test_reading_a_value_waits(asynchronous):
    tensor = torch.zeros((), device=on_device(1).device)
    asynchronous.delay(asynchronous.current_stream(), DELAY)
    tensor.fill_(5)
    assert tensor.item() == 5


def test_events_mark_a_place_in_a_stream(asynchronous):
    stream = torch.Stream()
    begin, end = torch.Event(enable_timing=True), asynchronous.Event(enable_timing=True)
    assert begin.query()  # never recorded
    begin.record(stream)
    asynchronous.delay(stream, DELAY)
    end.record(stream)
    assert not end.query()
    end.synchronize()
    assert end.query() and begin.elapsed_time(end) >= DELAY * 900


def test_an_event_recorded_again_does_not_hold_those_who_waited_before(asynchronous):
    slow, waiting, event = torch.Stream(), torch.Stream(), torch.Event()
    event.record(slow)
    waiting.wait_event(event)
    asynchronous.delay(slow, DELAY)
    event.record(slow)
    waiting.synchronize()
    assert not event.query()


def test_waiting_lets_other_threads_run_python(asynchronous):
    ticks = []
    thread = threading.Thread(target=lambda: [(ticks.append(time.monotonic()), time.sleep(0.01)) for _ in range(5)])
    asynchronous.delay(asynchronous.current_stream(), DELAY)
    thread.start()
    torch.accelerator.synchronize()
    finished = time.monotonic()
    thread.join()
    assert len([tick for tick in ticks if tick < finished]) == 5


@pytest.mark.parametrize("wait", ["device", "stream", "event", "item"])
def test_work_that_fails_in_a_queue_is_raised_at_the_next_synchronisation(asynchronous, wait):
    def fail():
        raise ValueError("no such luck")

    stream, tensor = asynchronous.current_stream(), on_device(1)
    asynchronous.launch(fail)
    waits = {
        "device": torch.accelerator.synchronize,
        "stream": stream.synchronize,
        "event": lambda: stream.record_event().synchronize(),
        "item": tensor.item,
    }
    with pytest.raises(RuntimeError, match=r"launch fail.*no such luck"):
        waits[wait]()
    torch.accelerator.synchronize()  # It is reported once,
    assert_equal(tensor + 1, tensor.cpu() + 1)  # and the device goes on.


def test_in_synchronous_mode_a_failure_is_raised_at_once(device):
    with pytest.raises(ZeroDivisionError):
        device.launch(lambda: 1 / 0)


def test_the_mode_is_changed_between_works(device):
    tensor = torch.zeros(1, device=on_device(1).device)
    for asynchronous in (True, False, True):
        device.set_asynchronous(asynchronous)
        assert device.is_asynchronous() is asynchronous
        tensor.add_(1)
    assert_equal(tensor, torch.full((1,), 3.0))


def test_threads_with_streams_of_their_own(mode, device):
    failures = []

    def work(number):
        try:
            with torch.Stream():
                for _ in range(30):
                    tensor = torch.full((100,), float(number), device=on_device(1).device)
                    total = (tensor * 2).sum()
                    device.launch(lambda memory: memory.add_(1), tensor)
                    parameter = torch.nn.Parameter(tensor)
                    (parameter * 3).sum().backward()
                    values = total.item(), tensor.sum().item(), parameter.grad.sum().item()
                    assert values == (200 * number, 100 * (number + 1), 300)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
