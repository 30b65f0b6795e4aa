"""Results of operators that the plan has a place for, where a graph keeps the addresses that it was captured with.

::

    buf0 = aten.sort(x)          the sort allocates in the graph's pool; its result is copied to the plan's memory in
    buf1 = buf0[0]        ->     the graph
    return buf1
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, on_simulated, tensors_in
from graph_building import Building
from placements import buffers_of, located, moved
from random_graphs import CPU, GraphMaker, check_calls, collectives, compile_request
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxwrap.errors import PlanError
from fxwrap.options import Options
from fxwrap.passes.analysis.aliasing import analyse_storages
from fxwrap.passes.memory.operator_results import placeable_results
from fxwrap.passes.memory.planner import plan_program, predict_memory
from fxwrap.passes.verify import verify_memory
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import MemoryPlan, ProgramPlan, SizedProgram

aten = torch.ops.aten


def placeable(gm: GraphModule, numbers: Mapping[Node, Any] | None = None) -> dict[str, int]:
    """Bytes by name."""
    facts = analyse_storages(gm)
    found = placeable_results(facts, gm, CPU, numbers or {})
    return {facts.storages[index].name: nbytes for index, nbytes in found.items()}


def planned(gm: GraphModule, eager_ops: tuple[str, ...] = (), **changes: Any) -> tuple[ProgramPlan, MemoryPlan]:
    """Where addresses are frozen."""
    plan = compile_host_graph(gm, compile_request(Options(eager_ops=eager_ops, capture="always"))).plan
    memory = plan_program(SizedProgram(plan, {}, {}, **changes))
    verify_memory(plan.graph, plan.schedule, plan.facts, memory, {})
    return plan, memory


def names(plan: ProgramPlan, memory: MemoryPlan) -> set[str]:
    return {plan.facts.storages[index].name for index in located(memory)}


def test_what_the_caller_gets_of_captured_work_has_a_place() -> None:
    """
    ::

        sine = sin(x); sums = cumsum(sine); twice = sums * 2; return sums, twice

        arena     .  s  s  s      s: from its call on; nobody gets sine, which the graph's pool has
                  .  .  t  t
    """
    b = Building()
    sine = b.call(aten.sin.default, b.x)
    sums = b.call(aten.cumsum.default, sine, 0)
    twice = b.call(aten.mul.Tensor, sums, 2)
    gm = b.module(sums, twice)
    assert placeable(gm) == {"sin_default": 96, "cumsum_default": 96, "mul_tensor": 96}
    plan, memory = planned(gm)
    assert names(plan, memory) == {"cumsum_default", "mul_tensor"}
    assert memory.outputs == located(memory).keys()
    buffers = buffers_of(SizedProgram(plan, {}, {}))
    assert {name: (buffer.begin, buffer.end) for name, buffer in buffers.items()} == {
        "cumsum_default": (1, 4),
        "mul_tensor": (2, 4),
    }
    # Nothing where no address is frozen.
    _, free = planned(gm, frozen=False)
    assert not located(free) and not free.outputs
    # One fault: both in the same place.
    one, two = located(memory)
    faulty = moved(memory, {one: located(memory)[two]})
    with pytest.raises(PlanError, match="overlap"):
        verify_memory(plan.graph, plan.schedule, plan.facts, faulty, {})


def test_of_eager_work_only_what_graphs_read_has_a_place() -> None:
    """
    ::

        ( sums = cumsum(x) ) --> [ twice = sums * 2 ] --> ( flat = flip(twice) )        returns sums, twice, flat
    """
    b = Building()
    sums = b.call(aten.cumsum.default, b.x, 0)
    twice = b.call(aten.mul.Tensor, sums, 2)
    gm = b.module(sums, twice, b.call(aten.flip.default, twice, [0]))
    assert names(*planned(gm, ("aten::cumsum", "aten::flip"))) == {"cumsum_default", "mul_tensor"}


def test_an_operators_own_memory_is_freed_when_its_result_is_copied() -> None:
    """In predictions, too, also of a forward whose results the backward reads.

    ::

        pool      s  f  .  |  g        what cumsum, flip and, in the backward, flip allocate: 96 bytes at a time
        arena     s  s  s  |  .
                  .  f  f  |  f g
    """
    b, later = Building(), Building()
    sums = b.call(aten.cumsum.default, b.x, 0)
    forward, _ = planned(b.module(sums, b.call(aten.flip.default, sums, [0])))
    backward, _ = planned(later.module(later.call(aten.flip.default, later.x, [1])))
    programs = [SizedProgram(plan, {}, {}) for plan in (forward, backward)]
    (alone,) = predict_memory(programs[:1], {})
    assert alone.operators == 96
    saved = {storage.index: ["x"] for storage in forward.facts.storages if storage.name == "flip_default"}
    (both,) = predict_memory(programs, saved)
    assert both.operators == 96


def run(gm: GraphModule, *sizes: tuple[int, ...], eager_ops: tuple[str, ...] = ()) -> Any:
    """Compare with the graph, on the CPU with graphs that keep addresses; outputs are held, spoilt, and compared."""
    with on_simulated():
        request = compile_request(Options(eager_ops=eager_ops, capture="always"))
        program = compile_host_graph(gm, request)
        hold = [False, True, False, False, True, True, False, False, False]
        check_calls(gm, lambda seed: [torch.randn(size) for size in sizes or [(4, 6)]], program, hold)
        assert program.counters.replays
    return program


@pytest.mark.parametrize("eager_ops", [(), ("aten::cumsum",), ("aten::mul",)])
def test_programs_compute_the_same(eager_ops: tuple[str, ...]) -> None:
    b = Building()
    sums = b.call(aten.cumsum.default, b.call(aten.sin.default, b.x), 0)
    run(b.module(sums, b.call(aten.mul.Tensor, sums, 2)), eager_ops=eager_ops)


def test_an_element_of_a_tuple_and_a_view_of_it() -> None:
    """What is handed out is the view of the place; who works on it works on what the caller gets."""
    b = Building()
    sort = b.call(aten.sort.default, b.x, 1)
    values, indices = (b.call(operator.getitem, sort, i) for i in (0, 1))
    gm = b.module(b.call(aten.t.default, values), b.call(aten.mul.Tensor, indices, 2))
    plan, memory = planned(gm)
    assert names(plan, memory) == {f"{sort.name}[0]", "mul_tensor"}
    # Eager work reads the other one in the graph's pool.
    assert names(*planned(gm, ("aten::mul",))) == {f"{sort.name}[0]"}
    run(gm)
    run(gm, eager_ops=("aten::mul",))


def test_what_may_be_the_callers_memory_stays() -> None:
    """The caller expects it to be one with its input."""
    b = Building()
    gm = b.module(b.call(aten.relu_.default, b.x))
    assert not placeable(gm)
    run(gm)


def test_what_a_communication_fills_stays() -> None:
    """It is filled when somebody has waited, not when the call that begins it returns."""
    maker = GraphMaker()
    x = maker.input("x")
    begun = maker.extern(collectives.all_reduce.default, x, "sum", "0", name="begun")
    waited = maker.extern(collectives.wait_tensor.default, begun, name="waited")
    assert not placeable(maker.finish([waited]))


def test_a_custom_operator_may_keep_what_it_returns() -> None:
    """So its result is copied to its place."""
    b = Building()
    gm = b.module(b.call(torch.ops.fxwrap_results.double.default, b.x))
    assert placeable(gm) == {"double_default": 96}
    assert names(*planned(gm)) == {"double_default"}
    run(gm)


@torch.library.custom_op("fxwrap_results::double", mutates_args=())
def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


_double.register_fake(torch.empty_like)


@pytest.mark.parametrize("known", [True, False])
def test_symbolic_sizes(known: bool) -> None:
    """Sizes follow from numbers that the graph has; where it has none, as for a size of data, the result stays."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    graph = Graph()
    how = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    value = mode.from_tensor(torch.randn(5, 3), symbolic_context=how, source=ConstantSource("x"))
    rows, columns = value.size()
    with mode:
        result = torch.empty_strided((rows, columns), (2 * columns, 1))
    numbers: dict[Node, Any] = {}
    for name, number, at_hand in (("rows", rows, 7), ("columns", columns, 4)):
        node = graph.placeholder(name)
        node.meta["val"] = number
        if known:
            numbers[node] = at_hand
    x = graph.placeholder("x")
    x.meta["val"] = value
    node = graph.call_function(aten.cumsum.default, (x, 0))
    node.meta["val"] = result
    graph.output([node])
    gm = GraphModule(torch.nn.Module(), graph)
    assert placeable(gm, numbers=numbers) == ({node.name: 4 * (6 * 8 + 4)} if known else {})


@pytest.mark.compiler
def test_replayed_with_any_shape(compiled: Any, device: torch.device) -> None:
    f: Compiled = compiled(lambda x: torch.nn.functional.avg_pool2d(x, 2) + 0, dynamic=True)
    for width in (8, 12, 8, 12, 8, 12):
        x = torch.randn(1, 2, 8, width)
        assert_same(f(x.to(device)).cpu(), torch.nn.functional.avg_pool2d(x, 2))


@pytest.mark.parametrize("fn", [lambda x: torch.sort(x, dim=0), lambda x: x.cumsum(0).t(), torch.nonzero])
def test_handed_out_and_held(compiled: Any, device: torch.device, fn: Any) -> None:
    """Of every shape, one after the other: nobody writes over what the caller has."""
    f: Compiled = compiled(fn, dynamic=True)
    held = []
    for call in range(12):
        x = torch.randn(3 + call % 3, 4)
        held.append((f(x.to(device)), fn(x)))
    # A GPU's scan adds in another order.
    compare = torch.testing.assert_close if device.type == "cuda" else assert_same
    for result, expected in held:
        compare([one.cpu() for one in tensors_in(result)], tensors_in(expected))
