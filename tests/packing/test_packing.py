"""The stand-alone planner: no overlap, no byte more than needed where that can be had, and time kept.

The drawings show an arena: steps go to the right, bytes go up, one row is 64 bytes (the alignment on a CPU).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placements import check_placement, heaviest_step, random_buffers, smallest_arena, tiling
from random_graphs import PROPERTY

from fxwrap.packing import Buffer, Placement, plan_memory
from fxwrap.packing.orders import lowest_offset_first, orders
from fxwrap.packing.problem import PackingPart, split


def only_part(buffers: Sequence[Buffer], alignment: int = 64) -> PackingPart:
    _, (part,) = split(buffers, alignment)
    return part


# -- promises -----------------------------------------------------------------------------------------------


@st.composite
def buffer_lists(draw: st.DrawFn) -> list[Buffer]:
    ranges = st.tuples(st.integers(0, 20), st.integers(1, 8), st.integers(0, 500))
    return [
        Buffer(f"b{i}", size, begin, begin + length)
        for i, (begin, length, size) in enumerate(draw(st.lists(ranges, max_size=25)))
    ]


@PROPERTY
@given(buffer_lists(), st.sampled_from([1, 3, 64, 512]))
def test_placements_keep_their_promises(buffers: list[Buffer], alignment: int) -> None:
    placement = plan_memory(buffers, alignment)
    check_placement(buffers, placement, alignment)
    assert placement.lower_bound == heaviest_step(buffers, alignment)


@PROPERTY
@given(buffer_lists())
def test_the_same_buffers_get_the_same_places(buffers: list[Buffer]) -> None:
    assert plan_memory(buffers) == plan_memory(iter(buffers))


# pytest -m sweep tests/packing/test_packing.py
@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_random_buffers_are_placed_without_overlap(count: int) -> None:
    """Sparse and crowded ones."""
    for seed in range(count):
        draw = random.Random(seed)
        steps, length = draw.choice([(4, 4), (12, 3), (12, 12), (40, 6)])
        buffers = random_buffers(draw, draw.randrange(40), steps, length, draw.choice([4, 300, 1 << 33]))
        alignment = draw.choice([1, 3, 64, 512])
        plain = plan_memory(buffers, alignment)
        check_placement(buffers, plain, alignment)
        assert plain.lower_bound == heaviest_step(buffers, alignment)


def test_a_proven_arena_is_the_smallest() -> None:
    """Compared with all orders of a few buffers."""
    proven = 0
    for seed in range(150):
        draw = random.Random(seed)
        buffers = random_buffers(draw, draw.randint(0, 6), 6, 5, 6)
        placement, least = plan_memory(buffers, 1), smallest_arena(buffers, 1)
        assert placement.lower_bound <= least <= placement.size
        assert not placement.proven or placement.size == least, f"seed {seed}"
        proven += placement.proven
    assert proven >= 75


# No order is known that places these in 12 bytes, which are enough: at these offsets.
HARD = tiling(random.Random(55828), 28, 10, 12)
FITTING = (7, 0, 4, 2, 2, 2, 7, 7, 10, 2, 4, 0, 5, 1, 1, 7, 8, 3, 9, 9, 10, 11, 3, 6, 6, 4, 7, 8)


def test_the_order_of_another_plan_is_tried_first() -> None:
    """What fits for one batch size fits for another: the same buffers lie on top of one another."""
    found = {buffer.name: offset for buffer, offset in zip(HARD, FITTING, strict=True)}
    plain = plan_memory(HARD, 1)
    assert (plain.size, plain.lower_bound, plain.proven) == (13, 12, False)
    for times in (1, 3, 50):
        larger = [Buffer(b.name, times * b.size, b.begin, b.end) for b in HARD]
        assert plan_memory(larger, 1).size == times * 13
        again = plan_memory(larger, 1, previous=found)
        check_placement(larger, again, 1)
        assert again.size == times * 12 and again.proven
    # Where it is not as good, or does not know all of them, it does no harm.
    upside_down = {name: -offset for name, offset in found.items()}
    for previous in (upside_down, {"b0": 64}, {"another": 0}):
        placement = plan_memory(HARD, 1, previous=previous)
        check_placement(HARD, placement, 1)
        assert placement.size <= 13


# -- drawings -----------------------------------------------------------------------------------------------


def test_lowest_offset_first_reaches_the_lower_bound() -> None:
    """
    ::

        in the order given                        the ones with most company first: both large ones are below

        320 |       d d d d
        256 |       d d d d
        192 | b b b b                             192 | b b b b c c c       size = lower bound = 192
        128 | a a a                               128 | a a a d d d d
         64 | a a a   c c c                        64 | a a a d d d d
          0 +--------------                         0 +--------------
              0 1 2 3 4 5 6                             0 1 2 3 4 5 6
    """
    buffers = [Buffer("a", 128, 0, 3), Buffer("b", 64, 0, 4), Buffer("c", 64, 4, 7), Buffer("d", 128, 3, 7)]
    placement = plan_memory(buffers, alignment=64)
    check_placement(buffers, placement, 64)
    assert placement.size == placement.lower_bound == 192
    assert placement.offsets == {"a": 0, "b": 128, "c": 128, "d": 0}


def test_another_order_is_tried_when_largest_first_is_not_the_best() -> None:
    """
    ::

        of those that can lie at 0, the largest   of those that can lie at 0, the one with most company
        first: c and a                            for longest: a, which leaves d, and then c and b

        256 |     b b
        192 | d d d                               192 |   c b b
        128 |   c   a a                           128 |   c   a a
         64 |   c   a a                            64 | d d d a a
          0 +----------                             0 +----------
              0 1 2 3 4                                 0 1 2 3 4
    """
    buffers = [Buffer("a", 128, 3, 5), Buffer("b", 64, 2, 4), Buffer("c", 128, 1, 2), Buffer("d", 64, 0, 3)]
    part = only_part(buffers)
    largest_first = sorted(range(4), key=lambda i: -part.sizes[i])
    offsets = lowest_offset_first(part, largest_first)
    names = [buffers[i].name for i in part.members]
    assert dict(zip(names, offsets, strict=True)) == {"a": 0, "b": 192, "c": 0, "d": 128}
    placement = plan_memory(buffers, 64)
    check_placement(buffers, placement, 64)
    assert (placement.size, placement.offsets) == (192, {"a": 0, "b": 128, "c": 64, "d": 0})


def test_a_range_ends_before_its_end() -> None:
    """
    ::

         64 | a a a b b b         a is live in steps 0, 1, 2 and b begins in step 3: they never meet
          0 +------------
              0 1 2 3 4 5
    """
    placement = plan_memory([Buffer("a", 64, 0, 3), Buffer("b", 64, 3, 6)])
    assert (placement.offsets, placement.size, placement.lower_bound) == ({"a": 0, "b": 0}, 64, 64)
    placement = plan_memory([Buffer("a", 64, 0, 4), Buffer("b", 64, 3, 6)])
    assert (sorted(placement.offsets.values()), placement.size, placement.lower_bound) == ([0, 64], 128, 128)


def test_what_no_buffer_connects_is_placed_apart() -> None:
    """
    ::

        256 |   b c c   e e
        192 | a a a c   e e           w is live all the time and lies below; nothing else is live both before and
        128 | a a a c d d d d         after step 4, so that two parts are left, with a bound of their own each
         64 | w w w w w w w w
          0 +----------------
              0 1 2 3 4 5 6 7
    """
    buffers = [
        Buffer("w", 64, 0, 8), Buffer("a", 128, 0, 3), Buffer("b", 64, 1, 2), Buffer("c", 64, 2, 4),
        Buffer("d", 64, 4, 8), Buffer("e", 128, 5, 7),
    ]  # fmt: skip
    offsets, parts = split(buffers, 64)
    found = [(part.base, part.bound, [buffers[i].name for i in part.members]) for part in parts]
    # d is live during all of its part, and lies below, too; then nothing needs a decision about e either.
    assert found == [(64, 192, ["a", "b", "c"])]
    assert offsets == [0, 0, 0, 0, 64, 128]
    placement = plan_memory(buffers)
    check_placement(buffers, placement, 64)
    assert placement.offsets == {"w": 0, "a": 64, "b": 192, "c": 192, "d": 64, "e": 128}
    assert placement.proven and placement.size == 256


HOLE = [
    Buffer("a", 1 * 64, 3, 8), Buffer("b", 4 * 64, 6, 9), Buffer("c", 2 * 64, 2, 7), Buffer("d", 1 * 64, 4, 7),
    Buffer("e", 3 * 64, 7, 10), Buffer("f", 4 * 64, 2, 3), Buffer("g", 2 * 64, 2, 6),
]  # fmt: skip


def test_a_mended_order_reaches_what_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """d ends too high in every quick order: it comes earlier the next time.

    ::

        quick orders                              mended

        576 |     d d d
        512 | f a a a a a                         512 | g g g g b b b
        448 | f       b b b                       448 | g g g g b b b
        384 | f       b b b                       384 | f       b b b
        320 | f       b b b                       320 | f       b b b
        256 | g g g g b b b                       256 | f a a a a a
        192 | g g g g   e e e                     192 | f   d d d e e e
        128 | c c c c c e e e                     128 | c c c c c e e e
         64 | c c c c c e e e                      64 | c c c c c e e e
          0 +----------------                       0 +----------------
              2 3 4 5 6 7 8 9                           2 3 4 5 6 7 8 9
    """
    placement = plan_memory(HOLE)
    check_placement(HOLE, placement, 64)
    assert placement.size == placement.lower_bound == 8 * 64
    monkeypatch.setattr("fxwrap.packing.orders._MENDING_WORK", 0)
    assert plan_memory(HOLE).size == 9 * 64


def test_sizes_are_counted_in_units_of_the_alignment() -> None:
    placement = plan_memory([Buffer("a", 1, 0, 2), Buffer("b", 65, 0, 1)], alignment=64)
    assert (placement.size, placement.lower_bound) == (192, 192)
    assert placement.offsets == {"a": 0, "b": 64}


def test_nothing_takes_nothing() -> None:
    assert plan_memory([]) == Placement({}, 0, 0)
    assert plan_memory([Buffer("empty", 0, 0, 1)]) == Placement({"empty": 0}, 0, 0)


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffers", "alignment", "message"),
    [
        ([Buffer("a", -1, 0, 1)], 64, "'a' needs size >= 0"),
        ([Buffer("a", 8, 2, 2)], 64, "'a' needs .* begin < end"),
        ([Buffer("a", 8, 3, 2)], 64, "'a' needs .* begin < end"),
        ([Buffer("a", 8, 0, 1), Buffer("a", 8, 1, 2)], 64, "'a' is given twice"),
        ([Buffer("a", 8, 0, 1)], 0, "alignment must be at least 1 byte, got 0"),
    ],
    ids=["negative size", "empty range", "reversed range", "doubled name", "no alignment"],
)
def test_what_cannot_be_placed_is_refused_by_name(buffers: list[Buffer], alignment: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_memory(buffers, alignment)


# -- the pieces ---------------------------------------------------------------------------------------------


def test_time_is_reduced_to_sections() -> None:
    """Only steps with a live set that no other contains are kept: of these, b and c share one, d is in another."""
    buffers = [Buffer("a", 1, 0, 9), Buffer("b", 1, 2, 5), Buffer("c", 1, 4, 8), Buffer("d", 1, 5, 10)]
    part = only_part(buffers, 1)
    assert (part.begins, part.ends) == ((0, 0, 0, 1), (2, 1, 2, 2))
    assert part.loads == (3, 3)
    assert part.spans == 6


def test_masks_that_do_not_fit_are_made_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    part = only_part(random_buffers(random.Random(0), 300, 500, 60, 99), 1)
    order = next(orders(part))
    expected = lowest_offset_first(part, order)
    for room in (0, 100, 10_000):
        monkeypatch.setattr("fxwrap.packing.orders._MASKS", max(1, room))
        assert lowest_offset_first(part, order) == expected
