"""One program, many shapes: right numbers, each shape recorded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor, on_simulated

from fxwrap.graphs.memory.arena_pool import ArenaPool
from fxwrap.graphs.memory.locks import LockOwner
from fxwrap.graphs.policy.specialization import Specialization
from fxwrap.graphs.policy.specializations import Specializations
from fxwrap.graphs.program import WARM_UPS
from fxwrap.graphs.replay.recording import next_use
from fxwrap.packing.reserved import lay_out_arena
from fxwrap.plan import Verdict


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)
    )


@pytest.mark.parametrize("dynamic", [True, None])
def test_eight_batch_sizes(compiled: Any, device: torch.device, dynamic: bool | None) -> None:
    model = _model().to(device)
    ours: Compiled = compiled(model, dynamic=dynamic)
    theirs = inductor(model, dynamic=dynamic)
    with torch.no_grad():
        for _ in range(5):
            before = ours.replays()
            for batch in range(2, 10):
                x = torch.randn(batch, 16, device=device)
                assert_same(ours(x), theirs(x))
    program = ours.programs[-1]
    # Automatic dynamic shapes compile the first size by itself, turn dynamic at the second, and take the first
    # one through the dynamic program when it comes again: one round less for it.
    assert len(program.specializations) == 8
    # A size that needs a larger arena than was foreseen ends what was recorded in it.
    assert set(program.counters.recordings) <= {"first", "new shape", "the arena moved"}
    assert program.counters.eager == {"warm-up": 1, "first call of these sizes": 7}
    assert sum(ours.replays()) - sum(before) == 8, "the last round replays every size"


def test_training_with_varying_batch(compiled: Any) -> None:
    model = _model()
    ours: Compiled = compiled(model, dynamic=True)
    twin = _model()
    twin.load_state_dict(model.state_dict())
    theirs = torch.compile(twin, backend="inductor", dynamic=True)
    for _ in range(4):
        for batch in (3, 5, 6):
            x = torch.randn(batch, 16)
            model.zero_grad()
            twin.zero_grad()
            ours(x).square().sum().backward()
            theirs(x).square().sum().backward()
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
    for program in ours.programs:
        assert len(program.specializations) == 3 and program.counters.replays >= 3


@pytest.mark.parametrize("train", [False, True])
def test_a_size_marked_unbacked_is_known_at_the_call(compiled: Any, device: torch.device, train: bool) -> None:
    """Inductor assumes nothing of it, not even that it is not 1. An input carries it: nothing waits for data."""
    model, twin = _model().to(device), _model().to(device)
    twin.load_state_dict(model.state_dict())
    ours: Compiled = compiled(model, fullgraph=True)
    theirs = inductor(twin, fullgraph=True)
    # Torch 2.11 divides by zero in the grid of some Triton kernels.
    sizes = (3, 1, 5) if device.type == "cuda" and not hasattr(torch.accelerator, "Graph") else (3, 1, 0, 5)
    with torch.set_grad_enabled(train):
        # Each result is alive in the next call, at another size: it takes some rounds until each has its recording.
        for _ in range(8):
            for batch in sizes:
                inputs = [torch.ones(batch, 16, device=device, requires_grad=train) for _ in range(2)]
                for x in inputs:
                    torch._dynamo.decorators.mark_unbacked(x, 0)
                results = [f(x) for f, x in zip((ours, theirs), inputs, strict=True)]
                assert_same(*results)
                if train:
                    for result in results:
                        result.sum().backward()
                    assert_same(*(x.grad for x in inputs))
    assert len(ours.programs) == 1 + train
    for program in ours.programs:
        (partition,) = program.plan.partitions
        assert partition.verdict is Verdict.CAPTURED and len(program.specializations) == len(sizes)
        assert program.counters.replays >= 4 * len(sizes), (program.counters.eager, program.counters.recordings)


def test_a_size_of_data_is_known_in_backward(compiled: Any, device: torch.device) -> None:
    """In the forward the product waits for the mask to be counted; the backward takes the number as an input."""

    def f(x: torch.Tensor, mask: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x[mask] @ w).sin() @ w).sum(0)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        ours: Compiled = compiled(f, fullgraph=True)
        theirs = inductor(f, fullgraph=True)
        # Triton's reductions are tuned for each function by itself, by time: two may round differently.
        check = torch.testing.assert_close if device.type in ("cuda", "xpu") else assert_same
        for count in (3, 5, 3, 5, 3, 5):
            x = torch.randn(8, 4, device=device)
            mask = torch.arange(8, device=device) < count
            w, twin = (torch.ones(4, 4, device=device, requires_grad=True) for _ in range(2))
            results = ours(x, mask, w), theirs(x, mask, twin)
            check(*results)
            for result in results:
                result.sum().backward()
            check(w.grad, twin.grad)
    forward, backward = ours.programs
    assert Verdict.EAGER in {partition.verdict for partition in forward.plan.partitions}
    assert {partition.verdict for partition in backward.plan.partitions} == {Verdict.CAPTURED}


def test_sizes_in_arithmetic_and_outputs(compiled: Any) -> None:
    def g(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        half = x.shape[0] // 2
        return (x[:half] * x.shape[0]).sum(0), x.shape[0] * 3

    f: Compiled = compiled(g, dynamic=True)
    for _ in range(3):
        for length in (4, 7, 9):
            x = torch.randn(length, 3)
            got, number = f(x)
            torch.testing.assert_close(got, g(x)[0])
            assert number == 3 * length


@torch.no_grad()
def _call(f: Compiled, batch: int, device: torch.device, most: int) -> None:
    x = torch.randn(batch, 4, device=device)
    torch.testing.assert_close(f(x), f.fn(x))
    recordings = f.program.specializations.recordings()
    assert len(recordings) <= most


def test_more_shapes_than_may_be_recorded(compiled: Any, device: torch.device, own_arenas: ArenaPool) -> None:
    """Called in turn they would take each other's place for ever: some are replayed, the others run eagerly."""
    f: Compiled = compiled(torch.nn.Linear(4, 4).to(device), dynamic=True, options={"max_recordings": 8})
    for _ in range(3):
        for batch in range(2, 42):
            _call(f, batch, device, 8)
    counters = f.program.counters
    assert set(counters.eager) == {*WARM_UPS, "8 other recordings are used more often (max_recordings)"}
    assert 8 <= sum(counters.recordings.values()) <= 40
    replays = counters.replays
    for _ in range(9):
        for batch in range(2, 42):
            _call(f, batch, device, 8)
    assert counters.replays - replays >= 9 * 4, counters.to_dict()


def test_another_phase(compiled: Any, device: torch.device, own_arenas: ArenaPool) -> None:
    """
    ::

        2 ... 9   2 ... 9   2 ... 9   10 ... 17   10 ... 17   10 ... 17   10 ... 17
                  recorded  replayed              in the place of the others          replayed
    """
    f: Compiled = compiled(torch.nn.Linear(4, 4).to(device), dynamic=True, options={"max_recordings": 8})
    for _ in range(12):
        for batch in range(2, 10):
            _call(f, batch, device, 8)
    replays = f.program.counters.replays
    assert replays >= 8 * 8
    for number in range(20):
        if number == 12:
            replays = f.program.counters.replays
        for batch in range(10, 18):
            _call(f, batch, device, 8)
    counters = f.program.counters
    assert counters.replays == replays + 8 * 8, counters.to_dict()
    assert counters.recordings["max_recordings: the least recently used"] == 0, "nobody came back"


def test_shapes_that_come_back_after_a_while_stay(compiled: Any, device: torch.device, own_arenas: ArenaPool) -> None:
    """Two phases in turn: patience grows, so that not every change of phase is recorded."""
    f: Compiled = compiled(torch.nn.Linear(4, 4).to(device), dynamic=True, options={"max_recordings": 4})
    for number in range(40):
        for _ in range(4):
            for batch in range(2, 6) if number % 2 else range(6, 10):
                _call(f, batch, device, 4)
    counters = f.program.counters
    assert sum(counters.recordings.values()) <= 40, counters.to_dict()
    assert counters.replays >= 0.4 * 40 * 16, counters.to_dict()


def test_a_shape_without_room_looks_for_it_more_and_more_rarely(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking takes as long as the call itself: all recordings are sorted by their last use."""
    f: Compiled = compiled(torch.nn.Linear(4, 4), dynamic=True, options={"max_recordings": 4})
    asked: list[int] = []
    make_room = Specializations.make_room

    def asks(self: Specializations, wanted: Specialization, owner: LockOwner) -> bool:
        asked.append(number)
        return make_room(self, wanted, owner)

    monkeypatch.setattr(Specializations, "make_room", asks)
    for number in range(130):
        if number == 2:
            asked.clear()
        for batch in range(2, 7):
            _call(f, batch, torch.device("cpu"), 4)
    assert asked == [2, 4, 7, 12, 21, 38, 71], "the next call, then after 1, 2, 4, ... others"
    assert f.program.counters.eager[f.program._no_room] == 129
    assert sum(f.program.counters.recordings.values()) == 4
    for _ in range(64):  # a phase of it alone
        _call(f, 6, torch.device("cpu"), 4)
    assert sum(f.program.counters.recordings.values()) == 5


def test_a_recording_in_use_is_not_evicted(compiled: Any) -> None:
    """Nothing is noted about its shape, either: it would take a later call for one after an eviction."""
    f: Compiled = compiled(torch.nn.Linear(4, 4), dynamic=True, options={"max_recordings": 2})
    for _ in range(3):
        for batch in (2, 3):
            _call(f, batch, torch.device("cpu"), 2)
    specializations = f.program.specializations
    in_use = [LockOwner() for _ in specializations.recordings()]
    assert all(r.acquire(owner) for r, owner in zip(specializations.recordings(), in_use, strict=True))
    wanted = Specialization()
    wanted.eviction.missed_at.extend(next_use() for _ in range(64))
    assert not specializations.make_room(wanted, LockOwner())
    assert len(specializations.recordings()) == 2 and not any(one.ended_because for one in specializations.values())


def test_nothing_grows_with_the_shapes_that_are_not_recorded(compiled: Any) -> None:
    f: Compiled = compiled(torch.nn.Linear(4, 4), dynamic=True, options={"max_recordings": 2})
    cpu = torch.device("cpu")
    for batch in range(2, 60):
        for _ in range(2):
            _call(f, batch, cpu, 2)
        assert len(f.program.specializations) <= 8 * 2


def test_sizes_that_never_come_again_are_not_planned_at_every_call(compiled: Any) -> None:
    """A cache that grows by a row: each size warms up once. One that comes again is recorded all the same."""
    f: Compiled = compiled(lambda x: (x @ x.t()).softmax(0).sin() @ x, dynamic=True)
    with torch.no_grad():
        for rows in (*range(3, 43), 42, 42):
            x = torch.randn(rows, 8)
            found = f(x)
            torch.testing.assert_close(found, (x @ x.t()).softmax(0).sin() @ x)
            del found
    runs, _ = f.program.stages["memory"]
    assert runs <= 12 and f.program.counters.eager == {"warm-up": 1, "first call of these sizes": 39}
    assert f.program.counters.replays == 1 and sum(f.program.counters.recordings.values()) == 1


def test_a_backward_that_takes_an_expression_of_sizes(compiled: Any, device: torch.device) -> None:
    """What a forward saved of its shape is an input of the backward."""

    class TimesCount(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.count = x.numel()
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * ctx.count

    f: Compiled = compiled(lambda x: TimesCount.apply(x) * 2, dynamic=True)
    for _ in range(4):
        for shape in ((5, 7), (9, 3)):
            x = torch.randn(*shape, device=device, requires_grad=True)
            f(x).sum().backward()
            assert torch.equal(x.grad.cpu(), torch.full(shape, 2.0 * x.numel()))  # type: ignore[union-attr]
    assert not f.compilation.fallbacks and all(f.replays()) and len(f.programs) == 2


def test_another_shape_is_planned_in_the_order_of_the_one_before(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def lay_out(*args: Any) -> Any:
        found = lay_out_arena(*args)
        tried.append((args[-1], found.offsets))
        return found

    monkeypatch.setattr("fxwrap.passes.memory.planner.lay_out_arena", lay_out)
    f: Compiled = compiled(lambda x: (x @ x.t()).softmax(-1) @ x, dynamic=True)
    with on_simulated():
        for length in (5, 5, 50, 50):
            x = torch.randn(length, 8)
            torch.testing.assert_close(f(x), (x @ x.t()).softmax(-1) @ x)
    first, *others = tried
    assert not first[0] and first[1]
    assert [like for like, _ in others] == [offsets for _, offsets in tried[:-1]]
