"""What operators return lies where the plan wants it: the device's allocator is told (``place_allocations``)."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import zeros

import fxwrap
from fxwrap.graphs.memory import ARENAS


def test_an_allocation_of_as_many_bytes_gets_the_place(device: Any) -> None:
    whole = zeros(64)  # 256 bytes, as places
    at = whole.data_ptr()
    device.place_allocations([(at, 64), (at + 64, 64), (at + 128, 32)])
    try:
        other, one, two, three = zeros(5), zeros(16), zeros(16), zeros(16)
        assert [one.data_ptr(), two.data_ptr()] == [at, at + 64]
        assert not at <= other.data_ptr() < at + 256 and not at <= three.data_ptr() < at + 256
        assert zeros(8).data_ptr() == at + 128
        # What is free again is given again: an operator may take memory for a while, and then some for its result.
        del one
        assert zeros(16).data_ptr() == at
    finally:
        device.place_allocations([])
    assert zeros(16).data_ptr() != at


def test_places_are_those_of_one_thread(device: Any) -> None:
    whole, found = zeros(16), list[int]()
    device.place_allocations([(whole.data_ptr(), 64)])
    try:
        thread = threading.Thread(target=lambda: found.append(zeros(16).data_ptr()))
        thread.start()
        thread.join()
        assert zeros(16).data_ptr() == whole.data_ptr() not in found
    finally:
        device.place_allocations([])


def test_what_is_freed_late_takes_no_place_away(device: Any) -> None:
    """A tensor of the last time is freed while its place is taken again: nobody else may get it."""
    whole = zeros(16)
    device.place_allocations([(whole.data_ptr(), 64)])
    before = zeros(16)
    device.place_allocations([(whole.data_ptr(), 64)])
    try:
        now = zeros(16)
        del before
        assert now.data_ptr() == whole.data_ptr() != zeros(16).data_ptr()
    finally:
        device.place_allocations([])


def test_placed_memory_is_counted_once(device: Any) -> None:
    whole, before = zeros(16), device.memory_allocated()
    device.place_allocations([(whole.data_ptr(), 64)])
    placed = zeros(16)
    device.place_allocations([])
    assert placed.data_ptr() == whole.data_ptr() and device.memory_allocated() == before
    del placed
    assert device.memory_allocated() == before


# -- programs ------------------------------------------------------------------------------------------------


@pytest.fixture
def registered(device: Any) -> Iterator[torch.device]:
    import hostsim.inductor

    torch.compiler.reset()
    with hostsim.inductor.register():
        yield torch.device(hostsim.NAME, 0)
    torch.compiler.reset()
    fxwrap.release()


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(2, 4, 3), torch.nn.Conv2d(4, 3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        return self.second(hidden.relu()), hidden


def pools() -> list[dict[str, int]]:
    import hostsim

    return [torch.get_device_module(hostsim.NAME).pool_stats(pool) for pool in ARENAS.pools()]


def test_convolutions_need_no_memory_beside_the_arena(registered: torch.device) -> None:
    """Results that the caller gets, too: they stay what they are while they are held."""
    torch.manual_seed(0)
    model = Convolutions()
    expected = [model(x) for x in (torch.randn(2, 2, 8, 8, generator=torch.manual_seed(i)) for i in range(8))]
    model = model.to(registered)
    f = torch.compile(model, backend="fxwrap")
    kept = []
    with torch.no_grad():
        for i in range(8):
            kept.append(f(torch.randn(2, 2, 8, 8, generator=torch.manual_seed(i)).to(registered)))
    for got, wanted in zip(kept, expected, strict=True):
        torch.testing.assert_close([one.cpu() for one in got], list(wanted), rtol=1e-4, atol=1e-5)
    assert fxwrap.report(f).graphs[0].counters["replays"] > 0
    del kept, got
    gc.collect()
    assert all(pool["allocations"] == 0 for pool in pools())


def test_gradients_of_convolutions(registered: torch.device) -> None:
    torch.manual_seed(0)
    model = Convolutions().to(registered)
    reference = copy.deepcopy(model).cpu()
    f = torch.compile(lambda x: sum(one.square().mean() for one in model(x)), backend="fxwrap")
    for i in range(6):
        x = torch.randn(2, 2, 8, 8, generator=torch.manual_seed(i))
        model.zero_grad()
        reference.zero_grad()
        f(x.to(registered)).backward()
        sum(one.square().mean() for one in reference(x)).backward()
        for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            assert got.grad is not None
            torch.testing.assert_close(got.grad.cpu(), wanted.grad, rtol=1e-4, atol=1e-5)
    assert [graph.counters["replays"] for graph in fxwrap.report(f).graphs] == [4, 4]
    assert all(pool["allocations"] == 0 for pool in pools())


def test_what_eager_work_returns_is_where_captured_work_reads_it(registered: torch.device) -> None:
    """Without a copy: ``(conv) [ relu conv relu ]`` at one address at every call."""
    torch.manual_seed(0)
    reference = Convolutions()
    model = copy.deepcopy(reference).to(registered)
    options = {"eager_ops": ("aten::convolution",), "capture": "always"}
    f = torch.compile(lambda x: model(x.sin())[0].cos().sum(1), backend="fxwrap", options=options)
    with torch.no_grad():
        for i in range(6):
            x = torch.randn(2, 2, 8, 8, generator=torch.manual_seed(i))
            wanted = reference(x.sin())[0].cos().sum(1)
            torch.testing.assert_close(f(x.to(registered)).cpu(), wanted, rtol=1e-4, atol=1e-5)
    (graph,) = fxwrap.report(f).graphs
    assert graph.counters["replays"] > 0
    assert [partition.verdict.value for partition in graph.partitions].count("eager") == 2
    recordings = [one for family in graph.program.families.values() for one in family.recordings]
    assert recordings and not any(recording.own_bytes for recording in recordings)


@pytest.mark.parametrize("eager_ops", [(), ("aten::convolution",)])
def test_results_of_several_sizes_have_one_place_after_another(registered: torch.device, eager_ops: Any) -> None:
    """
    ::

        a a .  .        a, of 8 x 8, is dead when c, of 6 x 6, is made: at the same address
        . b b  .   ->   a a c c
        . . c  c        . b b .
    """
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(2, 2, 3, padding=1), *(torch.nn.Conv2d(2, 2, 2) for _ in range(4))]
    reference = torch.nn.Sequential(*layers)
    model = copy.deepcopy(reference).to(registered)
    f = torch.compile(model, backend="fxwrap", options={"eager_ops": eager_ops, "capture": "always"})
    with torch.no_grad():
        for i in range(6):
            x = torch.randn(1, 2, 8, 8, generator=torch.manual_seed(i))
            torch.testing.assert_close(f(x.to(registered)).cpu(), reference(x), rtol=1e-4, atol=1e-5)
    (graph,) = fxwrap.report(f).graphs
    assert graph.memory is not None and graph.counters["replays"] > 0
    (arena,) = graph.memory.arenas.values()
    at: dict[int, set[int]] = {}
    for name, buffer in arena.buffers.items():
        at.setdefault(arena.placement.offsets[name], set()).add(buffer.size)
    assert any(len(sizes) > 1 for sizes in at.values())


def test_an_allocator_that_does_otherwise_changes_nothing(registered: torch.device, monkeypatch: Any) -> None:
    """A place is an offer. What lies elsewhere is in the pool of the graphs, and is copied when it is handed out."""
    from hostsim import device as module

    monkeypatch.setattr(module._C, "place_allocations", lambda places: None)
    torch.manual_seed(0)
    model = Convolutions().to(registered)
    f = torch.compile(model, backend="fxwrap")
    kept, expected = [], []
    with torch.no_grad():
        for i in range(6):
            x = torch.randn(2, 2, 8, 8, generator=torch.manual_seed(i)).to(registered)
            kept.append(f(x))
            expected.append(model(x))
    assert any(pool["allocations"] > 0 for pool in pools())
    assert fxwrap.report(f).graphs[0].counters["replays"] > 0
    for got, wanted in zip(kept, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_an_error_ends_placing(registered: torch.device, monkeypatch: Any) -> None:
    from hostsim import device as module

    offered, original = list[Any](), module._C.place_allocations
    monkeypatch.setattr(module._C, "place_allocations", lambda places: (offered.append(places), original(places)))
    options = {"eager_ops": ("aten::_embedding_bag_forward_only", "aten::_embedding_bag"), "capture": "always"}

    def bags(i: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding_bag(i + 1, table.sin(), mode="sum").cos()

    f = torch.compile(bags, backend="fxwrap", options=options)
    i, table = torch.arange(6, device=registered).view(2, 3), torch.randn(8, 4, device=registered)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(f(i, table), bags(i, table))
        assert max(map(len, offered)) >= 1 and offered[-1] == []
        with pytest.raises(RuntimeError, match=r"[Ii]ndex"):
            f(i + 100, table)
        assert len(offered[-2]) >= 1 and offered[-1] == []
        torch.testing.assert_close(f(i, table), bags(i, table))
