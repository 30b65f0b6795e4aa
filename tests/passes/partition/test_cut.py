"""Of all cuts with the fewest captured partitions the one that needs the least memory, within a budget.

Drawings as in test_partition.py: [captured], (eager).
"""

from __future__ import annotations

import random
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import (
    ALWAYS_EAGER,
    CPU,
    PROPERTY,
    GraphMaker,
    Recipe,
    aten,
    build,
    nodes_of,
    picture,
    recipes,
)
from torch.fx import GraphModule, Node

import fxwrap
from fxwrap.errors import PlanError
from fxwrap.host_graph.storages import StorageFacts
from fxwrap.passes.analysis.aliasing import analyse_storages
from fxwrap.passes.analysis.dependencies import build_dependency_graph
from fxwrap.passes.partition.capturability import judge
from fxwrap.passes.partition.cut import cut
from fxwrap.passes.verify import verify_schedule
from fxwrap.plan import Cut

MIB = 1 << 20


def mix(maker: GraphMaker, name: str, *sources: Node, host: bool = False) -> Node:
    """A new buffer that launch ``name`` fills from one or two others."""
    out = maker.allocate(name=f"{name}_out")
    maker.launch("host_mix" if host else "mix", sources[0], sources[-1], out, name=name)
    return out


def cut_of(gm: GraphModule, mib: dict[str, int] | int, budget: float = 1.1) -> Cut:
    """The cut if buffers are as large as that, in MiB: all of them, or by the name of their allocation."""
    facts = analyse_storages(gm)
    sizes = {}
    for index in facts.inner():
        name = facts.storages[index].node.removesuffix("_out")
        sizes[index] = (mib if isinstance(mib, int) else mib.get(name, 0)) * MIB
    found = cut(build_dependency_graph(gm, facts), judge(gm, ALWAYS_EAGER), CPU, facts, sizes, budget)
    verify_schedule(gm, nodes_of(gm, found.partitions))
    return found


def chains(count: int) -> GraphModule:
    """x --> a0 --> (b0) --> s0        x --> a1 --> (b1) --> s1 = s0 + b1        ..."""
    maker = GraphMaker()
    x = maker.input("x")
    total = x
    for number in range(count):
        a = mix(maker, f"a{number}", x)
        b = mix(maker, f"b{number}", a, host=True)
        total = mix(maker, f"s{number}", total, b)
    return maker.finish([total])


def test_fewer_partitions_may_not_take_more_memory_than_the_budget() -> None:
    """
    ::

        a0 (b0) s0  a1 (b1) s1  ...     as few as possible: [a0 a1 ...] (b0 b1 ...) [s0 s1 ...]: all are alive at once
    """
    gm = chains(8)
    unlimited = cut_of(gm, 4, budget=100)
    assert (unlimited.captured, unlimited.fewest, unlimited.in_program_order) == (2, 2, 9)
    assert unlimited.chosen == unlimited.fewest
    tight = cut_of(gm, 4)
    assert tight.chosen > tight.fewest and tight.peak <= 1.1 * tight.program_order_peak < unlimited.peak
    between = cut_of(gm, 4, budget=2)
    assert unlimited.captured < between.captured < tight.captured
    assert between.peak <= 2 * between.program_order_peak


def test_a_little_memory_does_not_decide() -> None:
    assert cut_of(chains(8), 0).captured == 2


def test_what_is_large_is_made_late() -> None:
    """
    ::

        x --> big ------------------------v           [ a ] --> ( b ) --> [ big c d ]
        x --> a --> (b) --> c --------> d           beside a, big would be alive while b runs
    """
    maker = GraphMaker()
    x = maker.input("x")
    big = mix(maker, "big", x)
    c = mix(maker, "c", mix(maker, "b", mix(maker, "a", x), host=True))
    gm = maker.finish([mix(maker, "d", big, c)])
    assert picture(cut_of(gm, {"big": 9, "a": 4, "b": 4}).partitions) == "captured[a] eager[b] captured[big c d]"


def test_what_makes_room_is_run_early() -> None:
    """
    ::

        x --> big --> s ------------------v           [ big s a ] --> ( b ) --> [ d ]
        x --> a --> (b) ---------------> d            s is small, and the last to use big
    """
    maker = GraphMaker()
    x = maker.input("x")
    s = mix(maker, "s", mix(maker, "big", x))
    b = mix(maker, "b", mix(maker, "a", x), host=True)
    gm = maker.finish([mix(maker, "d", s, b)])
    found = cut_of(gm, {"big": 9, "a": 9, "b": 9, "s": 1})
    assert picture(found.partitions) == "captured[big s a] eager[b] captured[d]"
    assert found.peak <= found.program_order_peak


@PROPERTY
@given(recipes(), st.integers(0, 1000), st.sampled_from([1.0, 1.1, 1.5, 100.0]))
def test_the_budget_holds_and_without_it_the_cut_is_minimal(recipe: Recipe, seed: int, budget: float) -> None:
    gm = build(recipe).gm
    facts = analyse_storages(gm)
    draw = random.Random(seed)
    sizes = {index: draw.choice([0, 1, 3, 20]) * MIB for index in facts.inner()}
    dependencies, verdicts = build_dependency_graph(gm, facts), judge(gm, ALWAYS_EAGER)
    found = cut(dependencies, verdicts, CPU, facts, sizes, budget)
    free = cut(dependencies, verdicts, CPU)
    verify_schedule(gm, nodes_of(gm, found.partitions))
    assert found.fewest == free.captured <= found.captured <= found.in_program_order
    assert found.peak <= max(budget * found.program_order_peak, found.program_order_peak + MIB)
    if budget == 100.0:
        assert found.captured == free.captured


# -- the checker is no friend of the cut ----------------------------------------------------------------


def _data() -> tuple[GraphModule, StorageFacts | None]:
    """f, (s), t <- s: without the edge t joins f."""
    maker = GraphMaker()
    x = maker.input("x")
    f = maker.extern(aten.cos.default, x, name="f")
    s = maker.extern(aten.sin.default, x, name="s")
    return maker.finish([f, maker.extern(aten.neg.default, s, name="t")]), None


def _raw() -> tuple[GraphModule, StorageFacts | None]:
    """f, (u) writes y, c reads y."""
    maker = GraphMaker()
    x, y = maker.input("x"), maker.input("y")
    f = mix(maker, "f", x)
    maker.launch("host_update", x, y, name="u")
    return maker.finish([f, mix(maker, "c", y)]), None


def _war() -> tuple[GraphModule, StorageFacts | None]:
    """f, (r) reads x, u writes x."""
    maker = GraphMaker()
    x, y = maker.input("x"), maker.input("y")
    f, r = mix(maker, "f", y), mix(maker, "r", x, host=True)
    maker.launch("update", y, x, name="u")
    return maker.finish([f, r]), None


def _waw() -> tuple[GraphModule, StorageFacts | None]:
    """f, (one) fills b, other fills b, for facts that know that neither reads it."""
    maker = GraphMaker()
    x, y = maker.input("x"), maker.input("y")
    f, b = mix(maker, "f", y), maker.allocate(name="b")
    maker.launch("host_mix", x, x, b, name="one")
    maker.launch("mix", y, y, b, name="other")
    gm = maker.finish([f, b])
    facts = analyse_storages(gm)
    read = {name: read - facts.written.get(name, frozenset()) for name, read in facts.read.items()}
    return gm, StorageFacts(facts.storages, facts.values, read, facts.written, handed_out=facts.handed_out)


def _order() -> tuple[GraphModule, StorageFacts | None]:
    """r draws, (s) draws, t draws."""
    maker = GraphMaker()
    import torch

    draw: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    r = maker.extern(aten.rand.default, [4, 4], name="r", **draw)
    s = maker.extern(aten.randn.default, [4, 4], name="s", **draw)
    return maker.finish([r, s, maker.extern(aten.rand.default, [4, 4], name="t", **draw)]), None


@pytest.mark.parametrize(
    "kind, make", [("data", _data), ("raw", _raw), ("war", _war), ("waw", _waw), ("order", _order)]
)
def test_a_schedule_made_without_one_kind_of_edge_is_refused(kind: str, make: Any) -> None:
    gm, facts = make()
    dependencies = build_dependency_graph(gm, facts or analyse_storages(gm))
    verdicts = judge(gm, (*ALWAYS_EAGER, "aten::sin", "aten::randn"))

    def schedule(dependencies: nx.DiGraph) -> list[Node]:
        return nodes_of(gm, cut(dependencies, verdicts, CPU).partitions)

    verify_schedule(gm, schedule(dependencies))
    faulty = nx.DiGraph()
    faulty.add_nodes_from(dependencies.nodes)
    faulty.add_edges_from(edge for edge in dependencies.edges if dependencies.edges[edge]["kind"] != kind)
    assert faulty.number_of_edges() < dependencies.number_of_edges()
    with pytest.raises(PlanError):
        verify_schedule(gm, schedule(faulty))


# -- rules ----------------------------------------------------------------------------------------------


def test_a_rule_matches_by_operator_tag_or_predicate_and_says_why() -> None:
    import torch

    maker = GraphMaker()
    x = maker.input("x")
    s = maker.extern(aten.sin.default, x, name="s")
    m = maker.extern(aten.mm.default, x, s, name="m")
    draw = maker.extern(aten.rand_like.default, m, name="draw")
    c = maker.extern(aten.cos.default, draw, name="c")
    gm = maker.finish([c])
    rules = (
        fxwrap.EagerRule("too precise", operators=("aten::sin",), remedy="use less"),
        fxwrap.EagerRule("draws", tags=(torch.Tag.nondeterministic_seeded,)),
        fxwrap.EagerRule("large", predicate=lambda node: "mm" in str(node.target) and "multiplies"),
        fxwrap.EagerRule("elsewhere", operators=("aten::cos",), devices=("cuda",)),
    )
    found = {name: judge(gm, rules)[name] for name in ("s", "m", "draw", "c")}
    assert {name: verdict.reason for name, verdict in found.items()} == {
        "s": "too precise", "m": "multiplies", "draw": "draws", "c": "",
    }  # fmt: skip
    assert found["s"].remedy == "use less"
