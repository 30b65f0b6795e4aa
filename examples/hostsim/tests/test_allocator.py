import contextlib
import functools
import gc

import pytest
import torch
from helpers import DELAY, assert_equal, capture, limited, on_device, zeros

ORDINARY = (0, 0)


@pytest.fixture(autouse=True)
def no_cache(device):
    gc.collect()
    torch.accelerator.synchronize()
    device.empty_cache()
    device.reset_peak_memory_stats()


def test_statistics_follow_what_is_allocated_and_freed(mode, device):
    before = device.memory_allocated()
    tensor = zeros(1000)
    assert device.memory_allocated() - before == torch.accelerator.memory_allocated() - before == 4096
    assert device.memory_stats()["requested_bytes.all.current"] >= 4000
    del tensor
    torch.accelerator.synchronize()
    assert device.memory_allocated() == before
    assert device.max_memory_allocated() >= before + 4096
    assert device.memory_reserved() >= before + 4096
    device.reset_peak_memory_stats()
    assert device.max_memory_allocated() == before
    device.empty_cache()
    assert device.memory_reserved() == before
    assert all(value > 0 for value in device.mem_get_info())


def test_what_is_not_reserved_is_free(device):
    free, total = device.mem_get_info()
    tensor = zeros(1000)
    assert device.mem_get_info() == (free - 4096, total)
    del tensor
    device.empty_cache()
    assert device.mem_get_info() == (free, total)


def test_there_is_no_more_memory_than_is_allowed(mode, device):
    failures = device.memory_stats()["num_ooms"]
    with limited(device, 8192):
        one, other = zeros(1000), zeros(1000)
        with pytest.raises(torch.OutOfMemoryError, match="hostsim:0 is out of memory: 4096 bytes are wanted, and of"):
            zeros(1000)
        assert device.memory_stats()["num_ooms"] == failures + 1
        del other
        assert_equal(zeros(1000), one)
        with device.device(1):
            zeros(100000)
    zeros(100000)


def test_what_is_cached_goes_before_memory_is_short(asynchronous):
    """Not before what is queued has used it."""
    source = on_device(2000)
    with limited(asynchronous, 8192):
        tensor, returned = zeros(2000), asynchronous.memory_stats()["num_device_free"]
        asynchronous.delay(asynchronous.current_stream(), DELAY)
        tensor.copy_(source)
        copied = torch.empty(2000)
        copied.copy_(tensor, non_blocking=True)
        del tensor
        assert asynchronous.memory_stats()["num_device_free"] == returned
        whole = torch.full((500,), 7.0, device=source.device)
        assert asynchronous.memory_stats()["num_device_free"] == returned + 1
        assert_equal(whole, torch.full((500,), 7.0))
    assert_equal(copied, source)


def test_a_part_of_the_memory_is_a_number_up_to_one(device):
    assert device.get_per_process_memory_fraction() == 1.0
    device.set_per_process_memory_fraction(0.5, 1)
    assert (device.get_per_process_memory_fraction(0), device.get_per_process_memory_fraction(1)) == (1.0, 0.5)
    device.set_per_process_memory_fraction(1.0, 1)
    for wrong in (-0.1, 1.1):
        with pytest.raises(ValueError, match="from 0 to 1"):
            device.set_per_process_memory_fraction(wrong)


def test_each_device_has_statistics_of_its_own(device):
    before = device.memory_allocated(0), device.memory_allocated(1)
    with device.device(1):
        tensor = zeros(1000)
    assert (device.memory_allocated(0), device.memory_allocated(1)) == (before[0], before[1] + 4096)
    del tensor


def test_freed_memory_is_used_again_on_its_stream_only(device):
    tensor = zeros(1000)
    address = tensor.data_ptr()
    del tensor
    with torch.Stream():
        assert zeros(1000).data_ptr() != address
    assert zeros(1000).data_ptr() == address


def test_what_is_queued_does_not_keep_memory(asynchronous):
    stream = asynchronous.current_stream()
    before = asynchronous.memory_allocated()
    tensor = zeros(1000)
    asynchronous.delay(stream, DELAY)
    tensor.add_(1)
    del tensor
    assert not stream.query() and asynchronous.memory_allocated() == before


def test_memory_in_use_on_another_stream_is_not_reused_before_that_is_done(asynchronous):
    side, source = torch.Stream(), torch.ones(1000).to(on_device(1).device)
    torch.accelerator.synchronize()
    asynchronous.delay(side, DELAY)
    with side:
        copied = source.clone()
    source.record_stream(side)
    address = source.data_ptr()
    del source
    reused = torch.full((1000,), 7.0, device=copied.device)
    assert reused.data_ptr() != address
    assert_equal(copied, torch.ones(1000))
    assert zeros(1000).data_ptr() == address


def test_memory_is_poisoned_if_asked_for(mode, device):
    device.set_poison(True)
    assert device.is_poisoned()
    assert torch.empty(10, device=on_device(1).device).isnan().all()
    assert torch.empty(10, dtype=torch.int32, device=on_device(1).device).eq(-1).all()
    device.set_poison(False)


def test_a_graph_allocates_from_a_pool_of_its_own(mode, device):
    source = on_device(1000)
    ordinary = device.pool_stats(ORDINARY)
    graph, result = capture(lambda: (source + 1) * 2)
    pool = device.pool_stats(graph.pool())
    assert device.pool_stats(ORDINARY) == ordinary
    assert (pool["allocated"], pool["blocks"], pool["graphs"]) == (4096, 1, 1)
    assert (pool["allocations"], pool["reserved"]) == (2, 8192)
    graph.replay()
    assert_equal(result, (source.cpu() + 1) * 2)
    assert device.pool_stats(graph.pool()) == pool


def test_blocks_freed_while_capturing_are_used_again(device):
    source = on_device(1000)

    def chain():
        result = source + 1
        for _ in range(10):
            result = result + 1
        return result

    graph, result = capture(chain)
    pool = device.pool_stats(graph.pool())
    assert (pool["allocations"], pool["reserved"]) == (11, 8192)
    graph.replay()
    assert_equal(result, sum([torch.ones(1000)] * 11, source.cpu()), rtol=0, atol=1e-5)


def test_graphs_that_share_a_pool_share_its_memory(device):
    source, stream, handle = on_device(1000), torch.Stream(), device.graph_pool_handle()
    first, result = capture(lambda: source + 1, stream=stream, pool=handle)
    assert first.pool() == handle
    reserved = device.pool_stats(handle)["reserved"]
    del result
    second, result = capture(lambda: source + 2, stream=stream, pool=first.pool())
    assert second.pool() == handle
    assert device.pool_stats(handle)["reserved"] == reserved and device.pool_stats(handle)["graphs"] == 2
    second.replay()
    assert_equal(result, source.cpu() + 2)


def test_a_pool_lives_as_long_as_its_last_graph_and_tensor(device):
    source, stream, handle = on_device(1000), torch.Stream(), device.graph_pool_handle()
    graphs = [capture(lambda: source + 1, stream=stream, pool=handle) for _ in range(2)]
    assert device.pool_stats(handle)["reserved"] == 8192
    graphs[0][0].reset()
    assert device.pool_stats(handle)["reserved"] == 8192
    first, second = graphs.pop(0)[1], graphs[0][1]
    del graphs[:]
    assert device.pool_stats(handle) | {"allocated": 8192, "blocks": 2, "graphs": 0} == device.pool_stats(handle)
    first.fill_(1), second.fill_(2)
    assert_equal(first + second, torch.full((1000,), 3.0))
    del first, second
    device.empty_cache()
    assert device.pool_stats(handle)["reserved"] == 0


def test_the_cache_of_a_living_graph_is_kept(device):
    source = on_device(1000)
    graph, result = capture(lambda: (source + 1) * 2)
    device.empty_cache()
    assert device.pool_stats(graph.pool())["reserved"] == 8192
    graph.replay()
    assert_equal(result, (source.cpu() + 1) * 2)


def test_what_a_capture_allocates_is_poisoned_until_the_first_replay(mode, device):
    source = on_device(10)
    graph, result = capture(lambda: source + 1)
    assert result.isnan().all()
    graph.replay()
    assert_equal(result, source.cpu() + 1)


def test_inputs_that_were_given_back_are_noticed(device):
    source = on_device(1000)
    graph, _ = capture(functools.partial(torch.add, source, 1))
    del source
    device.empty_cache()
    with pytest.raises(RuntimeError, match="has been given back"):
        graph.replay()


def test_storages_grow_and_keep_what_they_hold(mode, device):
    tensor = on_device(4)
    expected = tensor.cpu()
    tensor.resize_(2, 1000)
    assert_equal(tensor.view(-1)[:4], expected)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
    tensor.untyped_storage().resize_(8000)
    assert_equal(tensor.zero_(), torch.zeros(2, 1000))


def test_an_allocation_that_is_chosen_finds_no_memory(mode, device):
    for all_after in (False, True):
        device.fail_allocations(1, all_after)
        kept = [on_device(4)]
        for fails in (True, all_after):
            with pytest.raises(torch.OutOfMemoryError) if fails else contextlib.nullcontext():
                kept.append(torch.empty_like(kept[0]))
        assert device.allocations_wanted() == 3
        device.fail_allocations()
        assert_equal(kept[0] + 0, kept[0].cpu())
