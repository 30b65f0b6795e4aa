"""Whatever is refused is refused in words that say what was done and what to do, and leaves the device usable."""

import re
import threading

import pytest
import torch
from helpers import assert_equal, name, on_device

SIZE = 4


class Attempt:
    """What a capture may get wrong; each method is one way, and names the message it leads to."""

    def __init__(self, device):
        self.device = device
        self.stream = torch.Stream()
        self.source = on_device(SIZE)
        self.event = torch.Event()

    def synchronises_the_device(self):
        """synchronising .* not possible while a graph is captured on stream .*Synchronise|synchronise"""
        torch.accelerator.synchronize()

    def synchronises_its_stream(self):
        """synchronising stream .* not possible while"""
        self.stream.synchronize()

    def synchronises_another_stream(self):
        """synchronising the default stream .* not possible while"""
        self.device.default_stream().synchronize()

    def queries_its_stream(self):
        """querying stream"""
        self.stream.query()

    def queries_another_stream(self):
        """querying the default stream .* not possible while"""
        self.device.default_stream().query()

    def synchronises_an_event_of_the_capture(self):
        """an event that was recorded while capturing"""
        self.stream.record_event().synchronize()

    def queries_an_event_of_the_capture(self):
        """an event that was recorded while capturing"""
        self.stream.record_event().query()

    def synchronises_an_event_from_before(self):
        """synchronising an event"""
        self.event.synchronize()

    def queries_an_event_from_before(self):
        """querying an event"""
        self.event.query()

    def waits_for_work_outside(self):
        """was told to wait for work outside of the capture"""
        self.stream.wait_event(self.event)

    def reads_a_value(self):
        """'aten::_local_scalar_dense' .*read it after a replay"""
        self.source.sum().item()

    def branches_on_a_value(self):
        """'aten::_local_scalar_dense'"""
        return 1 if self.source.sum() > 0 else 2

    def copies_to_pageable_memory(self):
        """a pageable copy to the host .*pinned"""
        self.source.cpu()

    def copies_from_pageable_memory(self):
        """a pageable copy from the host .*pinned"""
        self.source.copy_(torch.ones(SIZE))

    def copies_from_pinned_memory_and_waits(self):
        """a blocking copy from the host .*non_blocking=True"""
        self.source.copy_(torch.ones(SIZE).pin_memory())

    def seeds_the_generator(self):
        """seeding a generator while a graph is captured"""
        self.device.manual_seed(12345)

    def has_a_result_of_unknown_size(self):
        """'aten::nonzero'"""
        self.source.nonzero()

    def works_on_the_default_stream(self):
        """was issued to the default stream .* outside of the capture"""
        with self.device.default_stream():
            self.source.add_(1)

    def works_on_a_stream_that_did_not_fork(self):
        """was issued to stream .* outside of the capture"""
        with torch.Stream():
            self.source.add_(1)

    def forks_to_the_default_stream(self):
        """the default stream cannot be captured"""
        self.device.default_stream().wait_stream(self.stream)

    def does_not_join_a_fork(self):
        """forked from the capture and has not been joined"""
        torch.Stream().wait_stream(self.stream)

    def replays_a_graph(self):
        """replaying a graph while"""
        self.graph.replay()

    def empties_the_cache(self):
        """emptying the cache"""
        self.device.empty_cache()

    def ends_on_another_stream(self):
        """capture_end was called on the default stream .* has begun on"""
        self.device.set_stream(self.device.default_stream())


WAYS = [way for way in vars(Attempt) if not way.startswith("__")]
# As torch refuses them before it asks the device.
GOES_ON = ("copies_to_pageable_memory", "copies_from_pageable_memory", "seeds_the_generator")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error_mode", ["global", "thread_local"])
def test_a_capture_that_does_what_it_must_not(mode, device, way, error_mode):
    attempt = Attempt(device)
    attempt.event.record()
    with torch.Stream():
        attempt.graph = torch.accelerator.Graph()
        attempt.graph.capture_begin()
        attempt.source + 1
        attempt.graph.capture_end()

    graph = torch.accelerator.Graph(capture_error_mode=error_mode)
    message = getattr(attempt, way).__doc__
    device.set_stream(attempt.stream)
    graph.capture_begin()
    attempt.source + 1
    try:
        getattr(attempt, way)()
    except RuntimeError as error:
        first = str(error)
    else:
        first = None
    if way in GOES_ON:
        assert re.search(message, first)
        graph.capture_end()
        graph.replay()
        return
    with pytest.raises(RuntimeError, match=f"the capture has failed and the graph is empty: .*{message}"):
        graph.capture_end()
    assert first is not None or way in ("does_not_join_a_fork", "ends_on_another_stream")

    assert not attempt.stream.is_capturing()
    with pytest.raises(RuntimeError, match="the graph is empty"):
        graph.replay()
    # The same graph and stream can be used at once.
    torch.accelerator.synchronize()
    device.set_stream(attempt.stream)
    graph.capture_begin()
    result = attempt.source + 1
    graph.capture_end()
    attempt.source.zero_()
    graph.replay()
    assert_equal(result, torch.ones(SIZE))


def test_work_after_a_failure_is_refused_with_its_reason(device):
    source, graph = on_device(SIZE), torch.accelerator.Graph()
    with torch.Stream():
        graph.capture_begin()
        with pytest.raises(RuntimeError):
            source.sum().item()
        with pytest.raises(RuntimeError, match=r"invalidated before: 'aten::_local_scalar_dense'"):
            source + 1
        with pytest.raises(RuntimeError, match="has failed"):
            graph.capture_end()


def test_the_error_of_the_program_is_kept_with_that_of_the_capture(device):
    with pytest.raises(RuntimeError, match="has failed") as failure, torch.Stream(), torch.accelerator.Graph():
        on_device(SIZE).sum().item()
    assert "_local_scalar_dense" in str(failure.value.__context__)


def test_the_default_stream_cannot_be_captured(device):
    with pytest.raises(
        RuntimeError, match=r"the default stream of .* cannot be captured; make another stream current"
    ):
        torch.accelerator.Graph().capture_begin()


def test_methods_called_in_the_wrong_order(device):
    source, graph = on_device(SIZE), torch.accelerator.Graph()
    for method, message in (
        (graph.capture_end, "nothing is being captured"),
        (graph.replay, "the graph is empty"),
        (graph.instantiate, "the graph is empty"),
        (graph.pool, "no memory before capture_begin"),
    ):
        with pytest.raises(RuntimeError, match=message):
            method()
    with torch.Stream():
        graph.capture_begin()
        for method in (graph.capture_begin, graph.replay, graph.instantiate):
            with pytest.raises(RuntimeError, match=r"being captured already|still being captured"):
                method()
        with pytest.raises(RuntimeError, match="is being captured already"):
            torch.accelerator.Graph().capture_begin()
        result = source + 1
        graph.capture_end()
        with pytest.raises(RuntimeError, match="call reset before"):
            graph.capture_begin()
        graph.replay()
        assert_equal(result, source.cpu() + 1)
        graph.reset()
        with pytest.raises(RuntimeError, match="the graph is empty"):
            graph.replay()


def test_an_event_of_a_capture_that_is_over_stands_for_nothing(device):
    source, stream, event = on_device(SIZE), torch.Stream(), torch.Event()
    with stream, torch.accelerator.Graph():
        source + 1
        event.record()
    with pytest.raises(RuntimeError, match="a capture which is over"):
        torch.accelerator.current_stream().wait_event(event)
    event.record()
    event.synchronize()


def in_thread(function):
    errors = []

    def run():
        try:
            function()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


@pytest.mark.parametrize("error_mode", ["default", "global", "thread_local", "relaxed"])
def test_what_other_threads_may_do_depends_on_the_mode(device, error_mode):
    source, other = on_device(SIZE), on_device(SIZE)
    graph = torch.accelerator.Graph(capture_error_mode=error_mode)

    def wait_elsewhere():
        assert other.sum().item() == pytest.approx(other.cpu().sum().item())

    with torch.Stream():
        graph.capture_begin()
        result = source + 1
        errors = in_thread(wait_elsewhere)
        if error_mode in ("default", "global"):
            assert len(errors) == 1
            with pytest.raises(RuntimeError, match="has failed"):
                graph.capture_end()
            return
        assert not errors
        graph.capture_end()
        graph.replay()
        assert_equal(result, source.cpu() + 1)


def test_in_relaxed_mode_the_thread_itself_may_wait_and_work_elsewhere(device):
    source, stream = on_device(SIZE), torch.Stream()
    graph = torch.accelerator.Graph(capture_error_mode="relaxed")
    with stream:
        graph.capture_begin()
        result = source + 1
        with device.default_stream():
            source.fill_(3)
            assert source.sum().item() == 3 * SIZE
        with pytest.raises(RuntimeError, match="not possible"):
            stream.synchronize()
        with pytest.raises(RuntimeError, match="has failed"):
            graph.capture_end()
        graph.capture_begin()
        result = source + 1
        assert not in_thread(lambda: stream_of(stream, graph.capture_end))
        graph.replay()
    assert_equal(result, torch.full((SIZE,), 4.0))


def test_in_relaxed_mode_what_does_not_concern_the_capture_is_allowed(device):
    event = torch.Event()
    event.record()
    graph = torch.accelerator.Graph(capture_error_mode="relaxed")
    with torch.Stream():
        graph.capture_begin()
        assert device.default_stream().query() and event.query()
        event.synchronize()
        device.default_stream().synchronize()
        graph.capture_end()


def test_a_generators_state_is_read_in_a_capture(device):
    before = device.get_rng_state()
    with torch.Stream(), torch.accelerator.Graph():
        assert torch.equal(device.get_rng_state(), before)
        device.manual_seed(device.initial_seed())  # the one that it has


def stream_of(stream, function):
    with stream:
        function()


def test_another_thread_cannot_end_a_capture(device):
    stream, graph = torch.Stream(), torch.accelerator.Graph()
    with stream:
        graph.capture_begin()
        (error,) = in_thread(lambda: stream_of(stream, graph.capture_end))
    assert "another thread" in error and not stream.is_capturing()
    assert name() in repr(on_device(1))
