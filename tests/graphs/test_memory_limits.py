"""Arenas: as large as the largest need, given back on demand, within a limit.

On the CPU there are none: what a call needs comes and goes with it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Compiled, freezes

import fxwrap
from fxwrap.errors import MemoryLimitError
from fxwrap.graphs.devices.runtime import runtime_for, using_runtime
from fxwrap.graphs.memory import operator_memory
from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.graphs.memory.arenas import OUT_OF_MEMORY, Arena
from fxwrap.graphs.memory.live_outputs import OutputStorage, WatchedOutputs
from fxwrap.graphs.memory.locks import LockOwner
from fxwrap.graphs.policy.shortage import ASKED_AGAIN, NOTHING_IS_ENOUGH
from fxwrap.passes.memory.planner import bytes_of_call

CPU = torch.device("cpu")


@pytest.fixture
def small_arenas(device: torch.device) -> Iterator[None]:
    """Without cuBLAS's workspace (32 MiB on sm_90), beside which the other storages here are nothing."""
    with contextlib.ExitStack() as stack:
        if freezes(device) and (runtime := runtime_for(device)).placements is not None:
            stack.enter_context(using_runtime(replace(runtime, placements=None)))
        yield


def _model(width: int = 64) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.GELU(), torch.nn.LayerNorm(width), torch.nn.Linear(width, 8)
    )


@torch.no_grad()
def _run(f: Any, x: torch.Tensor, calls: int = 3) -> None:
    for _ in range(calls):
        f(x)


def test_nothing_is_kept_between_calls_on_the_cpu(compiled: Any, own_arenas: ArenaPool) -> None:
    """And no limit holds there: it is about what is kept."""
    f: Compiled = compiled(_model(), options={"max_memory": 1})
    for _ in range(6):
        f(torch.randn(32, 16)).sum().backward()
    for program in f.programs:
        assert program.counters.eager == {"warm-up": 1}
        (recording,) = program.specializations.recordings()
        assert recording.request.arenas == {} and recording.own_bytes == 0
    assert own_arenas.kept() == 0


# -- how large --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_an_arena_lies_in_no_segment_that_was_cached(compiled: Any, own_arenas: ArenaPool) -> None:
    """Inductor times kernels with a buffer of 50 MiB, which the allocator then caches. An arena in a part of that
    segment would keep all of it."""
    mib, device = 1 << 20, torch.accelerator.current_accelerator()
    module = torch.get_device_module(device)
    fxwrap.release()
    module.empty_cache()
    before = module.memory_reserved()
    f: Compiled = compiled(lambda x: x.sin() + x, options={"capture": "always"})
    x = torch.randn(2048, 2048, device=device)
    f(x)
    module.empty_cache()
    torch.empty(50 * mib, dtype=torch.uint8, device=device)
    for _ in range(3):
        f(x)
    assert f.program.counters.replays >= 2 and 16 * mib <= own_arenas.kept() < 33 * mib
    module.empty_cache()
    assert module.memory_reserved() - before < 50 * mib


def test_sixteen_batch_sizes_take_what_the_largest_takes(
    compiled: Any, device: torch.device, own_arenas: ArenaPool
) -> None:
    model = _model().to(device)
    f: Compiled = compiled(model, dynamic=True)
    for batch in range(8, 136, 8):
        _run(f, torch.randn(batch, 16, device=device))
    together = own_arenas.kept(device)
    assert fxwrap.release(f.call) == together and own_arenas.kept(device) == 0
    alone: Compiled = compiled(model, dynamic=True)
    _run(alone, torch.randn(128, 16, device=device))
    assert together <= 1.15 * own_arenas.kept(device)
    assert (together > 0) == freezes(device)


@torch.no_grad()
def test_a_call_stays_within_memory_limit(compiled: Any, device: torch.device, own_arenas: ArenaPool) -> None:
    """A value that lies idle during two products is computed again after them.

    ::

        a = sin(x)                       a = sin(x)
        b = a @ w                        b = a @ w             a is free from here
        c = b @ w     a, b, c in use ->  c = b @ w             b, c
        d = c @ w                        d = c @ w             c, d
        return (d * a).sum(0)            a_again = sin(x)
    """
    weight, half = torch.randn(64, 64, device=device) / 8, 256 * 64 * 2

    def f(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        return (((a @ weight) @ weight) @ weight * a).sum(0)

    x = torch.randn(256, 64, device=device)
    free: Compiled = compiled(f)
    expected = free(x)
    _run(free, x)
    whole = _taken(free)
    limited: Compiled = compiled(f, options={"memory_limit": whole - half})
    for _ in range(4):
        assert torch.equal(limited(x), expected)
    assert _taken(limited) <= whole - half
    assert limited.program.plan.repeated
    assert limited.program.counters.replays >= 2


@torch.library.custom_op("fxwrap_test::read_by_the_host", mutates_args=())
def read_by_the_host(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.isnan().sum() == 0)


@read_by_the_host.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_capture_fails_where_only_small_calls_fit(
    compiled: Any, device: torch.device, own_arenas: ArenaPool
) -> None:
    """The program is partitioned again after the failure; within the limit it can be for small calls only."""

    def g(x: torch.Tensor) -> torch.Tensor:
        return read_by_the_host(x.sin()).cos()

    f: Compiled = compiled(g, options={"memory_limit": 8 << 20}, dynamic=True)
    with pytest.raises(MemoryLimitError):
        f(torch.randn(2048, 2048, device=device))
    for _ in range(5):
        x = torch.randn(64, 64, device=device)
        torch.testing.assert_close(f(x), g(x))
    counters = f.program.counters
    assert counters.replays >= 2 and bool(f.program.recorder.capture_errors) == freezes(device)


def _taken(f: Compiled) -> int:
    """What a call takes beside its inputs, by the newest plan."""
    sized, memory = f.program.recorder.newest_sized, f.program.newest_plan
    assert sized is not None and memory is not None
    return bytes_of_call(sized, memory)


def test_parts_cut_by_graph_breaks_share_an_arena(compiled: Any, device: torch.device, own_arenas: ArenaPool) -> None:
    first, second, third, fourth = (_model(width).to(device) for width in (64, 32, 128, 48))

    def parts(x: torch.Tensor) -> torch.Tensor:
        a = first(x).sum()
        torch._dynamo.graph_break()
        b = second(x).sum()
        torch._dynamo.graph_break()
        c = third(x).sum()
        torch._dynamo.graph_break()
        return a + b + c + fourth(x).sum()

    x = torch.randn(32, 16, device=device)
    f: Compiled = compiled(parts)
    _run(f, x, 5)
    together = own_arenas.kept(device)
    needs = [program.newest_plan.size for program in f.programs]
    assert len(needs) == 4 and max(needs) <= together <= 1.15 * max(needs)
    if freezes(device):
        assert sum(needs) > 1.5 * together
    else:
        assert together == 0 and own_arenas.kept() == 0


@pytest.mark.usefixtures("small_arenas")
def test_an_arena_shrinks_when_what_it_was_large_for_is_gone(
    compiled: Any, device: torch.device, own_arenas: ArenaPool
) -> None:
    if not freezes(device):
        pytest.skip("no arena")
    model = _model().to(device)
    large: Compiled = compiled(model)
    _run(large, torch.randn(512, 16, device=device))
    before = own_arenas.kept(device)
    keeper: Compiled = compiled(model)  # the arena lives on
    _run(keeper, torch.randn(2, 16, device=device))
    assert own_arenas.kept(device) == before
    del large
    torch._dynamo.reset()
    gc.collect()
    f: Compiled = compiled(model)
    _run(f, torch.randn(4, 16, device=device))
    assert 0 < own_arenas.kept(device) <= 2 * f.program.newest_plan.size < before


def test_what_is_expected_is_corrected_downwards() -> None:
    """A plan that was made before it was known what stays in place expects more than the recording needs."""
    pool, who, other = ArenaPool(), User(1), User(2)
    pool.announce(CPU, who, 1000)
    pool.announce(CPU, other, 300)
    pool.lower(CPU, who, 2000)
    assert pool.largest_announced(CPU) == 1000
    pool.lower(CPU, who, 200)
    assert pool.largest_announced(CPU) == 300
    pool.withdraw(other)
    assert pool.largest_announced(CPU) == 200
    del who
    gc.collect()
    assert pool.largest_announced(CPU) == 0


def test_the_first_arena_that_is_free_is_taken() -> None:
    """Whatever their sizes: programs in turn share one."""
    pool, arenas = ArenaPool(), list[Arena]()
    first, second = LockOwner(), LockOwner()
    one, two = pool.acquire(CPU, None, first, arenas), pool.acquire(CPU, None, second, arenas)
    two.resize(1000)
    one.lock.release(first)
    two.lock.release(second)
    assert one is not two and pool.acquire(CPU, None, LockOwner(), []) is one


def test_nothing_but_empty_tensors(compiled: Any, device: torch.device) -> None:
    """An arena of no bytes has no memory."""
    f: Compiled = compiled(lambda x: (x.exp() + 1).sin())
    for _ in range(4):
        x = torch.randn(0, 3, device=device, requires_grad=True)
        y = f(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == (0, 3)  # type: ignore[union-attr]
    assert all(program.counters.replays for program in f.programs)


# -- given back -------------------------------------------------------------------------------------------------


def test_release(compiled: Any, device: torch.device, own_arenas: ArenaPool) -> None:
    model = _model().to(device)
    f: Compiled = compiled(model)
    x = torch.randn(8, 16, device=device)
    _run(f, x)
    with torch.no_grad():
        kept = f(x)
    value = kept.clone()
    before = own_arenas.kept()
    assert fxwrap.release() == before and own_arenas.kept() == 0
    assert (before > 0) == freezes(device)
    with torch.no_grad():
        again = f(x)
    assert torch.equal(kept, value) and torch.equal(again, value)
    assert f.program.counters.recordings == {"first": 1, "released": 1}
    _run(f, x, 4)
    assert f.program.counters.replays >= 4


def test_release_of_one_function_leaves_the_others(
    compiled: Any, device: torch.device, own_arenas: ArenaPool
) -> None:
    f, g = (compiled(_model().to(device)) for _ in range(2))
    x = torch.randn(8, 16, device=device)
    _run(f, x)
    _run(g, x)
    assert fxwrap.release(f.call) == 0  # the arena is the other's, too
    before = g.program.counters.replays
    _run(g, x)
    assert g.program.counters.replays == before + 3
    assert (fxwrap.release(g.call) > 0) == freezes(device)
    with pytest.raises(fxwrap.FxwrapError, match="has no program"):
        fxwrap.release(torch.sin)


def test_what_is_recorded_after_a_release_and_a_shortage_is_not_the_first(
    compiled: Any, device: torch.device, own_arenas: ArenaPool
) -> None:
    """
    ::

        recorded  replay  | released |  too little memory, 31 calls  |  recorded
        first                                                           released
    """
    f: Compiled = compiled(_model().to(device))
    x = torch.randn(8, 16, device=device)
    _run(f, x)
    fxwrap.release(f.call)
    (specialization,) = f.program.specializations.values()
    specialization.shortage.note(OUT_OF_MEMORY, NOTHING_IS_ENOUGH)
    _run(f, x, ASKED_AGAIN - 1)
    assert f.program.counters.recordings == {"first": 1}
    assert f.program.counters.eager == {"warm-up": 1, OUT_OF_MEMORY: ASKED_AGAIN - 1}
    _run(f, x, 2)
    assert f.program.counters.recordings == {"first": 1, "released": 1}
    assert f.program.history[-1].why == "released" and f.program.counters.replays == 2


# -- a limit ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_arenas")
def test_what_needs_more_than_the_limit_runs_eagerly(
    compiled: Any, device: torch.device, own_arenas: ArenaPool
) -> None:
    model = _model().to(device)
    f: Compiled = compiled(model, dynamic=True, options={"max_memory": 16 << 10})
    for batch in (4, 512, 8, 512, 4):
        x = torch.randn(batch, 16, device=device)
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(f(x), model(x))
        assert own_arenas.kept(device) <= 16 << 10
    counters = f.program.counters
    warm_ups = {"warm-up": 1, "first call of these sizes": 2}
    assert counters.eager == ({**warm_ups, "more than max_memory": 5} if freezes(device) else warm_ups)
    assert counters.replays >= 3
    if freezes(device):
        g: Compiled = compiled(model, options={"max_memory": 1, "strict": True})
        g(torch.randn(4, 16, device=device))
        with pytest.raises(fxwrap.MemoryLimitError, match="max_memory"):
            _run(g, torch.randn(4, 16, device=device))


@pytest.mark.usefixtures("small_arenas")
def test_what_needs_more_than_the_limit_leaves_the_others_alone(
    compiled: Any, device: torch.device, own_arenas: ArenaPool
) -> None:
    """It is tried again and again whether there is memory now: nobody's recording ends for it every time."""
    f: Compiled = compiled(_model().to(device), dynamic=True, options={"max_memory": 16 << 10})
    for _ in range(40):
        for batch in (4, 512):
            _run(f, torch.randn(batch, 16, device=device), 1)
    assert sum(f.program.counters.recordings.values()) <= 4, f.program.counters.to_dict()
    assert f.program.counters.replays >= 34


def _calls_until_it_replays(f: Compiled, x: torch.Tensor) -> int:
    before = f.program.counters.replays
    for call in range(1, 20):
        _run(f, x, 1)
        if f.program.counters.replays > before:
            return call
    raise AssertionError(f.program.counters.to_dict())


@pytest.mark.usefixtures("small_arenas")
@pytest.mark.parametrize("length", [0, 1, 5, 30])
def test_after_a_shortage_it_replays_again(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, length: int
) -> None:
    """
    ::

        another call     64 KiB            | over                      of 80 KiB
        f wants 32 KiB   eager  eager ...  | ...  recorded  replay
    """
    if not freezes(device):
        pytest.skip("nothing is kept")
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x, options={"max_memory": 80 << 10})
    x = torch.randn(64, 64, device=device)
    call, taken = LockOwner(), list[Arena]()
    other = own_arenas.acquire(device, None, call, taken, lambda arena: True)
    other.resize(64 << 10)
    user = User(1)
    other.enter(user, WatchedOutputs(), other.nbytes)
    _run(f, x, 2 + length)
    assert f.program.counters.eager == {"warm-up": 1, "more than max_memory": 1 + length}
    assert not f.program.counters.recordings
    other.lock.release(call)
    assert _calls_until_it_replays(f, x) <= 10
    assert own_arenas.kept(device) <= 80 << 10


@pytest.mark.usefixtures("small_arenas")
@torch.no_grad()
@pytest.mark.parametrize("small", [0, 4])
def test_after_outputs_that_took_memory_are_gone_it_replays_again(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, small: int
) -> None:
    """Be it that others are kept by then: what counts is the memory."""
    if not freezes(device):
        pytest.skip("nothing is kept")
    options = {"max_memory": 80 << 10}
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x, options=options)
    g: Compiled = compiled(lambda x: x.sin() + 1, options=options)
    others: list[Compiled] = [compiled(lambda x, n=n: x.cos() * n + 1, options=options) for n in range(small)]
    x, y, z = (torch.randn(n, n, device=device) for n in (64, 4, 128))
    _run(g, z, 2)
    kept = g(z)
    value = kept.clone()
    _run(f, x, 8)
    keeps = []
    for other in others:
        _run(other, y, 2)
        keeps.append(other(y))
    assert torch.equal(kept, value)
    del kept
    assert _calls_until_it_replays(f, x) <= 10
    assert own_arenas.kept(device) <= 80 << 10


def test_a_training_step_and_a_compiled_optimizer_share_an_arena(
    compiled: Any, device: torch.device, own_arenas: ArenaPool
) -> None:
    """
    ::

        step          1  2  3 ...
        the arena     forward: 18  backward: 37, around what forward saved; optimizer: 10, so that all ended ...
                      ... and the next step began anew: now whoever ended because it grew still counts
    """
    width = 32
    norm, line = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), norm, line).to(device)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (model, twin)]
    x = torch.randn(width, width, device=device)
    loss: Compiled = compiled(lambda x: model(x).square().mean())
    update: Compiled = compiled(lambda: optimizers[0].step())
    for _ in range(16):
        optimizers[0].zero_grad()
        loss(x).backward()
        update()
        optimizers[1].zero_grad()
        twin(x).square().mean().backward()
        optimizers[1].step()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    for program in loss.programs:
        assert sum(program.counters.recordings.values()) <= 4 and program.counters.replays >= 8, (
            program.counters.to_dict()
        )


@torch.library.custom_op("fxwrap_test::product_that_reads", mutates_args=())
def product_that_reads(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b if a.sum().item() < 1e9 else a @ b + 1


@product_that_reads.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _keep_operands(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients_of_product(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = ctx.saved_tensors
    return product_that_reads(grad, b.mT), product_that_reads(a.mT, grad)


product_that_reads.register_autograd(_gradients_of_product, setup_context=_keep_operands)


def test_what_a_cut_has_moved_out_of_the_arena_takes_no_bytes_there(
    compiled: Any, device: torch.device, own_arenas: ArenaPool
) -> None:
    """
    ::

        recorded    forward: fails at the product    backward: fails at it, too           both once more
        the plan    for both, with a gradient        cut again: the product returns it    for both, without it
    """
    if not freezes(device):
        pytest.skip("there are no arenas")
    w = torch.randn(32, 512, device=device, requires_grad=True)
    x = torch.randn(8, 32, device=device)
    f: Compiled = compiled(lambda x, w: product_that_reads(x.sin() * 2, w).cos().sum())

    def arena_of_steps() -> int:
        for _ in range(6):
            w.grad = None
            f(x, w).backward()
        (arena,) = own_arenas.alive(device)
        return arena.nbytes

    at_first = arena_of_steps()
    assert all(replays for replays in f.replays())
    fxwrap.release()
    w.grad = None
    assert at_first == arena_of_steps()


def test_a_loss_that_is_kept_now_and_then_does_not_keep_the_arena(
    compiled: Any, device: torch.device, own_arenas: ArenaPool
) -> None:
    """
    ::

        calls    1  2  3  4  5  6  7  8        the arena stays as large as it was; the recording that has handed out
        kept              *     *     *        the first kept loss is replaced at once, by one that copies it
    """
    if not freezes(device):
        pytest.skip("there are no arenas")
    model = _model().to(device)
    f: Compiled = compiled(lambda x: model(x).square().mean())
    x = torch.randn(32, 16, device=device)
    expected = [model(x).square().mean().detach()] * 3
    kept, sizes = list[torch.Tensor](), list[int]()
    for call in range(1, 11):
        loss = f(x)
        loss.backward()
        model.zero_grad()
        if call in (4, 6, 8):
            kept.append(loss.detach())
        del loss
        sizes.append(own_arenas.kept(device))
    torch.testing.assert_close(kept, expected, rtol=1e-4, atol=1e-5)
    assert not any(own_arenas.owns(loss.data_ptr()) for loss in kept)
    assert max(sizes) <= 1.05 * sizes[2] and len(own_arenas.alive(device)) == 1
    forward = f.programs[0].counters
    assert forward.recordings["live outputs are copied from now on"] <= 2
    assert not forward.eager["an output of an earlier call is live"] and forward.replays >= 5


@dataclass
class User:
    """Something recorded."""

    used: int
    own_bytes: int = 0
    ended: str = ""

    def end(self, why: str) -> None:
        self.ended = why

    def tell_unit_of_others(self) -> None:
        pass


def test_an_arena_that_others_have_recorded_in_grows_with_room_for_the_next_size(own_arenas: ArenaPool) -> None:
    """
    ::

        recorded    100         104         106 (of KiB)
        arena       100         107.25      the same: nobody ends
    """
    arena = own_arenas.acquire(CPU, None, LockOwner(), [])

    def record(kib: int, **how: Any) -> User:
        own_arenas.fit(arena, kib << 10, **{"limit": 0, **how})
        arena.enter(user := User(1), WatchedOutputs(), kib << 10)
        return user

    first = record(100)
    assert arena.nbytes == 100 << 10
    second = record(104)
    assert first.ended and arena.nbytes == (104 << 10) * 33 // 32
    third = record(106)
    assert not second.ended and arena.nbytes == (104 << 10) * 33 // 32
    # There is no room where a limit leaves none, or where the size is to be exact.
    fourth = record(120, limit=121 << 10)
    assert third.ended and arena.nbytes == 120 << 10
    assert not fourth.ended and record(130, exactly=True) and arena.nbytes == 130 << 10


def test_who_may_be_back_does_not_keep_others_from_memory_that_is_short(own_arenas: ArenaPool) -> None:
    """Room is kept for a recording that ended because its arena moved, but not if another one could not be made."""
    call, taken = LockOwner(), list[Arena]()
    arena = own_arenas.acquire(torch.device("cpu"), None, call, taken)
    arena.resize(70 << 10)
    user = User(1)
    arena.enter(user, WatchedOutputs(), 70 << 10)
    arena.resize(10 << 10)
    assert user.ended and arena.needed() == 0 and arena.needed_again() == 70 << 10
    assert own_arenas.fit(arena, 32 << 10, 80 << 10) and arena.nbytes == 70 << 10
    other = own_arenas.acquire(torch.device("cpu"), None, call, taken, lambda arena: True)
    other.resize(40 << 10)
    assert own_arenas.fit(arena, 32 << 10, 80 << 10) and arena.nbytes == 32 << 10
    del user
    assert arena.needed_again() == 0


@pytest.mark.parametrize(
    ("needed", "sizes"), [([100, 104, 110, 200, 230], [100, 104, 208, 208, 400]), ([100, 120, 210], [100, 200, 240])]
)
def test_an_arena_grows_a_little_once_and_then_doubles(
    own_arenas: ArenaPool, needed: list[int], sizes: list[int]
) -> None:
    """Around live outputs a plan needs more: a backward beside what its forward saved, often a little, and once.

    ::

        needed   100   104   110   200   230            100   120   210
        arena    100   104   208   208   400            100   200   240       KiB
    """
    arena = own_arenas.acquire(CPU, None, LockOwner(), [])
    users = list[User]()
    for kib, size in zip(needed, sizes, strict=True):
        before = arena.nbytes
        assert own_arenas.fit(arena, kib << 10, 0) is (size << 10 != before)
        assert arena.nbytes == size << 10
        output = OutputStorage(arena.storage(0, 64), frozenset({0}), CPU)
        held = WatchedOutputs([output], lambda storages: lambda: [2], {output.storage._cdata: 1})
        users.append(User(len(users)))
        arena.enter(users[-1], held, kib << 10)
        assert arena.live()
    assert arena.grown
    arena.clear("released")
    assert not arena.grown


def _pool(sizes: list[int]) -> tuple[ArenaPool, list[Arena]]:
    pool, arenas = ArenaPool(), list[Arena]()
    for nbytes in sizes:
        call, taken = LockOwner(), list[Arena]()
        arena = pool.acquire(CPU, None, call, taken, lambda arena: True)
        arena.resize(nbytes)
        arenas.append(arena)
    return pool, arenas


def test_the_least_recently_used_ends_first() -> None:
    """
    ::

        arena 0   1000 bytes   a (used 3), b (used 1, 300 of its own)
        arena 1   2000 bytes   c (used 2)
        arena 2      0 bytes   wants 1500, within 3000: b, then c with its arena
    """
    pool, arenas = _pool([1000, 2000, 0])
    a, b, c = User(3), User(1, 300), User(2)
    for user, arena in ((a, arenas[0]), (b, arenas[0]), (c, arenas[1])):
        arena.enter(user, WatchedOutputs(), arena.nbytes)
    assert pool.kept(CPU) == 3300
    assert pool.make_room(arenas[2], 1500, 3000)
    assert (a.ended, bool(b.ended), bool(c.ended)) == ("", True, True)
    assert pool.kept(CPU) == 1000


def test_what_is_in_use_stays() -> None:
    pool, arenas = _pool([1000, 0])
    user = User(1)
    arenas[0].enter(user, WatchedOutputs(), 1000)
    running = LockOwner()
    assert arenas[0].lock.acquire(running)
    assert not pool.make_room(arenas[1], 500, 1200) and not user.ended
    arenas[0].lock.release(running)
    assert pool.make_room(arenas[1], 500, 1200) and user.ended


def test_a_limit_is_kept_whatever_is_recorded(compiled: Any, device: torch.device, own_arenas: ArenaPool) -> None:
    """Programs of several functions and sizes in turn, each with the same limit."""
    limit = 40 << 10
    options = {"max_memory": limit}
    functions = [compiled(_model(width).to(device), dynamic=True, options=options) for width in (16, 64)]
    for batch, f in itertools.product((4, 64, 16, 128, 8), functions):
        _run(f, torch.randn(batch, 16, device=device), 4)
        assert own_arenas.kept(device) <= limit


# -- during replay ----------------------------------------------------------------------------------------------


@pytest.mark.accelerator
@pytest.mark.parametrize("training", [False, True])
def test_a_replay_allocates_nothing(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, training: bool
) -> None:
    """Counted by the allocator: in all, and in the pool of the graphs. Convolutions allocate while captured."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3), torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, 16), torch.nn.LayerNorm(16),
    ).to(device)  # fmt: skip
    f: Compiled = compiled(lambda x: model(x).square().sum())
    x = torch.randn(2, 3, 8, 8, device=device)

    def allocations() -> list[int]:
        in_all = torch.accelerator.memory_stats(device)["allocation.all.allocated"]
        module = torch.get_device_module(device)
        pools = (
            [module.pool_stats(pool)["allocations"] for pool in own_arenas.pools()] if device.type != "cuda" else []
        )
        return [in_all, *pools]

    seed = torch.ones((), device=device)

    def step() -> None:
        model.zero_grad()
        with torch.set_grad_enabled(training):
            loss = f(x)
        if training:
            loss.backward(seed)

    for _ in range(16):
        step()
    replays = f.replays()
    for _ in range(4):
        before = allocations()
        step()
        assert allocations() == before
    if training:
        assert len(f.programs) == 2
    assert f.replays() == [count + 4 for count in replays]
    assert len(own_arenas.pools()) == 1


def test_a_limit_counts_all_of_the_block_in_which_an_arena_lies(
    compiled: Any, device: torch.device, own_arenas: ArenaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest limit is known before anything has run: operators are rehearsed, where they can be placed."""
    if not freezes(device):
        pytest.skip("there are no arenas")
    monkeypatch.setattr(operator_memory, "_known", {})
    x, weight = torch.randn(2, 3, 16, 16, device=device), torch.randn(8, 3, 3, 3, device=device)

    def program(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight).sin().topk(3).values

    with torch.no_grad(), pytest.raises(MemoryLimitError) as caught:
        compiled(program, options={"memory_limit": 1})(x)
    f: Compiled = compiled(program, options={"memory_limit": caught.value.least})
    _run(f, x, 4)
    (arena,) = own_arenas.alive(device)
    assert f.program.counters.replays and arena.block is not None
    assert arena.block.nbytes() == own_arenas.kept(device) <= caught.value.least
