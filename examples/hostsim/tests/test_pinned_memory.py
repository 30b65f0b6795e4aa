import pytest
import torch
from helpers import DELAY, assert_equal, capture, name, zeros


def test_pinning(device):
    pinned = torch.ones(10).pin_memory()
    assert pinned.is_pinned() and not torch.ones(10).is_pinned()
    assert torch.empty(10, pin_memory=True).is_pinned() and pinned[3:].is_pinned()
    with pytest.raises(RuntimeError, match="pin"):
        torch.empty(10, device=name(), pin_memory=True)


def test_freed_pinned_memory_is_used_again_and_can_be_emptied(device):
    pinned = torch.empty(1000).pin_memory()
    address = pinned.data_ptr()
    del pinned
    pinned = torch.empty(1000).pin_memory()
    assert pinned.data_ptr() == address
    del pinned
    torch.accelerator.empty_host_cache()


@pytest.mark.parametrize("pin", [True, False])
def test_only_pinned_copies_are_asynchronous(asynchronous, pin):
    stream = asynchronous.current_stream()
    host = torch.ones(10).pin_memory() if pin else torch.ones(10)
    tensor, back = zeros(10), torch.zeros(10, pin_memory=pin)
    stream.synchronize()
    asynchronous.delay(stream, DELAY)
    tensor.copy_(host, non_blocking=True)
    back.copy_(tensor, non_blocking=True)
    assert stream.query() is not pin
    stream.synchronize()
    assert_equal(back, torch.ones(10))


def test_a_blocking_copy_waits_also_if_pinned(asynchronous):
    asynchronous.delay(asynchronous.current_stream(), DELAY)
    tensor = torch.ones(10).pin_memory().to(name())
    assert asynchronous.current_stream().query()
    assert_equal(tensor, torch.ones(10))


def test_pinned_memory_freed_too_early_is_kept_until_its_copy_has_run(asynchronous):
    host, tensor = torch.ones(1000).pin_memory(), zeros(1000)
    address = host.data_ptr()
    asynchronous.delay(asynchronous.current_stream(), DELAY)
    tensor.copy_(host, non_blocking=True)
    del host
    other = torch.zeros(1000, pin_memory=True)
    assert other.data_ptr() != address
    assert_equal(tensor, torch.ones(1000))


def test_pinned_copies_are_captured(mode, device):
    source, result = torch.ones(10).pin_memory(), torch.zeros(10).pin_memory()
    tensor = zeros(10)

    def round_trip():
        tensor.copy_(source, non_blocking=True)
        result.copy_(tensor * 2, non_blocking=True)

    graph, _ = capture(round_trip)
    assert_equal(result, torch.zeros(10))
    for value in (3.0, 4.0):
        source.fill_(value)
        graph.replay()
        torch.accelerator.synchronize()
        assert_equal(result, torch.full((10,), 2 * value))


def test_copies_convert_and_broadcast(mode, device):
    tensor = torch.arange(3).to(name(), dtype=torch.float64)
    assert_equal(zeros(2, 3).copy_(tensor), torch.arange(3.0).expand(2, 3))
    assert_equal(torch.zeros(2, 3).copy_(tensor), torch.arange(3.0).expand(2, 3))
    complex_numbers = torch.tensor([1 + 2j]).to(name())
    assert_equal(complex_numbers.conj().clone(), torch.tensor([1 - 2j]))
    assert_equal(complex_numbers.conj(), torch.tensor([1 - 2j]))
