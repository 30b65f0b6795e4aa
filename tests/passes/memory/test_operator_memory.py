"""What operators allocate in a capture, planned as everything else.

::

    sums = cumsum(x); twice = sums * 2; return twice

    w              cumsum asks for its result (s) and for workspace (w), mul for its result (t), which lies where the
    w  t  t        workspace was. Nothing lies at the arena's own address.
    s  s
    .  .  .
    ---------
    cumsum  mul  (after)
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from graph_building import Building
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import compile_request

from fxwrap.errors import PlanError
from fxwrap.options import Options
from fxwrap.passes.memory.planner import bytes_of_call, plan_program
from fxwrap.passes.memory.requirements import Requirements
from fxwrap.passes.verify import verify_memory
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import MemoryPlan, OperatorMemory, ProgramPlan, SizedProgram

aten = torch.ops.aten
# The result, 24 floats; then two temporaries, of which the second lies where the first was.
CUMSUM = OperatorMemory(((0, 96), (1, 700), (1, 1024), (2, 10)), {0: 0})
MUL = OperatorMemory(((0, 96),), {0: 0})


def test_blocks_hold_the_most_that_is_asked_for() -> None:
    assert CUMSUM.blocks == (96, 1024, 10)
    assert CUMSUM.workspace == {1: 0, 2: 1024}
    assert CUMSUM.workspace_bytes == 1034
    assert CUMSUM.bytes_of(None) == 96 and CUMSUM.bytes_of(1) == 0
    assert MUL.workspace_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3000)), max_size=12), st.sets(st.integers(0, 6)))
def test_blocks_of_the_workspace_do_not_overlap(asked: list[tuple[int, int]], results: set[int]) -> None:
    numbers = {block: number for number, block in enumerate(dict.fromkeys(block for block, _ in asked))}
    allocations = tuple((numbers[block], nbytes) for block, nbytes in asked)
    memory = OperatorMemory(allocations, {block: block for block in results if block < len(numbers)})
    spans = [(offset, offset + memory.blocks[block]) for block, offset in memory.workspace.items()]
    assert all(offset % 512 == 0 for offset, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert memory.workspace.keys() | memory.results.keys() == set(range(len(memory.blocks)))


def _planned() -> tuple[SizedProgram, MemoryPlan]:
    b = Building()
    sums = b.call(aten.cumsum.default, b.x, 0)
    twice = b.call(aten.mul.Tensor, sums, 2)
    plan = compile_host_graph(b.module(twice), compile_request(Options(capture="always"))).plan
    operators = {"cumsum_default": CUMSUM, "mul_tensor": MUL}
    sized = SizedProgram(plan, {}, {}, operators=operators)
    return sized, plan_program(sized)


def _verify(sized: SizedProgram, memory: MemoryPlan) -> None:
    plan: ProgramPlan = sized.plan
    workspace = {node: own.workspace_bytes for node, own in sized.operators.items()}
    verify_memory(plan.graph, plan.schedule, plan.facts, memory, {}, workspace=workspace)


def test_all_of_it_lies_in_the_arena() -> None:
    sized, memory = _planned()
    _verify(sized, memory)
    (region,) = memory.regions
    requirements = Requirements.of(sized)
    assert not requirements.unplanned and not requirements.unmeasured
    buffers = {b.name: (b.begin, b.end, b.size) for _, b in requirements.planned[sized.plan.device]}
    assert buffers == {
        "cumsum_default": (0, 2, 96),
        "mul_tensor": (1, 3, 96),
        "cumsum_default workspace": (0, 1, 1034),
    }
    # The workspace is gone when mul allocates its result.
    assert region.size == 512 + region.lower_bound == 512 + 128 + 1088  # at multiples of 64, the CPU's alignment
    assert bytes_of_call(sized, memory) == memory.size
    spans = memory.footprint(region)
    assert sum(high - low for low, high in spans) <= region.size
    at = memory.workspaces["cumsum_default"]
    assert any(low <= at.offset and at.offset + at.nbytes <= high for low, high in spans)


def _moved(memory: MemoryPlan, **changes: int) -> MemoryPlan:
    return replace(memory, workspaces={"cumsum_default": replace(memory.workspaces["cumsum_default"], **changes)})


def test_the_verifier_finds_workspace_that_others_use() -> None:
    sized, memory = _planned()
    result = next(s.index for s in sized.plan.facts.storages if s.name == "cumsum_default")
    with pytest.raises(PlanError, match="cumsum_default workspace overlap at step 0"):
        _verify(sized, _moved(memory, offset=memory.places[result].offset))


def test_the_verifier_finds_workspace_without_a_place() -> None:
    sized, memory = _planned()
    with pytest.raises(PlanError, match="cumsum_default workspace is too small"):
        _verify(sized, replace(memory, workspaces={}))
    with pytest.raises(PlanError, match="cumsum_default workspace is too small"):
        _verify(sized, _moved(memory, nbytes=1024))
    with pytest.raises(PlanError, match="cumsum_default workspace is misaligned"):
        _verify(sized, _moved(memory, offset=memory.workspaces["cumsum_default"].offset + 32))
    with pytest.raises(PlanError, match="cumsum_default workspace lies outside of its arena"):
        _verify(sized, _moved(memory, offset=memory.size))


def test_the_verifier_finds_a_call_that_allocates_at_the_address_of_the_arena() -> None:
    sized, memory = _planned()
    for moved in (_moved(memory, offset=0), _with_result_at(0, sized, memory)):
        with pytest.raises(PlanError, match="has the address of its arena's block"):
            _verify(sized, moved)


def _with_result_at(offset: int, sized: SizedProgram, memory: MemoryPlan) -> MemoryPlan:
    result = next(s.index for s in sized.plan.facts.storages if s.name == "cumsum_default")
    moved = [replace(p, offset=offset) if i == result else p for i, p in enumerate(memory.places)]
    return replace(memory, places=tuple(moved))
