"""Addresses that are decided outside of the allocator, for what one thread allocates in a capture."""

import contextlib

import hostsim
import pytest
import torch
from helpers import capture, zeros
from hostsim.placements import Placements


@pytest.fixture
def placements(device):
    return Placements(torch.device(hostsim.NAME, 0))


def bytes_of(count):
    return torch.empty(count, dtype=torch.uint8, device=hostsim.NAME)


def test_allocations_lie_where_they_are_told(placements):
    arena = bytes_of(8192)
    low, high = arena.data_ptr() + 512, arena.data_ptr() + 4096
    before = torch.accelerator.memory_allocated()
    with placements.at([high, low]):
        one, other = bytes_of(100), bytes_of(2000)
        assert (one.data_ptr(), other.data_ptr()) == (high, low)
    assert torch.accelerator.memory_allocated() == before  # they are the arena's bytes
    assert placements.made() == [None]  # somebody has them still
    del one, other
    assert placements.made() == [[(high, 100), (low, 2000)]]
    assert bytes_of(100).data_ptr() not in (low, high)


def test_what_is_freed_is_used_again(placements):
    arena = bytes_of(8192)
    at = arena.data_ptr() + 512
    with placements.at([at]):
        for count in (1000, 700, 600):
            assert bytes_of(count).data_ptr() == at
    with pytest.raises(RuntimeError, match="more than 1 allocations"), placements.at([at]):
        bytes_of(1000), bytes_of(2000)  # the first is freed, and too small


@pytest.mark.parametrize("count", [0, 2])
def test_more_or_fewer_than_there_are_addresses(placements, count):
    arena = bytes_of(8192)
    expected = "more than 1 allocations" if count else "0 allocations in place of 1"
    with pytest.raises(RuntimeError, match=expected), placements.at([arena.data_ptr() + 512]):
        assert len([bytes_of(10) for _ in range(count)]) == count
    bytes_of(10)  # the allocator is as before


def test_a_capture_without_memory(placements):
    """It is never run, and needs none: neither for operands nor for results."""
    before = torch.accelerator.memory_allocated()
    storage = placements.stand_in(4000)
    operand = torch.empty(0, device=hostsim.NAME).set_(storage, 0, (1000,), (1,))

    def work():
        with placements.without_memory():
            (operand * 2).sum()

    capture(work)
    assert torch.accelerator.memory_allocated() == before
    (((product, nbytes), *_),) = placements.made()
    assert nbytes == 4000 and product != storage.data_ptr()


def test_an_error_inside_leaves_the_allocator_as_it_was(placements):
    with contextlib.suppress(KeyboardInterrupt), placements.without_memory():
        raise KeyboardInterrupt
    assert float(zeros(3).sum()) == 0
