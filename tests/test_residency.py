"""Which storages are allocated at every call: those without which arena and operators need less together."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest
from placements import aligned, random_buffers

from fxwrap.packing import Buffer
from fxwrap.passes.residency import choose_anew

KB = 1024


def peaks(buffers: Sequence[Buffer], beside: Sequence[Buffer], anew: Collection[str], alignment: int) -> list[int]:
    """The most bytes in the arena, and the most beside it, looked up step by step."""
    steps = range(max((buffer.end for buffer in (*buffers, *beside)), default=0))
    inside = [b for b in buffers if b.name not in anew]
    outside = [*beside, *(b for b in buffers if b.name in anew)]

    def most(items: Sequence[Buffer], unit: int) -> int:
        return max(
            (sum(aligned(b.size, unit) for b in items if b.begin <= step < b.end) for step in steps), default=0
        )

    return [most(inside, alignment), most(outside, 1)]


def alive(buffers: Sequence[Buffer], beside: Sequence[Buffer]) -> int:
    """The most bytes that are alive in any step, wherever they are."""
    return sum(peaks([], [*buffers, *beside], (), 1))


def test_what_is_not_alive_when_operators_need_most_is_allocated_anew() -> None:
    """
    ::

        arena    . . b b . .               arena    . . . . . .
                 a a a a a a                        a a a a a a
        beside   . . . . x x        ->     beside   . . b b x x
                 2 + 1 rows                         1 + 1 rows, and 2 are alive at most
    """
    buffers, beside = [Buffer("a", KB, 0, 6), Buffer("b", KB, 2, 4)], [Buffer("x", KB, 4, 6)]
    assert peaks(buffers, beside, (), 64) == [2 * KB, KB]
    assert choose_anew(buffers, beside, 64) == {"b"}
    assert peaks(buffers, beside, {"b"}, 64) == [KB, KB]


def test_an_arena_that_is_full_again_and_again_is_emptied_step_by_step() -> None:
    """
    ::

        arena    a a b b . .        ->     arena    . . . . . .
        beside   . . . . x x               beside   a a b b x x
    """
    buffers, beside = [Buffer("a", KB, 0, 2), Buffer("b", KB, 2, 4)], [Buffer("x", KB, 4, 6)]
    assert choose_anew(buffers, beside, 64) == {"a", "b"}


@pytest.mark.parametrize("beside", [[], [Buffer("x", KB, 2, 4)]], ids=["no operators", "at the fullest step"])
def test_nothing_is_allocated_anew_where_nothing_is_gained(beside: list[Buffer]) -> None:
    """
    ::

        arena    . . b b . .        What is alive at most is what both take together.
                 a a a a a a
        beside   . . x x . .
    """
    buffers = [Buffer("a", KB, 0, 6), Buffer("b", KB, 2, 4)]
    assert choose_anew(buffers, beside, 64) == frozenset()


def test_nothing_is_chosen_of_nothing() -> None:
    assert choose_anew([], [], 64) == choose_anew([], [Buffer("x", KB, 0, 1)], 64) == frozenset()


# pytest -m sweep tests/test_residency.py
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_both_together_never_take_more(count: int) -> None:
    """And never less than is alive; where something is allocated anew, less is taken."""
    gained = reached = 0
    for seed in range(count):
        draw = random.Random(seed)
        steps, length, alignment = draw.choice([4, 12, 30]), draw.choice([3, 10]), draw.choice([1, 64, 512])
        buffers = random_buffers(draw, draw.randrange(20), steps, length, 5000)
        operators = random_buffers(draw, draw.randrange(5), steps, draw.choice([1, 3]), 20_000)
        beside = [Buffer(f"x{i}", b.size, b.begin, b.end) for i, b in enumerate(operators)]
        anew = choose_anew(buffers, beside, alignment)
        assert anew <= {buffer.name for buffer in buffers}
        before, after = sum(peaks(buffers, beside, (), alignment)), sum(peaks(buffers, beside, anew, alignment))
        least = alive(buffers, beside)
        assert least <= after <= before, f"seed {seed}"
        assert (after < before) == bool(anew), f"seed {seed}"
        if alignment == 1 and least == before:
            assert not anew, f"seed {seed}"
        gained += bool(anew)
        reached += alignment == 1 and bool(anew) and after == least
    print(f"\n{count} profiles: {gained} take less, {reached} no more than is alive")
    assert gained >= count // 4 and reached >= count // 50
