import functools
import gc
import weakref

import pytest
import torch
from helpers import DELAY, assert_equal, capture, name, on_device, zeros
from torch._subclasses.fake_tensor import FakeTensorMode


def scale(source, factor, result):
    assert source.device.type == result.device.type == "cpu"
    result.copy_(source * factor)


def test_a_kernel_runs_on_the_memory_of_its_tensors(mode, device):
    source, result = on_device(4, 8), zeros(8, 4).t()
    device.launch(scale, source, 3, result)
    assert_equal(result, source.cpu() * 3)
    part = zeros(10)[4:8]
    device.launch(scale, source[1, 2:6], 2.0, part)
    assert_equal(part, source[1, 2:6].cpu() * 2)


def test_a_launch_is_captured(mode, device):
    source, result = on_device(4), zeros(4)
    graph, _ = capture(lambda: device.launch(scale, source, 3, result))
    assert_equal(result, torch.zeros(4))
    for _ in range(2):
        refill = torch.randn(4)
        source.copy_(refill)
        graph.replay()
        assert_equal(result, refill * 3)


def test_a_launch_is_in_order_with_operators(asynchronous):
    source = zeros(4)
    result = torch.empty_like(source)
    asynchronous.delay(asynchronous.current_stream(), DELAY)
    source.add_(1)
    asynchronous.launch(scale, source, 2, result)
    source.add_(1)
    assert not asynchronous.current_stream().query()
    assert_equal(result, torch.full((4,), 2.0))


def test_a_number_is_taken_when_the_kernel_is_launched(asynchronous):
    """As CUDA does: the value goes with the launch, also into a graph, and what it was read from is the program's."""
    source, result, factor = torch.ones(4, device=name()), zeros(4), torch.tensor(2.0)
    asynchronous.delay(asynchronous.current_stream(), DELAY)
    asynchronous.launch(scale, source, factor, result)
    factor.fill_(3)
    assert not asynchronous.current_stream().query()
    assert_equal(result, torch.full((4,), 2.0))
    graph, _ = capture(lambda: asynchronous.launch(scale, source, factor, result))
    factor.fill_(4)
    graph.replay()
    assert_equal(result, torch.full((4,), 3.0))


def test_a_launch_goes_to_the_device_of_its_tensors(device):
    source = torch.ones(2, device=torch.device(name(), 1))
    device.launch(scale, source, 2, source)
    assert_equal(source, torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="its tensors are on"):
        device.launch(scale, source, 2, on_device(2))


def test_a_recorded_launch_keeps_its_function_and_not_its_tensors(device):
    class Kernel:
        def __call__(self, tensor):
            tensor.add_(1)

    kernel, tensor = Kernel(), zeros(1000)
    gc.collect()  # of the tests before
    allocated = device.memory_allocated()
    graph, _ = capture(functools.partial(device.launch, kernel, tensor))
    alive = weakref.ref(kernel)
    del kernel, tensor
    gc.collect()
    assert alive() is not None and device.memory_allocated() == allocated - 4096
    graph.replay()
    graph.reset()
    gc.collect()
    assert alive() is None


def test_tensors_without_memory_launch_nothing(device):
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(on_device(4))
    for tensor in (fake, torch.empty(4, device="meta")):
        device.launch(scale, tensor, 2, tensor)


def test_what_is_no_device_tensor_is_handed_over_as_it_is(device):
    seen = []
    device.launch(lambda *arguments: seen.extend(arguments), 1, 2.5, "text", torch.ones(1), None)
    assert seen[:3] == [1, 2.5, "text"] and seen[3].item() == 1 and seen[4] is None
