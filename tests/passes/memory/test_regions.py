"""Regions: on the CPU, memory of several storages that is there in some steps of each call; tensors over it stay.

In the drawings steps go to the right; one letter is 64 bytes for one step.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Compiled, inductor
from hypothesis import given
from hypothesis import strategies as st
from memory_oracle import Case, memory_of, random_case
from placements import changed, moved, put
from random_graphs import (
    CPU,
    PROPERTY,
    GraphMaker,
    Recipe,
    build,
    check_calls,
    compile_request,
    halve,
    kernel,
    recipes,
)
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

import fxwrap
from fxwrap.codegen import torch_versions
from fxwrap.errors import PlanError
from fxwrap.graphs.program import Program
from fxwrap.graphs.replay.recording import Recording
from fxwrap.host_graph.storages import Origin
from fxwrap.packing import Buffer, plan_memory
from fxwrap.packing.shared_regions import SharedRegion, share_regions
from fxwrap.passes.memory.planner import plan_program
from fxwrap.passes.memory.requirements import Requirements
from fxwrap.passes.verify import verify_memory
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import Home, InputFacts, MemoryPlan, Place, Region, SizedProgram
from fxwrap.torch_private.functions import allocations

aten = torch.ops.aten
# What shared_regions.py knows of the C library, in bytes.
SMALL, LARGE = 128 << 10, (32 << 20) - 4096


def recordings(program: Program) -> list[Recording]:
    return [recording for one in program.specializations.values() for recording in one.recordings]


def bytes_of(recording: Recording) -> dict[str, int]:
    storages = recording.plan.facts.storages
    return {storages[i].name: storage.nbytes() for i, (storage, _) in recording._resources.regions.places.items()}


# -- which storages share one --------------------------------------------------------------------------------


def share(
    buffers: Mapping[int, Buffer], others: Sequence[int], room: int, alignment: int, unshared: Collection[int] = ()
) -> tuple[SharedRegion, ...]:
    """``others``: bytes that other things take, at each step."""
    taken = [Buffer("", n, step, step + 1) for step, n in enumerate(others)]
    return share_regions(buffers, taken, room, alignment, len(others), unshared)


def test_one_region_for_everything_where_there_is_room() -> None:
    """
    ::

        a a . . b b        s s s s s s      room for 3: one region of 2, as small as it can be packed
        . c c . . .   ->   s s s s s s
        x . . . x x        x . . . x x
    """
    buffers = {1: Buffer("a", 64, 0, 2), 2: Buffer("b", 64, 4, 6), 3: Buffer("c", 64, 1, 3)}
    others = [64, 0, 0, 0, 64, 64]
    (region,) = share(buffers, others, 192, 64)
    assert (region.begin, region.end, region.size) == (0, 6, 128)
    assert sorted(region.offsets) == [1, 2, 3] and region.offsets[1] != region.offsets[3]
    # It is not there when nobody needs it, and then others may take as much as they like.
    assert share(buffers, [*others, 1000], 1064, 64) == (region,)
    later = {i: replace(b, begin=b.begin + 1, end=b.end + 1) for i, b in buffers.items()}
    (moved,) = share(later, [192, *others, 192], 192, 64)
    assert moved == replace(region, begin=1, end=7)


def test_one_region_that_takes_too_much_in_any_step_is_not_made() -> None:
    """
    ::

        a a . . b b        s s s s s s      room for 2: a and b share one, c has its own
        . c c . . .   ->   . c c . . .
        x . . . x x        x . . . x x
    """
    buffers = {1: Buffer("a", 64, 0, 2), 2: Buffer("b", 64, 4, 6), 3: Buffer("c", 64, 1, 3)}
    expected = SharedRegion(0, 6, 64, {1: 0, 2: 0}), SharedRegion(1, 3, 64, {3: 0})
    assert share(buffers, [64, 0, 0, 0, 64, 64], 128, 64) == expected
    # One step with a byte more is enough, wherever it is. (In step 1 there would be no room for a and c.)
    for step in (0, 2, 3, 4, 5):
        others = [65 if step == i else 64 for i in range(6)]
        assert len(share(buffers, others, 192, 64)) > 1
    assert len(share(buffers, [64] * 6, 192, 64)) == 1


def test_a_region_is_as_small_as_it_can_be_packed() -> None:
    """Where joining one after the other would leave a hole, all are packed together.

    ::

        . b b          b b b
        a . b    ->    b a b       192 bytes, which is all that there is room for
        a c c          a c c
    """
    draw, small = random.Random(1), 0
    for _ in range(50):
        buffers = {}
        for i in range(8):
            begin = draw.randrange(8)
            buffers[i] = Buffer(f"b{i}", 64 * draw.randint(1, 6), begin, begin + draw.randint(1, 5))
        steps = [0] * max(b.end for b in buffers.values())
        packed = plan_memory(list(buffers.values()), 64)
        room = alone(list(buffers.values()), steps)
        small += packed.size == room
        assert (packed.size == room) <= (len(share(buffers, steps, room, 64)) == 1)
    assert small > 25


def test_what_is_counted_from_the_start_of_a_storage_has_a_region_of_its_own() -> None:
    buffers = {0: Buffer("b0", 64, 0, 2), 1: Buffer("b1", 10, 0, 2), 2: Buffer("b2", 128, 0, 1)}
    own, together = share(buffers, [0, 0], 1000, 64, {1})
    assert own == SharedRegion(0, 2, 10, {1: 0})
    assert (together.begin, together.end, together.size, together.offsets.keys()) == (0, 2, 192, {0, 2})
    assert share({1: buffers[1]}, [0, 0], 1000, 64, {1}) == (SharedRegion(0, 2, 10, {1: 0}),)
    # What lies apart takes its part of the room.
    assert share(buffers, [0, 64], 202 + 64, 64, {1}) == (own, together)
    assert len(share(buffers, [0, 64], 202 + 63, 64, {1})) == 3
    assert share({}, [0, 0], 1000, 64) == ()


def test_the_region_that_is_kept_is_there_in_all_steps() -> None:
    """One that is worth it, where there is room in all steps; a capital letter is 128 KiB for one step.

    ::

        . A A B B .        K K K K K K      room for 2
        X . . . . X   ->   X . . . . X
    """
    buffers = {1: Buffer("a", SMALL, 1, 3), 2: Buffer("b", SMALL, 3, 5)}
    others = [SMALL, 0, 0, 0, 0, SMALL]
    assert share(buffers, others, 2 * SMALL, 64) == (SharedRegion(0, 6, SMALL, {1: 0, 2: 0}, kept=True),)
    # A little less: too small to be worth it; or no room for it in the first and the last step.
    fewer = {i: replace(buffer, size=SMALL - 64) for i, buffer in buffers.items()}
    assert share(fewer, others, 2 * SMALL, 64) == (SharedRegion(1, 5, SMALL - 64, {1: 0, 2: 0}),)
    assert share(buffers, others, 2 * SMALL - 1, 64) == (SharedRegion(1, 5, SMALL, {1: 0, 2: 0}),)


def test_as_much_is_kept_as_there_is_room_for() -> None:
    """
    ::

        A A A C C        K K K K K      a and c take turns in what is kept
        . . B B .   ->   . . b b .      b would have to be there when x is
        . . . . X        . . . . X
    """
    buffers = {1: Buffer("a", 4 * SMALL, 0, 3), 2: Buffer("b", 2 * SMALL, 2, 4), 3: Buffer("c", 4 * SMALL, 3, 5)}
    others = [0, 0, 0, 0, 2 * SMALL]
    expected = SharedRegion(0, 5, 4 * SMALL, {1: 0, 3: 0}, kept=True), SharedRegion(2, 4, 2 * SMALL, {2: 0})
    assert share(buffers, others, 6 * SMALL, 64) == expected


@pytest.mark.parametrize("size", [LARGE // 2, LARGE // 2 + 64])
def test_what_is_not_kept_is_no_larger_than_what_the_c_library_may_keep(size: int) -> None:
    """
    ::

        a a . c c .        r r r r r .      up to 32 MiB; a larger one would return to the system at every call
        b b . . . .   ->   r r r r r .
        . . . . . x        . . . . . x      x takes all that there is
    """
    buffers = {1: Buffer("a", size, 0, 2), 2: Buffer("b", size, 0, 2), 3: Buffer("c", size, 3, 5)}
    regions = share(buffers, [0, 0, 0, 0, 0, 2 * size], 2 * size, 64)
    assert not any(region.kept for region in regions)
    assert [region.size for region in regions] == ([2 * size] if 2 * size <= LARGE else [size, size])


@st.composite
def temporaries(draw: st.DrawFn) -> tuple[dict[int, Buffer], list[int]]:
    unit = draw(st.sampled_from([1, 1 << 10, 1 << 18]))  # kept are regions from 128 KiB on, split those above 32 MiB
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(1, 400).map(unit.__mul__)), max_size=12))
    begins = [draw(st.integers(0, 11)) for _ in sizes]
    ends = [draw(st.integers(begin + 1, 12)) for begin in begins]
    buffers = {i: Buffer(f"b{i}", *one) for i, one in enumerate(zip(sizes, begins, ends, strict=True))}
    return buffers, draw(st.lists(st.integers(0, 1000).map(unit.__mul__), min_size=12, max_size=12))


def alone(buffers: Iterable[Buffer], others: Sequence[int]) -> int:
    """The most that is taken if every buffer has memory of its own."""
    return max(n + sum(b.size for b in buffers if b.begin <= step < b.end) for step, n in enumerate(others))


@PROPERTY
@given(temporaries(), st.integers(0, 500), st.sets(st.integers(0, 11)))
def test_regions_have_what_their_storages_need(
    problem: tuple[dict[int, Buffer], list[int]], more: int, apart: set[int]
) -> None:
    buffers, others = problem
    room = alone([*buffers.values()], others) + more
    regions = share(buffers, others, room, 64, apart)
    assert sorted(index for region in regions for index in region.offsets) == sorted(buffers)
    for step, nbytes in enumerate(others):
        assert nbytes + sum(region.size for region in regions if region.begin <= step < region.end) <= room
    assert sum(region.kept for region in regions) <= 1
    for region in regions:
        assert len(region.offsets) == 1 or apart.isdisjoint(region.offsets)
        assert not region.kept or ((region.begin, region.end) == (0, 12) and apart.isdisjoint(region.offsets))
        assert region.kept or region.size <= max(LARGE, *(buffers[index].size for index in region.offsets))
        for index, offset in region.offsets.items():
            own = buffers[index]
            assert region.begin <= own.begin < own.end <= region.end
            assert offset % 64 == 0 and 0 <= offset <= offset + own.size <= region.size
            for other, low in region.offsets.items():
                if other != index and buffers[other].begin < own.end and own.begin < buffers[other].end:
                    assert low + buffers[other].size <= offset or offset + own.size <= low


def test_few_regions() -> None:
    """On 200 small problems, compared with the fewest of all ways to share."""
    found = fewest = 0
    draw = random.Random(0)
    for _ in range(200):
        buffers = {}
        for i in range(6):
            begin = draw.randrange(8)
            buffers[i] = Buffer(f"b{i}", 64 * draw.randint(1, 6), begin, begin + draw.randint(1, 4))
        others = [64 * draw.randint(0, 6) for _ in range(12)]
        room = alone(list(buffers.values()), others)
        found += len(share(buffers, others, room, 64))
        fewest += min(len(ways) for ways in set_partitions(list(buffers.values())) if together(ways, others) <= room)
    print(f"\n{found} regions, {fewest} would do")
    assert found <= 1.15 * fewest


def set_partitions(items: list[Buffer]) -> Iterator[list[list[Buffer]]]:
    if not items:
        yield []
        return
    for rest in set_partitions(items[1:]):
        yield [[items[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]


def together(ways: list[list[Buffer]], others: Sequence[int]) -> int:
    """The most that is taken if buffers share regions that are packed without a gap."""
    regions = [
        Buffer("", alone(some, [0] * 12), min(b.begin for b in some), max(b.end for b in some)) for some in ways
    ]
    return alone(regions, others)


# -- running -------------------------------------------------------------------------------------------------


def test_memory_is_there_in_the_steps_that_name_a_storage() -> None:
    """
    ::

        step          0  1  2  3
        a             a  a  .  .      mix(x, x, a); mix(a, a, b)
        b             .  b  b  .      look(b)
        out           .  .  .  o      handed out: new at every call
        region        s  s  s  .      for a and b; more is taken at step 1 anyway
                      s  s  s  .
    """
    seen: list[dict[str, int]] = []

    def look(source: torch.Tensor) -> None:
        seen.append({name: nbytes for one in recordings(program) for name, nbytes in bytes_of(one).items()})

    maker = GraphMaker()
    x = maker.input("x")
    a, b, out = (maker.allocate(name=name) for name in ("a", "b", "out"))
    maker.launch("mix", x, x, a)
    maker.launch("mix", a, maker.view(a, (16,), (1,)), b)
    maker.launch(kernel("look", look, ()), b)
    maker.launch("mix", x, x, out)
    program = compile_host_graph(maker.finish([out]), compile_request())
    for seed in range(4):
        program(*maker.inputs(seed))
    assert seen[-2:] == [{"a": 128, "b": 128}] * 2  # replays
    (recording,) = recordings(program)
    assert bytes_of(recording) == {"a": 0, "b": 0}
    (text,) = [step.source for step in recording.graphs[0]._calls]
    # A storage is the constant between the calls that give it memory and take it back.
    assert text.splitlines() == [
        "def flat(r):",
        "    c1(c0, 128)",
        "    v0 = r[0]; r[0] = None",
        "    c3(v0, v0, c2)",
        "    c3(c2, c4, c5)",
        "    c6(c5)",
        "    c1(c0, 0)",
        "    v1 = c11(c7, c8, dtype=c9, device=c10)",
        "    r[1] = v1",
        "    c3(v0, v0, v1)",
        "    del v0, v1",
        "    return None",
    ]


@PROPERTY
@given(recipes(), st.lists(st.booleans(), min_size=3, max_size=6))
def test_random_graphs_compute_the_same(recipe: Recipe, hold: list[bool]) -> None:
    """A storage without memory has no address: whoever named it then would fail, not compute something else."""
    graph = build(recipe)
    program = compile_host_graph(graph.gm, compile_request(graph.options))
    check_calls(graph.gm, graph.inputs, program, hold)
    assert set(program.counters.eager) <= {"warm-up"}
    assert not any(sum(bytes_of(recording).values()) for recording in recordings(program))


def test_an_error_leaves_no_memory_behind() -> None:
    fails = False

    def may_fail(source: torch.Tensor, out: torch.Tensor) -> None:
        if fails:
            raise ValueError("here")
        out.copy_(source)

    maker = GraphMaker()
    x = maker.input("x")
    a, b, out = (maker.allocate(name=name) for name in ("a", "b", "out"))
    maker.launch("mix", x, x, a)
    maker.launch(kernel("may_fail", may_fail, (1,)), a, b)
    maker.launch("mix", b, b, out)
    gm = maker.finish([out])
    program = compile_host_graph(gm, compile_request())
    for seed in range(3):
        program(*maker.inputs(seed))
    (recording,) = recordings(program)
    fails = True
    with pytest.raises(ValueError, match="here"):
        program(*maker.inputs(3))
    assert bytes_of(recording) == {"a": 0, "b": 0}
    fails = False
    check_calls(gm, maker.inputs, program, [False, True])
    assert program.counters.recordings == {"first": 1}


@pytest.mark.compiler
def test_a_custom_operator_may_keep_what_it_is_given(compiled: object) -> None:
    """So that its operand is a new tensor at every call."""
    kept: list[torch.Tensor] = []

    @torch.library.custom_op("fxwrap_regions::keep", mutates_args=())
    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x + 1

    keep.register_fake(torch.empty_like)
    f: Compiled = compiled(lambda x: keep(x.sin()).cos())  # type: ignore[operator]
    given_ones = [torch.randn(4, 4) for _ in range(5)]
    for x in given_ones:
        torch.testing.assert_close(f(x), (x.sin() + 1).cos())
    assert f.program.counters.replays == 3
    for x, seen in zip(given_ones, kept, strict=True):
        torch.testing.assert_close(seen, x.sin())


def test_an_operator_that_counts_from_the_start_of_a_storage() -> None:
    """Its operand begins where its storage does, as it would in Inductor's wrapper."""
    maker = GraphMaker()
    x = maker.input("x")
    a, b, out = (maker.allocate(name=name) for name in ("a", "b", "out"))
    maker.launch("mix", x, x, a)
    maker.launch("mix", a, x, b)
    part = maker.extern(aten.as_strided_copy.default, b, (16,), (1,), 0, name="part")
    maker.launch("mix", a, part, out)
    gm = maker.finish([out])
    program = compile_host_graph(gm, compile_request())
    check_calls(gm, maker.inputs, program, [False, True, False])
    (recording,) = recordings(program)
    memory = recording.request.memory
    assert [list(memory.inside(region).values()) for region in memory.regions] == [[0], [0]]
    # Another plan is refused.
    one, two = (index for region in memory.regions for index in memory.inside(region))
    faulty = moved(replace(memory, regions=(Region(CPU, 0, 4, 128, 64),)), {one: 64, two: 0})
    with pytest.raises(PlanError, match=r"b is in a region with others"):
        verify_memory(recording.plan.graph, recording.plan.schedule, recording.plan.facts, faulty, {})


def test_an_operator_that_asks_whether_its_results_share_a_storage() -> None:
    """Two tensors in one region do, and a QR decomposition takes them for one.

    ::

        q, r = linalg.qr(x); out = q @ r
    """
    maker = GraphMaker()
    x = maker.input("x")
    q, r, out = (maker.allocate(name=name) for name in ("q", "r", "out"))
    for node in (q, r):
        node.args = ((4, 4), (1, 4))  # by columns: in other tensors it does not compute in place
    maker.extern(aten.linalg_qr.out, x, Q=q, R=r)
    maker.extern(aten.mm.out, q, r, out=out)
    gm = maker.finish([out])
    program = compile_host_graph(gm, compile_request())
    check_calls(gm, maker.inputs, program, [False, True, False, True])
    assert program.counters.replays == 2


# -- what is taken at each step --------------------------------------------------------------------------------


# Storages of inputs that the caller has let go of: bytes, and the inputs that lie in each.
Donated = Sequence[tuple[int, tuple[Node, ...]]]


def taken_at_steps(
    case: Case, donated: Donated, plan: MemoryPlan | None = None, workspace: Mapping[str, int] | None = None
) -> list[int]:
    """Bytes at each step, as a run of the graph shows them: donated inputs, and all that the program makes, but what
    lies in regions is replaced by them.

    ::

        donated     d d d . .     up to the last use of all inputs that lie there
        region      . r r r .
        new         . . o o o     what the caller gets, or an operator may keep
        operators   . x x . .
        workspace   . . w . .     of the call at that step
    """
    index = {memory_of(storage): storage.index for storage in case.plan.facts.storages}
    regions = plan.regions if plan is not None else ()
    inside = {i for region in regions for i in plan.inside(region)}
    made = [memory for memory in case.seen.nbytes if index[memory] not in inside]
    spans = [(case.life(memory), case.seen.nbytes[memory]) for memory in made]
    spans += [(range(region.begin, region.end), region.size) for region in regions]
    for nbytes, nodes in donated:
        # One that nobody uses is there as long as the call.
        ends = [case.uses.get((name, None), [case.end])[-1] + 1 for name in nodes]
        spans.append((range(0, max(ends)), nbytes))
    step_of = {node.name: step for step, node in enumerate(case.plan.schedule)}
    spans += [(range(step_of[name], step_of[name] + 1), nbytes) for name, nbytes in (workspace or {}).items()]
    return [sum(nbytes for life, nbytes in spans if step in life) for step in range(case.end)]


def random_donated(case: Case, draw: random.Random) -> Donated:
    inputs = [node for node in case.plan.graph.graph.nodes if node.op == "placeholder"]
    given = [node for node in inputs if not case.handed_out & case.seen.of[node] and draw.random() < 0.7]
    if len(given) > 1 and draw.random() < 0.3:
        return [(64 * draw.randint(1, 8), tuple(node.name for node in given))]
    return [(64 * draw.randint(1, 8), (node.name,)) for node in given]


# pytest -m sweep tests/passes/memory/test_regions.py
@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.sweep)])
def test_no_more_is_taken_at_any_step_than_is_alive_at_most(count: int) -> None:
    """With regions, new storages, what operators allocate and return, or take while they run (which nobody knows of
    some of them), and inputs that are freed after their last use."""
    seen = Counter[str]()
    for seed in range(count):
        draw = random.Random(seed)
        case = random_case(draw, values=True)  # without values nobody knows what operators allocate
        if not all(memory_of(s) in case.seen.nbytes for s in case.plan.facts.storages if s.origin is Origin.EXTERN):
            continue  # an operator without a schema might have returned memory of its own
        donated = random_donated(case, draw)
        workspace = {name: 64 * draw.choice([0, 0, 0, 0, *range(1, 9)]) for name in case.calls}
        known = {name: nbytes for name, nbytes in workspace.items() if draw.random() < 0.9}
        memory = plan_program(case.calls_again(donated=donated, workspace=known))
        alive = taken_at_steps(case, donated, workspace=workspace)
        inside = [memory.inside(region) for region in memory.regions]
        taken = taken_at_steps(case, donated, memory, workspace)
        assert max(taken, default=0) <= max(alive, default=0), f"seed {seed}"
        own = [memory_of(s) for s in case.plan.facts.storages if s.index in memory.per_call]
        assert {i for offsets in inside for i in offsets}.isdisjoint(memory.per_call)
        spans = [(case.life(one), case.seen.nbytes[one]) for one in own]
        spans += [(range(region.begin, region.end), region.size) for region in memory.regions]
        assert memory.peak == max(sum(n for life, n in spans if step in life) for step in range(case.end))
        assert memory.lower_bound <= memory.plain == sum(memory.sizes[i] for i in needed(case, memory))
        shared = [offsets for offsets in inside if len(offsets) > 1]
        seen["shared"] += bool(shared)
        seen["one region"] += bool(shared) and len(memory.regions) == 1
        seen["several regions"] += len(memory.regions) > 1
        seen["donated"] += bool(donated)
        seen["new"] += bool(memory.per_call - memory.outputs)
        seen["room"] += max(taken, default=0) > 0 and taken != alive
        # Were inputs not counted, more would be taken in some programs.
        unaware = plan_program(case.calls_again())
        seen["more if donated inputs are forgotten"] += max(taken_at_steps(case, donated, unaware)) > max(alive)
        unaware = plan_program(case.calls_again(donated=donated))
        more = max(taken_at_steps(case, donated, unaware, workspace)) > max(alive)
        seen["more if workspace is forgotten"] += more
    print(f"\n{dict(seen)}")
    assert len(seen) == 8 and min(seen.values()) >= count // 100, seen


def needed(case: Case, memory: MemoryPlan) -> set[int]:
    """Allocations that somebody works on, or gets."""
    lives = {s.index: case.life(memory_of(s)) for s in case.plan.facts.storages}
    return {index for index in memory.sizes if lives[index]}


def test_donated_inputs_are_let_go_of_after_their_last_use() -> None:
    """One that nobody uses lives as long as the call, and so the plan takes it to be there.

    ::

        s   s . .      mix(s, x, a); look(a); mix(a, a, out)
        u   u u u
    """
    gone: list[list[bool]] = []

    def look(source: torch.Tensor) -> None:
        gone.append([storage.expired() for storage in storages])

    maker = GraphMaker()
    x, s, _ = (maker.input(name) for name in ("x", "s", "u"))
    a, out = maker.allocate(name="a"), maker.allocate(name="out")
    maker.launch("mix", s, x, a)
    maker.launch(kernel("look", look, ()), a)
    maker.launch("mix", a, a, out)
    program = compile_host_graph(maker.finish([out]), compile_request(inputs=InputFacts(donated=frozenset({1, 2}))))
    for seed in range(4):
        inputs = [value.clone() for value in maker.inputs(seed)]
        storages = [StorageWeakRef(value.untyped_storage()) for value in inputs[1:]]
        program.run(inputs)
    assert gone[-2:] == [[True, False]] * 2  # replays
    (recording,) = recordings(program)
    sized = recording.request.sized
    assert sorted(sized.donated, key=str) == [(64, (name,)) for name in ("s", "u")]
    assert [(b.size, b.begin, b.end) for b in Requirements.of(sized).donated] == [(64, 0, 1), (64, 0, 4)]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (torch.nn.Linear(n, m) for n, m in ((16, 64), (64, 64), (64, 8)))
        self.norm = torch.nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.gelu(self.first(x))
        h = h + torch.tanh(self.second(self.norm(h)))
        return self.last(h).square().sum()


class Attention(torch.nn.Module):
    """Three views of one tensor are saved for backward: its memory is freed after the last use of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.norm = torch.nn.Linear(16, 96), torch.nn.Linear(32, 16), torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q, k, v = self.inner(self.norm(x)).view(-1, 8, 3, 2, 16).permute(2, 0, 3, 1, 4)
            seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.outer(seen.transpose(1, 2).reshape(-1, 32)).tanh()
        return x.square().sum()


def peak_of_a_step(compiled_model: Any, model: torch.nn.Module, rows: int) -> int:
    """The most bytes that are allocated at one time during a training step, beyond what was there before."""
    x = torch.randn(rows, 16)

    def step() -> None:
        compiled_model(x).backward()

    for _ in range(4):
        model.zero_grad(set_to_none=True)
        step()
    model.zero_grad(set_to_none=True)
    changes = allocations(step)
    assert changes
    return max(itertools.accumulate(changes))


@pytest.mark.compiler
@pytest.mark.parametrize("make", [pytest.param(Net, marks=pytest.mark.sweep), Attention])
def test_a_training_step_takes_what_is_alive_at_most(make: type[torch.nn.Module]) -> None:
    """Backward frees what was saved for it while it runs, and its regions leave room for that."""
    model = make()
    f, theirs = Compiled(model), inductor(model)
    peak = peak_of_a_step(f, model, 128)
    assert peak <= peak_of_a_step(theirs, theirs._orig_mod, 128)
    (predicted,) = fxwrap.report(f.call).graphs[0].predicted
    assert 4 <= peak - predicted.total <= 64, "4 bytes are autograd's, the loss's own gradient"
    backward = f.programs[1]
    assert backward.plan.inputs.donated and backward.newest_plan.regions


@pytest.mark.compiler
@pytest.mark.parametrize("make", [Net, pytest.param(Attention, marks=pytest.mark.sweep)])
def test_a_training_step_of_any_size_takes_what_is_alive_at_most(make: type[torch.nn.Module]) -> None:
    """Whatever the sizes were that the program was compiled for."""
    model = make()
    f, theirs = Compiled(model, compile_options={"dynamic": True}), inductor(model, dynamic=True)
    for rows in (16, 64, 128, 24, 512):
        assert peak_of_a_step(f, model, rows) <= peak_of_a_step(theirs, theirs._orig_mod, rows), rows


@torch.library.custom_op("fxwrap_regions::widen", mutates_args=())
def widen(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1].expand(x.size(0), 2000).contiguous()


widen.register_fake(lambda x: x.new_empty(x.size(0), 2000))


def products_around_widen(a: torch.Tensor) -> torch.Tensor:
    """``widen`` returns 8,000 bytes a row; products of ``len(a)`` by ``len(a)`` numbers before it, and after it."""
    first = a @ a.t()
    b = a + widen((first @ first) @ a)[:, :8]
    second = b @ b.t()
    return (second @ second) @ b


def convolutions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = F.conv2d(F.conv2d(x, w, padding=1).relu() + 1, w, padding=1).sigmoid() * x
    return x


@pytest.mark.compiler
@pytest.mark.parametrize(
    "fn, inputs, sizes",
    [
        (products_around_widen, lambda n: (torch.randn(n, 8) / 64,), (16, 512, 24)),
        (convolutions, lambda n: (torch.randn(2, 4, n, n), torch.randn(4, 4, 3, 3) / 8), (16, 128, 24)),
    ],
)
def test_a_call_of_any_size_takes_what_is_alive_at_most(
    fn: Callable[..., torch.Tensor], inputs: Callable[[int], tuple[torch.Tensor, ...]], sizes: Sequence[int]
) -> None:
    """What operators allocate has the sizes of the call. Its workspace is only known at those of the compilation.

    ::

        at 16 rows      first . . wide . second         at 512 rows    first . . . . . . second
                        ------------------------                              ____wide___
                        one region for the products                    two: there is no room for one beside wide
    """

    def peak(call: Callable[[], object]) -> int:
        for _ in range(4):
            call()
        changes = allocations(call)
        assert changes is not None
        return max(itertools.accumulate(changes), default=0)

    f, theirs = Compiled(fn, compile_options={"dynamic": True}), inductor(fn, dynamic=True)
    with torch.no_grad():
        for n in sizes:
            given = inputs(n)
            assert peak(lambda given=given: f(*given)) <= peak(lambda given=given: theirs(*given)), n


def test_the_copy_of_a_factor_that_no_library_reads_as_it_lies_is_reckoned_with() -> None:
    """A column with a stride of its own: the product takes a copy of it. A row of a matrix is read as it lies."""

    def call(stride: tuple[int, int]) -> dict[str, int]:
        maker = GraphMaker()
        x, y = maker.input("x", (64, 1)), maker.input("y", (1, 64))
        out = maker.allocate((64, 64), name="out")
        maker.extern(aten.mm.out, maker.view(x, (64, 1), stride), y, out=out, name="product")
        return dict(compile_host_graph(maker.finish([out]), compile_request()).plan.workspace)

    assert call((1, 1)) == {}, "none at any size"
    assert call((1, 0)) == {"product": 64 * 4}


@pytest.mark.compiler
def test_more_is_taken_if_donated_inputs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above see it."""
    model = Net()
    peak = peak_of_a_step(Compiled(model), model, 128)
    torch._dynamo.reset()
    monkeypatch.setattr(torch_versions, "donated_inputs", lambda gm: frozenset())
    f = Compiled(model)
    assert peak_of_a_step(f, model, 128) > peak
    assert not f.programs[1].plan.inputs.donated


# -- one fault ----------------------------------------------------------------------------------------------


def faults(memory: MemoryPlan, draw: random.Random) -> Iterator[tuple[MemoryPlan, str]]:
    """A plan with one thing wrong, and what is said of it."""

    for number, region in enumerate(memory.regions):
        inside = memory.inside(region)
        yield changed(memory, number, begin=region.begin + 1), "has no memory at step"
        yield changed(memory, number, end=region.end - 1), "has no memory at step"
        index, offset = draw.choice(sorted(inside.items()))
        yield moved(memory, {index: offset + 1}, number), "is misaligned"
        yield put(memory, index, Place(Home.OPERATOR)), "has no memory"
        if memory.sizes[index]:
            yield changed(memory, number, size=offset + memory.sizes[index] - 1), "lies outside of its region"
            yield moved(memory, {index: -64}, number), "lies outside of its region"
    for index in sorted(memory.per_call):
        yield put(memory, index, Place(Home.INPUT)), "has no memory"
    for index in sorted(memory.outputs):
        # Somebody has it when the next call fills the region.
        region = Region(CPU, 0, 100, memory.sizes[index], 64)
        there = replace(memory, regions=(*memory.regions, region))
        yield put(there, index, Place(Home.REGION, len(memory.regions))), "has memory in steps"


def test_faults_are_found() -> None:
    planted = overlapping = 0
    for seed in range(120):
        draw = random.Random(seed)
        case = random_case(draw)
        memory = plan_program(case.calls_again())
        case.verify(memory)
        for faulty, message in faults(memory, draw):
            planted += 1
            with pytest.raises(PlanError, match=message):
                case.verify(faulty)
        for number, region in enumerate(memory.regions):
            faulty = moved(memory, dict.fromkeys(memory.inside(region), 0), number)
            if case.collision(case.plan.facts, faulty):
                overlapping += 1
                with pytest.raises(PlanError, match="overlap at step"):
                    case.verify(faulty)
    print(f"\n{planted} faults, {overlapping} overlaps, missed: 0")
    assert planted > 500 and overlapping > 20


def test_what_somebody_may_keep_is_in_no_region() -> None:
    """A custom operator's operand: the next call would write over what it has kept."""
    maker = GraphMaker()
    x, b, out = maker.input("x"), maker.allocate(name="b"), maker.allocate(name="out")
    maker.launch("mix", x, x, b)
    kept = maker.extern(halve, maker.view(b, (16,), (1,)), name="kept")
    maker.launch("mix", kept, x, out)
    gm = maker.finish([out])
    plan = compile_host_graph(gm, compile_request()).plan
    memory = plan_program(SizedProgram(plan, {}, {}, frozen=False))
    assert not memory.regions
    (index,) = memory.per_call - memory.outputs
    faulty = moved(replace(memory, regions=(Region(CPU, 0, 3, 64, 64),)), {index: 0})
    with pytest.raises(PlanError, match="b has memory in steps"):
        verify_memory(gm, plan.schedule, plan.facts, faulty, {})
