"""Outputs in an arena: at the other end of what others have, and planned for two programs at once.

The drawings show an arena: steps go to the right, bytes go up, one row is 64 bytes (the alignment on a CPU). ``#`` is
what others have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from placements import aligned, check_placement, heaviest_step, located, placement_of, random_buffers
from random_graphs import CPU, GraphMaker, by_name, compile_request
from torch.fx import GraphModule

from fxwrap.errors import PlanError
from fxwrap.packing import Buffer, Placement, Reserved, plan_memory
from fxwrap.packing.reserved import lay_out_arena
from fxwrap.passes.memory.planner import plan_pair, plan_program
from fxwrap.passes.verify import memory as verify_module
from fxwrap.passes.verify import verify_memory
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import ProgramPlan, SizedProgram

ROW = 64


def fits(offsets: Mapping[str, int], buffers: Sequence[Buffer], reserved: Sequence[Reserved], alignment: int) -> bool:
    """Whether a hint is followed to the letter."""
    found = lay_out_arena(buffers, (), reserved, alignment, Placement(offsets, 1 << 40, 0))
    return all(found.offsets[b.name] == offsets.get(b.name) for b in buffers)


def rows(placement: Placement) -> dict[str, int]:
    assert all(offset % ROW == 0 for offset in placement.offsets.values())
    return {name: offset // ROW for name, offset in placement.offsets.items()}


# -- one program --------------------------------------------------------------------------------------------


def test_outputs_come_down_from_the_top_where_others_have_bytes() -> None:
    """
    ::

        lowest offset first                top down

        384 |   t                          320 | g g g      g stays after the program
        320 |   t                          256 | u u
        256 | u u                          192 | u u
        192 | u u                          128 |   t        t fits below them
        128 | g g g                         64 | # t        # is given away: free after its last use, in step 0
         64 | #                              0 +------
          0 +------                              0 1 2
              0 1 2
    """
    buffers = [Buffer("t", 2 * ROW, 1, 2), Buffer("u", 2 * ROW, 0, 2), Buffer("g", ROW, 0, 3)]
    reused_inputs = [Reserved(0, ROW, 0, 1)]
    placement = lay_out_arena(buffers, {"g"}, reused_inputs, ROW)
    assert rows(placement) == {"t": 0, "u": 2, "g": 4}
    assert placement.size == placement.lower_bound == 5 * ROW
    check(buffers, reused_inputs, placement, ROW)


def test_fixed_bytes_are_left_alone_between_the_two_ends() -> None:
    """
    ::

        256 |   g g g
        192 |   g g g
        128 | # # # #           # is held by somebody all the time
         64 | t t
          0 +--------
              0 1 2 3
    """
    buffers = [Buffer("t", ROW, 0, 2), Buffer("g", 2 * ROW, 1, 4)]
    held = [Reserved(ROW, 2 * ROW, 0, 4)]
    placement = lay_out_arena(buffers, {"g"}, held, ROW)
    assert rows(placement) == {"t": 0, "g": 2}
    assert placement.size == placement.lower_bound == 4 * ROW


def test_bytes_that_are_given_away_are_used_after_their_last_use() -> None:
    """As in a backward program: what was saved last is needed first.

    ::

        320 | t t
        256 | g g g g
        192 | # h h h
        128 | # # i i
         64 | # # #
          0 +--------
              0 1 2 3
    """
    buffers = [Buffer("g", ROW, 0, 4), Buffer("h", ROW, 1, 4), Buffer("i", ROW, 2, 4), Buffer("t", ROW, 0, 2)]
    saved = [Reserved(0, ROW, 0, 3), Reserved(ROW, 2 * ROW, 0, 2), Reserved(2 * ROW, 3 * ROW, 0, 1)]
    placement = lay_out_arena(buffers, {"g", "h", "i"}, saved, ROW)
    assert rows(placement) == {"g": 3, "h": 2, "i": 1, "t": 4}
    assert placement.size == placement.lower_bound == 5 * ROW
    check(buffers, saved, placement, ROW)


def test_what_fits() -> None:
    """
    ::

        192 |   b b
        128 | # # .         # is free in step 2
         64 | a a
          0 +------
              0 1 2
    """
    buffers = [Buffer("a", ROW, 0, 2), Buffer("b", ROW, 1, 3)]
    fixed = [Reserved(ROW, 2 * ROW - 1, 0, 2)]
    assert fits({"a": 0, "b": 2 * ROW}, buffers, fixed, ROW)
    assert fits({"a": 0, "b": 2 * ROW, "another": 0}, buffers, fixed, ROW)
    assert not fits({"a": 0, "b": ROW}, buffers, fixed, ROW), "b begins before # is free"
    assert not fits({"a": 2 * ROW, "b": 2 * ROW}, buffers, fixed, ROW), "a and b meet in step 1"
    assert not fits({"a": 0}, buffers, fixed, ROW), "b has no place"
    assert fits({"a": 0, "b": ROW}, [buffers[0], Buffer("b", ROW, 2, 3)], fixed, ROW)
    assert fits({"a": 0, "b": 0}, [buffers[0], Buffer("b", ROW, 2, 3)], fixed, ROW)


def test_a_hint_is_followed_but_for_what_is_in_the_way() -> None:
    """
    ::

        hint                    with # in the way

        192 | c c c             192 | c c c
        128 | a b b             128 | a # #       # has what b wants
         64 | a . .              64 | a b b
          0 +------               0 +------
    """
    buffers = [Buffer("a", 2 * ROW, 0, 1), Buffer("b", ROW, 1, 3), Buffer("c", ROW, 0, 3)]
    hint = Placement({"a": 0, "b": ROW, "c": 2 * ROW}, 3 * ROW, 3 * ROW)
    assert lay_out_arena(buffers, (), (), ROW, hint) == hint
    found = lay_out_arena(buffers, (), [Reserved(ROW, 2 * ROW, 1, 3)], ROW, hint)
    assert rows(found) == {"a": 0, "b": 0, "c": 2} and found.size == found.lower_bound == 3 * ROW
    # A buffer that the hint does not name finds a place, too.
    found = lay_out_arena([*buffers, Buffer("d", ROW, 2, 3)], (), (), ROW, hint)
    assert rows(found) == {"a": 0, "b": 1, "c": 2, "d": 0}


def test_a_hint_is_left_where_it_would_make_the_arena_larger() -> None:
    buffers = [Buffer("a", ROW, 0, 1), Buffer("b", ROW, 0, 1)]
    poor = Placement({"a": ROW}, ROW, ROW)
    assert lay_out_arena(buffers, (), (), ROW, Placement({"a": 3 * ROW}, ROW, ROW)).size == 2 * ROW
    found = lay_out_arena(buffers, (), [Reserved(0, ROW, 0, 1)], ROW, poor)
    assert sorted(rows(found).values()) == [1, 2] and found.size == found.lower_bound == 3 * ROW


def test_a_hint_is_followed_into_an_arena_that_is_hardly_larger() -> None:
    for rows_of_a, followed in ((4000, True), (100, False)):
        buffers = [Buffer("a", rows_of_a * ROW, 0, 1), Buffer("b", ROW, 0, 1)]
        hint = Placement({"a": ROW, "b": 0}, rows_of_a * ROW, 0)
        found = lay_out_arena(buffers, (), (), ROW, hint)
        assert found.size == (rows_of_a + 1) * ROW
        assert (found.lower_bound == hint.lower_bound) == followed


def test_a_hint_is_not_trusted_beside_what_lies_upon_one_another() -> None:
    twice = [Reserved(0, 2 * ROW, 0, 1), Reserved(ROW, 2 * ROW, 0, 3)]
    found = lay_out_arena([Buffer("a", ROW, 2, 3)], (), twice, ROW, Placement({"a": ROW}, 2 * ROW, ROW))
    assert rows(found) == {"a": 0}


def test_nothing_takes_what_is_reserved() -> None:
    assert lay_out_arena([], (), (), ROW) == Placement({}, 0, 0)
    assert lay_out_arena([], (), [Reserved(ROW, 100, 0, 3)], ROW) == Placement({}, 100, 36)


def test_what_must_not_lie_at_the_begin_is_turned_or_moved_away_from_there() -> None:
    """Buffers in upper case may not lie at the begin.

    ::

        192 |               192 |               192 | B .
        128 | b .           128 | A A           128 | A A
         64 | a a            64 | A A            64 | A A
          0 | a a             0 | b .             0 |
    """
    a, b = Buffer("a", 2 * ROW, 0, 2), Buffer("b", ROW, 0, 1)
    assert rows(plan_memory([a, b], ROW)) == {"a": 0, "b": 2}
    assert rows(plan_memory([replace(a, first=ROW), b], ROW)) == {"a": 1, "b": 0}
    both = plan_memory([replace(a, first=ROW), replace(b, first=ROW)], ROW)
    assert rows(both) == {"a": 1, "b": 3} and both.size == both.lower_bound + ROW == 4 * ROW


# -- promises -----------------------------------------------------------------------------------------------


def random_fixed(draw: random.Random, steps: int) -> list[Reserved]:
    found, low = [], 0
    for _ in range(draw.randrange(5)):
        low += ROW * draw.randrange(4)
        found.append(Reserved(low, low + draw.randint(1, 400), 0, draw.randint(1, steps)))
        low = aligned(found[-1].high, ROW)
    return found


def check(buffers: Sequence[Buffer], fixed: Sequence[Reserved], placement: Placement, alignment: int) -> None:
    """Every promise of ``lay_out_arena``, worked out step by step."""
    assert placement.offsets.keys() == {buffer.name for buffer in buffers}
    assert collision(buffers, fixed, placement.offsets) == ""
    ends = [placement.offsets[buffer.name] + buffer.size for buffer in buffers]
    assert all(offset >= 0 and offset % alignment == 0 for offset in placement.offsets.values())
    assert max([*ends, *(one.high for one in fixed)], default=0) <= placement.size
    assert heaviest_step(buffers, alignment) <= placement.lower_bound <= placement.size


def collision(buffers: Sequence[Buffer], fixed: Sequence[Reserved], offsets: Mapping[str, int]) -> str:
    """Two that have the same byte in the same step; empty if there are none."""
    items = [(b.name, offsets[b.name], offsets[b.name] + b.size, b.begin, b.end) for b in buffers]
    items += [(f"fixed {one.low}", one.low, one.high, one.begin, one.end) for one in fixed]
    for i, (name, low, high, begin, end) in enumerate(items):
        for other, low2, high2, begin2, end2 in items[:i]:
            if max(low, low2) < min(high, high2) and max(begin, begin2) < min(end, end2):
                return f"{name} and {other}"
    return ""


# pytest -m sweep tests/packing/test_reserved.py
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_layouts_keep_their_promises(count: int) -> None:
    proven = 0
    for seed in range(count):
        draw = random.Random(seed)
        steps = draw.choice([4, 12, 30])
        buffers = random_buffers(draw, draw.randrange(20), steps, 6, 400)
        end = max((buffer.end for buffer in buffers), default=1)
        outputs = {buffer.name for buffer in buffers if draw.random() < 0.3}
        buffers = [Buffer(b.name, b.size, b.begin, end if b.name in outputs else b.end) for b in buffers]
        fixed = random_fixed(draw, end) if seed % 2 else []
        placement = lay_out_arena(buffers, outputs, fixed, ROW)
        check(buffers, fixed, placement, ROW)
        assert fits(placement.offsets, buffers, fixed, ROW), f"seed {seed}"
        assert placement == lay_out_arena(buffers, outputs, fixed, ROW)
        if not fixed:
            assert placement.size <= plan_memory(buffers, ROW).size
            proven += placement.proven
        # Some with a lowest offset, by a hint and without.
        some = [replace(b, first=2 * ROW if draw.random() < 0.5 else 0) for b in buffers]
        for hint in (None, placement):
            found = lay_out_arena(some, outputs, fixed, ROW, hint=hint)
            check(some, fixed, found, ROW)
            assert all(found.offsets[b.name] >= b.first for b in some if b.size), f"seed {seed}"
            assert fixed or hint or found.size <= placement.size + 2 * ROW
    assert proven >= count // 3


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_a_buffer_at_another_offset_is_found_wherever_it_does_harm(count: int) -> None:
    """By ``fits``, by the checker of placements and by the verifier's sweep, against every pair of buffers."""
    harmful = 0
    for seed in range(count):
        draw = random.Random(seed)
        steps, length = draw.choice([(4, 4), (12, 3), (12, 12), (40, 6)])
        found = random_buffers(draw, draw.randint(2, 30), steps, length, draw.choice([4, 300, 5000]))
        buffers = [Buffer(b.name, b.size + 1, b.begin, b.end) for b in found]
        placement = plan_memory(buffers, ROW)
        assert is_accepted(buffers, placement) == [True] * 3, f"seed {seed}"
        moved = draw.choice(buffers)
        room = placement.size - aligned(moved.size, ROW)
        offsets = {**placement.offsets, moved.name: draw.randrange(0, room + 1, ROW)}
        harm = collision(buffers, (), offsets)
        faulty = Placement(offsets, placement.size, placement.lower_bound)
        assert is_accepted(buffers, faulty) == [not harm] * 3, f"seed {seed}: {harm}"
        harmful += bool(harm)
    print(f"\nbuffer sets: {count}, {harmful} with a harmful shift, missed: 0")
    assert harmful >= count // 4


def is_accepted(buffers: Sequence[Buffer], placement: Placement) -> list[bool]:
    def accepts(check_all: Callable[..., None], *args: Any) -> bool:
        try:
            check_all(*args)
        except (AssertionError, PlanError):
            return False
        return True

    offsets = placement.offsets
    items = [
        verify_module.Interval(b.name, offsets[b.name], offsets[b.name] + b.size, b.begin, b.end) for b in buffers
    ]
    return [
        fits(offsets, buffers, (), ROW),
        accepts(check_placement, buffers, placement, ROW),
        accepts(verify_module.check_overlap, items, ()),
    ]


# -- two programs -------------------------------------------------------------------------------------------


def forward() -> GraphModule:
    """``x -> f0 -> s0 -> f1 -> s1 -> f2 -> s2``; all are saved."""
    maker = GraphMaker()
    value = x = maker.input("x")
    saved = []
    for i in range(3):
        saved.append(maker.allocate(name=f"s{i}"))
        maker.launch("mix", value, x, saved[-1], name=f"f{i}")
        value = saved[-1]
    return maker.finish(saved)


def backward() -> GraphModule:
    """``s2 -> b0 -> g2``, ``s1, g2 -> b1 -> g1``, ``s0, g1 -> b2 -> g0``; all three are gradients."""
    maker = GraphMaker()
    saved = [maker.input(f"s{i}") for i in range(3)]
    gradients = []
    value = saved[2]
    for step, i in enumerate((2, 1, 0)):
        gradients.append(maker.allocate(name=f"g{i}"))
        maker.launch("mix", saved[i], value, gradients[-1], name=f"b{step}")
        value = gradients[-1]
    return maker.finish(gradients)


def plan_of(gm: GraphModule) -> ProgramPlan:
    return compile_host_graph(gm, compile_request()).plan


def test_gradients_take_the_place_of_saved_activations() -> None:
    """
    ::

        256 |       s2 s2|s2 g1 g1 g1         s0, s1, s2 live on, each up to its last use in the second program
        192 |    s1 s1 s1|s1 s1 g0 g0
        128 |            |g2 g2 g2 g2
         64 | s0 s0 s0 s0|s0 s0 s0
          0 +------------+-----------
              f0 f1 f2    b0 b1 b2 (after)
    """
    first, second = plan_of(forward()), plan_of(backward())
    index = {storage.name: storage.index for storage in first.facts.storages}
    inputs = by_name(second.graph)
    saved_as = {index[name]: [inputs[name].name] for name in ("s0", "s1", "s2")}
    own, others = plan_pair(SizedProgram(first, {}, {}), SizedProgram(second, {}, {}), saved_as)
    assert rows(own[CPU]) == {"s0": 0, "s1": 2, "s2": 3}
    assert rows(others[CPU]) == {"g2": 1, "g1": 3, "g0": 2}
    for hint in (own, others):
        assert hint[CPU].size == hint[CPU].lower_bound == 4 * ROW

    # Both programs' plans follow it, the second where the first has left what it saved.
    memory = plan_program(SizedProgram(first, {}, {}), hint=own)
    verify_memory(first.graph, first.schedule, first.facts, memory, {})
    assert placement_of(memory, first) == own[CPU]
    saved = [Reserved(o, o + ROW, nodes=(inputs[name].name,)) for name, o in own[CPU].offsets.items()]
    memory = plan_program(SizedProgram(second, {}, {}), {CPU: saved}, others)
    verify_memory(second.graph, second.schedule, second.facts, memory, {})
    assert placement_of(memory, second) == others[CPU]


def test_what_somebody_else_may_have_lives_on_through_both() -> None:
    """As above, but s0 is held: its bytes are used by nothing in the second program."""
    first, second = plan_of(forward()), plan_of(backward())
    index = {storage.name: storage.index for storage in first.facts.storages}
    inputs = by_name(second.graph)
    saved_as = {index[name]: [inputs[name].name] for name in ("s1", "s2")}
    own, others = plan_pair(SizedProgram(first, {}, {}), SizedProgram(second, {}, {}), saved_as)
    s0 = own[CPU].offsets["s0"]
    assert s0 not in others[CPU].offsets.values()
    assert own[CPU].size == own[CPU].lower_bound == 4 * ROW


def test_a_suggestion_is_not_followed_where_somebody_has_the_bytes() -> None:
    first, second = plan_of(forward()), plan_of(backward())
    index = {storage.name: storage.index for storage in first.facts.storages}
    inputs = by_name(second.graph)
    own, _ = plan_pair(
        SizedProgram(first, {}, {}),
        SizedProgram(second, {}, {}),
        {index[f"s{i}"]: [inputs[f"s{i}"].name] for i in range(3)},
    )
    held = [Reserved(0, ROW)]
    memory = plan_program(SizedProgram(first, {}, {}), {CPU: held}, own)
    verify_memory(first.graph, first.schedule, first.facts, memory, {})
    assert sorted(located(memory).values()) == [ROW, 2 * ROW, 3 * ROW]
