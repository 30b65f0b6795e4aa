"""Which storages have a place in an arena, and which get memory when they are needed.

In the drawings steps go to the right; one letter is 64 bytes for one step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st
from placements import aligned
from random_graphs import PROPERTY

from fxwrap.packing import Buffer
from fxwrap.passes.arena_layout import most_alive
from fxwrap.passes.residency import choose_anew


def taken(
    buffers: Sequence[Buffer],
    beside: Sequence[Buffer],
    anew: Collection[str],
) -> int:
    """The largest arena and the most beside it."""
    inside = [(aligned(b.size, 64), b.begin, b.end) for b in buffers if b.name not in anew]
    outside = [*beside, *(b for b in buffers if b.name in anew)]
    return most_alive(inside) + most_alive((b.size, b.begin, b.end) for b in outside)


def test_what_is_alive_where_the_arena_is_fullest_moves_out() -> None:
    """
    ::

        arena    a a a a a a        b anew     a a a a a a
                 . b b . . .          ->
        beside   . . . . x x                   . b b . x x       192 bytes -> 128
    """
    buffers = [Buffer("a", 64, 0, 6), Buffer("b", 64, 1, 3)]
    beside = [Buffer("x", 64, 4, 6)]
    assert choose_anew(buffers, beside, 64, {"a", "b"}) == {"b"}
    assert choose_anew(buffers, beside, 64, {"a"}) == frozenset()
    assert choose_anew(buffers, beside, 64, {"a"}, {"a"}) == {"a"}


def test_nothing_moves_where_an_arena_takes_what_is_alive() -> None:
    """
    ::

        arena    a a b b      the second half of the arena is full when x is there
                 . . b b
        beside   . . x x
    """
    buffers = [Buffer("a", 64, 0, 2), Buffer("b", 128, 2, 4)]
    assert choose_anew(buffers, [Buffer("x", 64, 2, 4)], 64, {"a", "b"}) == frozenset()
    assert choose_anew(buffers, [], 64, {"a", "b"}) == frozenset()
    assert choose_anew([], [Buffer("x", 64, 2, 4)], 64, set()) == frozenset()


def test_an_arena_rounds_sizes_up() -> None:
    """Four bytes take 64 in the arena, and four outside of it, where nobody else rounds."""
    buffers, beside = [Buffer("a", 64, 0, 2), Buffer("b", 4, 0, 2)], [Buffer("x", 1, 0, 2)]
    assert choose_anew(buffers, beside, 64, {"a", "b"}) == {"b"}
    assert choose_anew(buffers, [], 64, {"a", "b"}) == frozenset()


@st.composite
def buffers(draw: st.DrawFn, letter: str, most: int) -> list[Buffer]:
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(1, 400)), max_size=most))
    begins = [draw(st.integers(0, 8)) for _ in sizes]
    ends = [begin + draw(st.integers(1, 6)) for begin in begins]
    every = zip(sizes, begins, ends, strict=True)
    return [Buffer(f"{letter}{i}", *one) for i, one in enumerate(every)]


@PROPERTY
@given(buffers("a", 9), buffers("x", 4), st.data())
def test_no_more_is_taken_than_with_everything_inside_or_outside(
    planned: list[Buffer], beside: list[Buffer], data: st.DataObject
) -> None:
    names = [b.name for b in planned]
    movable = data.draw(st.sets(st.sampled_from(names))) if names else set()
    asked = data.draw(st.sets(st.sampled_from(sorted(movable)))) if movable else set()
    found = choose_anew(planned, beside, 64, movable, asked)
    assert asked <= found <= movable
    least = taken(planned, beside, found)
    assert least <= min(taken(planned, beside, anew) for anew in (asked, movable if beside else asked))
    if set(names) == movable and beside:
        assert least == most_alive((b.size, b.begin, b.end) for b in (*planned, *beside))


def test_few_move() -> None:
    """On 200 small problems, compared with the fewest of all choices that take as little."""
    moved = fewest = 0
    draw = random.Random(0)
    for _ in range(200):
        planned = [
            Buffer(f"a{i}", 64 * draw.randint(1, 6), begin := draw.randrange(8), begin + draw.randint(1, 5))
            for i in range(7)
        ]
        beside = [
            Buffer(f"x{i}", 64 * draw.randint(1, 6), begin := draw.randrange(8), begin + draw.randint(1, 3))
            for i in range(2)
        ]
        names = [b.name for b in planned]
        found = choose_anew(planned, beside, 64, names)
        least = taken(planned, beside, found)
        moved += len(found)
        fewest += next(
            count
            for count in range(len(names) + 1)
            if any(taken(planned, beside, some) <= least for some in itertools.combinations(names, count))
        )
    print(f"\n{moved} storages move, {fewest} would do")
    assert moved <= 1.2 * fewest
