"""What operators return lies where the plan wants it: the device's allocator is told (``place_allocations``)."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import zeros

import fxwrap
from fxwrap.graphs.memory.shared_state import SHARED


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


def test_other_allocations_lie_in_workspace_where_there_is_room(device: Any) -> None:
    whole = zeros(64)  # 256 bytes: a place of 64, and workspace of 192
    at = whole.data_ptr()
    device.place_allocations([(at, 64)], [(at + 64, 192)])
    try:
        place, one, two, three = zeros(16), zeros(16), zeros(20), zeros(20)
        assert [tensor.data_ptr() - at for tensor in (place, one, two)] == [0, 64, 128]
        assert not at <= three.data_ptr() < at + 256
        del one
        assert zeros(4).data_ptr() == at + 64
    finally:
        device.place_allocations([])


def test_what_is_in_use_is_told(device: Any) -> None:
    whole = zeros(64)
    at = whole.data_ptr()
    assert at not in device.place_allocations([(at, 64)], [(at + 128, 128)])
    one, other = zeros(16), zeros(4)
    assert {at, at + 128} <= set(device.place_allocations([]))
    thread = threading.Thread(target=one.__class__.set_, args=(one,))  # it may be freed on another thread
    thread.start()
    thread.join()
    assert at not in device.place_allocations([])
    del other
    assert at + 128 not in device.place_allocations([])


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

    return [torch.get_device_module(hostsim.NAME).pool_stats(pool) for pool in SHARED.arenas.pools()]


def test_convolutions_need_no_memory_beside_the_arena(registered: torch.device) -> None:
    """Results that the caller gets, too: they stay what they are while they are held."""
    torch.manual_seed(0)
    model = Convolutions()
    expected = [model(x) for x in (torch.randn(2, 2, 8, 8, generator=torch.manual_seed(i)) for i in range(8))]
    model = model.to(registered)
    f = torch.compile(model, backend="fxwrap")
    kept = []
    before = sum(pool["allocations"] for pool in pools())  # of other tests
    with torch.no_grad():
        for i in range(8):
            kept.append(f(torch.randn(2, 2, 8, 8, generator=torch.manual_seed(i)).to(registered)))
    for got, wanted in zip(kept, expected, strict=True):
        torch.testing.assert_close([one.cpu() for one in got], list(wanted), rtol=1e-4, atol=1e-5)
    assert fxwrap.report(f).graphs[0].counters["replays"] > 0
    del kept, got
    gc.collect()
    assert sum(pool["allocations"] for pool in pools()) <= before


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
    recordings = graph.program.specializations.recordings()
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
    for index, offset in graph.memory.inside(arena).items():
        at.setdefault(offset, set()).add(graph.memory.sizes[index])
    assert any(len(sizes) > 1 for sizes in at.values())


def test_an_allocator_that_does_otherwise_changes_nothing(registered: torch.device, monkeypatch: Any) -> None:
    """A place is an offer. What lies elsewhere is in the pool of the graphs, and is copied when it is handed out."""
    from hostsim import device as module

    monkeypatch.setattr(module._C, "place_allocations", lambda places, workspace: None)
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

    def place(places: Any, workspace: Any) -> list[int]:
        offered.append(places)
        return original(places, workspace)

    monkeypatch.setattr(module._C, "place_allocations", place)
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


# -- operators that are not torch's own, which may keep what they allocate -----------------------------------


@pytest.fixture
def operators() -> Iterator[Callable[..., Callable[..., Any]]]:
    """Defines operators that have to wait for the host, and so run eagerly between graphs."""
    libraries = []

    def define(function: Callable[..., Any], schema: str = "(Tensor x) -> Tensor") -> Callable[..., Any]:
        name = f"fxwrap_kept{next(_numbers)}"
        library = torch.library.Library(name, "DEF")
        library.define(f"op{schema}")
        library.impl("op", lambda x: (x.sum().item(), function(x))[1], "CompositeExplicitAutograd")

        def fake(x: torch.Tensor) -> Any:
            return tuple(map(torch.empty_like, (x, x))) if schema.endswith("Tensor)") else torch.empty_like(x)

        torch.library.register_fake(f"{name}::op", fake, lib=library)
        libraries.append(library)
        return getattr(torch.ops, name).op.default

    yield define
    for library in libraries:
        library._destroy()


_numbers = itertools.count()


def results(op: Callable[..., Any], calls: int) -> tuple[list[Any], Any]:
    """Calls of a program with ``op`` between captured work."""
    f = torch.compile(lambda x: op(x.sin()).cos() + 1, backend="fxwrap", options={"capture": "always"})
    found = []
    for i in range(calls):
        found.append(f(torch.full((64, 8), float(i), device="hostsim")).cpu())
    return found, f


def expected(calls: int) -> list[torch.Tensor]:
    return [(torch.full((64, 8), float(i)).sin() * 2).cos() + 1 for i in range(calls)]


def recordings(f: Any) -> list[Any]:
    (graph,) = fxwrap.report(f).graphs
    return [one for one in graph.program.specializations.recordings() if not one.ended]


def test_a_custom_operator_returns_into_the_arena(registered: torch.device, operators: Any) -> None:
    """Nothing is copied, nothing lies beside the arena."""
    addresses = []

    def double(x: torch.Tensor) -> torch.Tensor:
        found = x * 2
        addresses.append(found.data_ptr())
        return found

    found, f = results(operators(double), 8)
    torch.testing.assert_close(found, expected(8))
    (recording,) = recordings(f)
    (arena,) = recording.request.arenas.values()
    begin = arena.storage(0, 1).data_ptr()
    # The first calls are for warming up, for finding out that it cannot be captured, and for the trial.
    assert len(set(addresses[3:])) == 1 and begin <= addresses[-1] < begin + arena.nbytes
    assert not recording.own_bytes
    assert not [n for n in recording.plan.graph.graph.nodes if n.target is torch.ops.aten.copy_.default]


def test_the_caller_may_get_it_too(registered: torch.device, operators: Any) -> None:
    """A graph could not hand it out; once it is known that none returns it, it is not copied any more.

    ::

        [ sin double copy cos ]   ->   [ sin ] (double) [ cos ]
    """
    op = operators(lambda x: x * 2)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = op(x.sin())
        return y, y.cos()

    f = torch.compile(program, backend="fxwrap", options={"capture": "always"})
    kept = [f(torch.full((64, 8), float(i), device=registered)) for i in range(8)]
    for i, (one, other) in enumerate(kept):
        wanted = torch.full((64, 8), float(i)).sin() * 2
        torch.testing.assert_close((one.cpu(), other.cpu()), (wanted, wanted.cos()))
    del kept, one, other
    for _ in range(4):
        f(torch.zeros(64, 8, device=registered))
    for recording in recordings(f):
        assert not [n for n in recording.plan.graph.graph.nodes if n.target is torch.ops.aten.copy_.default]
        assert not recording.own_bytes


def test_what_it_takes_for_a_while_may_be_as_large(registered: torch.device, operators: Any) -> None:
    """Its second allocation of so many bytes is the result: found out in a few calls."""
    addresses = []

    def double(x: torch.Tensor) -> torch.Tensor:
        half = x * 0.5
        found = half * 4
        addresses.append(found.data_ptr())
        return found

    found, f = results(operators(double), 10)
    torch.testing.assert_close(found, expected(10))
    (arena,) = recordings(f)[0].request.arenas.values()
    begin = arena.storage(0, 1).data_ptr()
    assert begin <= addresses[-1] < begin + arena.nbytes


def test_results_may_be_allocated_in_another_order(registered: torch.device, operators: Any) -> None:
    """Than that in which they are returned, and than at the call before; one of them may be kept, too."""
    kept, calls = [], itertools.count()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        call = next(calls)
        if call < 6:
            second = x * 3
            return x * 2, second
        first, second = x * 2, x * 3
        if call == 7:
            kept.append(second)
        return first, second

    op = operators(both, "(Tensor x) -> (Tensor, Tensor)")

    def program(x: torch.Tensor) -> torch.Tensor:
        one, two = op(x.sin())
        return one.cos() + two.sin().cumsum(0)

    f = torch.compile(program, backend="fxwrap", options={"capture": "always"})
    for i in range(12):
        x = torch.full((64, 8), float(i))
        wanted = (x.sin() * 2).cos() + (x.sin() * 3).sin().cumsum(0)
        torch.testing.assert_close(f(x.to(registered)).cpu(), wanted)
    assert not recordings(f)[0].own_bytes
    torch.testing.assert_close(kept[0].cpu(), torch.full((64, 8), 7.0).sin() * 3)


@pytest.mark.parametrize("first", [0, 6])
def test_a_result_that_its_operator_keeps(registered: torch.device, operators: Any, first: int) -> None:
    """From the first call on, or from a later one on: it is never overwritten.

    Its sum is another buffer: Inductor's own kernels write elementwise results over what they read.
    """
    kept: list[torch.Tensor] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        found = x * 2
        kept.append(found if calls[0] >= first else found.clone())
        calls[0] += 1
        return found

    calls, op = [0], operators(double)
    f = torch.compile(lambda x: op(x.sin()).cos().sum(0), backend="fxwrap", options={"capture": "always"})
    for i in range(12):
        x = torch.full((64, 8), float(i))
        torch.testing.assert_close(f(x.to(registered)).cpu(), (x.sin() * 2).cos().sum(0))
    seen = sorted(one.cpu().flatten()[0].item() for one in kept)
    assert seen == pytest.approx(sorted(math.sin(i) * 2 for i in range(12)), abs=1e-5)


def test_a_table_that_an_operator_keeps_from_its_first_call_on(registered: torch.device, operators: Any) -> None:
    table: list[torch.Tensor] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        if not table:
            table.append(torch.full_like(x, 2.0))
        return x * table[0]

    found, _ = results(operators(double), 10)
    torch.testing.assert_close(found, expected(10))
    assert table[0].cpu().eq(2).all()


def test_a_table_that_an_operator_begins_to_keep_later(registered: torch.device, operators: Any) -> None:
    """It is as large as the result, and cannot be moved: the call says so, and the next ones are right."""
    tables: list[torch.Tensor] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        if calls[0] in (5, 9):
            tables.append(torch.full_like(x, 2.0))
        calls[0] += 1
        return x * (tables[-1] if tables else 2)

    calls, op = [0], operators(double)
    f = torch.compile(lambda x: op(x.sin()).cos() + 1, backend="fxwrap", options={"capture": "always"})
    errors = []
    for i in range(14):
        try:
            found = f(torch.full((64, 8), float(i), device="hostsim")).cpu()
        except fxwrap.CaptureError as error:
            errors.append(str(error))
        else:
            torch.testing.assert_close(found, expected(14)[i])
    assert len(errors) == 1 and "has begun to keep memory" in errors[0] and "call again" in errors[0]
    assert all(table.cpu().eq(2).all() for table in tables)


def test_results_that_only_eager_work_reads(registered: torch.device, operators: Any) -> None:
    op, addresses = operators(lambda x: x * 2), []
    other = operators(lambda x: (addresses.append(x.data_ptr()), x + 1)[1])
    f = torch.compile(lambda x: other(op(x.sin())).cos(), backend="fxwrap", options={"capture": "always"})
    for i in range(8):
        x = torch.full((64, 8), float(i))
        torch.testing.assert_close(f(x.to(registered)).cpu(), (x.sin() * 2 + 1).cos())
    assert len(set(addresses[3:])) == 1


def test_what_a_captured_operator_keeps_is_never_used_again(registered: torch.device, monkeypatch: Any) -> None:
    """The allocator says so of memory that was offered for a while only."""
    from hostsim import device as module

    claimed, original = list[int](), module._C.place_allocations

    def place(places: Any, workspace: Any) -> list[int]:
        if workspace and not claimed:
            claimed.append(workspace[0][0])
            return original(places, [])
        return [*original(places, workspace), *claimed]

    monkeypatch.setattr(module._C, "place_allocations", place)
    torch.manual_seed(0)
    model = Convolutions().to(registered)
    f = torch.compile(lambda x: model(x.sin().cumsum(0)), backend="fxwrap")
    with torch.no_grad():
        for i in range(8):
            x = torch.randn(2, 2, 8, 8, generator=torch.manual_seed(i)).to(registered)
            torch.testing.assert_close(f(x), model(x.sin().cumsum(0)), rtol=1e-4, atol=1e-5)
    (graph,) = fxwrap.report(f).graphs
    assert claimed and any("keeps memory that it was offered" in reason for reason in graph.counters["recordings"])
    for recording in recordings(f):
        (arena,) = recording.request.arenas.values()
        begin = arena.storage(0, 1).data_ptr()
        assert not begin <= claimed[0] < begin + arena.nbytes
