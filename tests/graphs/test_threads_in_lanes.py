"""Work in lanes on threads of the CPU: the same bits as one lane, and whatever else callers may do with a call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, all_in_lanes
from torch import nn

import fxwrap
from fxwrap.plan import Lanes

pytestmark = pytest.mark.skipif(
    os.environ.get("FXWRAP_NATIVE_REPLAY") == "0", reason="lanes are the helper library's"
)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with all_in_lanes():
        yield


class Towers(nn.Module):
    """Towers that nothing connects before the end: products, kernels, and operators of ATen."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(count))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8)) for _ in range(count)
        )

        self.register_buffer("begins", torch.arange(0, 15, 3))

    def forward(self, *keys: torch.Tensor) -> torch.Tensor:
        bags = zip(self.tables, self.towers, keys, strict=True)
        return torch.cat([tower(table(those, self.begins)) for table, tower, those in bags], 1).softmax(1)


def keys(count: int = 4) -> list[torch.Tensor]:
    return [torch.randint(0, 50, (15,)) for _ in range(count)]


def compiled(model: Callable[..., Any], lanes: int = 2) -> Compiled:
    return Compiled(model, compile_options={"dynamic": False, "options": {"lanes": lanes}})


def lanes_of(function: Compiled) -> list[Lanes]:
    (recording,) = function.program.specializations.recordings()
    assert recording.unit is not None
    return list(recording.request.memory.lanes)


@torch.no_grad()
def test_the_same_bits_as_one_after_the_other() -> None:
    torch.manual_seed(1)
    model = Towers().eval()
    one, two = compiled(model, 1), compiled(model, 2)
    for _ in range(200):
        given = keys()
        assert torch.equal(one(*given), two(*given))
    assert not lanes_of(one)
    (lanes,) = lanes_of(two)
    assert lanes.count == 2 and lanes.waits_for


def test_a_training_step_in_lanes() -> None:
    losses = []
    for lanes in (1, 2):
        torch.manual_seed(1)
        model = Towers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = fxwrap.train_step(
            model, lambda net, *given: net(*given).square().sum(), optimizer, options={"lanes": lanes}
        )
        losses.append([step(*keys()).item() for _ in range(30)])
    assert losses[0] == losses[1]


@torch.no_grad()
def test_one_lane_within_a_limit_that_comes_later() -> None:
    """Lanes may take more, by a bound."""
    function, given = compiled(Towers().eval()), keys()
    expected = [function(*given) for _ in range(3)][-1]
    assert lanes_of(function)
    fxwrap.limit_memory(function.call, "1 MiB")
    assert all(torch.equal(function(*given), expected) for _ in range(4))
    assert not lanes_of(function)


@torch.no_grad()
def test_the_number_of_threads_changes_between_calls() -> None:
    model, given = Towers().eval(), keys()
    function = compiled(model)
    expected = function(*given)
    for threads in (2, 1, 2, 3, 1, 2) * 5:
        torch.set_num_threads(threads)
        assert torch.equal(function(*given), expected)


@torch.no_grad()
def test_several_threads_call() -> None:
    model = Towers().eval()
    function, given = compiled(model), [keys() for _ in range(4)]
    expected = [function(*own) for own in given]
    wrong = list[int]()

    def call(number: int) -> None:
        with torch.no_grad():
            wrong.extend(number for _ in range(100) if not torch.equal(function(*given[number]), expected[number]))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@torch.no_grad()
def test_an_error_in_a_lane_is_the_callers_and_leaves_everything_usable() -> None:
    """As it would be raised by one thread: of several errors that of the first step."""
    model, given = Towers().eval(), keys()
    function = compiled(model)
    expected = [function(*given) for _ in range(3)][-1]
    for wrong in (0, 1, 3):
        bad = [*given]
        bad[wrong] = torch.full((15,), 50)
        for _ in range(5):
            with pytest.raises((IndexError, RuntimeError), match=r"(?i)index|out of") as raised:
                function(*bad)
            if hasattr(raised.value, "__notes__"):  # from Python 3.11 on
                assert any("_embedding_bag" in note for note in raised.value.__notes__)
            assert torch.equal(function(*given), expected)


@torch.no_grad()
def test_inputs_are_freed() -> None:
    """Behind the lanes: to drop the last reference to a tensor of Python's takes the interpreter's lock."""
    import weakref

    model = Towers().eval()
    function = compiled(model)
    for _ in range(6):
        given = keys()
        references = [weakref.ref(one) for one in given]
        function(*given)
        del given
        assert not any(reference() is not None for reference in references)


@torch.no_grad()
def test_denormal_numbers_are_flushed_in_every_lane() -> None:
    """The setting is that of the calling thread."""
    tiny = torch.full((4, 64), 1e-39)

    def halves(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.special.expit(x * scale).cumsum(1) * 0 + x * scale for scale in (0.5, 0.25, 0.75, 0.125)]
        return torch.stack(parts)

    one, two = compiled(halves, 1), compiled(halves, 2)
    for flush in (True, False):
        if not torch.set_flush_denormal(flush):
            pytest.skip("this processor cannot flush")
        try:
            for _ in range(5):
                found = two(tiny), one(tiny)
                assert torch.equal(*found) and bool(found[0].any()) is not flush
        finally:
            torch.set_flush_denormal(False)


@torch.no_grad()
def test_a_profile_shows_all_work() -> None:
    model, given = Towers().eval(), keys()
    function = compiled(model)
    for _ in range(3):
        function(*given)
    with torch.profiler.profile() as profile:
        function(*given)
    names = [event.name for event in profile.events()]
    assert sum("_embedding_bag" in name for name in names) >= 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@torch.no_grad()
def test_a_forked_child_calls() -> None:
    """OpenMP's threads are not there: one thread does the work."""
    model, given = Towers().eval(), keys()
    function = compiled(model)
    expected = [function(*given) for _ in range(3)][-1]
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        # Products of ATen's, with several threads, wait forever in a child.
        torch.set_num_threads(1)
        os._exit(0 if all(torch.equal(function(*given), expected) for _ in range(3)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(function(*given), expected)


@torch.no_grad()
def test_an_interrupt_leaves_the_function_usable() -> None:
    model, given = Towers().eval(), keys()
    function = compiled(model)
    expected = [function(*given) for _ in range(3)][-1]
    for _ in range(5):
        timer = threading.Timer(0.02, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                function(*given)
        timer.join()
        assert torch.equal(function(*given), expected)
