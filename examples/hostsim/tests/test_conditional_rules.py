"""What is refused of branches and loops while a graph is captured, and what becomes of the capture."""

import re

import pytest
import torch
from helpers import assert_equal, capture, name, on_device, zeros


def truth(value):
    return torch.tensor(value, device=name())


class Misuse:
    """What a program may get wrong; each method is one way, and names the message it leads to."""

    def __init__(self, device):
        self.device, self.source, self.going = device, zeros(4), truth(True)
        self.begin, self.end, self.decide = device._C.begin_branch, device._C.end_body, device._C.set_condition
        self.forked = torch.Stream()
        self.elsewhere = torch.ones((), dtype=torch.bool, device=torch.device(name(), 1))

    def does_not_end_a_branch(self):
        """capture_end: the body of a branch or a loop on stream .* has not been ended; call end_body before"""
        self.begin(self.going)
        self.source.add_(1)

    def does_not_end_a_body_in_another_stream(self):
        """end_body: the body of a branch or a loop on stream .* has not been ended"""
        with self.device.branch(self.going):
            self.forked.wait_stream(self.device.current_stream())
            with self.forked:
                self.begin(self.going)

    def does_not_decide_anew(self):
        """the loop would never end; call set_condition in its body"""
        with self.device.loop(self.going):
            self.source.add_(1)

    def draws_random_numbers(self):
        """'aten::uniform_' draws random numbers in the body of a branch or a loop: .* Draw them before it"""
        with self.device.branch(self.going):
            self.source.uniform_()

    def does_not_join_what_it_forks_in_a_body(self):
        """end_body: stream .* was forked from the capture and has not been joined"""
        with self.device.branch(self.going):
            self.forked.wait_stream(self.device.current_stream())

    def waits_in_a_body_for_what_is_outside(self):
        """waits for an event of another capture"""
        event = self.device.current_stream().record_event()
        with self.device.branch(self.going):
            self.device.current_stream().wait_event(event)

    def waits_outside_for_what_is_in_a_body(self):
        """recorded in a capture which is over"""
        with self.device.branch(self.going):
            event = self.device.current_stream().record_event()
        self.forked.wait_event(event)

    def reads_a_value_in_a_body(self):
        """'aten::_local_scalar_dense' .*read it after a replay"""
        with self.device.loop(self.going) as decide:
            self.source.sum().item()
            decide(self.going)

    def replays_a_graph_in_a_body(self):
        """a graph cannot be part of another one"""
        with self.device.branch(self.going):
            self.other.replay()

    def sets_a_condition_outside(self):
        """set_condition: what is captured is not the body of a loop; call begin_loop first"""
        self.decide(self.going)

    def sets_a_condition_in_a_branch(self):
        """set_condition: what is captured is not the body of a loop"""
        with self.device.branch(self.going):
            self.decide(self.going)

    def sets_a_condition_in_a_branch_of_a_loop(self):
        """set_condition: what is captured is not the body of a loop"""
        with self.device.loop(self.going) as decide, self.device.branch(self.going):
            decide(self.going)

    def ends_a_body_that_has_not_begun(self):
        """end_body: no body is captured on stream .*; call begin_branch or begin_loop first"""
        self.end()

    def ends_a_body_on_another_stream(self):
        """end_body was called on stream .*, but the body has begun on stream .*; make that stream current"""
        with self.device.branch(self.going):
            self.forked.wait_stream(self.device.current_stream())
            with self.forked:
                self.end()

    def has_a_number_decide(self):
        """begin_branch: a predicate is a boolean without dimensions on .*; this is Float of size \\[\\]"""
        self.begin(self.source[0])

    def has_several_decide(self):
        """this is Bool of size \\[1\\] on"""
        self.begin(self.going.reshape(1))

    def has_the_host_decide(self):
        """this is Bool of size \\[\\] on cpu"""
        self.begin(torch.tensor(True))

    def has_another_device_decide(self):
        """on \\w+:0; this is Bool of size \\[\\] on \\w+:1"""
        self.begin(self.elsewhere)

    def goes_on_with_a_number(self):
        """set_condition: a predicate is a boolean without dimensions"""
        with self.device.loop(self.going) as decide:
            decide(self.source[0])


WAYS = [way for way in vars(Misuse) if not way.startswith("_")]
# What is refused before anything is recorded: the capture goes on.
GOES_ON = [
    "waits_outside_for_what_is_in_a_body",
    "sets_a_condition_outside",
    "sets_a_condition_in_a_branch",
    "ends_a_body_that_has_not_begun",
    "has_a_number_decide",
    "has_several_decide",
    "has_the_host_decide",
    "has_another_device_decide",
]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_refused(mode, device, way):
    misuse, graph = Misuse(device), torch.accelerator.Graph()
    misuse.other, _ = capture(lambda: None)
    message = getattr(Misuse, way).__doc__
    raised = None
    with torch.Stream():
        graph.capture_begin()
        try:
            getattr(misuse, way)()
        except RuntimeError as error:
            raised = error
        if way in GOES_ON:
            misuse.source.add_(1)
            graph.capture_end()
        else:
            with pytest.raises(RuntimeError, match=f"has failed and the graph is empty|{message}") as ended:
                graph.capture_end()
            raised = raised or ended.value
        assert not device.is_current_stream_capturing()
    assert re.search(message, str(raised)), raised
    if way in GOES_ON:
        graph.replay()
        assert_equal(misuse.source, torch.ones(4))
    graph, result = capture(lambda: misuse.source + 1)  # the device is as good as before
    graph.replay()
    assert_equal(result, misuse.source.cpu() + 1)


@pytest.mark.parametrize("begin", ["branch", "loop"])
def test_nothing_decides_outside_of_a_capture(device, begin):
    nodes = getattr(device, begin)(truth(True))
    with pytest.raises(RuntimeError, match=f"begin_{begin}: nothing is captured on the default stream"), nodes:
        pass
    with pytest.raises(RuntimeError, match="end_body: nothing is captured"):
        device._C.end_body()


def test_an_abandoned_body_ends_with_its_graph(device):
    source, stream, going = on_device(4), torch.Stream(), truth(True)
    with stream:
        graph = torch.accelerator.Graph()
        graph.capture_begin()
        device._C.begin_branch(going)
        graph.reset()
        assert not stream.is_capturing()
        assert_equal(source + 1, source.cpu() + 1)
