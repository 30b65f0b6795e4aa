"""Exact plans: the smallest arena, proved, within a budget of time.

The drawings show an arena: steps go to the right, bytes go up.
"""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from placements import check_placement, random_buffers, smallest_arena, tiling

import fxwrap
from fxwrap.features.exact_packing.exact import RULES, Search, library
from fxwrap.features.exact_packing.plan_memory import plan_memory
from fxwrap.packing import Buffer
from fxwrap.packing.orders import height
from fxwrap.packing.problem import Part, split


def only_part(buffers: Sequence[Buffer], alignment: int = 64) -> Part:
    _, (part,) = split(buffers, alignment)
    return part


@pytest.fixture
def compiler() -> None:
    """What an exact plan needs."""
    try:
        library()
    except RuntimeError as error:
        pytest.skip(str(error))


exact_plans = pytest.mark.usefixtures("compiler")


@exact_plans
def test_an_exact_plan_is_no_worse_than_a_plain_one() -> None:
    for seed in range(150):
        draw = random.Random(seed)
        steps, length = draw.choice([(4, 4), (12, 3), (12, 12), (40, 6)])
        buffers = random_buffers(draw, draw.randrange(40), steps, length, draw.choice([4, 300, 1 << 33]))
        alignment = draw.choice([1, 3, 64, 512])
        plain = plan_memory(buffers, alignment)
        better = plan_memory(buffers, alignment, 0.02, exact=True)
        check_placement(buffers, better, alignment)
        assert plain.lower_bound <= better.lower_bound <= better.size <= plain.size
    assert plan_memory([], budget_s=1, exact=True).proven


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.sweep)])
@exact_plans
def test_exact_plans_are_smallest(count: int) -> None:
    for seed in range(count):
        draw = random.Random(seed)
        buffers = random_buffers(draw, draw.randint(0, 6), 6, 5, 6)
        exact = plan_memory(buffers, 1, 60, exact=True)
        check_placement(buffers, exact, 1)
        assert exact.proven
        assert exact.size == smallest_arena(buffers, 1), f"seed {seed}"


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.sweep)])
@exact_plans
def test_a_search_finds_what_fits_and_nothing_else(count: int) -> None:
    """By itself, by every rule: the quick orders find most optima of a few buffers before a search begins."""
    for seed in range(count):
        draw = random.Random(seed)
        buffers = random_buffers(draw, 6, draw.choice([5, 8]), draw.choice([3, 6]), draw.choice([3, 6]))
        for part in split(buffers, 1)[1]:
            least = smallest_arena([buffers[i] for i in part.members], 1)
            search = Search(part)
            ranks = draw.sample(range(len(part)), len(part))
            for rule in RULES:
                search.start(ranks, least, rule)
                assert search.run(10**6, 60) is True, f"seed {seed}"
                assert height(part, search.offsets()) == least
                search.start(ranks, least - 1, rule)
                assert search.run(10**6, 60) is False, f"seed {seed}"


# No order is known that places these in 12 bytes, which are enough.
HARD = tiling(random.Random(55828), 28, 10, 12)


@exact_plans
def test_a_search_finds_what_no_order_does() -> None:
    plain = plan_memory(HARD, 1)
    assert (plain.size, plain.lower_bound, plain.proven) == (13, 12, False)
    exact = plan_memory(HARD, 1, 60, exact=True)
    check_placement(HARD, exact, 1)
    assert (exact.size, exact.lower_bound, exact.proven) == (12, 12, True)


@exact_plans
def test_parts_are_searched_one_by_one() -> None:
    """Twenty copies of what takes a search, side by side in time, take twenty small searches and no large one."""
    buffers = [
        Buffer(f"{b.name} {copy}", b.size, b.begin + 20 * copy, b.end + 20 * copy) for copy in range(20) for b in HARD
    ]
    assert len(split(buffers, 1)[1]) == 20
    placement = plan_memory(buffers, 1, 30, exact=True)
    check_placement(buffers, placement, 1)
    assert placement.proven and placement.size == 12


@exact_plans
def test_the_order_of_another_plan_is_tried_first() -> None:
    """What took a search for one batch size takes none for another: the same buffers lie on top of one another."""
    found = plan_memory(HARD, 1, 60, exact=True)
    for times in (1, 3, 50):
        larger = [Buffer(b.name, times * b.size, b.begin, b.end) for b in HARD]
        assert plan_memory(larger, 1).size == times * 13
        again = plan_memory(larger, 1, previous=found.offsets)
        check_placement(larger, again, 1)
        assert again.size == times * 12 and again.proven
    # Where it is not as good, or does not know all of them, it does no harm.
    upside_down = {name: -offset for name, offset in found.offsets.items()}
    for previous in (upside_down, {"b0": 64}, {"another": 0}):
        placement = plan_memory(HARD, 1, previous=previous)
        check_placement(HARD, placement, 1)
        assert placement.size <= 13


@exact_plans
def test_a_proof_raises_the_lower_bound() -> None:
    """Six rows are needed although no more than five are ever live, which only looking at everything can tell.

    ::

        6 |         d d
        5 | e e e     g g g
        4 | e e e     g g g
        3 | b c c c c g g g
        2 | b c c c c   a
        1 | b f f f f f a
        0 +----------------
            1 2 3 4 5 6 7 8
    """
    buffers = [
        Buffer("a", 2, 7, 8), Buffer("b", 3, 1, 2), Buffer("c", 2, 2, 6), Buffer("d", 1, 5, 7), Buffer("e", 2, 1, 4),
        Buffer("f", 1, 2, 7), Buffer("g", 3, 6, 9),
    ]  # fmt: skip
    plain = plan_memory(buffers, 1)
    assert (plain.size, plain.lower_bound, plain.proven) == (6, 5, False)
    exact = plan_memory(buffers, 1, 60, exact=True)
    assert (exact.size, exact.lower_bound, exact.proven) == (6, 6, True)
    assert smallest_arena(buffers, 1) == 6


def test_the_planner_is_public() -> None:
    assert fxwrap.plan_memory is plan_memory


def test_impossible_budgets_are_refused() -> None:
    for budget_s in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="an exact plan needs a budget"):
            plan_memory([], 64, budget_s, exact=True)
    for budget_s in (10.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="only an exact plan takes a budget"):
            plan_memory([], 64, budget_s)


def hard_buffers() -> list[Buffer]:
    """More than a minute's work."""
    return tiling(random.Random(0), 400, 100, 1 << 20)


@exact_plans
@pytest.mark.parametrize("count", [400, 3000])
def test_budgets_are_kept(count: int) -> None:
    """In time of this thread, which is no more than time on the clock: what else the machine does is not counted."""
    buffers = tiling(random.Random(0), count, 100, 1 << 20)
    plain = time.thread_time()
    default = plan_memory(buffers, 1)
    plain = time.thread_time() - plain
    begin = time.thread_time()
    placement = plan_memory(buffers, 1, 0.5, exact=True)
    assert time.thread_time() - begin < 0.5 + 3 * plain + 2
    assert default.lower_bound <= placement.size <= default.size


@exact_plans
def test_a_search_can_be_interrupted() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # hypothesis is called back by the collector, and what is raised there is lost
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        begin = time.thread_time()
        with pytest.raises(Interrupted):
            plan_memory(hard_buffers(), 1, 60, exact=True)
        assert time.thread_time() - begin < 0.5 + 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library.cache_clear()
    monkeypatch.setenv("FXWRAP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler --at-all")
    yield
    library.cache_clear()


def test_an_exact_plan_needs_a_compiler(no_compiler: None, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"needs a C\+\+ compiler(?s:.*)no-such-compiler(?s:.*)without exact=True"
        ):
            plan_memory(HARD, 1, 60, exact=True)
    assert not list(tmp_path.rglob("*.so"))
    assert plan_memory(HARD, 1).size == 13


@exact_plans
def test_processes_may_compile_at_the_same_time(tmp_path: Path) -> None:
    code = "from fxwrap.features.exact_packing import exact; print(exact.library() is not None)"
    environment = {**os.environ, "FXWRAP_CACHE_DIR": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in running] == ["True", "True"]
    assert len(list((tmp_path / "fxwrap").iterdir())) == 1
