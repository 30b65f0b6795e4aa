"""Slabs: memory beside an arena that comes and goes at every call, on the CPU; storages and tensors over it stay.

In the drawings steps go to the right; one letter is 64 bytes for one step.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Compiled
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import CPU, PROPERTY, TORCH_FUNCTIONS, GraphMaker, Recipe, build, check_calls, kernel, recipes
from test_verify_random import random_case

import fxwrap.passes.memory_planning as planning
from fxwrap.compiler import CompileRequest, compile_host_graph
from fxwrap.errors import PlanError
from fxwrap.graphs.program import Program
from fxwrap.graphs.recording import Recording
from fxwrap.packing import Buffer
from fxwrap.passes.memory_planning import plan_program
from fxwrap.passes.slabs import share_slabs
from fxwrap.passes.verify import verify_memory
from fxwrap.plan import MemoryPlan, Slab

aten = torch.ops.aten


@pytest.fixture
def all_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is allocated when it is needed, whether that takes less or not."""
    monkeypatch.setattr(planning, "choose_anew", _all)


def _all(buffers: object, beside: object, alignment: int, movable: set[str], *rest: object) -> frozenset[str]:
    return frozenset(movable)


def recordings(program: Program) -> list[Recording]:
    return [recording for family in program.families.values() for recording in family.recordings]


def memory_of(recording: Recording) -> dict[str, int]:
    storages = recording.plan.facts.storages
    return {storages[i].name: storage.nbytes() for i, (storage, _) in recording._slabs.places.items()}


# -- which storages share one --------------------------------------------------------------------------------


def test_storages_share_a_slab_where_there_is_room() -> None:
    """
    ::

        a a . . b b        s s s s s s      room for 3: all in one slab of 2, b where a was
        . c c . . .   ->   s s s s s s
        x . . . x x        x . . . x x

                           s s s s s s      room for 2: a and b share one
                      ->   . c c . . .
                           x . . . x x
    """
    buffers = {1: Buffer("a", 64, 0, 2), 2: Buffer("b", 64, 4, 6), 3: Buffer("c", 64, 1, 3)}
    others = [64, 0, 0, 0, 64, 64]
    assert share_slabs(buffers, others, 192, 64) == (Slab(0, 6, 128, {1: 0, 3: 64, 2: 0}),)
    assert share_slabs(buffers, others, 128, 64) == (Slab(0, 6, 64, {1: 0, 2: 0}), Slab(1, 3, 64, {3: 0}))


def test_what_is_counted_from_the_start_of_a_storage_has_a_slab_of_its_own() -> None:
    buffers = {i: Buffer(f"b{i}", 10, 0, 2) for i in range(3)}
    assert share_slabs(buffers, [0, 0], 1000, 64, {1}) == (Slab(0, 2, 10, {1: 0}), Slab(0, 2, 74, {0: 0, 2: 64}))


@st.composite
def temporaries(draw: st.DrawFn) -> tuple[dict[int, Buffer], list[int]]:
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(1, 400)), max_size=12))
    begins = [draw(st.integers(0, 11)) for _ in sizes]
    ends = [draw(st.integers(begin + 1, 12)) for begin in begins]
    buffers = {i: Buffer(f"b{i}", *one) for i, one in enumerate(zip(sizes, begins, ends, strict=True))}
    return buffers, draw(st.lists(st.integers(0, 1000), min_size=12, max_size=12))


def alone(buffers: Iterable[Buffer], others: Sequence[int]) -> int:
    """The most that is taken if every buffer has memory of its own."""
    return max(n + sum(b.size for b in buffers if b.begin <= step < b.end) for step, n in enumerate(others))


@PROPERTY
@given(temporaries(), st.integers(0, 500), st.sets(st.integers(0, 11)))
def test_slabs_have_what_their_storages_need(
    problem: tuple[dict[int, Buffer], list[int]], more: int, apart: set[int]
) -> None:
    buffers, others = problem
    room = alone([*buffers.values()], others) + more
    slabs = share_slabs(buffers, others, room, 64, apart)
    assert sorted(index for slab in slabs for index in slab.offsets) == sorted(buffers)
    for step, nbytes in enumerate(others):
        assert nbytes + sum(slab.size for slab in slabs if slab.begin <= step < slab.end) <= room
    for slab in slabs:
        assert len(slab.offsets) == 1 or apart.isdisjoint(slab.offsets)
        for index, offset in slab.offsets.items():
            own = buffers[index]
            assert slab.begin <= own.begin < own.end <= slab.end
            assert offset % 64 == 0 and 0 <= offset <= offset + own.size <= slab.size
            for other, low in slab.offsets.items():
                if other != index and buffers[other].begin < own.end and own.begin < buffers[other].end:
                    assert low + buffers[other].size <= offset or offset + own.size <= low


def test_few_slabs() -> None:
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
        found += len(share_slabs(buffers, others, room, 64))
        fewest += min(len(ways) for ways in set_partitions(list(buffers.values())) if together(ways, others) <= room)
    print(f"\n{found} slabs, {fewest} would do")
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
    """The most that is taken if buffers share slabs that are packed without a gap."""
    slabs = [Buffer("", alone(some, [0] * 12), min(b.begin for b in some), max(b.end for b in some)) for some in ways]
    return alone(slabs, others)


# -- running -------------------------------------------------------------------------------------------------


def test_memory_is_there_in_the_steps_that_name_a_storage(all_that_can: None) -> None:
    """
    ::

        step          0  1  2  3
        a             a  a  .  .      mix(x, x, a); mix(a, a, b)
        b             .  b  b  .      look(b)
        out           .  .  .  o      handed out: new at every call
        slab          s  s  s  .      for a and b; more is taken at step 1 anyway
                      s  s  s  .
    """
    seen: list[dict[str, int]] = []

    def look(source: torch.Tensor) -> None:
        seen.append({name: nbytes for one in recordings(program) for name, nbytes in memory_of(one).items()})

    maker = GraphMaker()
    x = maker.input("x")
    a, b, out = (maker.allocate(name=name) for name in ("a", "b", "out"))
    maker.launch("mix", x, x, a)
    maker.launch("mix", a, maker.view(a, (16,), (1,)), b)
    maker.launch(kernel("look", look, ()), b)
    maker.launch("mix", x, x, out)
    program = compile_host_graph(maker.finish([out]), CompileRequest())
    for seed in range(4):
        program(*maker.inputs(seed))
    assert seen[-2:] == [{"a": 128, "b": 128}] * 2  # replays
    (recording,) = recordings(program)
    assert memory_of(recording) == {"a": 0, "b": 0}
    (text,) = [step.source for step in recording._graphs[0]._calls]
    # A storage is the constant between the calls that give it memory and take it back.
    assert text.splitlines() == [
        "def flat(r):",
        "    c0()",
        "    v0 = r[0]",
        "    r[0] = None",
        "    c2(v0, v0, c1)",
        "    c2(c1, c3, c4)",
        "    c5(c4)",
        "    c6()",
        "    v1 = c11(c7, c8, dtype=c9, device=c10)",
        "    r[1] = v1",
        "    c2(v0, v0, v1)",
        "    del v0, v1",
        "    return None",
    ]


@PROPERTY
@given(recipes(), st.lists(st.booleans(), min_size=3, max_size=6))
def test_random_graphs_compute_the_same(recipe: Recipe, hold: list[bool]) -> None:
    """A storage without memory has no address: whoever named it then would fail, not compute something else."""
    graph = build(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "choose_anew", _all)
        program = compile_host_graph(graph.gm, CompileRequest(graph.options, torch=TORCH_FUNCTIONS["use counts"]))
        check_calls(graph.gm, graph.inputs, program, hold)
    assert set(program.counters.eager) <= {"warm-up"}
    assert not any(sum(memory_of(recording).values()) for recording in recordings(program))


def test_an_error_leaves_no_memory_behind(all_that_can: None) -> None:
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
    program = compile_host_graph(gm, CompileRequest())
    for seed in range(3):
        program(*maker.inputs(seed))
    (recording,) = recordings(program)
    fails = True
    with pytest.raises(ValueError, match="here"):
        program(*maker.inputs(3))
    assert memory_of(recording) == {"a": 0, "b": 0}
    fails = False
    check_calls(gm, maker.inputs, program, [False, True])
    assert program.counters.recordings == {"first": 1}


def test_a_custom_operator_may_keep_what_it_is_given(all_that_can: None, compiled: object) -> None:
    """So that its operand is a new tensor at every call."""
    kept: list[torch.Tensor] = []

    @torch.library.custom_op("fxwrap_slabs::keep", mutates_args=())
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


def test_an_operator_that_counts_from_the_start_of_a_storage(all_that_can: None) -> None:
    """Its operand begins where its storage does, as it would in Inductor's wrapper."""
    maker = GraphMaker()
    x = maker.input("x")
    a, b, out = (maker.allocate(name=name) for name in ("a", "b", "out"))
    maker.launch("mix", x, x, a)
    maker.launch("mix", a, x, b)
    part = maker.extern(aten.as_strided_copy.default, b, (16,), (1,), 0, name="part")
    maker.launch("mix", a, part, out)
    gm = maker.finish([out])
    program = compile_host_graph(gm, CompileRequest())
    check_calls(gm, maker.inputs, program, [False, True, False])
    (recording,) = recordings(program)
    memory = recording.request.memory
    assert [list(slab.offsets.values()) for slab in memory.slabs] == [[0], [0]]
    # Another plan is refused.
    one, two = (index for slab in memory.slabs for index in slab.offsets)
    faulty = replace(memory, slabs=(Slab(0, 4, 128, {one: 64, two: 0}),))
    with pytest.raises(PlanError, match=r"b is in a slab with others"):
        verify_memory(recording.plan.graph, recording.plan.schedule, recording.plan.facts, faulty, {})


# -- one fault ----------------------------------------------------------------------------------------------


def faults(memory: MemoryPlan, draw: random.Random) -> Iterator[tuple[MemoryPlan, str]]:
    """A plan with one thing wrong, and what is said of it."""

    def instead(slab: Slab, **changes: Any) -> MemoryPlan:
        rest = tuple(one for one in memory.slabs if one is not slab)
        return replace(memory, slabs=(*rest, replace(slab, **changes)))

    for slab in memory.slabs:
        yield instead(slab, begin=slab.begin + 1), "has no memory at step"
        yield instead(slab, end=slab.end - 1), "has no memory at step"
        index, offset = draw.choice(sorted(slab.offsets.items()))
        yield instead(slab, offsets={**slab.offsets, index: offset + 1}), "is misaligned"
        yield replace(memory, location={**memory.location, index: (CPU, 0)}), "has memory in steps"
        yield replace(memory, slabs=(*memory.slabs, Slab(0, 100, 100, {index: 0}))), "has memory in steps"
        if memory.sizes[index]:
            yield instead(slab, size=offset + memory.sizes[index] - 1), "lies outside of its slab"
            yield instead(slab, offsets={**slab.offsets, index: -64}), "lies outside of its slab"
    for index in memory.outputs & memory.made_at_calls:
        yield replace(memory, slabs=(Slab(0, 100, memory.sizes[index], {index: 0}),)), "has memory in steps"


def test_faults_are_found(all_that_can: None) -> None:
    planted = overlapping = 0
    for seed in range(100):
        draw = random.Random(seed)
        case = random_case(draw)
        memory = plan_program(replace(case.planned(), frozen=False), lambda device, case=case: case.taken)
        case.verify(memory)
        for faulty, message in faults(memory, draw):
            planted += 1
            with pytest.raises(PlanError, match=message):
                case.verify(faulty)
        for slab in memory.slabs:
            faulty = replace(memory, slabs=(replace(slab, offsets=dict.fromkeys(slab.offsets, 0)),))
            if case.collision(case.plan.facts, faulty):
                overlapping += 1
                with pytest.raises(PlanError, match="overlap at step"):
                    case.verify(faulty)
    assert planted > 200 and overlapping > 20
