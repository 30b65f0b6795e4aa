"""A collective works on until somebody waits for it: what is under way is neither used, nor written, nor freed.

Collectives here belong to a group that reads and writes at the last moment there is (see ``lazy_group``), so whatever
comes too early shows in the numbers. ``test_distributed`` runs real ones.

::

    g = all_gather(b)   k: c <- f(x)   l: b <- ...   wait(g)   read: d <- f(g)
        |                                  ^            ^            ^
        +--- b must keep its bytes --------+------------+            |
        +--- g is filled, and nobody's ---------------- +            |
                                           |<--- war ---+--- raw --->|
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from lazy_group import LAZY_GROUP
from random_graphs import (
    ALWAYS_EAGER,
    CPU,
    GraphMaker,
    by_name,
    check_calls,
    collectives,
    compile_request,
    expected_of,
    picture,
    run_schedule,
    same,
)
from torch.fx import GraphModule, Node

from fxwrap.errors import PlanError
from fxwrap.graphs.devices.runtime import DeviceRuntime, using_runtime
from fxwrap.graphs.record.flat import FlatBuilder
from fxwrap.graphs.record.registers import Registers
from fxwrap.host_graph.storages import StorageFacts
from fxwrap.options import Options
from fxwrap.passes.analysis.aliasing import analyse_storages
from fxwrap.passes.analysis.dependencies import build_dependency_graph
from fxwrap.passes.memory.planner import plan_program
from fxwrap.passes.partition.capturability import judge
from fxwrap.passes.partition.cut import cut
from fxwrap.passes.verify import verify_memory, verify_schedule
from fxwrap.pipeline import compile_host_graph
from fxwrap.plan import InputFacts, ProgramPlan, SizedProgram
from fxwrap.testing.simulated import SIMULATED


def gather(maker: GraphMaker, source: Node, name: str = "g") -> Node:
    return maker.extern(collectives.all_gather_into_tensor.default, source, 2, LAZY_GROUP, name=name)


def wait(maker: GraphMaker, value: Node, name: str = "wait") -> Node:
    return maker.extern(collectives.wait_tensor.default, value, name=name)


def plan_of(gm: GraphModule, facts: StorageFacts | None = None) -> ProgramPlan:
    facts = facts or analyse_storages(gm)
    verdicts = judge(gm, ALWAYS_EAGER)
    found = cut(build_dependency_graph(gm, facts), verdicts, CPU)
    return ProgramPlan(gm, facts, verdicts, found, CPU, InputFacts())


def forgetful(gm: GraphModule, facts: StorageFacts) -> StorageFacts:
    """The facts of an analysis that takes schemas at their word: waiting reads its operand, and does nothing else."""
    read, written, nodes = dict(facts.read), dict(facts.written), by_name(gm)
    for name in facts.awaited:
        read[name], written[name] = facts.of(nodes[name].args[0]), frozenset()
    return replace(facts, read=read, written=written, awaited={}, in_flight=frozenset())


def computes_the_same(gm: GraphModule, plan: ProgramPlan, maker: GraphMaker) -> bool:
    inputs = maker.inputs(0)
    expected = expected_of(gm, inputs, 0)
    return same([*run_schedule(gm, plan.schedule, inputs), *inputs], expected)


@dataclass(frozen=True)
class Overlap:
    """Two collectives, the second of which needs captured work: there a careless cut reads ``g`` too early.

    ::

        begin: h <- f(x)    g = all_gather(x)    k: p <- f(h)    s = all_gather(p)    wait(g)    wait(s)
                                                                             read: c <- f(g)
    """

    maker: GraphMaker
    gm: GraphModule


@pytest.fixture
def overlap() -> Overlap:
    maker = GraphMaker()
    x, h, p, c, d = maker.input("x"), *(maker.allocate(name=name) for name in "hpcd")
    maker.launch("host_mix", x, x, h, name="begin")
    g = gather(maker, x)
    maker.launch("mix", h, h, p, name="k")
    s = gather(maker, p, "s")
    wait(maker, g, "wait_g")
    maker.launch("mix", g, g, c, name="read")
    wait(maker, s, "wait_s")
    maker.launch("mix", s, c, d, name="last")
    return Overlap(maker, maker.finish([d]))


# -- order --------------------------------------------------------------------------------------------------


def edge(gm: GraphModule, before: str, after: str) -> str | None:
    nodes = by_name(gm)
    data = build_dependency_graph(gm, analyse_storages(gm)).get_edge_data(nodes[before], nodes[after])
    return data["kind"] if data is not None else None


@pytest.mark.parametrize("values", [True, False], ids=["fake values", "no fake values"])
def test_what_is_filled_is_read_after_the_wait(values: bool) -> None:
    maker = GraphMaker(values)
    x, c = maker.input("x"), maker.allocate()
    g = gather(maker, x)
    wait(maker, g)
    maker.launch("mix", g, g, c, name="read")
    assert edge(maker.finish([c]), "wait", "read") == "raw"


def test_what_is_reduced_in_place_is_read_after_the_wait() -> None:
    maker = GraphMaker()
    x, b, c = maker.input("x"), maker.allocate(name="b"), maker.allocate()
    maker.launch("mix", x, x, b)
    maker.extern(collectives.all_reduce_.default, b, "sum", LAZY_GROUP, name="reduce")
    wait(maker, b)
    maker.launch("mix", b, b, c, name="read")
    assert edge(maker.finish([c]), "wait", "read") == "raw"


def test_what_a_collective_reads_is_written_after_the_wait() -> None:
    maker = GraphMaker()
    x, b, c = maker.input("x"), maker.allocate(name="b"), maker.allocate()
    maker.launch("mix", x, x, b)
    g = gather(maker, b)
    wait(maker, g)
    maker.launch("update", x, b, name="write")
    maker.launch("mix", g, b, c)
    assert edge(maker.finish([c]), "wait", "write") == "war"


def test_waiting_returns_its_operand() -> None:
    """
    ::

        w = wait(g)        update w  --raw-->  read of g
    """
    maker = GraphMaker()
    x, c = maker.input("x"), maker.allocate()
    g = gather(maker, x)
    w = wait(maker, g, "w")
    maker.launch("update", x, w, name="write")
    maker.launch("mix", g, g, c, name="read")
    gm = maker.finish([c])
    facts = analyse_storages(gm)
    assert facts.values["w"] == facts.values["g"]
    assert edge(gm, "write", "read") == "raw"


def test_what_is_received_is_written() -> None:
    """The schema of ``irecv`` says that it reads its operand and returns a new tensor."""
    if not hasattr(collectives, "irecv"):
        pytest.skip(f"torch {torch.__version__} has no _c10d_functional.irecv")
    maker = GraphMaker(values=False)
    b, c = maker.input("b"), maker.allocate()
    maker.extern(collectives.irecv.default, b, 0, 0, LAZY_GROUP, name="receive")
    wait(maker, b)
    maker.launch("mix", b, b, c, name="read")
    gm = maker.finish([c])
    facts = analyse_storages(gm)
    assert facts.written["receive"] == facts.values["b"] and not facts.in_flight
    assert edge(gm, "wait", "read") == "raw"
    verify_schedule(gm, plan_of(gm).schedule)
    verify_memory(gm, plan_of(gm).schedule, facts, plan_program(SizedProgram(plan_of(gm), {}, {})), {})


def test_a_schedule_that_reads_too_early_is_caught(overlap: Overlap) -> None:
    sound = plan_of(overlap.gm)
    verify_schedule(overlap.gm, sound.schedule)
    assert computes_the_same(overlap.gm, sound, overlap.maker)

    faulty = plan_of(overlap.gm, forgetful(overlap.gm, analyse_storages(overlap.gm)))
    assert not computes_the_same(overlap.gm, faulty, overlap.maker), "the fault must matter"
    with pytest.raises(PlanError, match=r"read runs before wait_g\n.*wait_g writes g first"):
        verify_schedule(overlap.gm, faulty.schedule)


# -- memory -------------------------------------------------------------------------------------------------


def test_what_a_collective_reads_keeps_its_bytes_until_the_wait() -> None:
    """
    ::

        128 | b  b  b  b  out out       the gather is the last node that names b, and reads it until the wait is over
         64 |       c  c  c  c
          0 +--------------------
              k0 g  k1 w  k2 (after)
    """
    maker = GraphMaker()
    x, b, c, out = maker.input("x"), *(maker.allocate(name=name) for name in ("b", "c", "out"))
    maker.launch("mix", x, x, b, name="k0")
    g = gather(maker, b)
    # Eager work, or the cut would not leave it between the two.
    maker.launch("host_mix", x, x, c, name="k1")
    wait(maker, g, "w")
    maker.launch("mix", g, c, out, name="k2")
    gm = maker.finish([c, out])
    plan = plan_of(gm)
    assert [node.name for node in plan.schedule] == ["k0", "g", "k1", "w", "k2"]
    index = {storage.name: storage.index for storage in plan.facts.storages}
    assert plan.lifetimes[index["b"]] == range(4)
    memory = plan_program(SizedProgram(plan, {}, {}))
    verify_memory(gm, plan.schedule, plan.facts, memory, {})

    forgotten = replace(plan, facts=forgetful(plan.graph, plan.facts))
    faulty = plan_program(SizedProgram(forgotten, {}, {}))
    assert forgotten.lifetimes[index["b"]] == range(2)
    with pytest.raises(PlanError, match="b and c overlap at step 2"):
        verify_memory(gm, plan.schedule, plan.facts, faulty, {})


@pytest.mark.parametrize("runtime", [None, SIMULATED], ids=["host", "simulated"])
def test_what_arrives_across_captured_work_is_copied_when_it_is_there(
    overlap: Overlap, runtime: DeviceRuntime | None
) -> None:
    """Captured work on hardware reads fixed addresses: what eager work makes has a place that it is copied to."""
    with using_runtime(runtime) if runtime is not None else contextlib.nullcontext():
        program = compile_host_graph(overlap.gm, compile_request(Options(eager_ops=ALWAYS_EAGER)))
        check_calls(overlap.gm, overlap.maker.inputs, program, [False] * 4)
    assert picture(program.plan.partitions) == "eager[begin g] captured[k] eager[s wait_g wait_s] captured[read last]"
    assert set(program.counters.eager) == {"warm-up"}


def test_what_a_collective_was_given_is_not_freed_before_the_wait() -> None:
    """As in Inductor's own wrapper, whatever the process group does to keep it."""
    maker = GraphMaker()
    x = maker.input("x")
    s = maker.extern(torch.ops.aten.sin.default, x, name="s")
    g = gather(maker, s)
    t = maker.extern(torch.ops.aten.cos.default, x, name="t")
    wait(maker, g)
    gm = maker.finish([g, t])
    dependencies = build_dependency_graph(gm, analyse_storages(gm))
    (partition,) = cut(dependencies, judge(gm, ("aten::sin", "aten::cos")), CPU).partitions
    builder = FlatBuilder({}, {by_name(gm)["x"]: 0})
    builder.append_partition(plan_of(gm), partition)
    lines = [line.strip() for line in builder.build([by_name(gm)["g"], by_name(gm)["t"]]).source.splitlines()]
    (gathers,) = [line for line in lines if repr(LAZY_GROUP) in line]
    given = gathers.split("(")[1].split(",")[0]
    (waits,) = [i for i, line in enumerate(lines) if line.endswith(f"({gathers.split(' =')[0]})")]
    (freed,) = [i for i, line in enumerate(lines) if line.startswith("del") and given in line]
    assert freed > waits > lines.index(gathers)


def test_what_a_collective_was_given_is_not_freed_before_a_wait_in_another_partition(overlap: Overlap) -> None:
    """
    ::

        ( begin  g = all_gather(x) )   [ k ]   ( s  wait_g  wait_s )   [ read  last ]
                 x is named here last ----------> and read until here
    """
    program = compile_host_graph(overlap.gm, compile_request(Options(eager_ops=ALWAYS_EAGER)))
    for call in range(2):
        program(*overlap.maker.inputs(call))
    (specialization,) = program.specializations.values()
    (recording,) = specialization.recordings
    index = {name: p.index for p in program.plan.partitions for name in p.nodes}
    registers = Registers.of(program.plan, recording.request.memory, frozen=False)
    # Where a register is emptied; one that is not listed is emptied when the call is over.
    emptied = registers.last_reader.get(by_name(overlap.gm)["x"], len(index))
    assert emptied >= index["wait_g"] > index["g"]


# -- beyond the program -------------------------------------------------------------------------------------


def _never_awaited(maker: GraphMaker) -> GraphModule:
    x, b = maker.input("x"), maker.allocate(name="b")
    maker.launch("mix", x, x, b)
    return maker.finish([gather(maker, b)])


def _begun_before(maker: GraphMaker) -> GraphModule:
    g, c = maker.input("g"), maker.allocate()
    wait(maker, g)
    maker.launch("mix", g, g, c)
    return maker.finish([c])


@pytest.mark.parametrize("make", [_never_awaited, _begun_before])
def test_what_is_under_way_beyond_the_program_is_never_recorded(make: Callable[[GraphMaker], GraphModule]) -> None:
    """Between two calls the arena is somebody else's, and an output that is copied while it arrives is wrong."""
    maker = GraphMaker()
    gm = make(maker)
    program = compile_host_graph(gm, compile_request(Options()))
    for call in range(3):
        x = maker.inputs(call)
        (result,) = program(*x)
        (expected,) = gm(*x)
        for arriving in (result, expected):
            collectives.wait_tensor(arriving)
        assert torch.equal(result, expected)
    assert program.counters.replays == 0
    assert program.counters.eager["a communication on g is in flight when a call begins or ends"] == 2
    strict = compile_host_graph(gm, compile_request(Options(strict=True, warmup=0)))
    with pytest.raises(PlanError, match="wait for it inside of the compiled region"):
        strict(*maker.inputs(0))


@pytest.mark.parametrize("make", [_never_awaited, _begun_before])
def test_a_plan_for_what_is_under_way_beyond_the_program_is_caught(make: Callable[[GraphMaker], GraphModule]) -> None:
    gm = make(GraphMaker())
    plan = plan_of(gm)
    faulty = plan_program(SizedProgram(replace(plan, facts=replace(plan.facts, in_flight=frozenset())), {}, {}))
    with pytest.raises(PlanError, match="a communication on g is in flight when a call begins or ends"):
        verify_memory(gm, plan.schedule, plan.facts, faulty, {})
