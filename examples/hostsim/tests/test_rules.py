"""What torch does on CUDA, this device does, too, unless it is told to be kinder."""

import contextlib
import gc
import re

import pytest
import torch
from helpers import capture, limited, name, on_device, zeros


@pytest.fixture
def strict(device):
    device.enforce_all_rules()
    return device


def fail_to_capture(source, pool):
    graph = torch.accelerator.Graph(pool=pool)
    with pytest.raises(RuntimeError, match="not possible while a graph is captured"), torch.Stream():
        graph.capture_begin()
        try:
            source.sum().item()
        finally:
            with pytest.raises(RuntimeError, match="has failed and the graph is empty"):
                graph.capture_end()
    return graph


def test_rules_say_where_they_come_from(strict):
    for effect, source in strict.rules().values():
        assert effect and re.search(r"/\w+\.(cpp|h), ", source) and "torch 2." in source
    assert strict.relaxed_rules() == []
    with pytest.raises(ValueError, match="no rule is called 'kindness'; there are: pool_dies"):
        strict.relax("kindness")


def test_a_pool_dies_with_its_last_graph(strict):
    """
    ::

        graph a  ------|                      b has to begin while a is there, or once nothing of the pool is left
        graph b           x
    """
    source, pool = on_device(64), strict.graph_pool_handle()
    first, result = capture(lambda: source + 1, pool=pool)
    second, _ = capture(lambda: source * 2, pool=pool)
    del first, second
    gc.collect()
    assert strict.pool_stats(pool)["graphs"] == 0 and strict.pool_stats(pool)["reserved"]
    with pytest.raises(RuntimeError, match="the last graph of this memory pool is gone"):
        capture(lambda: source + 3, pool=pool)
    capture(lambda: source + 3)  # another pool
    strict.relax("pool_dies_with_its_last_graph")
    capture(lambda: source + 3, pool=pool)
    del result


@pytest.mark.parametrize("pinned_first", [True, False])
def test_memory_of_a_dead_pool_is_free_when_both_caches_are_emptied(strict, pinned_first):
    source, pool = on_device(64), strict.graph_pool_handle()
    graph, _ = capture(lambda: source + 1, pool=pool)
    del graph, _
    gc.collect()
    assert strict.pool_stats(pool)["reserved"] == 512
    caches = [torch.accelerator.empty_host_cache, strict.empty_cache]
    for empty in caches if pinned_first else reversed(caches):
        # torch.accelerator.Graph empties both when it is entered.
        with pytest.raises(RuntimeError, match="the last graph of this memory pool is gone"), torch.Stream():
            torch.accelerator.Graph(pool=pool).capture_begin()
        empty()
    assert strict.pool_stats(pool)["reserved"] == 0
    capture(lambda: source + 1, pool=pool)  # the id is as good as new


def test_a_failed_capture_goes_on_recording_to_its_pool(strict):
    source, pool = on_device(64), strict.graph_pool_handle()
    fail_to_capture(source, pool)
    with pytest.raises(RuntimeError, match="another capture records to this memory pool"), torch.Stream():
        torch.accelerator.Graph(pool=pool).capture_begin()
    with pytest.raises(RuntimeError, match="emptying the cache: a capture records"):
        strict.empty_cache()
    strict.recover(0, pool)
    strict.empty_cache()
    capture(lambda: source + 1)  # for the generators


def test_a_failed_capture_spoils_its_pool_for_good(strict):
    source, pool = on_device(64), strict.graph_pool_handle()
    fail_to_capture(source, pool)
    strict.recover(0, pool)
    with pytest.raises(RuntimeError, match="a capture has failed in this memory pool"):
        capture(lambda: source + 1, pool=pool)
    capture(lambda: source + 1)  # another pool
    strict.empty_cache()
    torch.accelerator.empty_host_cache()
    strict.relax("failed_capture_spoils_its_pool")
    capture(lambda: source + 1, pool=pool)


def test_after_a_failed_capture_nothing_is_drawn_until_one_ends_well(strict):
    source, pool = on_device(64), strict.graph_pool_handle()
    fail_to_capture(source, pool)
    strict.recover(0, pool)
    with pytest.raises(RuntimeError, match="a random number outside of captures"):
        torch.rand(4, device=source.device)
    capture(lambda: source + 1)
    torch.rand(4, device=source.device)


@contextlib.contextmanager
def while_capturing(index=0):
    graph = torch.accelerator.Graph()
    with torch.Stream(torch.device(name(), index)):
        graph.capture_begin()
        yield
        graph.capture_end()


def test_the_cache_stays_while_a_graph_is_captured(strict):
    """
    ::

        8192 are allowed   8192 are cached   | capture: 2048 are wanted   | 2048 are wanted
        the cache                            | stays, and nobody has any  | goes
    """
    source = on_device(500)
    with limited(strict, 8192):
        zeros(2000)
        with while_capturing():
            with pytest.raises(torch.OutOfMemoryError, match="8192 are kept by the cache and by pools while a graph"):
                source + 1
            with strict.stream(strict.default_stream()), pytest.raises(torch.OutOfMemoryError):
                torch.empty_like(source)
        zeros(500)
        zeros(2000)
        with while_capturing(1):
            torch.empty_like(source)  # another device has a cache of its own
        zeros(2000)
        strict.relax("cache_stays_while_capturing")
        capture(lambda: source + 1)
